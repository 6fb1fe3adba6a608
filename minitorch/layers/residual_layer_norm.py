"""The operations between two branches of a transformer: residual + dropout(x), and the norm of this sum.

Backends without such a kernel use a composed form, which is also the tests' reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.runtime.dtypes import is_floating

from ..autodiff import Context
from ..functions.base import Function, check_tensor
from ..functions.dropout_seeds import dropout_seed
from ..functions.fused import rounded, stored, stored_weights
from ..modules_basic import Dropout, layer_norm, rms_norm

if TYPE_CHECKING:
    from ..tensor import Tensor


class ResidualLayerNorm(Function):
    """residual + dropout(x) and its layer norm, in one kernel forward and two kernels backward."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        eps: float,
        seed: int,
        p_dropout: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm, (…, n), for (…, n) twice and (n,) twice."""
        fused, layer = x.f.fused, "layer_norm"
        noise = fused.Noise(seed, p_dropout, 1.0 / (1.0 - p_dropout))
        shifts = () if beta is None else (beta,)
        weights, *bias = stored_weights(x, layer, gamma, *shifts)
        hidden, out, mean, rstd = fused.residual_layer_norm(
            stored(x, layer),
            stored(residual, layer),
            weights,
            bias[0] if bias else None,
            eps,
            noise,
        )
        total = x.wrap(hidden)  # x itself is not needed again
        ctx.save_for_backward(total, gamma.dtype, noise, bool(bias), hidden, weights, mean, rstd)
        return total, x.wrap(out)

    @staticmethod
    def backward(
        ctx: Context, grad_hidden: Tensor | None, grad_out: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of x, residual, gamma and beta, recomputing the dropout mask."""
        total, dtype, noise, centred, *saved = ctx.saved_values
        dhidden, dout = (
            stored(total.zeros() if grad is None else grad, "layer_norm", total.dtype)
            for grad in (grad_hidden, grad_out)
        )
        found = total.f.fused.residual_layer_norm_backward(dout, dhidden, *saved, noise, centred)
        dgamma, dbeta = (
            rounded(total, dweights, dtype) for dweights in (found.dgamma, found.dbeta)
        )
        dx, dresidual = total.wrap(found.dx), total.wrap(found.dresidual)
        return dx, dresidual, dgamma, dbeta if centred else None, None, None, None


def composed_residual_layer_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, p_dropout: float = 0.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result of :func:`residual_layer_norm`, composed of three operations."""
    hidden = residual + Dropout(p_dropout)(x)
    if beta is None:
        return hidden, rms_norm(hidden, gamma, eps)
    return hidden, layer_norm(hidden, gamma, beta, eps)


def residual_layer_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, p_dropout: float = 0.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return residual + dropout(x) and its layer norm, in one kernel where the backend has it.

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
    rate = Dropout(p_dropout).p_dropout  # which rejects anything else
    fits = x.dtype == residual.dtype and is_floating(x.dtype) and x.backend is residual.backend
    if fits and hasattr(x.f.fused, "residual_layer_norm"):
        seed = dropout_seed() if rate else 0
        hidden, out = ResidualLayerNorm.apply_several(x, residual, gamma, beta, eps, seed, rate)
        return hidden, out
    return composed_residual_layer_norm(x, residual, gamma, beta, eps, rate)
