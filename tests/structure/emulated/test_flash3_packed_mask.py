"""The words of a block mask in the lanes of Hopper's kernels are what the mask lets see."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types, uint32, void

from kernels import BlockMask
from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash3_wgmma.dropout_bits import (
    bit_words,
    has_bit,
    lane_offset_of,
    offset_of,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import (
    ROWS,
    make_pattern_word,
    pack_patterns,
    pack_patterns_by_keys,
)
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.cuda.runtime.kernel import WARP, Kernel
from kernels.runtime.targets import cuda

from ...support.emulated.gpu import launch


def _kernel(rows: int, cols: int, by_keys: bool) -> Kernel:
    """Return a kernel that writes the elements of a tile as its warps see them."""
    words, word_of = bit_words(cols), make_pattern_word(rows, cols)
    offset, lane_offset = offset_of(by_keys), lane_offset_of(by_keys)

    def elements_of(out, pattern, extras):
        if cuda.threadIdx.x >= WARPGROUP:
            warp, lane = (cuda.threadIdx.x - WARPGROUP) // WARP, cuda.threadIdx.x % WARP
            seen = cuda.local.array(2, uint32)  # (words,)
            for n in range(words):
                seen[n] = word_of(n, pattern, extras)
            row, col = lane_offset(lane)
            for t in range(cols // 8):
                for i in range(4):
                    r, c = offset(t, i)
                    along, across = (col + c, row + r) if by_keys else (row + r, col + c)
                    out[(warp * ROWS + along) * cols + across] = has_bit(seen, t, i)

    out = types.Array(types.boolean, 1, "C")
    return Kernel(
        elements_of, void(out, types.int64, types.Tuple(())), WARPGROUP + rows // ROWS * WARP
    )


@given(data=st.data())
@settings(max_examples=12)
def test_bits_are_what_the_mask_lets_see(data: Any) -> None:
    rows = data.draw(st.sampled_from([16, 64, 128]), "rows of the warps")
    cols = data.draw(st.sampled_from([16, 48, 64, 80, 128]), "columns")
    by_keys = data.draw(st.booleans(), "by keys")
    seq_q, seq_k = (data.draw(st.integers(1, 260), name) for name in ("seq_q", "seq_k"))
    block = tuple(data.draw(st.sampled_from([16, 32, 48, 64, 144]), "side") for _ in range(2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    states = rng.integers(0, 4, (2, ceil_div(seq_q, block[0]), ceil_div(seq_k, block[1])))
    mask = BlockMask(states, seq_q, seq_k, block, rng.random((2, *block)) < 0.5)
    tile = (cols, rows) if by_keys else (rows, cols)
    pack = pack_patterns_by_keys if by_keys else pack_patterns
    numbers, packed = mask.tile_patterns(*tile, by_keys, pack)
    lists = mask.tile_list(*tile, by_keys)
    lines = ceil_div(seq_k if by_keys else seq_q, rows)
    entry = data.draw(st.integers(0, max(len(numbers) - 1, 0)), "entry")
    if not len(numbers):
        return
    line = int(np.searchsorted(lists.tile_ptr, entry, "right")) - 1
    head, own, other = line // lines, line % lines * rows, int(lists.tile_ids[entry]) * cols
    row, col = (other, own) if by_keys else (own, other)
    wanted = np.zeros(tile, bool)
    inside = mask.visible(row, min(tile[0], seq_q - row), col, min(tile[1], seq_k - col))[head]
    wanted[: inside.shape[0], : inside.shape[1]] = inside
    if numbers[entry] == 0:
        assert wanted.all()
        return
    words = np.concatenate([x.ravel() for x in packed])
    extras = Extras(**{**dict.fromkeys(Extras._fields, 0), "pattern_words": words})
    out = np.zeros(rows * cols, bool)
    launch(_kernel(rows, cols, by_keys), (1, 1), out, int(numbers[entry]), extras)
    found = out.reshape(rows, cols)
    np.testing.assert_array_equal(found.T if by_keys else found, wanted)
