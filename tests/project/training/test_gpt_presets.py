"""Presets of the training script: bytes as tokens, parts of a step, precision, utilisation."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import train_gpt
from data import text as text_data
from hypothesis import given
from hypothesis import strategies as st
from training import gpt_files, gpt_loop, gpt_presets, script_helpers

import minitorch
from kernels.runtime.targets import EMULATED
from kernels.traffic.formulas import training_flops
from minitorch import FastBackend
from minitorch.training.model_files import read_checkpoint

from ...support.device.fake_device import fake_device
from ...support.models.captured_training import made_steps
from .test_train_gpt import SMALL

# -- bytes ---------------------------------------------------------------------------------------------


@given(st.text(), st.integers(1, 4))
def test_any_text_comes_back_from_its_bytes_piece_by_piece(text: str, piece: int) -> None:
    characters = gpt_presets.characters_of(256)
    ids = text_data.encode(gpt_presets.spelled(text, characters), characters).tolist()
    assert bytes(ids) == text.encode()
    read = gpt_presets.reader(characters)
    assert "".join(read(ids[i : i + piece]) for i in range(0, len(ids), piece)) == text


@given(st.text())
def test_what_is_no_ascii_is_a_question_mark(text: str) -> None:
    characters = gpt_presets.characters_of(96)
    spelled = gpt_presets.spelled(text, characters)
    assert len(characters) == 96 and len(spelled) == len(text)
    for c, found in zip(text, spelled, strict=True):
        assert found == (c if c == "\n" or (c.isascii() and c.isprintable()) else "?")
    assert gpt_presets.reader(characters)(text_data.encode(spelled, characters).tolist()) == spelled


# -- a step in parts -----------------------------------------------------------------------------------


def model_of(precision: str) -> minitorch.DecoderLM:
    minitorch.manual_seed(0)
    return minitorch.DecoderLM(
        7, 8, 2, 5, 0.0, backend=FastBackend, n_layer=1, middle_dim=16, precision=precision
    )


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_of_a_batch_have_its_loss_and_gradients(parts: int) -> None:
    ids = np.random.default_rng(0).integers(0, 7, (6, 6))
    found = []
    for accumulate in (1, parts):
        model = model_of("float32")
        optimizer = minitorch.AdamW(model.parameters(), lr=0.0)
        loss = gpt_loop.train_step(model, optimizer, ids[:, :-1], ids[:, 1:], accumulate=accumulate)
        found.append([loss.item(), *(m.to_numpy() for m, _ in optimizer.moments.values())])
    for whole, summed in zip(*found, strict=True):
        np.testing.assert_allclose(summed, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_warming_up_leaves_the_model(precision: str) -> None:
    model = model_of(precision)
    before = {name: p.value.to_numpy().tobytes() for name, p in model.named_parameters()}
    corpus = text_data.Corpus.from_text("ab" * 500, model.n_positions, "ab")
    args: Any = SimpleNamespace(
        backend="fast", seed=3, batch=3, context=model.n_positions, accumulate=5, clip=1.0
    )
    gpt_loop.warm_up(model, corpus, args)
    assert before == {name: p.value.to_numpy().tobytes() for name, p in model.named_parameters()}
    assert all(p.value.grad is None for p in model.parameters())


# -- the schedule --------------------------------------------------------------------------------------


@given(st.floats(0.0, 1.0), st.floats(0.0, 0.9), st.sampled_from(script_helpers.SCHEDULES))
def test_the_learning_rate_rises_then_falls_or_stays(
    progress: float, warm_up: float, schedule: str
) -> None:
    rate = script_helpers.learning_rate(progress, 2.0, schedule, warm_up)
    assert 0.0 < rate <= 2.0
    if progress >= warm_up:
        later = script_helpers.learning_rate(min(progress + 0.05, 1.0), 2.0, schedule, warm_up)
        assert later <= rate and (schedule == "cosine" or rate == 2.0)
    if schedule == "cosine" and warm_up == 0.0:
        expected = 0.2 + 0.9 * (1.0 + math.cos(math.pi * progress))
        assert rate == pytest.approx(expected)


# -- operations by the book ----------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))
def test_a_step_counts_its_products(layers: int, seq: int, middle: int, words: int) -> None:
    """Six operations for each weight that multiplies, and the causal half of two products of attention."""
    model = minitorch.DecoderLM(
        words, 4, 2, seq, 0.0, n_layer=layers, middle_dim=middle, dtype=np.float32
    )
    weights = sum(
        p.value.size
        for name, p in model.named_parameters()
        if p.value.dims == 2 and "embeddings" not in name
    )
    scores = sum(2 * 2 * 4 * (seq * seq / 2) for _ in range(layers))
    assert training_flops(seq, layers, 4, middle, words) == 6.0 * weights * seq + 3.0 * scores
    assert gpt_presets.flops_per_token(model, seq) * seq == pytest.approx(
        training_flops(seq, layers, 4, middle, words)
    )


@given(st.integers(1, 40), st.integers(1, 60))
def test_a_window_counts_the_keys_that_it_shows(seq: int, window: int) -> None:
    # As in the causal half of a square, a row's own key counts half.
    keys = sum(min(row, window - 1) + 0.5 for row in range(seq)) + 0.5 * max(seq - window, 0)
    attention = training_flops(seq, 1, 4, 0, 0, window) - training_flops(seq, 1, 4, 0, 0, 1)
    one = seq - 0.5  # pairs of a window of one, counted in the same way
    assert attention == pytest.approx(3.0 * 4 * 4 * (keys - one))


# -- the script ----------------------------------------------------------------------------------------

TINY = [*SMALL, "--preset", "toy", "--max-seconds", "1e6"]


def test_a_run_in_bfloat16_goes_on_bit_for_bit_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Żółty pies – and the quick brown fox. " * 60, encoding="utf-8")
    options = ["--text", text, "--precision", "bfloat16", "--accumulate", "2", "--recompute", "--clip",
               "0.5", "--dropout", "0.2", "--schedule", "constant", "--warm-up", "0.3", "--vocabulary",
               "300", "--checkpoint-every", "5", "--peak", "0.001"]  # fmt: skip
    train_gpt.main([*map(str, [*TINY, *options, "--out", tmp_path])])
    printed = capsys.readouterr().out
    assert "utilisation" in printed and "of 0.001 TFLOP/s" in printed and "bfloat16" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    tokens = 12 * 4 * 2 * 16 / result["seconds"]
    assert result["tokens_per_second"] == pytest.approx(tokens)
    assert result["utilisation"] == pytest.approx(tokens * result["flops_per_token"] / 1e9)
    arrays, config = read_checkpoint(tmp_path / "model.safetensors")
    assert config["vocabulary"] == 300 and config["precision"] == "bfloat16"
    assert arrays["token_embeddings.weights"].shape[0] == 300
    (tmp_path / "checkpoints" / "step-00000012.safetensors").unlink()
    random.seed(5)
    train_gpt.main(["--resume", str(tmp_path), "--text", str(text), "--sample", "0"])
    again: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert again["resumed"] == [10] and again["curve"] == result["curve"]
    for name, array in read_checkpoint(tmp_path / "model.safetensors")[0].items():
        assert array.tobytes() == arrays[name].tobytes()
    capsys.readouterr()
    train_gpt.main(
        ["--load", str(tmp_path / "model.safetensors"), "--prompt", "Żół", "--sample", "9"]
    )
    assert capsys.readouterr().out.startswith("Żół")


@pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")
@pytest.mark.parametrize("more", [[], ["--accumulate", "2", "--dropout", "0.1"], ["--eager"]])
def test_steps_on_a_device_are_captured_unless_they_are_to_be_eager(
    more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = made_steps(monkeypatch)
    size = (
        "--preset toy --precision bfloat16 --layers 1 --width 32 --heads 2 --context 16 --batch 2"
    )
    run = "--backend cuda --steps 12 --max-seconds 60 --sample 0 --checkpoint-every 4"
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} and {n * n}" for n in range(60)), encoding="utf-8")
    files = ["--text", str(text), "--out", str(tmp_path / "run")]
    with fake_device():
        train_gpt.main([*size.split(), *run.split(), *more, *files])
        if "--eager" in more:
            assert made == []
        else:
            (step,) = made
            assert step.is_captured and step.calls == 12 and step.kernels > 50
            step.reset()  # while there is a device


# -- options for long contexts -----------------------------------------------------------------


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


def test_the_standard_library_is_a_text_of_whole_modules() -> None:
    text = text_data.read_text(text_data.LIBRARY)
    assert text == text_data.library_text() and len(text) > 2_000_000
    modules = text.split(text_data.FORM_FEED)
    assert (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8") in modules
