"""Which tiles lines visit, against asking of each element whether it is seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.geometry import PLAIN

BLOCK = st.integers(1, 7)
BOUND = st.integers(-30, 30)


@given(BLOCK, BLOCK, st.integers(1, 25), st.integers(1, 25), BOUND, st.integers(0, 30))
def test_tiles_are_those_whose_elements_are_seen(
    block_q: int, block_k: int, seq_q: int, seq_k: int, lower: int, wide: int
) -> None:
    upper = lower + wide
    row, col = np.indices((seq_q, seq_k))
    seen = (row + lower <= col) & (col <= row + upper)
    for start in range(0, seq_q, block_q):
        stop = min(start + block_q, seq_q)
        first = PLAIN.first_tile(start, block_k, seq_k, lower)
        visited = range(first, PLAIN.tiles_stop(stop, block_k, seq_k, upper))
        full = range(
            PLAIN.first_full_tile(stop, block_k, lower),
            PLAIN.full_tiles_stop(start, block_k, seq_k, upper),
        )
        for tile in range(PLAIN.ceil_div(seq_k, block_k)):
            col = tile * block_k
            part = seen[start:stop, col : col + block_k]
            # Bounds are of the tile, which reaches beyond the last key where that is in the middle.
            is_seen = PLAIN.is_tile_seen(start, stop, col, block_k, lower, upper)
            assert is_seen or not part.any()
            if col + block_k <= seq_k:
                assert is_seen == part.any()
            assert tile in visited or not part.any()
            assert tile not in visited or part.any() or lower > upper
            assert tile not in full or (part.all() and part.shape[1] == block_k)
            is_full = PLAIN.is_full_tile(start, block_q, seq_q, col, block_k, seq_k, lower, upper)
            assert is_full == (part.shape == (block_q, block_k) and bool(part.all()))


@given(BLOCK, BOUND, BOUND)
def test_no_lines_see_nothing(block: int, start: int, upper: int) -> None:
    assert not PLAIN.is_tile_seen(start, start, start, block, -99, upper)
