"""Parts of a sequence: each row is on one rank, all ranks have equal work, and pairs see what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitorch.distributed import positions
from minitorch.distributed.sequence_parts import LAYOUTS, Segment, pair, segments

SIZES = st.integers(1, 5)


@st.composite
def packings(draw: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Draw the length of a sequence, ranks, a layout, and cumulative lengths, some of them equal."""
    size, layout = draw(SIZES), draw(st.sampled_from(LAYOUTS))
    seq = draw(st.integers(1, 8)) * size * 2
    sums = (0, *sorted(draw(st.lists(st.integers(0, seq), max_size=8))), seq)
    return seq, size, layout, sums


def rows_of(seq: int, rank: int, size: int, layout: str) -> Any:
    group: Any = SimpleNamespace(rank=rank, size=size)
    return positions(seq, group, layout)


@given(packings())
def test_every_row_is_in_one_segment_of_one_rank(drawn: Any) -> None:
    seq, size, layout, sums = drawn
    every = [rows_of(seq, rank, size, layout) for rank in range(size)]
    assert sorted(np.concatenate(every).tolist()) == list(range(seq))
    for rank, rows in enumerate(every):
        found = segments(seq, rank, size, layout, sums)
        assert (
            np.concatenate([rows[s.start : s.start + s.rows] for s in found]).tolist()
            == rows.tolist()
        )
        assert [x for s in found for x in range(s.place, s.place + s.rows)] == rows.tolist()
        assert len(found) <= 3 * (2 if layout == "zigzag" else 1)


@given(SIZES, st.integers(1, 20))
def test_zigzag_gives_all_ranks_the_same_causal_work(size: int, chunk: int) -> None:
    work = {
        int((rows_of(2 * size * chunk, rank, size, "zigzag") + 1).sum()) for rank in range(size)
    }
    assert len(work) == 1


def seen(queries: Segment, keys: Segment, sums: Any, left: int, right: int) -> Any:
    """Return which pairs of rows of two segments see one another, (rows, keys), by their places alone."""
    row = np.arange(queries.place, queries.place + queries.rows)[:, None]
    col = np.arange(keys.place, keys.place + keys.rows)
    sequence_of = np.searchsorted(sums, np.arange(sums[-1]), side="right")
    inside = (left < 0) | (col >= row - left)
    return (sequence_of[row] == sequence_of[col]) & inside & ((right < 0) | (col <= row + right))


@given(packings(), st.integers(-1, 9), st.integers(-1, 9))
def test_a_pair_sees_what_its_numbers_say(drawn: Any, left: int, right: int) -> None:
    seq, size, layout, sums = drawn
    every = [s for rank in range(size) for s in segments(seq, rank, size, layout, sums)]
    for queries in every:
        for keys in every:
            wanted, found = seen(queries, keys, sums, left, right), pair(queries, keys, left, right)
            if found is None:
                assert not wanted.any()
                continue
            row = found.row + np.arange(queries.rows)[:, None]
            col = found.col + np.arange(keys.rows)
            shown = ((left < 0) | (col >= row - left)) & ((right < 0) | (col <= row + right))
            if found.sums:
                assert found.sums[-1] == queries.rows == keys.rows
                sequence_of = np.searchsorted(found.sums, np.arange(queries.rows), side="right")
                shown = shown & (sequence_of[:, None] == sequence_of)
            np.testing.assert_array_equal(shown, wanted)


@pytest.mark.parametrize(("layout", "count"), [("zigzag", 6), ("contiguous", 3)])
def test_a_sequence_that_does_not_divide_is_refused(layout: str, count: int) -> None:
    with pytest.raises(ValueError, match=rf"13 does not divide into {count} equal chunks"):
        rows_of(13, 0, 3, layout)
