"""Join tensors along an existing dimension, or along a new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels.common.arguments import listed

from ..backends.dtype_promotion import result_dtype
from ..functions.base import check_tensor
from ..functions.joining import Cat
from ..tensor import Tensor
from ..tensor_ops import normalize_dim


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a dimension; differentiable.

    Args:
        tensors: At least one; their shapes agree except along ``dim``.
        dim: The dimension.

    Returns:
        A contiguous tensor on the backend of the first, in the widest of their dtypes.

    Raises:
        TypeError: If one is not a tensor, or they are on different devices.
        ValueError: If there are no tensors, or a shape does not fit.
    """
    tensors = _tensors("cat", tensors)
    first = tensors[0]
    dim = normalize_dim(dim, first.shape)
    beside = (*first.shape[:dim], *first.shape[dim + 1 :])
    for each in tensors:
        if each.dims != first.dims or (*each.shape[:dim], *each.shape[dim + 1 :]) != beside:
            raise ValueError(
                f"cat along dimension {dim} joins tensors whose other sizes are equal, got shapes "
                f"{', '.join(str(t.shape) for t in tensors):.200}"
            )
    dtype = result_dtype(*tensors) if len({t.dtype for t in tensors}) > 1 else first.dtype
    return Cat.apply(dim, *[first._ensure_tensor(t).to(dtype) for t in tensors])


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of equal shape along a new dimension; see :func:`cat`.

    Args:
        tensors: At least one.
        dim: Index of the new dimension in the result.
    """
    tensors = _tensors("stack", tensors)
    if len({each.shape for each in tensors}) > 1:
        raise ValueError(
            f"stack joins tensors of one shape, got {', '.join(str(t.shape) for t in tensors):.200}; cat "
            "joins them along a dimension that they have"
        )
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def _tensors(function: str, tensors: Any) -> list[Tensor]:
    """Return the arguments of a function that joins tensors."""
    found = listed(f"the argument of {function}", tensors)
    if not found:
        raise ValueError(f"{function} needs at least one tensor, got none")
    for each in found:
        check_tensor(f"each argument of {function}", each)
    return found
