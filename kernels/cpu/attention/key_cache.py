"""Rotate queries and keys by their positions, and append keys and values to a cache on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.problem.cached_keys import Cached
from kernels.runtime.dtypes import acc_dtype, rounded

Array = npt.NDArray[Any]


def append(call: Cached) -> tuple[Array, npt.NDArray[np.int64]]:
    """Append the new keys and values; return the rotated queries, and the lengths with the new keys."""
    batch, _, page_size = call.q.shape[0], *call.k_cache.shape[1:3]
    if call.lengths is None:
        lengths = np.full(batch, page_size * (1 if call.table is None else call.table.shape[1]))
    else:
        lengths = call.lengths.astype(np.int64) + call.new
    if call.k is not None:
        positions = lengths[:, None] + np.arange(-call.new, 0)  # (batch, new)
        rows = np.arange(batch)[:, None]
        pages = rows if call.table is None else call.table[rows, positions // page_size]
        for new, cache in ((_rotated(call, call.k, lengths), call.k_cache), (call.v, call.v_cache)):
            cache[pages, :, positions % page_size] = new.swapaxes(1, 2)
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
