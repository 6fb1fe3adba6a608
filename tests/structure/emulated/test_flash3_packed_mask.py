"""Bits of a block mask in the lanes of Hopper's kernels are what the mask lets see."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types, void

from kernels import BlockMask
from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash3_wgmma.dropout_bits import TILES, bit_words
from kernels.cuda.attention.flash3_wgmma.packed_mask import WORDS, make_block_bits
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, Line
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.runtime.kernel import WARP, Kernel
from kernels.runtime.targets import cuda

from ...support.emulated.gpu import launch


def _kernel(cols: int, by_keys: bool) -> Kernel:
    """Return a kernel of one warp that writes the bits of 16 rows, or keys, from (row, col) on."""
    words, block_bits = bit_words(cols), make_block_bits(cols, by_keys)

    def bits_of(out, flat, row, col, seq_q, seq_k, extras):
        lane = cuda.threadIdx.x
        across, along = lane // 4, 2 * (lane % 4)
        own_row, own_col = (row + along, col + across) if by_keys else (row + across, col + along)
        line = Line(flat, b=0, h=0, batch=0, head=0, slope=0, rows=seq_q, cols=seq_k)
        place = LanePlace(lane, own_row, own_col, line)
        for n in range(words):
            out[lane * words + n] = block_bits(n, place, extras)

    integer = types.int64
    return Kernel(bits_of, void(WORDS, *[integer] * 5, types.Tuple(())), WARP)


def _extras(mask: BlockMask) -> Extras:
    patterns = mask.patterns
    if not len(patterns):  # as on a device
        patterns = np.zeros((1, mask.block_q, mask.block_k), bool)
    none = dict.fromkeys(Extras._fields, 0)
    # Copies: the emulator reads arrays from their beginning.
    own = {"heads": 2, "states": mask.states.copy(), "patterns": patterns.copy()}
    return Extras(**{**none, **own})


@given(data=st.data())
@settings(max_examples=12)
def test_bits_are_what_the_mask_lets_see(data: Any) -> None:
    cols = data.draw(st.sampled_from([16, 48, 64, 80, 128]), "columns of a tile")
    by_keys = data.draw(st.booleans(), "by keys")
    seq_q, seq_k = (data.draw(st.integers(1, 260), name) for name in ("seq_q", "seq_k"))
    block = tuple(data.draw(st.sampled_from([16, 32, 48, 64, 144]), "side") for _ in range(2))
    heads, flat = data.draw(st.sampled_from([1, 2]), "heads"), data.draw(st.integers(0, 3), "flat")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    states = rng.integers(0, 4, (heads, ceil_div(seq_q, block[0]), ceil_div(seq_k, block[1])))
    mask = BlockMask(states, seq_q, seq_k, block, rng.random((2, *block)) < 0.5)
    sides = (cols, 16) if by_keys else (16, cols)
    row, col = (
        side * data.draw(st.integers(0, (seq - 1) // side), "tile")
        for side, seq in zip(sides, (seq_q, seq_k), strict=True)
    )
    words = bit_words(cols)
    out = np.zeros(WARP * words, np.uint32)
    launch(_kernel(cols, by_keys), (1, 1), out, flat, row, col, seq_q, seq_k, _extras(mask))
    rows, columns = min(sides[0], seq_q - row), min(sides[1], seq_k - col)
    wanted = mask.visible(row, rows, col, columns)[flat % 2 % heads]
    for (r, c), is_seen in np.ndenumerate(wanted):
        across, along = (c, r) if by_keys else (r, c)
        lane = across % 8 * 4 + along % 8 // 2
        tile, element = along // 8, across // 8 * 2 + along % 2
        word = out[lane * words + tile // TILES]
        found = bool(word >> np.uint32(4 * (tile % TILES) + element) & np.uint32(1))
        assert found == is_seen, f"{mask} at {(row + r, col + c)}: {found}"
