"""Gather, scatter-add, stable sort, inverse and cumulative sum by NumPy, for the simple backend.

``kernels.cpu.layers.indexing`` documents the arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def gather(x: Array, index: Array, missing: int = 0) -> Array:
    """Pick elements along the middle dimension: out[o, j] = x[o, index[o, j]], a number for -1."""
    index = np.broadcast_to(index, (len(x), index.shape[1]))
    picked = x[np.arange(len(x))[:, None], index]
    return np.where(index[..., None] >= 0, picked, np.array(missing, x.dtype))


def scatter_add(source: Array, index: Array, n: int) -> Array:
    """Add elements up at the places that an index names: out[o, index[o, j]] += source[o, j]."""
    out = np.zeros((len(source), n, source.shape[2]), source.dtype)
    np.add.at(out, (np.arange(len(source))[:, None], index), source)
    return out


def sort(x: Array) -> tuple[Array, Array]:
    """Sort each row; return it and the place that each element came from."""
    order = np.argsort(x, axis=1, kind="stable")
    return np.take_along_axis(x, order, 1), order


def invert(order: Array) -> Array:
    """Return the inverse of each row, a permutation: where each place stands."""
    return np.argsort(order, axis=1)


def cumsum(x: Array, exclusive: bool, reverse: bool) -> Array:
    """Add up along the middle dimension, from its start or its end, with or without the element."""
    step = -1 if reverse else 1
    out = np.zeros((len(x), x.shape[1] + 1, x.shape[2]), x.dtype)
    np.cumsum(x[:, ::step], 1, x.dtype, out[:, 1:])
    return np.ascontiguousarray((out[:, :-1] if exclusive else out[:, 1:])[:, ::step])
