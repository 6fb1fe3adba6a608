"""A recording of a kernel on the emulated GPU: what it holds is what the kernel computed, and moved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from app_pages.recording import Recording, RunSettings, record
from app_pages.tile_view import Story
from app_pages.tile_words import sentence

from kernels.traffic.formulas import TRAFFIC, HeadShape, total


def recorded(rung: str, mask: str, seq: int = 14, tile: tuple[int, int] = (4, 8)) -> Recording:
    return record(RunSettings(rung, seq, 6, *tile, mask))[0]


def textbook(recording: Recording) -> np.ndarray[Any, Any]:
    """Return the scores by the textbook, minus infinity where the bounds hide them."""
    seq, dim = recording.q.shape
    distance = np.arange(seq) - np.arange(seq)[:, None]
    seen = (recording.lower <= distance) & (distance <= recording.upper)
    return np.where(seen, recording.q @ recording.k.T / np.sqrt(dim), -np.inf)


@pytest.mark.parametrize(
    ("rung", "mask"),
    [*itertools.product(["flash1", "flash2"], ["none", "causal"]), ("flash2", "window of 5")],
)
def test_a_recording_tells_what_the_kernel_computed(rung: str, mask: str) -> None:
    recording = recorded(rung, mask)
    story, scores = Story(recording), textbook(recording)
    assert next(filter(None, story.visits)) == (0, 0)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(
        recording.out, weights / weights.sum(1, keepdims=True) @ recording.v, atol=1e-5
    )
    maxima = np.full(14, -np.inf)
    kinds = set()
    for number, visit in enumerate(story.visits):
        view = story.tiles(number)
        if view is None or visit is None:
            continue
        rows = slice(4 * visit[0], min(4 * visit[0] + 4, 14))
        cols = slice(8 * visit[1], min(8 * visit[1] + 8, 14))
        np.testing.assert_allclose(view.q_tile, recording.q[rows], atol=1e-6)
        if view.scores is not None:
            np.testing.assert_allclose(view.scores, scores[rows, cols], atol=1e-5)
        if view.rescale is None or view.probs is None or view.row_max is None:
            continue
        kinds.add(visit)
        old, now = maxima[rows], np.maximum(maxima[rows], scores[rows, cols].max(1))
        own = now if rung == "flash2" else scores[rows, cols].max(1)
        shift, own = (np.where(np.isfinite(x), x, 0) for x in (now, own))
        np.testing.assert_allclose(view.row_max, now, atol=1e-5)
        expected = np.exp(scores[rows, cols] - own[:, None])
        np.testing.assert_allclose(view.probs, expected, atol=1e-5)
        if rung == "flash2" or np.isfinite(old).all():
            np.testing.assert_allclose(view.rescale, np.exp(old - shift), atol=1e-5)
        maxima[rows] = now
    progress = story.progress(len(recording.steps) - 1)
    assert kinds == {tuple(map(int, place)) for place in np.argwhere(progress)}
    hidden = [
        not np.isfinite(scores[4 * i : 4 * i + 4, 8 * j : 8 * j + 8]).any()
        for i, j in np.argwhere(progress == 0)
    ]
    assert all(hidden) and (len(hidden) > 0) == (mask != "none")


@pytest.mark.parametrize("rung", ["flash1", "flash2"])
def test_a_sentence_tells_by_how_much_a_row_shrinks(rung: str) -> None:
    recording = recorded(rung, "none")
    story, scores = Story(recording), textbook(recording)
    told = [sentence(story, n) for n in range(len(recording.steps))]
    assert all(told)
    maxima = scores[:, :8].max(1), scores.max(1)  # after the first of two key tiles, and after both
    grown = maxima[1] - maxima[0]
    for i in range(0, 14, 4):
        row = i + int(np.argmax(grown[i : i + 4]))
        wanted = f"Row {row} found a larger maximum, {maxima[1][row]:.2f}"
        assert any(wanted in text for text in told) == (grown[row] > 0)
        if grown[row] > 0:
            assert any(
                text.startswith(wanted) and f"= {np.exp(-grown[row]):.2f}." in text for text in told
            )


def test_a_block_mask_skips_tiles() -> None:
    (recording,) = record(RunSettings("flash2", 48, 4, 16, 16, "blocks of 16"))
    progress = Story(recording).progress(len(recording.steps) - 1)
    assert (progress == 0).sum() == 2, progress  # a butterfly of three has two blocks hidden


def test_running_counts_end_where_the_formula_does() -> None:
    recording = recorded("flash1", "causal")
    shape = HeadShape(14, 14, 6, 6, recording.lower, recording.upper)
    moved = [total(step.counts).moved for step in recording.steps]
    assert moved == sorted(moved)
    assert recording.steps[-1].counts == TRAFFIC["flash1"](shape, (4, 8))


def test_a_recording_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="flash2 needs tiles of multiples of 4"):
        record(RunSettings("flash2", 8, 4, 3, 3))
