"""Layers whose forward and backward pass are one kernel each, for backends that have such kernels.

Other backends use the composed forms in ``nn`` and ``modules_basic``, which are also the reference of the
tests.
"""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import acc_dtype

from ..autodiff import Context
from ..backends.tensor_protocol import AnyTensor
from ..backends.tensor_protocol import TensorLike as Tensor
from .base import Function, check_tensor


def dense(t: Tensor, dtype: Any = None) -> Any:
    """Return a tensor's elements as a contiguous array, in float32 if the tensor's dtype has 16 bits.

    Args:
        t: Any tensor; it is copied, on its device, only if necessary.
        dtype: Dtype of the result before widening; that of t if None.
    """
    dtype, data = acc_dtype(t.dtype if dtype is None else dtype), t._tensor
    if dtype != data.dtype or not data.is_contiguous():
        t = t.f.id_map(t, t.empty(t.shape, dtype))
    return t.array()


def stored(t: Tensor, layer: str, dtype: Any = None) -> Any:
    """Return a tensor's elements as :func:`dense` does, but in 16 bits where a kernel supports them.

    Args:
        t: Any tensor.
        layer: The kernel's name.
        dtype: Dtype of the result; that of t if None.
    """
    dtype, data = t.dtype if dtype is None else dtype, t._tensor
    if layer not in getattr(t.f.fused, "TAKES_HALF", ()):
        return dense(t, dtype)
    if dtype != data.dtype or not data.is_contiguous():
        t = t.f.id_map(t, t.empty(t.shape, dtype))
    return t.array()


def stored_weights(x: Tensor, layer: str, *weights: Tensor) -> list[Any]:
    """Return weights in a dtype that a kernel supports for x: that of x, or that of its sums.

    Args:
        x: The tensor that they multiply.
        layer: The kernel's name.
        weights: The weights, all converted to one dtype.
    """
    own = weights[0].dtype
    return [stored(w, layer, own if own == x.dtype else acc_dtype(x.dtype)) for w in weights]


def rounded(like: AnyTensor, array: Any, dtype: Any = None) -> AnyTensor:
    """Return a kernel's result as a tensor, rounded to 16 bits where ``dense`` widened the operand.

    Args:
        like: A tensor of the backend.
        array: A contiguous result of a kernel.
        dtype: Dtype of the tensor; that of ``like`` if None.
    """
    dtype = like.dtype if dtype is None else dtype
    return like.wrap(like.f.memory.convert(array, dtype))


class Softmax(Function):
    """Softmax over the last dimension."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Return (…, n) for (…, n)."""
        out = rounded(a, a.f.fused.softmax(dense(a)))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Return P ∘ (dP - rowsum(P ∘ dP))."""
        (out,) = ctx.saved_values
        return rounded(out, out.f.fused.softmax_backward(dense(grad_output, out.dtype), dense(out)))


class LayerNorm(Function):
    """Normalise the last dimension, then scale and shift it; without a shift, an RMS norm."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
        """Return (…, n) for (…, n), (n,) and (n,), or None for an RMS norm.

        Raises:
            ValueError: If the sizes differ; the kernel would read beyond gamma and beta.
        """
        shifts = () if beta is None else (beta,)
        for name, t in zip(("gamma", "beta"), (gamma, *shifts), strict=False):
            check_tensor(name, t)
        if any(t.shape != x.shape[-1:] for t in (gamma, *shifts)):
            kind, of = ("layer", "weights and a bias") if shifts else ("RMS", "weights")
            raise ValueError(
                f"{kind} norm of shape {x.shape} needs {of} of shape {x.shape[-1:]}, "
                f"got {' and '.join(str(t.shape) for t in (gamma, *shifts))}"
            )
        rows = stored(x, "layer_norm")
        weights, *bias = stored_weights(x, "layer_norm", gamma, *shifts)
        out, mean, rstd = x.f.fused.layer_norm(rows, weights, bias[0] if bias else None, eps)
        ctx.save_for_backward(x, gamma.dtype, rows, weights, mean, rstd, bool(bias))
        return rounded(x, out)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, gamma and beta."""
        x, dtype, rows, weights, mean, rstd, centred = ctx.saved_values
        backward, dout = x.f.fused.layer_norm_backward, stored(grad_output, "layer_norm", x.dtype)
        dx, *others = backward(dout, rows, weights, mean, rstd, centred)
        dgamma, dbeta = (rounded(x, gradient, dtype) for gradient in others)
        return rounded(x, dx), dgamma, dbeta if centred else None, None


class Gelu(Function):
    """GELU in its tanh form."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Apply to each element."""
        elements = stored(a, "gelu")
        ctx.save_for_backward(a, elements)
        return rounded(a, a.f.fused.gelu(elements))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by the slope."""
        a, elements = ctx.saved_values
        dout = stored(grad_output, "gelu", a.dtype)
        return rounded(a, a.f.fused.gelu_backward(dout, elements))


class CrossEntropy(Function):
    """The negative log-likelihood of integer targets under softmax(logits)."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Any) -> Tensor:
        """Return (rows,) for logits (rows, classes) and an integer array (rows,)."""
        fused = logits.f.fused
        ids = fused.place_ids(targets)  # once, for both passes
        losses, *kept = fused.cross_entropy(stored(logits, "cross_entropy"), ids)
        ctx.save_for_backward(ids, kept, logits.dtype)
        return rounded(logits, losses)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return (softmax(logits) - one_hot(targets)) times the gradient of each row."""
        ids, kept, dtype = ctx.saved_values
        backward = grad_output.f.fused.cross_entropy_backward
        dlogits = backward(dense(grad_output, dtype), ids, *kept)
        return rounded(grad_output, dlogits, dtype), None


class Lookup(Function):
    """Rows of a table by integer index."""

    @staticmethod
    def forward(ctx: Context, table: Tensor, ids: Any) -> Tensor:
        """Return (*ids.shape, dim) for a table (count, dim) and an integer array."""
        fused = table.f.fused
        placed = fused.place_ids(ids)  # once, for both passes
        ctx.save_for_backward(ids, placed, table.shape[0], table.dtype)
        return rounded(table, fused.embedding(stored(table, "embedding"), placed, ids.shape))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of each row."""
        ids, placed, rows, dtype = ctx.saved_values
        dout = stored(grad_output, "embedding", dtype)
        dtable = grad_output.f.fused.embedding_backward(dout, ids, placed, rows)
        return rounded(grad_output, dtable, dtype), None


class SeededDropout(Function):
    """Dropout with a counter-based mask, which the backward pass recomputes instead of storing it."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, seed: int, rate: float, scale: float) -> Tensor:
        """Set each element to 0 with probability ``rate`` and multiply the others by ``scale``."""
        ctx.save_for_backward(a, seed, rate, scale)
        return rounded(a, a.f.fused.dropout(stored(a, "dropout"), seed, rate, scale))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Do the same to the gradient."""
        a, *options = ctx.saved_values
        out = a.f.fused.dropout(stored(grad_output, "dropout", a.dtype), *options)
        return rounded(a, out), None, None, None
