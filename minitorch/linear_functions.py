"""Linear layers with what follows them: bias, and GELU, while the product is still in registers.

Where the backend has no such kernel they are composed of tensor operations, which is also what the tests
compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .autodiff import Context
from .function import Function
from .nn import GELU
from .shape_functions import swap_last

if TYPE_CHECKING:
    from .tensor import Tensor


class Linear(Function):
    """rows @ weights + bias, and GELU of it if asked for, in one kernel."""

    @staticmethod
    def forward(
        ctx: Context, rows: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Return (n, out_size) for (n, in_size), (in_size, out_size) and (out_size,)."""
        shape = rows.shape[0], weights.shape[1]
        out = rows.empty(shape, rows.dtype)
        before = rows.empty(shape, rows.dtype) if has_gelu else None
        if bias is not None and not bias._tensor.is_contiguous():
            bias = bias.contiguous()
        rows.f.linear_into(
            out._tensor, rows._tensor, weights._tensor, None if bias is None else bias._tensor,
            None if before is None else before._tensor,
        )  # fmt: skip
        ctx.save_for_backward(rows, weights, before, bias is not None)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return grad @ weightsᵀ, rowsᵀ @ grad and the sum of grad over rows, grad through GELU."""
        rows, weights, before, has_bias = ctx.saved_values
        if before is not None:
            outer = grad_output.to(rows.dtype).contiguous()
            grad_output = rows.empty(before.shape, rows.dtype)
            rows.f.gelu_backward_into(grad_output._tensor, outer._tensor, before._tensor)
        multiply, cols = rows.f.matrix_multiply, weights.shape[1]
        bias = rows.f.add_reduce(grad_output, 0).view(cols) if has_bias else None
        return (
            multiply(grad_output, swap_last(weights)),
            multiply(swap_last(rows), grad_output),
            bias,
            None,
        )


def composed_linear(
    rows: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return what :func:`linear` does, composed of a product, a sum and GELU."""
    out = rows @ weights
    if bias is not None:
        out = out + bias
    return GELU(out) if has_gelu else out


def linear(
    rows: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return rows @ weights + bias, and GELU of it: one kernel where the backend has it, else composed.

    Tensor cores of a GPU have it, for float16 and bfloat16, and for float32 where
    :func:`minitorch.set_matmul_precision` allows them to round.

    Args:
        rows: (n, in_size).
        weights: (in_size, out_size).
        bias: (out_size,), or None.
        has_gelu: Apply GELU in its tanh form.

    Returns:
        (n, out_size).

    Raises:
        ValueError: If the bias does not fit the weights.
        AssertionError: If the weights do not fit the rows, as of ``rows @ weights``.
    """
    cols = weights.shape[-1:]
    if bias is not None and bias.shape != cols:
        raise ValueError(f"weights {weights.shape} need a bias {cols}, got {bias.shape}")
    operands = [rows, weights] if bias is None else [rows, weights, bias]
    is_one_kernel = (
        (bias is not None or has_gelu)
        and rows.shape[1:] == weights.shape[:-1]
        and rows.dims == 2
        and all(t.dtype == rows.dtype and t.backend == rows.backend for t in operands)
        and rows.f.fuses_linear(rows.dtype, (rows.shape[0], *cols, rows.shape[1]))
    )
    if is_one_kernel:
        return Linear.apply(rows, weights, bias, has_gelu)
    return composed_linear(rows, weights, bias, has_gelu)
