"""Bits of a warp's elements, drawn on the emulated GPU: those of dropout, lane by lane, as keep decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import int64, types, uint32, void

from kernels.cuda.device import Kernel
from kernels.cuda.flash3_scores import (
    bit_words,
    has_bit,
    make_draw_kept,
    make_draw_kept_by_keys,
)
from kernels.cuda.scores import Features, extras_type
from kernels.dtypes import FLOAT32
from kernels.philox import PLAIN, drop_threshold
from kernels.targets import cuda

from .emulated_gpu import launch
from .mma_attention import FAR, Extras

DROPOUT = Features(dropout=True)
FOUND = types.Array(uint32, 3, "C")


def _kernel(draw: Any, cols: int) -> Kernel:
    words, tiles = bit_words(cols), cols // 8

    def kernel(found, flat, row, col, extras):
        bits = cuda.local.array(words, uint32)
        lane = cuda.threadIdx.x
        draw(bits, lane, flat, row, col, extras)
        for t in range(tiles):
            for i in range(4):
                found[lane, t, i] = has_bit(bits, t, i)

    extras = extras_type(DROPOUT, FLOAT32)
    return Kernel(kernel, void(FOUND, int64, int64, int64, extras), 32)


@pytest.mark.parametrize("by_keys", [False, True], ids=["by rows", "by keys"])
@pytest.mark.parametrize("cols", [16, 80, 128])
def test_a_warp_draws_what_dropout_keeps_of_its_16_rows(cols: int, by_keys: bool) -> None:
    make = make_draw_kept_by_keys if by_keys else make_draw_kept
    seed, threshold, flat, row, col = 1234567890123, drop_threshold(0.4), 5, 37, 64
    extras = Extras(-FAR, FAR, 2, 0, 0.0, seed, threshold, 1.0)
    found = np.full((32, cols // 8, 4), 7, np.uint32)
    launch(_kernel(make(cols), cols), (1, 1), found, flat, row, col, extras)
    lane, t, i = np.indices(found.shape)
    r, c = lane // 4 + 8 * (i // 2), 8 * t + 2 * (lane % 4) + i % 2
    r, c = (row + c, col + r) if by_keys else (row + r, col + c)
    expected = np.vectorize(lambda r, c: PLAIN.keep(seed, flat, int(r), int(c), threshold))(r, c)
    np.testing.assert_array_equal(found, expected)
