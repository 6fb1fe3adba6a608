"""The operations between two branches of a transformer: residual + dropout(x), and the norm of this sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..backends.operations import operation
from ..functions.base import check_tensor
from ..modules_basic import Dropout, layer_norm
from .rms_norm import rms_norm

if TYPE_CHECKING:
    from ..tensor import Tensor


def check_residual_layer_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, p_dropout: float
) -> float:
    """Check the arguments of :func:`residual_layer_norm`, and return the probability.

    Raises:
        TypeError: If an operand is not a tensor.
        ValueError: If the shapes do not fit, or the probability is not in [0, 1).
    """
    weights = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
    operands = {"x": x, "residual": residual, **weights}
    for name, t in operands.items():
        check_tensor(name, t)
    if x.shape != residual.shape or any(w.shape != x.shape[-1:] for w in weights.values()):
        shapes = ", ".join(f"{name} {t.shape}" for name, t in operands.items())
        raise ValueError(
            "residual_layer_norm needs x and residual of one shape (…, n), gamma and beta (n,), got "
            f"{shapes}"
        )
    return Dropout(p_dropout).p_dropout  # which rejects anything else


@operation
def residual_layer_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, p_dropout: float = 0.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return residual + dropout(x) and its layer norm.

    Args:
        x: The result of a branch, (…, n).
        residual: The residual stream, of the shape and dtype of x.
        gamma: Weights of the layer norm, (n,).
        beta: Bias of the layer norm, (n,); None for an RMS norm.
        eps: Added to the variance.
        p_dropout: Probability that an element of x becomes 0; the others are divided by 1 - p_dropout.
            Pass 0 outside training.

    Returns:
        The sum, which is the next residual, and its layer norm, which is the input of the next branch, both
        (…, n).

    Raises:
        TypeError: If an operand is not a tensor.
        ValueError: If the shapes do not fit, or the probability is not in [0, 1).
    """
    rate = check_residual_layer_norm(x, residual, gamma, beta, p_dropout)
    hidden = residual + Dropout(rate)(x)
    if beta is None:
        return hidden, rms_norm(hidden, gamma, eps)
    return hidden, layer_norm(hidden, gamma, beta, eps)
