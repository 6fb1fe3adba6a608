"""Parts of a sequence: each row is on one rank, all ranks have equal work, and pairs see what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitorch.distributed import positions
from minitorch.distributed.blocks import blocks
from minitorch.distributed.sequence_parts import LAYOUTS, Pair, Segment, segments

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


def shown(found: Pair, rows: int, keys: int, left: int, right: int) -> Any:
    """Return which rows of a call see which keys, (rows, keys), by its numbers."""
    row, col = found.row + np.arange(rows)[:, None], found.col + np.arange(keys)
    inside = ((left < 0) | (col >= row - left)) & ((right < 0) | (col <= row + right))
    if not found.sums:
        return inside
    assert found.sums[-1] == rows == keys
    sequence_of = np.searchsorted(found.sums, np.arange(rows), side="right")
    return inside & (sequence_of[:, None] == sequence_of)


@given(packings(), st.integers(-1, 9), st.integers(-1, 9), st.booleans())
def test_the_calls_of_two_ranks_see_each_pair_of_rows_once(
    drawn: Any, left: int, right: int, keeps_places: bool
) -> None:
    seq, size, layout, sums = drawn
    every = [segments(seq, rank, size, layout, sums) for rank in range(size)]
    for own in every:
        for other in every:
            wanted = np.block(
                [[seen(a, b, sums, left, right).astype(int) for b in other] for a in own]
            )
            count = np.zeros_like(wanted)
            for block in blocks(own, other, left, right, keeps_places):
                sizes = len(block.rows), len(block.cols)
                count[np.ix_(block.rows, block.cols)] += shown(block.pair, *sizes, left, right)
                for numbers, parts, rows in (
                    (block.queries, own, block.rows),
                    (block.keys, other, block.cols),
                ):
                    assert [x for n in numbers for x in parts[n].here] == [*rows]
                if keeps_places:
                    for start, numbers, parts in (
                        (block.pair.row, block.queries, own),
                        (block.pair.col, block.keys, other),
                    ):
                        for part in (parts[n] for n in numbers):
                            assert part.first == start or part.sums
                            start += part.rows
            np.testing.assert_array_equal(count, wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_makes_one_causal_call_for_the_keys_of_each(size: int) -> None:
    whole = (0, 8 * size)
    every = [segments(whole[1], rank, size, "zigzag", whole) for rank in range(size)]
    for i, own in enumerate(every):
        for j, other in enumerate(every):
            (block,) = blocks(own, other, -1, 0, False)
            rows, keys = (range(2), range(1)) if j < i else (range(i < j, 2), range(2))
            offset = block.pair.row - block.pair.col
            assert (block.queries, block.keys) == (rows, keys)
            # The rows see all keys of another rank, and a causal offset of as many keys masks none.
            assert offset == 0 if i == j else offset >= 4 * len(keys)


@pytest.mark.parametrize(("layout", "count"), [("zigzag", 6), ("contiguous", 3)])
def test_a_sequence_that_does_not_divide_is_refused(layout: str, count: int) -> None:
    with pytest.raises(ValueError, match=rf"13 does not divide into {count} equal chunks"):
        rows_of(13, 0, 3, layout)
