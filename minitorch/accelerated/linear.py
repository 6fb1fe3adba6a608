"""Linear layers with an epilogue: bias and GELU, applied while the product is in registers or cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cuda.backend import empty_device, repeats
from kernels.cuda.layers import fused as cuda_kernels
from kernels.cuda.matmul import cuda_cores as cuda_core_matmul
from kernels.cuda.matmul import dispatch as matmul_dispatch
from kernels.runtime.dtypes import COMPUTE_DTYPES

from .. import operators
from ..autodiff import Context
from ..backends.matmul_precision import get_matmul_precision
from ..backends.operations import Operations
from ..functions.base import Function
from ..functions.kernel_arrays import dense
from ..functions.views import reshaped
from ..layers.linear import check_linear
from ..tensor import Tensor
from ..tensor_data import Ints, Storage, TensorData
from .cuda_loops import Matrices, fold, matrices


class _Linear(Function):
    """x @ weights + bias, optionally followed by GELU, in one kernel."""

    @staticmethod
    def composed(
        _: Context, x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Apply the plain function."""
        return Operations.plain["linear"](x, weights, bias, has_gelu)


class FusedLinear(_Linear):
    """A linear layer as one kernel per pass on the CPU."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Return (…, out_size) for (…, in_size), (in_size, out_size) and (out_size,)."""
        rows, matrix = dense(x).reshape(-1, x.shape[-1]), dense(weights)
        out, before = x.f.ops.kernels.linear(
            rows, matrix, None if bias is None else dense(bias), has_gelu
        )
        ctx.save_for_backward(x, rows, matrix, before, bias is not None)
        return x.wrap(out.reshape(*x.shape[:-1], out.shape[-1]))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, weights and bias."""
        x, rows, matrix, before, has_bias = ctx.saved_values
        grad = dense(grad_output, x.dtype).reshape(-1, matrix.shape[-1])
        dx, dmatrix, dbias = x.f.ops.kernels.linear_backward(grad, rows, matrix, before)
        return (
            x.wrap(dx.reshape(x.shape)),
            x.wrap(dmatrix),
            x.wrap(dbias) if has_bias else None,
            None,
        )


class Linear(_Linear):
    """Linear layer on CUDA: rows @ weights + bias, with GELU if asked, in one kernel on tensor cores."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool
    ) -> Tensor:
        """Return (…, out_size) for (…, in_size), (in_size, out_size) and (out_size,)."""
        rows = as_rows(x)
        shape = rows.shape[0], weights.shape[1]
        out = rows.empty(shape, rows.dtype)
        before = rows.empty(shape, rows.dtype) if has_gelu else None
        if bias is not None and not bias._tensor.is_contiguous():
            bias = bias.contiguous()
        linear_into(
            out._tensor, rows._tensor, weights._tensor, None if bias is None else bias._tensor,
            None if before is None else before._tensor,
        )  # fmt: skip
        ctx.save_for_backward(x.shape, rows, weights, before, bias is not None)
        return reshaped(out, (*x.shape[:-1], shape[1]))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return grad @ weightsᵀ, rowsᵀ @ grad and the sum of grad, after the backward of GELU."""
        shape, rows, weights, before, has_bias = ctx.saved_values
        grad = as_rows(grad_output).to(rows.dtype).contiguous()
        x, w = rows._tensor, weights._tensor
        drows, dweights, dbias = linear_backward(
            grad._tensor._storage, x._storage, x.strides, w._storage, w.strides,
            None if before is None else before._tensor._storage, has_bias,
            (*x.shape, w.shape[1]), get_matmul_precision(),
        )  # fmt: skip
        return (
            rows.on(drows, shape, None),
            rows.on(dweights, weights.shape, None),
            None if dbias is None else rows.on(dbias, weights.shape[1:], None),
            None,
        )


def as_rows(x: Tensor) -> Tensor:
    """Return x as a matrix of its rows; a copy if x is neither contiguous nor a matrix."""
    return x if x.dims == 2 else reshaped(x.contiguous(), (x.size // x.shape[-1], x.shape[-1]))


# -- products with an epilogue on CUDA ---------------------------------------------------------------


def fuses_linear(dtype: np.dtype[Any], shape: Ints) -> bool:
    """Tell whether tensor cores support a dtype and whole vectors, for (rows, out_size, in_size)."""
    kind = matmul_dispatch.kind_of(dtype, get_matmul_precision(), (1, 1, *shape))
    return kind not in (None, "split") and shape[1] % 8 == 0


def linear_into(
    out: TensorData, rows: TensorData, weights: TensorData, bias: TensorData | None,
    before_gelu: TensorData | None,
) -> None:  # fmt: skip
    """Fill ``out`` with rows @ weights + bias, or ``before_gelu`` with it and ``out`` with its GELU.

    The operands are matrices that :func:`fuses_linear` allows.
    """
    operands = matrices(out, rows, weights)
    assert operands is not None, "two matrices"
    kind = matmul_dispatch.kind_of(out.dtype, get_matmul_precision(), operands.shape)
    assert kind is not None, "fuses_linear allowed it"
    numbers, before = (None if t is None else t._storage for t in (bias, before_gelu))
    epilogue = matmul_dispatch.Epilogue(numbers, before is not None, before)
    matmul_dispatch.multiply(*operands, kind, *epilogue)


@repeats
def linear_backward(
    grad: Storage, rows: Storage, row_steps: Ints, weights: Storage, weight_steps: Ints,
    before_gelu: Storage | None, has_bias: bool, shape: Ints, precision: str,
) -> tuple[Storage, Storage, Storage | None]:  # fmt: skip
    """Return the gradients of a linear layer, flat and row-major.

    Args:
        grad: Of the output, (count, cols), row-major.
        rows: (count, depth).
        row_steps: Its strides.
        weights: (depth, cols).
        weight_steps: Its strides.
        before_gelu: What GELU was applied to, (count, cols), row-major; None without GELU.
        has_bias: Whether to return the gradient of the bias.
        shape: (count, depth, cols).
        precision: That products of float32 may use.
    """
    count, depth, cols = shape
    dtype = rows.dtype
    if before_gelu is not None:
        grad = cuda_kernels.gelu_backward(grad, before_gelu)
    along = (cols, 1)

    def product(a: Storage, a_steps: Ints, b: Storage, b_steps: Ints, sizes: Ints) -> Storage:
        out = empty_device((sizes[0] * sizes[1],), dtype)
        out_steps, a_steps, b_steps = ((0, 0, *x) for x in ((sizes[1], 1), a_steps, b_steps))
        operands = Matrices(out, out_steps, a, a_steps, b, b_steps, (1, 1, *sizes))
        kind = matmul_dispatch.kind_of(dtype, precision, operands.shape)
        if kind is None:
            cuda_core_matmul.multiply(*operands)
        else:
            matmul_dispatch.multiply(*operands, kind)
        return out

    drows = product(grad, along, weights, weight_steps[::-1], (count, depth, cols))
    dweights = product(rows, row_steps[::-1], grad, along, (depth, cols, count))
    return drows, dweights, sum_of_rows(grad, count, cols) if has_bias else None


def sum_of_rows(grad: Storage, count: int, cols: int) -> Storage:
    """Return the sums of the columns of a row-major matrix, which are the gradient of a bias."""
    total = empty_device((cols,), grad.dtype)
    fold(operators.add, 0.0, total, cols, grad, count, (cols, cols, 0, 1))
    return total


# -- entries of the tables --------------------------------------------------------------------------


def fits(x: Tensor, weights: Tensor, bias: Tensor | None) -> bool:
    """Tell whether one kernel can read the operands: two matrices that fit, of one backend and dtype."""
    fits = weights.dims == 2 and x.shape[-1:] == weights.shape[:1] and x.size * weights.size > 0
    return fits and _are_alike(x, weights) and (bias is None or _are_alike(x, bias))


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.backend is y.backend and x.dtype == y.dtype


def linear(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return a linear layer of float32 or float64 in one kernel, on the CPU."""
    check_linear(x, weights, bias, has_gelu)
    if fits(x, weights, bias) and x.dtype in COMPUTE_DTYPES:
        return FusedLinear.apply(x, weights, bias, has_gelu)
    return Operations.plain["linear"](x, weights, bias, has_gelu)


def tensor_core_linear(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return a linear layer in one kernel, where tensor cores support its dtype and sizes."""
    check_linear(x, weights, bias, has_gelu)
    has_epilogue = bias is not None or has_gelu
    if has_epilogue and fits(x, weights, bias):
        shape = x.size // x.shape[-1], weights.shape[1], x.shape[-1]
        if fuses_linear(x.dtype, shape):
            return Linear.apply(x, weights, bias, has_gelu)
    return Operations.plain["linear"](x, weights, bias, has_gelu)
