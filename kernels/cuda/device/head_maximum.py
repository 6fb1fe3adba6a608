"""The largest number of a head, for kernels that scale by it: one launch measures and uses it.

A block measures a part of one head, and then processes the same part of an earlier head, which earlier
blocks have measured.  It waits only for these blocks, and a GPU starts blocks in the order of their index.
The part was read from memory a short time ago, and is often still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.memory import fill
from kernels.cuda.device.per_device import multiprocessors
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.ptx.copies import global_address, ld_relaxed, st_relaxed
from kernels.cuda.ptx.numbers import bits_of, float_of
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import WARP, WORD, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32

#: The sign bit of a part's maximum in memory, set when the maximum has been stored, even if it is 0.
_STORED = np.uint32(1 << 31)
_ZERO, _INF = np.float32(0), np.float32(np.inf)


def lag_of(blocks: int) -> int:
    """Return the number of heads between measuring and using, if ``blocks`` blocks share a head.

    One, plus half a block per multiprocessor; with a larger lag, the part has left the L2 cache.
    """
    return ceil_div(multiprocessors(), 2 * blocks)


def head_words(operands: int, heads: int, count: int) -> Any:
    """Return (operands, heads, count) float32 zeros: a word for each part of a head, and other words."""
    words = empty_device((operands, heads, count), FLOAT32)
    fill(words, 0.0)
    return words


@device_function
def head_address(words, which, line):
    """Return the address of the words of a head of an operand, in an array of :func:`head_words`."""
    return global_address(words) + which * words.strides[0] + line * words.strides[1]


@device_function
def largest_of(x, first, count, most):
    """Return the largest magnitude of ``count`` finite numbers of x, or ``most`` if that is larger."""
    for n in range(count):
        size = abs(x[first + n])
        most = max(most, size if size < _INF else _ZERO)
    return most


@cache
def make_note_max(threads: int) -> Callable[..., None]:
    """Return ``note_max(x, at)``: store the maximum over the threads of a block as that of its part."""
    (block_max, _), warps = make_row_folds(RowBlock(threads, 1)), threads // WARP

    @device_function
    def note_max(x, at):
        x = block_max(cuda.shared.array(warps, float32), x)
        if cuda.threadIdx.x == 0:
            st_relaxed(at, bits_of(x) | _STORED)

    return note_max


@cache
def make_head_max(threads: int) -> Callable[..., Any]:
    """Return ``head_max(at, parts)``: the maximum of a head's parts, as soon as all have been stored."""
    (block_max, _), warps = make_row_folds(RowBlock(threads, 1)), threads // WARP

    @device_function
    def head_max(at, parts):
        most = _ZERO
        for i in range(cuda.threadIdx.x, parts, threads):
            word = ld_relaxed(at + WORD * i)
            while word == 0:
                word = ld_relaxed(at + WORD * i)
            most = max(most, abs(float_of(word)))
        return block_max(cuda.shared.array(warps, float32), most)

    return head_max
