"""Layers whose value and gradient are each one kernel, for backends that have such kernels.

Their composed forms stand in ``nn`` and ``modules_basic``, serve every other backend, and are what
the tests compare these with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .autodiff import Context
from .function import Function

if TYPE_CHECKING:
    from .tensor import Tensor


class Softmax(Function):
    """Softmax over the last dimension."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Return (…, n) for (…, n)."""
        out = a.wrap(a.f.fused.softmax(a.array()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Return P ∘ (dP - rowsum(P ∘ dP))."""
        (out,) = ctx.saved_values
        return out.wrap(out.f.fused.softmax_backward(grad_output.array(), out.array()))


class LayerNorm(Function):
    """Normalise the last dimension, then scale and shift it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        """Return (…, n) for (…, n), (n,) and (n,).

        Raises:
            ValueError: If the sizes differ; the kernel would read beyond gamma and beta.
        """
        if not gamma.shape == beta.shape == x.shape[-1:]:
            raise ValueError(
                f"layer norm of shape {x.shape} needs weights and a bias of shape {x.shape[-1:]}, "
                f"got {gamma.shape} and {beta.shape}"
            )
        out, mean, rstd = x.f.fused.layer_norm(x.array(), gamma.array(), beta.array(), eps)
        ctx.save_for_backward(x, gamma, mean, rstd)
        return x.wrap(out)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of x, gamma and beta."""
        x, gamma, mean, rstd = ctx.saved_values
        backward = x.f.fused.layer_norm_backward
        dx, dgamma, dbeta = backward(grad_output.array(), x.array(), gamma.array(), mean, rstd)
        return x.wrap(dx), x.wrap(dgamma), x.wrap(dbeta), None


class Gelu(Function):
    """GELU in its tanh form."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Apply to each element."""
        ctx.save_for_backward(a)
        return a.wrap(a.f.fused.gelu(a.array()))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by the slope."""
        (a,) = ctx.saved_values
        return a.wrap(a.f.fused.gelu_backward(grad_output.array(), a.array()))


class CrossEntropy(Function):
    """The negative log-likelihood of integer targets under softmax(logits)."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Any) -> Tensor:
        """Return (rows,) for logits (rows, classes) and an integer array (rows,)."""
        losses, probs = logits.f.fused.cross_entropy(logits.array(), targets)
        ctx.save_for_backward(probs, targets)
        return logits.wrap(losses)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return (softmax(logits) - one_hot(targets)) times the gradient of each row."""
        probs, targets = ctx.saved_values
        backward = grad_output.f.fused.cross_entropy_backward
        return grad_output.wrap(backward(grad_output.array(), targets, probs)), None


class Lookup(Function):
    """Rows of a table by integer index."""

    @staticmethod
    def forward(ctx: Context, table: Tensor, ids: Any) -> Tensor:
        """Return (*ids.shape, dim) for a table (count, dim)."""
        ctx.save_for_backward(ids, table.shape[0])
        return table.wrap(table.array()[ids])

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of each row."""
        ids, rows = ctx.saved_values
        backward = grad_output.f.fused.embedding_backward
        return grad_output.wrap(backward(grad_output.array(), ids.reshape(-1), rows)), None
