"""Steps of optimisers in one kernel for each parameter; see ``optim``."""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import is_floating

from ..backends.operations import Operations
from ..functions.kernel_arrays import dense, rounded
from ..tensor import Tensor
from ..training.steps import same_shape


def sgd_step(value: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return value - lr * grad."""
    if not is_floating(value.dtype):
        return Operations.plain["sgd_step"](value, grad, lr)
    same_shape(value, grad)
    step = value.f.ops.kernels.sgd_step
    return rounded(value, step(dense(value), dense(grad, value.dtype), lr))


def adam_step(
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, **numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next value of a parameter, and its moments, which the kernel changes in place."""
    step = value.f.ops.kernels.adam_step
    moved = step(dense(value), dense(grad, value.dtype), m.array(), v.array(), **numbers)
    return rounded(value, moved), m, v
