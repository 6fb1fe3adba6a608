"""Linear layers with a fused epilogue: bias and GELU, applied while the product is in registers or cache.

Backends without such a kernel use a form composed of tensor operations, which is also the tests' reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.common.arguments import flag
from kernels.runtime.dtypes import COMPUTE_DTYPES

from ..autodiff import Context
from ..functions.base import Function, check_tensor
from ..functions.fused import dense
from ..functions.views import reshaped
from ..nn import GELU

if TYPE_CHECKING:
    from ..tensor import Tensor


class FusedLinear(Function):
    """x @ weights + bias, optionally followed by GELU, as one kernel per pass on the CPU."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Return (…, out_size) for (…, in_size), (in_size, out_size) and (out_size,)."""
        rows, matrix = dense(x).reshape(-1, x.shape[-1]), dense(weights)
        out, before = x.f.fused.linear(
            rows, matrix, None if bias is None else dense(bias), has_gelu
        )
        ctx.save_for_backward(x, rows, matrix, before, bias is not None)
        return x.wrap(out.reshape(*x.shape[:-1], out.shape[-1]))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, weights and bias."""
        x, rows, matrix, before, has_bias = ctx.saved_values
        grad = dense(grad_output, x.dtype).reshape(-1, matrix.shape[-1])
        dx, dmatrix, dbias = x.f.fused.linear_backward(grad, rows, matrix, before)
        return (
            x.wrap(dx.reshape(x.shape)),
            x.wrap(dmatrix),
            x.wrap(dbias) if has_bias else None,
            None,
        )


class Linear(Function):
    """Linear layer on CUDA: rows @ weights + bias, with GELU if asked, in one kernel on tensor cores."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Return (…, out_size) for (…, in_size), (in_size, out_size) and (out_size,)."""
        rows = _as_rows(x)
        shape = rows.shape[0], weights.shape[1]
        out = rows.empty(shape, rows.dtype)
        before = rows.empty(shape, rows.dtype) if has_gelu else None
        if bias is not None and not bias._tensor.is_contiguous():
            bias = bias.contiguous()
        rows.f.linear_into(
            out._tensor, rows._tensor, weights._tensor, None if bias is None else bias._tensor,
            None if before is None else before._tensor,
        )  # fmt: skip
        ctx.save_for_backward(x.shape, rows, weights, before, bias is not None)
        return reshaped(out, (*x.shape[:-1], shape[1]))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return grad @ weightsᵀ, rowsᵀ @ grad and the sum of grad, after the backward of GELU."""
        shape, rows, weights, before, has_bias = ctx.saved_values
        grad = _as_rows(grad_output).to(rows.dtype).contiguous()
        drows, dweights, dbias = rows.f.linear_backward(
            grad._tensor, rows._tensor, weights._tensor, None if before is None else before._tensor,
            has_bias,
        )  # fmt: skip
        return (
            reshaped(rows._new(drows), shape),
            rows._new(dweights),
            None if dbias is None else rows._new(dbias),
            None,
        )


def _as_rows(x: Tensor) -> Tensor:
    """Return x as a matrix of its rows; a copy if x is neither contiguous nor a matrix."""
    return x if x.dims == 2 else reshaped(x.contiguous(), (x.size // x.shape[-1], x.shape[-1]))


def composed_linear(
    rows: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return the result of :func:`linear`, composed of a product, a sum and GELU."""
    out = rows @ weights
    if bias is not None:
        out = out + bias
    return GELU(out) if has_gelu else out


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.backend is y.backend and x.dtype == y.dtype


def linear(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return x @ weights + bias, optionally followed by GELU, in one kernel where the backend has it.

    The fast backend has the kernel for float32 and float64.  The CUDA backend has it, on tensor cores, for
    float16 and bfloat16, and for float32 where :func:`minitorch.set_matmul_precision` permits rounding.

    Args:
        x: Input, (…, in_size).
        weights: (in_size, out_size).
        bias: (out_size,), or None.
        has_gelu: Apply GELU in its tanh form.

    Returns:
        (…, out_size).

    Raises:
        TypeError: If the input or the weights are not tensors.
        ValueError: If the input has no dimension, or the bias does not fit the weights.
        AssertionError: If the weights do not fit x, as in ``x @ weights``.
    """
    for name, t in (("input", x), ("weights", weights), ("bias", bias)):
        if t is not None or name != "bias":
            check_tensor(name, t)
    flag("has_gelu", has_gelu)
    if x.dims == 0:
        raise ValueError(
            "a linear layer needs rows (…, in_size), got shape (); add a dimension with view"
        )
    cols = weights.shape[-1:]
    if bias is not None and bias.shape != cols:
        raise ValueError(
            f"weights of shape {weights.shape} need a bias of shape {cols}, got {bias.shape}"
        )
    fits = weights.dims == 2 and x.shape[-1:] == weights.shape[:1] and x.size * weights.size > 0
    fits = fits and _are_alike(x, weights) and (bias is None or _are_alike(x, bias))
    if fits and x.dtype in COMPUTE_DTYPES and hasattr(x.f.fused, "linear"):
        return FusedLinear.apply(x, weights, bias, has_gelu)
    is_one_kernel = (
        fits
        and (bias is not None or has_gelu)
        and x.f.fuses_linear(x.dtype, (x.size // x.shape[-1], *cols, x.shape[-1]))
    )
    if is_one_kernel:
        return Linear.apply(x, weights, bias, has_gelu)
    if x.dims != 2:  # one product of two matrices, which the gradient of the weights requires
        rows = x.contiguous().view(x.size // x.shape[-1], x.shape[-1])
        return composed_linear(rows, weights, bias, has_gelu).view(*x.shape[:-1], *cols)
    return composed_linear(x, weights, bias, has_gelu)
