"""The training script as a user runs it: what it prints and writes, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minitorch
from kernels.targets import why_no_cuda
from minitorch.checkpoint import (
    CheckpointError,
    load_parameters,
    read_checkpoint,
    save_checkpoint,
)

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "12", "--batch", "4", "--context", "16", "--width", "16", "--heads", "2",
         "--layers", "1", "--sample", "20"]  # fmt: skip


def run(script: str, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "project" / script), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # also where the package is not installed
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def fails_in_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]


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


def test_a_checkpoint_writes_again(trained: tuple[Path, str]) -> None:
    out, printed = trained
    model = out / "model.safetensors"
    done = run("train_gpt.py", "--load", model, "--prompt", "The ", "--sample", 20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in printed  # the same seed, the same text


def test_a_truncated_checkpoint_is_one_line(trained: tuple[Path, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((trained[0] / "model.safetensors").read_bytes()[:-100])
    fails_in_one_line(run("train_gpt.py", "--load", broken), "broken.safetensors", "not a readable")


def test_missing_files_and_wrong_text_are_one_line(tmp_path: Path) -> None:
    fails_in_one_line(
        run("train_gpt.py", "--load", tmp_path / "none"), "none", "no such checkpoint"
    )
    fails_in_one_line(run("train_gpt.py", "--text", tmp_path / "none"), "none", "No such file")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    fails_in_one_line(run("train_gpt.py", "--text", short), "9 characters", "longer text")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00abc" * 100)
    fails_in_one_line(run("train_gpt.py", "--text", binary), "UTF-8")


def test_flash_and_naive_give_the_same_curve(tmp_path: Path) -> None:
    curves = []
    for attention in ("flash", "naive"):
        done = run("train_gpt.py", "--attention", attention, "--out", tmp_path / attention, *SMALL)
        assert done.returncode == 0, done.stderr
        curves.append(json.loads((tmp_path / attention / "result.json").read_text())["curve"])
    np.testing.assert_allclose(curves[0]["train"], curves[1]["train"], rtol=1e-4)
    np.testing.assert_allclose(curves[0]["held_out"], curves[1]["held_out"], rtol=1e-4)


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the simulator")
def test_a_missing_gpu_is_one_line(tmp_path: Path) -> None:
    for extra in ((), ("--load", tmp_path / "none")):
        done = run("train_gpt.py", "--backend", "cuda", *extra)
        fails_in_one_line(done, "--backend cuda cannot run", "fast backend")


@pytest.mark.cuda
def test_the_losses_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    curves = []
    for backend in ("fast", "cuda"):
        done = run("train_gpt.py", "--backend", backend, "--out", tmp_path / backend,
                   "--max-seconds", 1000, *SMALL)  # fmt: skip
        assert done.returncode == 0, done.stderr
        curves.append(json.loads((tmp_path / backend / "result.json").read_text())["curve"])
    np.testing.assert_allclose(curves[1]["train"], curves[0]["train"], rtol=1e-3)
    np.testing.assert_allclose(curves[1]["held_out"], curves[0]["held_out"], rtol=1e-3)


def test_the_benchmark_prints_and_writes_its_rows(tmp_path: Path) -> None:
    record = tmp_path / "rows.json"
    done = run("bench_attention.py", "--lengths", 32, 48, "--heads", 1, "--head-dim", 8,
               "--seconds", 0.01, "--json", record)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [row["length"] for row in rows] == [32, 48]
    assert all(row["flash"]["forward_ms"] > 0 and row["naive"]["backward_ms"] > 0 for row in rows)
    assert "| 48 |" in done.stdout


def tiny_model(width: int = 8) -> minitorch.DecoderLM:
    return minitorch.DecoderLM(5, width, 2, 6, n_layer=1, middle_dim=16)


def test_a_checkpoint_restores_every_parameter(tmp_path: Path) -> None:
    model, other, path = tiny_model(), tiny_model(), tmp_path / "m.safetensors"
    save_checkpoint(path, model, {"width": 8})
    arrays, config = read_checkpoint(path)
    load_parameters(other, arrays)
    assert config == {"width": 8}
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert np.array_equal(p.value.to_numpy(), q.value.to_numpy()), name
        assert q.value.requires_grad() and q.value.dtype == p.value.dtype


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", tiny_model()
    save_checkpoint(path, tiny_model(width=4), {})
    before = [p.value.to_numpy().copy() for p in model.parameters()]
    with pytest.raises(CheckpointError, match="shape"):
        load_parameters(model, read_checkpoint(path)[0])
    after = [p.value.to_numpy() for p in model.parameters()]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_failed_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "m.safetensors", tiny_model()
    save_checkpoint(path, model, {"step": 1})

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, {"step": 2})
    assert read_checkpoint(path)[1] == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Kill a process that does nothing but write checkpoints; the file is always one of them."""
    path = tmp_path / "m.safetensors"
    script = f"""
import minitorch
from minitorch.checkpoint import save_checkpoint
model = minitorch.DecoderLM(50, 32, 2, 6, n_layer=2)
step = 0
while True:
    save_checkpoint({str(path)!r}, model, {{"step": step}})
    step += 1
    print(step, flush=True)
"""
    seen = -1
    for count in (1, 3, 8):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(count):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
        step = read_checkpoint(path)[1]["step"]
        assert step >= count - 1
        seen = max(seen, step)
    assert seen >= 7
