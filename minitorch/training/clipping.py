"""Clip gradients by their norm."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from kernels.common.arguments import flag, listed, number, short, shown

from ..module import Parameter
from ..scalar import Scalar
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..tensors.factories import zeros


def checked_norm(max_norm: Any) -> float:
    """Check that a maximum norm is above 0, and return it; the reciprocal of a tiny one is infinite."""
    norm = number("max_norm", max_norm)
    if not norm >= sys.float_info.min:
        raise ValueError(f"max_norm must be a number above 0, got {short(max_norm)}; 1.0 is common")
    return norm


@no_grad()
def clip_grad_norm_(
    parameters: Iterable[Parameter], max_norm: float, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by one factor, so that their total norm is at most ``max_norm``.

    Call it between ``backward`` and the optimiser's ``step``.  Gradients whose norm is already small enough
    are unchanged bit for bit.

    Args:
        parameters: Parameters that are tensors of any backend; those without a gradient are skipped.
        max_norm: Maximum norm, above 0; infinity only computes the norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite; this synchronises with a GPU.

    Returns:
        The norm before scaling, the root of the sum of all squares, float64 of shape (1,).  The squares are
        added in the order of the parameters, in float64, because they may overflow float32.

    Raises:
        ValueError: If ``max_norm`` is not above 0.
        TypeError: If it is not a number, or a parameter is a Scalar.
        FloatingPointError: If ``error_if_nonfinite`` is set and the norm is NaN or infinite; the gradients
            are unchanged.  Without it, the scaled gradients become NaN.

    Source: Pascanu, Mikolov and Bengio (2013), Algorithm 1.
    """
    max_norm = checked_norm(max_norm)
    parameters = listed("parameters", parameters)
    flag("error_if_nonfinite", error_if_nonfinite)
    for p in parameters:
        if not isinstance(p, Parameter) or isinstance(p.value, Scalar):
            raise TypeError(
                f"the parameters of clip_grad_norm_ must be Parameters that hold tensors, got {shown(p)}"
            )
    values = [p.value for p in parameters if getattr(p.value, "grad", None) is not None]
    if not values:
        return zeros((1,), dtype=np.float64)
    total = zeros((1,), values[0].backend, dtype=np.float64)
    for value in values:
        grad = value.grad.to(np.float64)
        total = total + (grad * grad).sum().to(total.backend)
    norm = total**0.5
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise FloatingPointError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, or run the step within "
            "minitorch.detect_anomaly() to find the operation that produced it"
        )
    if max_norm < math.inf:
        # max_norm / max(norm, max_norm), without reading it from the device.  It must be exactly 1 for a
        # small norm, which a / a is not: a quotient of tensors is a product with the reciprocal.
        scale = 1.0 / (1.0 + (norm - max_norm).relu() / max_norm)
        for value in values:
            grad = value.grad
            clipped = grad.to(np.float64) * scale.to(grad.backend)
            value.grad = grad.expand(clipped).to(
                grad.dtype
            )  # of shape () where the scale's is (1,)
    return norm
