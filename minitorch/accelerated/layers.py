"""Layers of ``nn`` and ``modules_basic`` whose forward and backward passes are one kernel each."""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import acc_dtype, is_floating

from ..autodiff import Context
from ..backends.operations import Operations
from ..functions.base import Function, as_int, check_tensor
from ..functions.dropout_seeds import dropout_seed
from ..functions.kernel_arrays import contiguous_array, dense, rounded
from ..layers.checks import check_rate, checked_targets
from ..layers.indices import integer_array
from ..tensor import Tensor
from ..tensor_ops import normalize_dim

plain = Operations.plain


def stored(t: Tensor, layer: str, dtype: Any = None) -> Any:
    """Return a tensor's elements as :func:`dense` does, but in 16 bits where a kernel supports them.

    Args:
        t: Any tensor.
        layer: The kernel's name.
        dtype: Dtype of the result; that of t if None.
    """
    dtype = t.dtype if dtype is None else dtype
    takes_half = layer in getattr(t.f.ops.kernels, "TAKES_HALF", ())
    return contiguous_array(t, dtype) if takes_half else dense(t, dtype)


def stored_weights(x: Tensor, layer: str, *weights: Tensor) -> list[Any]:
    """Return weights in a dtype that a kernel supports for x: that of x, or that of its sums.

    Args:
        x: The tensor that they multiply.
        layer: The kernel's name.
        weights: The weights, all converted to one dtype.
    """
    own = weights[0].dtype
    return [stored(w, layer, own if own == x.dtype else acc_dtype(x.dtype)) for w in weights]


class Softmax(Function):
    """Softmax over the last dimension."""

    is_symmetric = True

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Return (…, n) for (…, n)."""
        out = rounded(a, a.f.ops.kernels.softmax(dense(a)))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Return P ∘ (dP - rowsum(P ∘ dP))."""
        (out,) = ctx.saved_values
        return rounded(
            out, out.f.ops.kernels.softmax_backward(dense(grad_output, out.dtype), dense(out))
        )

    @staticmethod
    def composed(_: Context, a: Tensor) -> Tensor:
        """Apply the plain function."""
        return plain["softmax"](a, a.dims - 1)


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
        out, mean, rstd = x.f.ops.kernels.layer_norm(rows, weights, bias[0] if bias else None, eps)
        ctx.save_for_backward(x, gamma.dtype, rows, weights, mean, rstd, bool(bias))
        return rounded(x, out)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, gamma and beta."""
        x, dtype, rows, weights, mean, rstd, centred = ctx.saved_values
        backward, dout = (
            x.f.ops.kernels.layer_norm_backward,
            stored(grad_output, "layer_norm", x.dtype),
        )
        dx, *others = backward(dout, rows, weights, mean, rstd, centred)
        dgamma, dbeta = (rounded(x, gradient, dtype) for gradient in others)
        return rounded(x, dx), dgamma, dbeta if centred else None, None

    @staticmethod
    def composed(_: Context, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
        """Apply the plain function."""
        if beta is None:
            return plain["rms_norm"](x, gamma, eps)
        return plain["layer_norm"](x, gamma, beta, eps)


class Gelu(Function):
    """GELU in its tanh form."""

    is_symmetric = True

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Apply to each element."""
        elements = stored(a, "gelu")
        ctx.save_for_backward(a, elements)
        return rounded(a, a.f.ops.kernels.gelu(elements))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by the slope."""
        a, elements = ctx.saved_values
        dout = stored(grad_output, "gelu", a.dtype)
        return rounded(a, a.f.ops.kernels.gelu_backward(dout, elements))

    @staticmethod
    def composed(_: Context, a: Tensor) -> Tensor:
        """Apply the plain function."""
        return plain["GELU"](a)


class CrossEntropy(Function):
    """The negative log-likelihood of integer targets under softmax(logits)."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Any) -> Tensor:
        """Return (rows,) for logits (rows, classes) and an integer array (rows,)."""
        fused = logits.f.ops.kernels
        ids = fused.place_ids(targets)  # once, for both passes
        losses, *kept = fused.cross_entropy(stored(logits, "cross_entropy"), ids)
        ctx.save_for_backward(ids, kept, logits.dtype)
        return rounded(logits, losses)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return (softmax(logits) - one_hot(targets)) times the gradient of each row."""
        ids, kept, dtype = ctx.saved_values
        backward = grad_output.f.ops.kernels.cross_entropy_backward
        dlogits = backward(dense(grad_output, dtype), ids, *kept)
        return rounded(grad_output, dlogits, dtype), None

    @staticmethod
    def composed(_: Context, logits: Tensor, targets: Any) -> Tensor:
        """Apply the plain function."""
        return plain["softmax_loss"](logits, targets)


class Lookup(Function):
    """Rows of a table by integer index."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, table: Tensor, ids: Any) -> Tensor:
        """Return (*ids.shape, dim) for a table (count, dim) and an integer array."""
        fused = table.f.ops.kernels
        placed = fused.place_ids(ids)  # once, for both passes
        ctx.save_for_backward(ids, placed, table.shape[0], table.dtype)
        return rounded(table, fused.embedding(stored(table, "embedding"), placed, ids.shape))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of each row."""
        ids, placed, rows, dtype = ctx.saved_values
        dout = stored(grad_output, "embedding", dtype)
        dtable = grad_output.f.ops.kernels.embedding_backward(dout, ids, placed, rows)
        return rounded(grad_output, dtable, dtype), None


class SeededDropout(Function):
    """Dropout with a counter-based mask, which the backward pass recomputes instead of storing it."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, seed: int, rate: float, scale: float) -> Tensor:
        """Set each element to 0 with probability ``rate`` and multiply the others by ``scale``."""
        ctx.save_for_backward(a, seed, rate, scale)
        return rounded(a, a.f.ops.kernels.dropout(stored(a, "dropout"), seed, rate, scale))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Do the same to the gradient."""
        a, *options = ctx.saved_values
        out = a.f.ops.kernels.dropout(stored(grad_output, "dropout", a.dtype), *options)
        return rounded(a, out), None, None, None


# -- entries of the tables --------------------------------------------------------------------------


def softmax(input: Tensor, dim: int) -> Tensor:
    """Return softmax over ``dim``, in one kernel over the last dimension."""
    dim = normalize_dim(as_int(dim), input.shape)
    if dim == input.dims - 1 and is_floating(input.dtype):
        return Softmax.apply(input)
    return plain["softmax"](input, dim)


def softmax_loss(logits: Tensor, target: Any) -> Tensor:
    """Return the cross entropy of each row, in one kernel."""
    if not is_floating(logits.dtype):
        return plain["softmax_loss"](logits, target)
    return CrossEntropy.apply(logits, checked_targets(logits, target))


def gelu(input: Tensor) -> Tensor:
    """Return GELU in its tanh form, in one kernel."""
    return Gelu.apply(input) if is_floating(input.dtype) else plain["GELU"](input)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return layer norm over the last dimension, in one kernel."""
    return LayerNorm.apply(_as_floating(x), gamma, beta, eps)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Return RMS norm over the last dimension, in one kernel."""
    return LayerNorm.apply(_as_floating(x), gamma, None, eps)


def lookup(table: Tensor, x: Any) -> Tensor:
    """Return rows of a table, in one kernel."""
    if not is_floating(table.dtype):
        return plain["lookup"](table, x)
    return Lookup.apply(table, integer_array(x, table.shape[0], "token ids"))


def dropout(input: Tensor, rate: float, ignore: bool = False) -> Tensor:
    """Apply dropout with a mask drawn on the device, from the seed of ``manual_seed``."""
    if not check_rate(rate, ignore):
        return input
    return SeededDropout.apply(_as_floating(input), dropout_seed(), rate, 1.0)


def scaled_dropout(x: Tensor, rate: float) -> Tensor:
    """Set elements to 0 and scale the others, with a mask drawn on the device."""
    return SeededDropout.apply(_as_floating(x), dropout_seed(), rate, 1.0 / (1.0 - rate))


def _as_floating(x: Tensor) -> Tensor:
    return x if is_floating(x.dtype) else x * 1.0
