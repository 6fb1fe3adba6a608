"""Tensors of a range of numbers, and tensors with the shape, backend and dtype of another one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import number, short

from ..backends.elements import check_memory
from ..functions.base import check_tensor
from ..tensor import Tensor
from ..tensor_ops import SimpleBackend, TensorBackend
from .factories import full, ones, rand, randn, tensor, zeros


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return the numbers from ``start`` up to, but excluding, ``end``; ``arange(n)`` counts from 0.

    Args:
        start: The first number.
        end: The bound.
        step: The distance of two numbers, not 0.
        backend: The backend that computes on the tensor.
        requires_grad: Whether the tensor requires a gradient.
        dtype: A dtype or its name.  None means int64 for whole numbers, and else the default dtype.

    Raises:
        TypeError: If a bound or the step is not a number.
        ValueError: If it is not finite, or the step is 0.
        MemoryError: If the tensor would take more memory than any machine has.
    """
    first, last = (0, start) if end is None else (start, end)
    given = first, last, step
    span, by = number("end", last) - number("start", first), number("step", step)
    if by == 0.0 or not math.isfinite(span) or not math.isfinite(span / by):
        raise ValueError(f"arange needs finite bounds and a step other than 0, got {short(given)}")
    check_memory((max(math.ceil(span / by), 0),), np.dtype(np.float64))
    array = np.arange(*given)
    dtype = np.int64 if dtype is None and array.dtype.kind in "iu" else dtype
    return tensor(array, backend, requires_grad, dtype)


def full_like(
    x: Tensor, value: float, requires_grad: bool = False, dtype: npt.DTypeLike | None = None
) -> Tensor:
    """Return a tensor of equal elements with the shape, backend and dtype of ``x``, or another dtype."""
    check_tensor("x", x)
    return full(x.shape, value, x.backend, requires_grad, x.dtype if dtype is None else dtype)


def _like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a factory that takes the shape, the backend and the dtype from a tensor."""

    def make_like(
        x: Tensor, requires_grad: bool = False, dtype: npt.DTypeLike | None = None
    ) -> Tensor:
        check_tensor("x", x)
        return make(x.shape, x.backend, requires_grad, x.dtype if dtype is None else dtype)

    make_like.__name__ = make_like.__qualname__ = f"{make.__name__}_like"
    make_like.__doc__ = (
        f"Return ``{make.__name__}`` of the shape, backend and dtype of ``x``, or another dtype."
    )
    return make_like


zeros_like, ones_like, rand_like, randn_like = map(_like, (zeros, ones, rand, randn))
