"""Gather, scatter-add, stable sort, inverse and cumulative sum in plain Python, for the simple backend.

``kernels.cpu.layers.indexing`` documents the arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def gather(x: Array, index: Array, missing: int = 0) -> Array:
    """Pick elements along the middle dimension: out[o, j] = x[o, index[o, j]], a number for -1."""
    out = np.empty((len(x), index.shape[1], x.shape[2]), x.dtype)
    for row, picks in enumerate(np.broadcast_to(index, (len(x), index.shape[1]))):
        for j, pick in enumerate(picks):
            out[row, j] = x[row, pick] if pick >= 0 else missing
    return out


def scatter_add(source: Array, index: Array, n: int) -> Array:
    """Add elements up at the places that an index names: out[o, index[o, j]] += source[o, j]."""
    out = np.zeros((len(source), n, source.shape[2]), source.dtype)
    for row, targets in enumerate(np.broadcast_to(index, source.shape[:2])):
        for j, target in enumerate(targets):
            out[row, target] += source[row, j]
    return out


def sort(x: Array) -> tuple[Array, Array]:
    """Sort each row; return it and the place that each element came from."""
    order = np.empty(x.shape, np.int64)
    for row, elements in enumerate(x.tolist()):
        # Python's sort keeps the order of equal elements; NaN, which equals nothing, comes last.
        keys = [(math.isnan(x), 0.0 if math.isnan(x) else x) for x in elements]
        order[row] = sorted(range(len(keys)), key=keys.__getitem__)
    return np.take_along_axis(x, order, 1), order


def invert(order: Array) -> Array:
    """Return the inverse of each row, a permutation: where each place stands."""
    out = np.empty_like(order)
    for row, places in enumerate(order):
        for i, place in enumerate(places):
            out[row, place] = i
    return out


def cumsum(x: Array, exclusive: bool, reverse: bool) -> Array:
    """Add up along the middle dimension, from its start or its end, with or without the element."""
    out = np.empty(x.shape, x.dtype)
    total = np.zeros((len(x), x.shape[2]), x.dtype)
    for k in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        out[:, k] = total if exclusive else total + x[:, k]
        total = total + x[:, k]
    return out
