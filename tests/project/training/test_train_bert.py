"""``train_bert.py`` learns, goes on from its checkpoints bit for bit, and fine-tunes a classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_bert

from kernels.runtime.targets import EMULATED
from minitorch.training.model_files import read_checkpoint

from ...support.device.fake_device import fake_device
from ...support.models.captured_training import made_steps
from ...support.scripts import refused

pytestmark = pytest.mark.slow

TINY = ["--width", "8", "--heads", "2", "--layers", "1", "--context", "24", "--batch", "4", "--steps", "12",
        "--max-seconds", "1e6", "--checkpoint-every", "4"]  # fmt: skip


def run(out: Path, *options: Any) -> dict[str, Any]:
    train_bert.main([*map(str, options), "--out", str(out)])
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"]
    path.write_text(
        "\n\n".join(" ".join(rng.choice(words, rng.integers(3, 9))) for _ in range(150))
    )
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with dropout."""
    out = tmp_path_factory.mktemp("trained")
    run(out, *TINY, "--text", text, "--dropout", 0.1)
    return out


@pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")
@pytest.mark.parametrize("layout", ["--packed", "--padded"])
def test_steps_on_a_device_are_captured(
    layout: str, text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = made_steps(monkeypatch)
    with fake_device():
        run(tmp_path, *TINY, "--text", text, "--backend", "cuda", "--precision", "bfloat16",
            "--width", 128, "--accumulate", 2, "--dropout", 0.1, "--steps", 40, layout)  # fmt: skip
        (step,) = made
        assert step.calls == 40 and step.kernels > 50, "no step was captured anew"
        step.reset()  # while there is a device


def test_fine_tuning_learns_classes_and_goes_on(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    for name in ("cats", "mats"):
        (data / name).mkdir(parents=True)
        for i in range(20):
            (data / name / f"{i}.txt").write_text(f"the {name} sat {i}" + " again" * 9 * (i == 0))
    options = ["--finetune", trained / "model.safetensors", "--data", data, "--batch", 8, "--lr", 0.01,
               "--checkpoint-every", 40, "--steps", 80, "--max-seconds", "1e6"]  # fmt: skip
    found = run(out, *options)
    assert "2 classes; 2 are cut to 24 tokens" in capsys.readouterr().out
    assert found["accuracy"] >= 0.9 and found["train_loss"] < 0.3
    (out / "checkpoints" / "step-00000080.safetensors").unlink()
    assert run(out, "--resume", out)["curve"] == found["curve"]
    _, config = read_checkpoint(out / "model.safetensors")
    assert config["classes"] == ["cats", "mats"]
    again = ["--finetune", out / "model.safetensors", "--out", tmp_path / "b"]
    assert "is a classifier already" in refused(train_bert.main, *options, *again)
