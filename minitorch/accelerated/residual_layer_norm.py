"""The operations between two branches of a transformer in one kernel."""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import is_floating

from ..autodiff import Context
from ..backends.operations import Operations
from ..functions.dropout_seeds import dropout_seed
from ..functions.kernel_arrays import rounded
from ..functions.several import Several
from ..layers.residual_layer_norm import check_residual_layer_norm
from ..tensor import Tensor
from .layers import LayerNorm, SeededDropout, stored, stored_weights


class ResidualLayerNorm(Several):
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
        fused, layer = x.f.ops.kernels, "layer_norm"
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
        found = total.f.ops.kernels.residual_layer_norm_backward(
            dout, dhidden, *saved, noise, centred
        )
        dgamma, dbeta = (
            rounded(total, dweights, dtype) for dweights in (found.dgamma, found.dbeta)
        )
        dx, dresidual = total.wrap(found.dx), total.wrap(found.dresidual)
        return dx, dresidual, dgamma, dbeta if centred else None, None, None, None

    @staticmethod
    def composed(
        ctx: Context, x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
        seed: int, rate: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Apply dropout with the same mask, add, and normalise."""
        kept = SeededDropout.apply(x, seed, rate, 1.0 / (1.0 - rate)) if rate else x
        hidden = residual + kept
        return hidden, LayerNorm.composed(ctx, hidden, gamma, beta, eps)


def residual_layer_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, p_dropout: float = 0.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return residual + dropout(x) and its norm, in one kernel."""
    rate = check_residual_layer_norm(x, residual, gamma, beta, p_dropout)
    if not (x.dtype == residual.dtype and is_floating(x.dtype) and x.backend is residual.backend):
        return Operations.plain["residual_layer_norm"](x, residual, gamma, beta, eps, rate)
    seed = dropout_seed() if rate else 0
    hidden, out = ResidualLayerNorm.apply_several(x, residual, gamma, beta, eps, seed, rate)
    return hidden, out
