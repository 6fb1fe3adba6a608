"""Options of the training script for long contexts: positions, windows, sinks, and the standard library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_gpt
from data import text as text_data

from minitorch.training.model_files import read_checkpoint

from ...support.scripts import refused
from .test_resume import curve_of, weights_of
from .test_train_gpt import SMALL

from training import gpt_files, gpt_options  # isort: skip  # found in the folder that test_train_gpt puts on the path

LONG = ["--positions", "rotary", "--rotary-scaling", "linear:2", "--window", "5", "--sinks",
        "--recompute", "--checkpoint-every", "4", "--max-seconds", "1e6"]  # fmt: skip
KEPT = {
    "rotary_theta": 10_000.0, "rotary_scaling": {"rope_type": "linear", "factor": 2.0}, "window": 5,
    "sinks": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with all of them."""
    out = tmp_path_factory.mktemp("long")
    train_gpt.main([*SMALL, *LONG, "--out", str(out)])
    return out


def test_a_checkpoint_keeps_the_options_of_its_model(finished: Path) -> None:
    arrays, config = read_checkpoint(finished / "model.safetensors")
    assert {name: config[name] for name in KEPT} == KEPT
    assert np.abs(arrays["t_layer_1.attention.sink"]).max() > 0.0  # they have learned
    model, _ = gpt_files.load_run(str(finished), "fast")
    assert model.window == 5 and model.rotary is not None and model.rotary.scaling is not None
    ids = np.arange(16)[None]
    naive, _ = gpt_files.load_run(str(finished / "model.safetensors"), "fast", "naive")
    np.testing.assert_allclose(model(ids).to_numpy(), naive(ids).to_numpy(), atol=1e-4)


def test_a_run_with_them_goes_on_bit_for_bit(finished: Path) -> None:
    curve, weights = curve_of(finished), weights_of(finished / "model.safetensors")
    for step in (8, 12):
        (finished / "checkpoints" / f"step-{step:08d}.safetensors").unlink()
    for option, words in (("--window 6", "--window 5 6"), ("--positions learned", "rotary")):
        line = refused(train_gpt.main, "--resume", finished, *option.split())
        assert all(word in line for word in words.split()), line
    train_gpt.main(["--resume", str(finished), "--sample", "0", "--rotary-scaling", "linear:2"])
    assert curve_of(finished) == curve
    assert weights_of(finished / "model.safetensors") == weights
    assert json.loads((finished / "result.json").read_text())["resumed"] == [4]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window": 0}, "window must be"),
        ({"sinks": 1}, "sinks must be true"),
        ({"rotary_theta": -1}, "rotary_theta must be"),
    ],
)
def test_a_configuration_is_checked(changed: dict[str, Any], words: str, finished: Path) -> None:
    _, config = read_checkpoint(finished / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        gpt_options.check_config({**config, **changed})


def test_the_standard_library_is_a_text_of_whole_modules() -> None:
    text = text_data.read_text(text_data.LIBRARY)
    assert text == text_data.library_text() and len(text) > 2_000_000
    modules = text.split(text_data.FORM_FEED)
    assert (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8") in modules
