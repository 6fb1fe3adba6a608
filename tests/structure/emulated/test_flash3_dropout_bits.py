"""Bits of a warp's elements, drawn on the emulated GPU: those of dropout, lane by lane, as keep decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import float32, int64, types, uint32, void

from kernels.common.philox import PLAIN, attention_threshold
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, make_kept, make_kept_by_keys
from kernels.cuda.attention.options.score_functions import Extras, extras_type
from kernels.cuda.ptx.numbers import pack_bf16
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import Features

from ...support.emulated.gpu import launch

DROPOUT = Features(dropout=True)
FOUND = types.Array(float32, 4, "C")


def _kernel(kept: Any, cols: int) -> Kernel:
    """Return a kernel that says of each element in three ways whether it is kept."""
    words, tiles = bit_words(cols), cols // 8
    draw, pair_of, has, signed = kept

    def kernel(found, flat, row, col, extras):
        bits = cuda.local.array(words, uint32)
        lane = cuda.threadIdx.x
        draw(bits, lane, flat, row, col, extras)
        ones = pack_bf16(float32(1.0), float32(1.0))
        for t in range(tiles):
            for i in range(4):
                found[0, lane, t, i] = 1.0 if has(bits, t, i) else 0.0
                found[1, lane, t, i] = max(signed(float32(1.0), bits, t, i), float32(0.0))
                half = pair_of(ones, bits, t, i // 2) >> (16 * (i % 2))
                found[2, lane, t, i] = (half & 0xFFFF) / 0x3F80

    extras = extras_type(DROPOUT, FLOAT32)
    return Kernel(kernel, void(FOUND, int64, int64, int64, extras), 32)


def _assert_draws(cols: int, by_keys: bool, rate: float) -> None:
    make = make_kept_by_keys if by_keys else make_kept
    seed, threshold, flat, row, col = 1234567890123, attention_threshold(rate), 5, 37, 64
    extras = Extras(-(1 << 20), 1 << 20, 2, 0, 0.0, 0.0, seed, threshold, 1.0)
    found = np.full((3, 32, cols // 8, 4), 7, np.float32)
    launch(_kernel(make(cols), cols), (1, 1), found, flat, row, col, extras)
    lane, t, i = np.indices(found.shape[1:])
    r, c = lane // 4 + 8 * (i // 2), 8 * t + 2 * (lane % 4) + i % 2
    r, c = (row + c, col + r) if by_keys else (row + r, col + c)
    expected = np.vectorize(lambda r, c: PLAIN.keep(seed, flat, int(r), int(c), threshold))(r, c)
    for way, got in zip(("has", "signed", "pair"), found, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=f"{way}, rate {rate}")


@pytest.mark.parametrize("by_keys", [False, True], ids=["by rows", "by keys"])
@pytest.mark.parametrize("cols", [16, 64, 80, 128])
def test_a_warp_draws_what_dropout_keeps_of_its_16_rows(cols: int, by_keys: bool) -> None:
    _assert_draws(cols, by_keys, 0.4)


@pytest.mark.parametrize("rate", [0.0, 0.75, 1.0])
def test_a_warp_draws_at_every_rate(rate: float) -> None:
    _assert_draws(16, True, rate)


@pytest.mark.parametrize("make", [make_kept, make_kept_by_keys])
def test_wider_tiles_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="up to 128 columns, got 136"):
        make(136)
