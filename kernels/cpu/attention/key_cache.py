"""Append rotated keys and values to a cache on the host, and load rows of it that are not read in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.cpu.attention.tile_scores import copy_tile, rows_of
from kernels.cpu.runtime.function_pointers import contiguous
from kernels.problem.cached_keys import Cached
from kernels.reference.lines import page_places
from kernels.runtime import dtypes
from kernels.runtime.dtypes import acc_dtype, is_half, rounded
from kernels.runtime.jit import FASTMATH

Array = npt.NDArray[Any]
#: Forms of a cache: rows that are read in place, rows to be copied, and 16-bit numbers to be converted.
IN_PLACE, STRIDED, BFLOAT16, FLOAT16 = range(4)


def append(call: Cached) -> tuple[Array, npt.NDArray[np.int64]]:
    """Append the new keys and values; return the rotated queries, and the lengths with the new keys."""
    batch, _, page_size = call.q.shape[0], *call.k_cache.shape[1:3]
    if call.lengths is None:
        lengths = np.full(batch, page_size * (1 if call.table is None else call.table.shape[1]))
    else:
        lengths = call.lengths.astype(np.int64) + call.new
    if call.k is not None:
        positions = lengths[:, None] + np.arange(-call.new, 0)  # (batch, new)
        table = np.arange(batch)[:, None] if call.table is None else call.table
        pages, places = page_places(table, positions, page_size)
        for new, cache in ((_rotated(call, call.k, lengths), call.k_cache), (call.v, call.v_cache)):
            cache[pages, :, places] = new.swapaxes(1, 2)
    return _rotated(call, call.q, lengths), lengths


def _rotated(call: Cached, x: Array, lengths: npt.NDArray[np.int64]) -> Array:
    """Return the last rows of each sequence, (batch, heads, rows, dim), rotated by their positions.

    The first pairs of elements are rotated; a position before the first one is taken as the first.
    """
    if call.cos is None:
        return x
    rows, sums = x.shape[2], acc_dtype(x.dtype)
    positions = np.maximum(lengths[:, None] + np.arange(-rows, 0), 0)
    cos, sin = (t.astype(sums)[positions][:, None] for t in (call.cos, call.sin))
    pairs, found = cos.shape[-1], x.astype(sums)  # (batch, 1, rows, pairs)
    first, second = np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs]
    if call.is_interleaved:
        first, second = np.s_[..., : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2]
    a, b = found[first].copy(), found[second].copy()
    found[first], found[second] = a * cos - b * sin, a * sin + b * cos
    return rounded(found, x.dtype)


def form_of(array: Any) -> int:
    """Return how the kernel loads the rows of a cache."""
    if is_half(array.dtype):
        return BFLOAT16 if array.dtype == dtypes.BFLOAT16 else FLOAT16
    return IN_PLACE if array.strides[3] == array.itemsize or array.shape[3] == 1 else STRIDED


@njit(fastmath=FASTMATH)
def load_tile(form, array, page, head, place, target):
    """Load rows of a cache that cannot be read in place to a tile, (count, dim)."""
    count = target.shape[0]
    if form == STRIDED:
        copy_tile(rows_of(array, page, head, place, count, target.dtype), target)
        return
    bits = rows_of(array, page, head, place, count, np.uint16)
    for r in range(count):
        own, row = bits[r], contiguous(target[r]).view(np.uint32)  # (dim,)
        if form == BFLOAT16:
            for i in range(len(row)):
                row[i] = np.uint32(own[i]) << np.uint32(16)
        else:
            for i in range(len(row)):
                number = np.uint32(own[i])
                own_bits = (number & np.uint32(0x7FFF)) << np.uint32(13)
                # the largest exponent, of infinities and NaN, remains the largest
                is_last = (number & np.uint32(0x7C00)) == np.uint32(0x7C00)
                own_bits |= np.uint32(0x7F800000) if is_last else np.uint32(0)
                row[i] = own_bits | ((number & np.uint32(0x8000)) << np.uint32(16))
    if form == FLOAT16:
        factor = target.dtype.type(2.0**112)  # the bias of an exponent is 127 instead of 15
        for r in range(count):
            row = target[r]
            for i in range(len(row)):
                row[i] *= factor
