"""Dropout of a tile of probabilities on the CPU: one pass, which the backward pass repeats."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types, void

from kernels.common.philox import (
    ATTENTION,
    ATTENTION_ROUNDS,
    COLUMNS,
    HALF,
    HALF_MASK,
    MASK,
    WEYL_0,
    WEYL_1,
    WORDS,
    make_philox,
)
from kernels.cpu.attention.tile_scores import SETTINGS_TYPE, TILE_POSITION_TYPE
from kernels.cpu.runtime.function_pointers import address_of
from kernels.runtime.jit import FASTMATH, njit_cached

mix: Any = make_philox(njit).mix


@njit
def mix_words(words, seed):
    """Turn counters, (WORDS, count) uint32, into random words in place, as ``philox_7`` does for one.

    The outer loop is over rounds, so that LLVM vectorises the inner one over counters.
    """
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]  # (count,) each
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ATTENTION_ROUNDS):
        for i in range(words.shape[1]):
            c0, c1, c2, c3 = np.int64(w0[i]), np.int64(w1[i]), np.int64(w2[i]), np.int64(w3[i])
            w0[i], w1[i], w2[i], w3[i] = mix(k0, k1, c0, c1, c2, c3)
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK


@njit_cached(fastmath=FASTMATH)
def keep_pass(z, settings, place):
    """Fill the dropout factors of a tile of probabilities, up to its width: 0 or ``philox.keep_scale``.

    One counter, (column / 8, row, batch · heads + head, ATTENTION), gives the words of eight columns.
    """
    o = settings[0]
    threshold, kept, zero = np.uint32(o.threshold), z.dtype.type(o.kept), z.dtype.type(0)
    batch = place.flat // o.heads + place.sequence
    flat = np.uint32(batch * o.whole_heads + place.flat % o.heads + o.first_head)
    lines, width, by_keys = z.shape[0], place.width, o.by_keys != 0
    cols, rows = (width, lines) if by_keys else (lines, width)
    first_col, first_row = (place.lane, place.line) if by_keys else (place.line, place.lane)
    first_col, first_row = first_col + o.first_col, first_row + o.first_row
    first = first_col // COLUMNS
    blocks = (first_col + cols + COLUMNS - 1) // COLUMNS - first
    # By keys all rows' blocks at once; else the rows of one block, in the order of the lanes.
    batch = 1 if by_keys else blocks
    count = rows * blocks // batch
    words = np.empty((WORDS, count), np.uint32)  # (WORDS, count)
    for start in range(batch):
        for i in range(count):
            row, block = (i // blocks, i % blocks) if by_keys else (i, start)
            words[0, i] = np.uint32(first + block)
            words[1, i] = np.uint32(first_row + row)
            words[2, i] = flat
            words[3, i] = np.uint32(ATTENTION)
        mix_words(words, o.seed)
        for number in range(COLUMNS):
            own, shift = words[number // 2], np.uint32(HALF * (number % 2))  # (count,)
            if by_keys:
                for row in range(rows):
                    z_row = z[row]  # (lanes,)
                    for block in range(blocks):
                        col = (first + block) * COLUMNS + number - first_col
                        if 0 <= col < cols:
                            half = (own[row * blocks + block] >> shift) & np.uint32(HALF_MASK)
                            z_row[col] = kept if half >= threshold else zero
            else:
                col = (first + start) * COLUMNS + number - first_col
                if 0 <= col < cols:
                    z_row = z[col]  # (lanes,)
                    for row in range(rows):
                        half = (own[row] >> shift) & np.uint32(HALF_MASK)
                        z_row[row] = kept if half >= threshold else zero


@cache
def keep_address(dtype: np.dtype[Any]) -> int:
    """Return the address of the dropout pass for one dtype."""
    return address_of(
        keep_pass, void(types.Array(from_dtype(dtype), 2, "C"), SETTINGS_TYPE, TILE_POSITION_TYPE)
    )
