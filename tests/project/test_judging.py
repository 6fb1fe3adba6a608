"""The scripts that judge trained language models: perplexity, and which continuation follows a chapter."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import harness
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import judging
from training import gpt_files

import minitorch
from minitorch.training.model_files import save_checkpoint

CONTEXT = 48
#: A configuration of a small model of bytes, as a checkpoint has it.
CONFIG: dict[str, Any] = {
    "characters": bytes(range(256)).decode("latin-1"), "prompt": "a", "width": 8, "heads": 2,
    "layers": 1, "context": CONTEXT, "dropout": 0.0, "attention": "flash", "tie_weights": False,
    "vocabulary": 256,
}  # fmt: skip
STRUCTURES = ({}, {"rotary_theta": 100.0, "window": 7, "sinks": True})
IDS = np.random.default_rng(0).integers(0, 256, 160)


def model_of(**options: Any) -> minitorch.DecoderLM:
    minitorch.manual_seed(0)
    model = gpt_files.build({**CONFIG, **options}, "fast")
    model.eval()
    return model


MODELS = [model_of(**options) for options in STRUCTURES]
MODEL_OF = st.sampled_from(MODELS)


# -- losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_tokens_are_those_of_the_logits(
    model: minitorch.DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = IDS[:80].reshape(2, 40), IDS[1:81].reshape(2, 40)
    logits = model(ids).to_numpy().astype(np.float64)
    total = np.log(np.exp(logits).sum(-1))
    expected = total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    for chunk in (1 << 25, 256 * 7):  # all rows at once, and seven
        monkeypatch.setattr(judging, "CHUNK", chunk)
        np.testing.assert_allclose(judging.token_losses(model, ids, targets), expected, atol=1e-5)
    assert judging.token_losses(model, ids, targets).mean() == pytest.approx(
        model.loss(ids, targets).item(), abs=1e-5
    )


# -- perplexity --------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(MODEL_OF, st.integers(1, 4), st.integers(1, CONTEXT), st.integers(1, 3))
def test_a_stride_of_the_context_is_the_mean_over_windows_that_do_not_overlap(
    model: minitorch.DecoderLM, count: int, context: int, batch: int
) -> None:
    count = min(count, (len(IDS) - 1) // context)
    ids = IDS[: count * context + 1]
    losses, places = judging.sliding_losses(model, ids, context, context, batch)
    inputs, targets = ids[:-1].reshape(count, context), ids[1:].reshape(count, context)
    assert losses.mean() == pytest.approx(model.loss(inputs, targets).item(), abs=1e-5)
    np.testing.assert_array_equal(places, np.tile(np.arange(context), count))
    rows = judging.by_position(losses, places, context)
    assert sum(row["tokens"] for row in rows) == len(losses)
    weighted = sum(row["tokens"] * row["loss"] for row in rows) / len(losses)
    assert weighted == pytest.approx(losses.mean())


@settings(max_examples=10)
@given(MODEL_OF, st.integers(1, CONTEXT), st.data())
def test_a_token_is_judged_after_those_of_its_window(
    model: minitorch.DecoderLM, context: int, data: Any
) -> None:
    stride = data.draw(st.integers(max(context // 4, 1), context))
    ids = IDS[: data.draw(st.integers(2, len(IDS)))]
    losses, places = judging.sliding_losses(model, ids, context, stride, 2)
    assert np.isfinite(losses).all()
    at = data.draw(st.integers(0, len(losses) - 1))
    seen = ids[at - places[at] : at + 1]
    assert len(seen) >= min(at + 1, context - stride + 1)
    alone = judging.token_losses(model, seen[None], ids[None, at - places[at] + 1 : at + 2])
    assert losses[at] == pytest.approx(alone[0, -1], abs=1e-5)


# -- chapters ----------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(MODEL_OF, st.integers(1, 6), st.data())
def test_a_prefix_is_read_once_and_scores_are_those_of_whole_texts(
    model: minitorch.DecoderLM, length: int, data: Any
) -> None:
    context = data.draw(st.integers(length + 1, CONTEXT))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    questions = [
        judging.Question(rng.integers(0, 256, 60), rng.integers(0, 256, (6, length)))
        for _ in range(3)
    ]
    found = judging.scores(model, questions, context, data.draw(st.integers(1, 4)))
    for question, row in zip(questions, found, strict=True):
        for own, score in zip(question.continuations, row, strict=True):
            text = np.concatenate([question.prefix, own])[-context:]
            losses = judging.token_losses(model, text[None, :-1], text[None, 1:])[0]
            assert score == pytest.approx(-losses[-length:].mean(), abs=1e-5)


CHAPTERS = "\f".join(
    "".join(f"def f{i}{d}(x):\n    return {i * 7 % 10}{i * 3 % 10} * x\n\n\n" for i in range(12))
    for d in range(4)
)


def test_questions_begin_where_chapters_do() -> None:
    config = {**CONFIG, "tokenizer": None}
    ids = np.frombuffer(CHAPTERS.encode(), np.uint8).astype(np.int64)
    subject = judging.Subject("", MODELS[0], config, ids)
    ask = (subject, re.compile(judging.DEFINITION, re.MULTILINE))
    found = judging.questions_of(*ask, 20, 10, 99, 0)
    assert len(found) == 4 * 6  # the first chapter has too little before it, the last ones after
    for prefix, continuations in found:
        before, *after = (bytes(x.astype(np.uint8)).decode() for x in (prefix, *continuations))
        assert before.endswith("\n\n\n") and all(x.startswith("def f") for x in after)
        assert CHAPTERS.count(before + after[0]) == 1 and len({*after}) == 6
        place = CHAPTERS.index(before + after[0])
        assert all(CHAPTERS.index(x) > place for x in after[1:])
    again = judging.questions_of(*ask, 20, 10, 7, 0)
    assert len(again) == 7
    assert judging.questions_of(*ask, 2000, 10, 99, 0) == []


# -- the scripts -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with a model, and a text beside it."""
    (tmp_path / "text.py").write_text(CHAPTERS * 3)
    folder = tmp_path / "run"
    folder.mkdir()
    save_checkpoint(folder / "model.safetensors", MODELS[0], {**CONFIG, "precision": "float32"})
    return folder


def judged(name: str, folder: Path, *args: Any) -> dict[str, Any]:
    """Run a measurement; return its record."""
    given = [
        "--device",
        "cpu",
        "--json",
        folder / "record.json",
        "--text",
        folder / "text.py",
        *args,
    ]
    assert harness.run(harness.load(name), [str(arg) for arg in given]) == 0
    return json.loads((folder / "record.json").read_text())


def test_perplexity_writes_a_record(run: Path, tmp_path: Path) -> None:
    runs = ["--runs", run, run / "model.safetensors"]
    record = judged(
        "perplexity", tmp_path, *runs, "--stride", 16, "--contexts", 16, CONTEXT, "--batch", 3
    )
    first, second = record["rows"]
    assert first["by_context"] == second["by_context"] and first["tokens"] > 300  # a tenth
    assert [(row["context"], row["stride"]) for row in first["by_context"]] == [
        (16, 16),
        (CONTEXT, 16),
    ]
    for row in first["by_context"]:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_chapter_break_writes_a_record(run: Path, tmp_path: Path) -> None:
    given = ["--runs", run, "--all", "--continuation", 8, "--questions", 9, "--batch", 4]
    (row,) = judged("chapter_break", tmp_path, *given)["rows"]
    assert [one["context"] for one in row["by_context"][::2]] == [16, 32, CONTEXT]
    assert {one["score"] for one in row["by_context"]} == {*judging.SCORES}
    assert row["questions"] == 9 and row["chance"] == pytest.approx(1 / 6)
    for one in row["by_context"]:
        assert one["low"] <= one["accuracy"] <= one["high"]
    for i, score in enumerate(judging.SCORES):
        more = row["by_context"][4 + i]["accuracy"] - row["by_context"][i]["accuracy"]
        assert row["longest_minus_shortest"][score]["mean"] == pytest.approx(more)
