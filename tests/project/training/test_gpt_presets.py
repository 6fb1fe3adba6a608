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
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from kernels.runtime.targets import IS_SIMULATOR
from kernels.traffic.formulas import training_flops
from minitorch import FastBackend
from minitorch.training.model_files import read_checkpoint

from ...support.device.fake_device import fake_device
from ...support.models.captured_training import made_steps
from .test_train_gpt import SMALL

from training import gpt_loop, gpt_presets  # isort: skip  # found in the folder that test_training puts on the path
from data import text as text_data  # isort: skip
from training import gpt_options  # isort: skip
from training import script_helpers  # isort: skip

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


def test_tokens_that_no_text_has_can_be_read() -> None:
    assert gpt_presets.reader(gpt_presets.BYTES)([65, 50_000, 0xC3, 0xB6]) == "A\ufffdö"
    assert gpt_presets.reader(gpt_presets.ASCII)([0, 96]) == "\n\ufffd"


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


def test_gradients_of_16_bits_are_summed_in_float32() -> None:
    ids = np.random.default_rng(0).integers(0, 7, (4, 6))
    model = model_of("bfloat16")

    class Noted(minitorch.AdamW):
        def step(self) -> None:
            self.seen = [p.value.grad.dtype for p in self.parameters]
            super().step()

    optimizer = Noted(model.parameters(), lr=1e-3)
    loss = gpt_loop.train_step(model, optimizer, ids[:, :-1], ids[:, 1:], accumulate=4)
    assert {*optimizer.seen} == {np.dtype(np.float32)} and loss.dtype == np.float32


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_warming_up_takes_a_step_of_full_size_and_leaves_the_model(
    precision: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a smaller step leaves to be compiled in the first one is time that the clock counts.
    model, seen = model_of(precision), []
    before = {name: p.value.to_numpy().copy() for name, p in model.named_parameters()}
    real = minitorch.DecoderLM.loss

    def loss(self: minitorch.DecoderLM, inputs: Any, targets: Any) -> Any:
        seen.append(np.shape(inputs))
        return real(self, inputs, targets)

    monkeypatch.setattr(minitorch.DecoderLM, "loss", loss)
    corpus = text_data.Corpus.from_text("ab" * 500, model.n_positions, "ab")
    args = SimpleNamespace(
        backend="fast", seed=3, batch=3, context=model.n_positions, accumulate=accumulate, clip=1.0
    )
    gpt_loop.warm_up(model, corpus, args)  # type: ignore[arg-type]
    assert seen == min(accumulate, 2) * [(3, model.n_positions)]
    for name, p in model.named_parameters():
        assert p.value.to_numpy().tobytes() == before[name].tobytes(), name
        assert p.value.grad is None, name


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


def test_a_preset_gives_way_to_what_the_command_line_names() -> None:
    args = gpt_options.parse_args(None, ["--preset", "gpt2-small", "--layers", "2", "--lr", "0.1"])
    assert (args.layers, args.lr, args.width, args.vocabulary) == (2, 0.1, 768, 50_304)
    assert args.tie_weights and args.context == 1024
    plain = gpt_options.parse_args(None, [])
    assert (plain.vocabulary, plain.precision, plain.layers) == (None, "float32", 2)


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


@pytest.mark.skipif(IS_SIMULATOR, reason="the simulator has no driver")
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
