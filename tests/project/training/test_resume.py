"""A training goes on from its checkpoint as if nothing had happened, or says what is wrong."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import train_gpt
from training import gpt_loop

import minitorch
from minitorch.accelerated import layers as fused_functions
from minitorch.training.model_files import read_checkpoint

from ...support.scripts import refused
from .test_train_gpt import SMALL

pytestmark = pytest.mark.slow


def curve_of(out: Path) -> dict[str, list[float]]:
    return json.loads((out / "result.json").read_text())["curve"]


def weights_of(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in read_checkpoint(path)[0].items()}


RANDOM = ["--dropout", "0.2", "--clip", "0.5", "--max-seconds", "1e6", "--checkpoint-every", "4",
          "--keep", "3"]  # fmt: skip


@pytest.fixture(autouse=True)
def more_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_loop, "JUDGE_EVERY", 5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with dropout and clipping, and with all of its checkpoints."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_loop, "JUDGE_EVERY", 5)
        train_gpt.main([*SMALL, *RANDOM, "--out", str(out)])
    return out


@pytest.fixture
def unbroken(finished: Path, tmp_path: Path) -> Path:
    """Return a copy that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "unbroken"))


@pytest.mark.parametrize("step", [4, 12])
def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(unbroken: Path, step: int) -> None:
    curve, weights = curve_of(unbroken), weights_of(unbroken / "model.safetensors")
    assert len(curve["train"]) == 12 and curve["held_out_step"] == [4, 9, 11]
    np.random.seed(step)  # and whatever else a new process has
    random.seed(step)
    for later in (12, 8):
        if later > step:
            (unbroken / "checkpoints" / f"step-{later:08d}.safetensors").unlink()
    train_gpt.main(["--resume", str(unbroken), "--sample", "0"])
    assert curve_of(unbroken) == curve
    assert weights_of(unbroken / "model.safetensors") == weights
    assert json.loads((unbroken / "result.json").read_text())["resumed"] == [step]


def test_a_killed_training_goes_on_as_if_nothing_had_happened(
    finished: Path, tmp_path: Path
) -> None:
    out, script = tmp_path / "killed", Path(train_gpt.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), *SMALL, *RANDOM, "--out", str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not [*out.glob("checkpoints/step-*.safetensors")]:
        time.sleep(0.002)
    process.kill()
    process.wait()
    train_gpt.main(["--resume", str(out), "--sample", "0"])
    files = (folder / "model.safetensors" for folder in (out, finished))
    assert weights_of(next(files)) == weights_of(next(files))


def test_a_run_goes_on_with_its_own_options_only(unbroken: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another text. " * 100)
    last = unbroken / "checkpoints" / "step-00000012.safetensors"
    for options, words in (
        ("--lr 1", "--lr 0.005 1.0 start a new run"),
        ("--steps 20", "--steps 12 20"),
        ("--clip 1", "--clip 0.5"),
        ("--tie-weights", "--tie-weights False True"),
        (f"--text {other}", "another text than --text"),
        ("--load x", "--load --resume one of them"),
    ):
        line = refused(train_gpt.main, "--resume", unbroken, *options.split())
        assert all(word in line for word in words.split()), line
    line = refused(train_gpt.main, "--resume", "--out", tmp_path / "empty")
    assert "empty/checkpoints: the folder holds no checkpoint" in line
    line = refused(train_gpt.main, "--resume", unbroken / "model.safetensors")
    assert "not the state of its training" in line
    last.write_bytes(last.read_bytes()[:-1])
    line = refused(train_gpt.main, "--resume", "--out", unbroken)
    assert f"{last}: the checkpoint cannot be read" in line
    assert "is intact: " in line and "step-00000008" in line
    # What does not decide what is learnt may be another; results go where the user says.
    train_gpt.main(["--resume", str(last.with_name("step-00000008.safetensors")), "--lr", "0.005",
                    "--sample", "1", "--keep", "1", "--out", str(tmp_path / "new")])  # fmt: skip
    assert curve_of(tmp_path / "new") == curve_of(unbroken)
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == [last.name]


def test_an_interrupted_run_can_write_and_a_new_one_sets_it_aside(
    unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = unbroken / "checkpoints" / "step-00000012.safetensors"
    for path in (last, unbroken / "model.safetensors"):
        capsys.readouterr()
        train_gpt.main(["--load", str(path), "--sample", "9", "--temperature", "0"])
        written = capsys.readouterr().out
        assert len(written.rstrip("\n")) == len("The ") + 9
    train_gpt.main([*SMALL, "--out", str(unbroken), "--checkpoint-every", "0", "--steps", "2"])
    assert f"{unbroken / 'checkpoints.before'}" in capsys.readouterr().out
    assert (unbroken / "checkpoints.before" / last.name).exists()
    assert not (unbroken / "checkpoints").exists()


def test_a_loss_that_is_no_number_names_the_operation_and_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    options = [*SMALL, "--out", tmp_path, "--lr", "1000", "--checkpoint-every", "1", "--keep", "2"]
    line = refused(train_gpt.main, *options)
    found = re.search(r"the loss at step (\d+) is nan; at step (\d+) (\w+) \((\w+)\) made", line)
    assert found and int(found[2]) <= int(found[1])
    assert hasattr(fused_functions, found[3]) or hasattr(minitorch, found[3])
    assert "gpt_loop.py" in line and "in train_step" in line and "--lr, now 1000" in line
    kept = re.search(r"the last good checkpoint is (\S+);", line)
    assert kept and all(np.isfinite(x).all() for x in read_checkpoint(kept[1])[0].values())
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 2
    again = refused(train_gpt.main, "--resume", "--out", tmp_path)  # and meets the same number
    assert again.split(";")[0] == line.split(";")[0]
