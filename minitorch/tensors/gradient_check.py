"""Compare the gradients of backward with central differences."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from ..functions.base import check_tensor
from ..tensor import Tensor
from ..tensor_data import UserIndex
from .factories import zeros


def grad_central_difference(
    f: Callable[..., Tensor], *vals: Tensor, arg: int = 0, epsilon: float = 1e-6, ind: UserIndex
) -> float:
    """Estimate the derivative of ``f(*vals).sum()`` with respect to one element of one argument.

    Args:
        f: A function of tensors.
        vals: Its arguments.
        arg: Index of the argument.
        epsilon: Half the distance between the two points.
        ind: Index of the element.
    """
    x = vals[arg]
    up = zeros(x.shape, dtype=x.dtype)
    up[ind] = epsilon
    up = up.to(x.backend)
    above = [val if j != arg else val + up for j, val in enumerate(vals)]
    below = [val if j != arg else val - up for j, val in enumerate(vals)]
    delta = f(*above).sum() - f(*below).sum()
    return delta[0] / (2.0 * epsilon)


def grad_check(
    f: Callable[..., Tensor], *vals: Tensor, tol: float = 1e-2, epsilon: float = 1e-6
) -> None:
    """Check one random element of each argument's gradient.

    Args:
        f: A function of tensors, which should be float64: float32 is too coarse for the check.
        vals: Its arguments; their gradients are reset.
        tol: Relative and absolute tolerance.
        epsilon: Half the distance between the two points of a central difference.

    Raises:
        AssertionError: If a gradient differs; the message names the argument, the element and both values.
        TypeError: If an argument is not a tensor.
    """
    for i, x in enumerate(vals):
        check_tensor(f"argument {i}", x)
    for x in vals:
        x.requires_grad_(True)
        x.zero_grad_()
    random.seed(10)
    out = f(*vals)
    out.sum().backward()
    for i, x in enumerate(vals):
        ind = x._tensor.sample()
        expected = grad_central_difference(f, *vals, arg=i, epsilon=epsilon, ind=ind)
        if x.grad is None:
            raise AssertionError(f"argument {i} of {f} got no gradient")
        np.testing.assert_allclose(
            float(x.grad[ind]),
            float(expected),
            tol,
            tol,
            err_msg=f"gradient of argument {i}, shape {x.shape}, at {tuple(map(int, ind))}: "
            "backward (actual) against central difference (desired)",
        )
