"""Differentiable functions that only rearrange, copy or convert elements."""

from __future__ import annotations

import math
from typing import Any

from kernels.common.arguments import short, shown

from ..autodiff import Context
from ..backends.tensor_protocol import AnyTensor
from ..backends.tensor_protocol import TensorLike as Tensor
from ..tensor_data import UserShape
from .base import Function, as_ints


class Permute(Function):
    """The dimensions in a different order; shares storage."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, order: Any) -> Tensor:
        """Reorder the strides."""
        # TASK 2.3: Permute a._tensor; save the order as numbers, as_ints(order).
        dims = as_ints(order)
        ctx.save_for_backward(dims)
        return a._new(a._tensor.permute(*dims))
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        """Restore the order of the dimensions."""
        # TASK 2.4: Which order puts each dimension back? 0.0 for the order itself.
        (dims,) = ctx.saved_values
        back = sorted(range(len(dims)), key=lambda i: dims[i])
        return grad_output._new(grad_output._tensor.permute(*back)), 0.0
        # END TASK 2.4


class View(Function):
    """The same elements in a different shape; shares storage."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, shape: Any) -> Tensor:
        """Lay a new shape over the storage, which must be contiguous."""
        ctx.save_for_backward(a.shape)
        return reshaped(a, as_ints(shape))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        """Lay the old shape over the gradient."""
        (shape,) = ctx.saved_values
        # The gradient of a permuted result arrives permuted: its storage is in another order.
        return reshaped(grad_output.contiguous(), shape), 0.0


def reshaped(a: AnyTensor, shape: UserShape) -> AnyTensor:
    """Return a view of a contiguous tensor with a different shape, without history."""
    shape = tuple(shape)
    if not a._tensor.is_contiguous():
        raise AssertionError(
            f"Must be contiguous to view: shape {a.shape} has strides {a._tensor.strides}; call "
            "contiguous() first"
        )
    size = math.prod(shape)
    if size != a.size or min(shape, default=1) < 0:
        raise AssertionError(
            f"cannot view shape {a.shape}, {a.size} elements, as {shown(shape)}, {short(size)} elements; "
            "give sizes of equal product, or call reshape, which infers one from -1"
        )
    return a._new(type(a._tensor).fresh(a._tensor._storage, shape))


class Copy(Function):
    """The same tensor in row-major order."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Copy element by element."""
        return a.f.id_map(a, a.empty(a.shape))  # integers stay integers

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return grad_output


class To(Function):
    """The same values on a different backend, or in a different dtype."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, backend: Any, dtype: Any) -> Tensor:
        """Convert the tensor."""
        ctx.save_for_backward(a.backend, a.dtype)
        return a._converted(backend, dtype)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Convert back."""
        return grad_output._converted(*ctx.saved_values), None, None


def swap_last(a: AnyTensor) -> AnyTensor:
    """Return a view with the last two dimensions exchanged, without history."""
    order = (*range(a.dims - 2), a.dims - 1, a.dims - 2)
    return a._new(a._tensor.permute(*order))
