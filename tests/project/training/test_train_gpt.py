"""The training script as a user runs it: what it prints and writes, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_gpt
from data import text as text_data
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from training import gpt_loop

from kernels.runtime.targets import why_no_cuda
from minitorch.training.model_files import read_checkpoint

from ...support.scripts import refused

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow

SMALL = ["--steps", "12", "--batch", "4", "--context", "16", "--width", "16", "--heads", "2",
         "--layers", "1", "--sample", "20"]  # fmt: skip


def run(script: str, *args: Any, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "project" / script), *map(str, args)]
    # The path, for where the package is not installed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, encoding="utf-8"
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train a tiny model on a file and return its folder and what was printed."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    done = run("train_gpt.py", "--text", text, "--out", folder / "out", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


def test_training_reports_and_saves(trained: tuple[Path, str]) -> None:
    out, printed = trained
    for word in ("train loss", "held-out loss", "nats per character", "tokens/s", "The "):
        assert word in printed
    assert (out / "loss.png").stat().st_size > 1000
    result = json.loads((out / "result.json").read_text())
    curve = result["curve"]["train"]
    assert len(curve) == 12 and curve[-1] < curve[0]
    assert np.isfinite(result["held_out_loss"])


def test_the_default_is_to_learn_without_repeats_and_to_judge_by_unseen_text() -> None:
    corpus = text_data.Corpus.from_text(text_data.manual_text(), 128)
    assert len(corpus.train) + len(corpus.held_out) > 300_000
    seen = text_data.decode(list(corpus.train), corpus.characters)
    windows = corpus.held_out_windows(128)[0]
    texts = [text_data.decode(list(window), corpus.characters) for window in windows]
    assert sum(text in seen for text in texts) == 0


@given(st.integers(2, 3000), st.floats(0.01, 1.0))
def test_the_first_held_out_windows_are_evenly_spread(count: int, share: float) -> None:
    held_out = np.arange(count * 2 + 1)
    corpus = text_data.Corpus("", held_out, held_out, "")
    starts = corpus.held_out_windows(2)[0][:, 0] // 2
    assert sorted(starts) == list(range(count))
    first = np.sort(starts[: max(1, int(share * count))])
    gaps = np.diff([-1, *first, count])
    assert gaps.max() <= 3 * count / len(first) + 1


def test_the_prompt_is_of_the_text(tmp_path: Path) -> None:
    text = tmp_path / "it's Żółw.txt"
    text.write_text("żółć " * 100, encoding="utf-8")
    done = run("train_gpt.py", "--text", text, "--out", tmp_path, *SMALL, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert "\n????" in done.stdout and "(last 12 steps)" in done.stdout
    assert read_checkpoint(tmp_path / "model.safetensors")[1]["prompt"] == "żółć"
    line = refused(train_gpt.main, "--text", text, "--out", tmp_path, "--prompt", "The ", *SMALL)
    assert "--prompt" in line and "never seen" in line


#: What cannot work → words of the line that says so.
WRONG = {
    "--temperature nan": "--temperature must 0",
    "--out /dev/null/out": "--out /dev/null/out another",
    "--lr 1000 --steps 5": "nan --lr",  # in the last step, or in the evaluation after it
    "--positions sinusoidal": "--positions 'sinusoidal' learned rotary",
    "--positions rotary --rotary-scaling cubic:2": "linear:factor cubic:2",
    "--sinks --ring 2": "--ring --sinks",
    "--positions rotary --width 6 --heads 2 --steps 1": "even 3",
    "--tokenizer bpe --vocab-size 256": "257 or more",
    "--init DIR --width 8": "leave out --width",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_cannot_work_are_one_line(options: str, tmp_path: Path) -> None:
    line = refused(train_gpt.main, *SMALL, "--out", tmp_path, *options.split())
    assert all(word in line for word in WRONG[options].split()), line
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_what_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step: Callable[..., Any] = gpt_loop.train_step
    calls: list[int] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)  # the first of a run is its warm-up
        if len(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        if len(calls) == 15:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return step(*args, **options)

    monkeypatch.setattr(gpt_loop, "train_step", interrupted)
    line = refused(train_gpt.main, *SMALL, "--out", tmp_path)
    assert "Ctrl-C after 7 of 12 steps" in line
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 7
    read_checkpoint(tmp_path / "model.safetensors")
    assert refused(train_gpt.main, *SMALL, "--out", tmp_path) == "stopped by Ctrl-C"
    assert len(calls) == 15


def test_a_run_that_the_clock_shortens_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the slow backend too, where judging the whole held-out text would take hours."""
    train_gpt.main([*SMALL, "--steps", "1000", "--max-seconds", "0.8", "--backend", "simple",
                    "--batch", "1", "--context", "8", "--width", "4", "--out", str(tmp_path)])  # fmt: skip
    printed, result = capsys.readouterr().out, json.loads((tmp_path / "result.json").read_text())
    assert result["by_clock"] and 0 < result["steps"] < 1000
    assert f"{result['steps']} of 1000 steps" in printed and "--max-seconds" in printed
    assert "windows, evenly spread: time was up" in printed
    assert (tmp_path / "checkpoints" / f"step-{result['steps']:08d}.safetensors").exists()


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the emulated one")
def test_a_missing_gpu_is_one_line(tmp_path: Path) -> None:
    for more in ((), ("--load", tmp_path / "none")):
        line = refused(train_gpt.main, "--backend", "cuda", *more)
        assert "--backend cuda cannot run" in line and "fast backend" in line


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ([], "expected an object"),
        ({}, "characters is missing"),
        ({"heads": 3}, "multiple"),
        ({"width": 512}, "larger model"),
        ({"characters": "aa"}, "characters must be"),
        ({"sinks": 1}, "sinks must be true"),
    ],
)
def test_a_configuration_of_no_model_is_one_line(
    change: Any, word: str, trained: tuple[Path, str], tmp_path: Path
) -> None:
    arrays, config = read_checkpoint(trained[0] / "model.safetensors")
    config = {**config, **change} if change else change
    path = tmp_path / "odd.safetensors"
    path.write_bytes(save(arrays, {"format": "minitorch-1", "config": json.dumps(config)}))
    line = refused(train_gpt.main, "--load", path)
    assert "odd.safetensors" in line and word in line
