"""Dimensions and shapes that operations are given, checked."""

from __future__ import annotations

import numpy as np

from kernels.common.arguments import shown

from ..tensor_data import IndexingError, UserShape, shape_broadcast


def normalize_dim(dim: int, shape: UserShape) -> int:
    """Return a dimension counted from the left.

    Raises:
        IndexingError: If there is no such dimension.
        TypeError: If ``dim`` is no whole number.
    """
    if not isinstance(dim, (int, np.integer)) or isinstance(dim, bool):
        raise TypeError(
            f"dim must be one whole number, got {shown(dim)}; for several dimensions, call once for each"
        )
    if not -len(shape) <= dim < len(shape):
        valid = f"use {-len(shape)} to {len(shape) - 1}" if shape else "reshape it to (1,) first"
        raise IndexingError(f"dim {dim} does not exist in shape {tuple(shape)}; {valid}")
    return int(dim) % len(shape)


def matmul_shape(a: UserShape, b: UserShape) -> tuple[int, ...]:
    """Return the shape of a matrix product.

    Raises:
        ValueError: If an operand has fewer than two dimensions; it names both shapes.
        AssertionError: If the inner sizes differ; it names both shapes.
        IndexingError: If the batch dimensions do not broadcast; it names both shapes.
    """
    if len(a) < 2 or len(b) < 2:
        raise ValueError(
            f"@ multiplies matrices: both operands need two dimensions or more, got shapes {tuple(a)} "
            f"and {tuple(b)}; add one with view"
        )
    if a[-1] != b[-2]:
        # What the published course raises here, and its users catch.
        raise AssertionError(
            f"cannot multiply shapes {tuple(a)} and {tuple(b)}: the left has {a[-1]} columns, the right "
            f"{b[-2]} rows; permute one of them"
        )
    try:
        batch = shape_broadcast(a[:-2], b[:-2])
    except IndexingError:
        raise IndexingError(
            f"cannot multiply shapes {tuple(a)} and {tuple(b)}: their batch dimensions "
            f"{tuple(a[:-2])} and {tuple(b[:-2])} do not broadcast; sizes must be equal or 1, change "
            "them with view or permute"
        ) from None
    return (*batch, a[-2], b[-1])
