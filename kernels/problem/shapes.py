"""Checks of arrays and tiles, and of the dtypes and shapes of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.common.arguments import shown
from kernels.runtime.dtypes import FLOAT_DTYPES, NAMES

MAX_HEAD_DIM = 512
_NAMES = ", ".join(map(str, FLOAT_DTYPES[:-1])) + f" or {FLOAT_DTYPES[-1]}"
#: Maximum rows or columns of a tile; the scores of a larger one do not fit into fast memory.
MAX_TILE = 4096


def check_tile(tile: Any) -> tuple[int, int] | None:
    """Return the requested tile as two ints, or None if it is None.

    Anything but a pair of whole numbers raises a TypeError, and a side that is not from 1 to
    ``MAX_TILE`` a ValueError.
    """
    if tile is None:
        return None
    sides = tuple(tile) if isinstance(tile, Sequence) and not isinstance(tile, str) else ()
    if not (len(sides) == 2 and all(map(is_whole, sides))):
        raise TypeError(
            f"tile must be (block_q, block_k), two whole numbers, or None for the rung's default, got "
            f"{shown(tile)}"
        )
    if not (min(sides) >= 1 and max(sides) <= MAX_TILE):
        raise ValueError(
            f"tile must be (block_q, block_k), each from 1 to {MAX_TILE}, got {sides}; the scores of a "
            "larger tile do not fit into fast memory; None uses the rung's default"
        )
    return int(sides[0]), int(sides[1])


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_array(name: str, operand: Any) -> None:
    """Check that an operand is an array or a tensor of any library; otherwise raise a TypeError."""
    shape, dtype = getattr(operand, "shape", None), getattr(operand, "dtype", None)
    if shape is None or dtype is None or isinstance(operand, np.generic):
        raise TypeError(
            f"{name} must be an array or a tensor, got {type(operand).__name__}; convert it first"
        )


def check_dtypes(q: Any, k: Any, v: Any) -> np.dtype[Any]:
    """Return the common floating dtype of the operands; raise a TypeError if they have none."""
    dtypes: list[Any] = []
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_array(name, operand)
        dtypes.append(dtype := operand.dtype)
        if np.dtype(dtype) not in NAMES:
            raise TypeError(
                f"attention needs {_NAMES}, got {name} of {dtype}; convert it with "
                "Tensor.to (NumPy arrays: .astype) to float32"
            )
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        raise TypeError(
            "q, k and v must have the same dtype, got {}, {} and {}; convert them to one".format(
                *dtypes
            )
        )
    return np.dtype(dtypes[0])


@lru_cache(maxsize=1024)
def check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *, enable_gqa: bool
) -> tuple[tuple[int, ...], int, int, int, int, int]:
    """Return the leading dimensions of the scores, groups, seq_q, seq_k, head_dim and value_dim.

    Shapes that do not fit together raise a ValueError.
    """
    shapes = f"q {q}, k {k}, v {v}"
    if min(len(q), len(k), len(v)) < 2:
        raise ValueError(
            "attention needs (…, heads, seq, head_dim) or (seq, head_dim), two dimensions or "
            f"more; got {shapes}"
        )
    if q[-1] != k[-1]:
        raise ValueError(
            f"q and k must have the same head_dim (their last size), got {q[-1]} and {k[-1]} in "
            f"{shapes}"
        )
    if k[-2] != v[-2]:
        raise ValueError(
            f"k and v must have the same length (second-to-last size), got {k[-2]} and {v[-2]} "
            f"in {shapes}"
        )
    if q[-2] < 1 or k[-2] < 1:
        raise ValueError(
            f"sequences must hold at least one row, got {shapes}; leave the call out for an empty sequence"
        )
    for name, size in (("head_dim", q[-1]), ("value dim", v[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must be from 1 to {MAX_HEAD_DIM}, got {size} in {shapes}; use more heads "
                "of a smaller size, or in a downloaded model, whose heads are fixed, another attention, "
                "such as attn_implementation='sdpa' of transformers"
            )
    groups = _check_groups(q, k, v, shapes) if enable_gqa else 1
    last = -3 if groups > 1 else -2
    try:
        lead = np.broadcast_shapes(q[:last], k[:last], v[:last])
    except ValueError:
        may_share = not enable_gqa and _have_heads(q, k, v) and _may_share(q, k, v)
        raise ValueError(
            "the leading dimensions (batch and heads) of q, k and v must be equal or broadcast, "
            f"got {shapes}; repeat the smaller ones"
            + (", or let query heads share them with enable_gqa=True" if may_share else "")
        ) from None
    lead = (*lead, *q[last:-2])
    if 0 in lead:
        raise ValueError(
            f"batch and heads must not be empty, got {shapes}; leave the call out for an empty batch"
        )
    return lead, groups, int(q[-2]), int(k[-2]), int(q[-1]), int(v[-1])


def _have_heads(*shapes: Sequence[int]) -> bool:
    return min(map(len, shapes)) > 2


def _may_share(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    """Return whether query heads can share the heads of k and v."""
    return k[-3] == v[-3] >= 1 and q[-3] % k[-3] == 0


def _check_groups(q: Sequence[int], k: Sequence[int], v: Sequence[int], shapes: str) -> int:
    """Check grouped heads, and return the number of query heads that share a head of k and v."""
    if not _have_heads(q, k, v):
        raise ValueError(
            f"enable_gqa needs heads: (…, heads, seq, head_dim), three dimensions or more; got {shapes}"
        )
    if not _may_share(q, k, v):
        raise ValueError(
            "with enable_gqa, k and v must have the same number of heads, and q a multiple of it; got "
            f"{q[-3]}, {k[-3]} and {v[-3]} heads in {shapes}; give k and v a divisor of q's heads"
        )
    return q[-3] // k[-3]
