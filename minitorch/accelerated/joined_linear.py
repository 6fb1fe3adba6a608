"""The linear layers of one input, such as those of q, k and v, in one product on Hopper's tensor cores."""

from __future__ import annotations

from typing import Any

from kernels.cuda.backend import empty_device, repeats
from kernels.cuda.matmul.dispatch import is_hopper, multiply_heads
from kernels.runtime.dtypes import is_half

from ..autodiff import Context
from ..backends.operations import Operations
from ..functions.joining import Cat
from ..functions.several import Several
from ..modules_basic import Linear
from ..scalars.modes import modes
from ..tensor import Tensor
from ..tensor_data import Ints, Storage
from .linear import as_rows, fits, fuses_linear, sum_of_rows


class JoinedLinear(Several):
    """Linear layers of one input and of equal sizes, in one kernel forward and two kernels backward.

    The gradient of the input is one product as well, whose sums run over the columns of all layers.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return ``count`` results (…, out_size) for x, (…, in_size).

        Args:
            ctx: Stores the operands.
            x: Input.
            count: The number of layers.
            parameters: The weights of each layer, (in_size, out_size), and then either the bias of each,
                (out_size,), or nothing.
        """
        rows, (in_size, out_size) = as_rows(x).contiguous(), parameters[0].shape
        weights, biases = [w.contiguous() for w in parameters[:count]], parameters[count:]
        bias = Cat.forward(Context(), 0, *biases)._tensor._storage if biases else None
        made = joined_products(
            (rows.shape[0], in_size, out_size),
            bias,
            *(t._tensor._storage for t in (rows, *weights)),
        )
        ctx.save_for_backward(x.shape, bool(biases), rows, *weights)
        return tuple(rows.on(out, (*x.shape[:-1], out_size), None) for out in made)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the weights and the biases."""
        shape, has_bias, rows, *weights = ctx.saved_values
        (in_size, out_size), count = weights[0].shape, len(weights)
        given = (rows.zeros((*shape[:-1], out_size)) if grad is None else grad for grad in grads)
        own = [as_rows(grad).to(rows.dtype).contiguous() for grad in given]
        dx, *others = joined_backward(
            (rows.shape[0], in_size, out_size), has_bias,
            *(t._tensor._storage for t in (rows, *own, *weights)),
        )  # fmt: skip
        dweights = [rows.on(x, weights[0].shape, None) for x in others[:count]]
        dbiases = [rows.on(x, (out_size,), None) for x in others[count:]]
        return rows.on(dx, shape, None), None, *dweights, *dbiases

    @staticmethod
    def composed(_: Context, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Apply one layer after the other."""
        biases = parameters[count:] or (None,) * count
        pairs = zip(parameters[:count], biases, strict=True)
        return tuple(Operations.plain["linear"](x, *pair) for pair in pairs)


@repeats
def joined_products(
    shape: Ints, bias: Storage | None, rows: Storage, *weights: Storage
) -> tuple[Storage, ...]:
    """Return rows @ weights + bias for each of the weights, flat and row-major.

    Args:
        shape: (count, depth, cols).
        bias: (layers, cols), or None.
        rows: (count, depth), row-major.
        *weights: (depth, cols) each, row-major.
    """
    (count, depth, cols), heads = shape, len(weights)
    made = tuple(empty_device((count * cols,), rows.dtype) for _ in weights)
    sizes, arrays = (heads, count, cols, depth), (*made, rows, *weights)
    multiply_heads((heads, 1, heads), sizes, (depth, 1), (cols, 1), bias, *arrays)
    return made


@repeats
def joined_backward(
    shape: Ints, has_bias: bool, rows: Storage, *others: Storage
) -> tuple[Storage, ...]:
    """Return the gradients of the rows, of each layer's weights, and of each bias, flat and row-major.

    Args:
        shape: (count, depth, cols).
        has_bias: Whether to return the gradients of biases.
        rows: (count, depth), row-major.
        *others: The gradient of each result, (count, cols), and the weights of each layer, (depth, cols).
    """
    (count, depth, cols), heads = shape, len(others) // 2
    grads, weights = others[:heads], others[heads:]
    drows = empty_device((count * depth,), rows.dtype)
    sizes, arrays = (heads, count, depth, cols), (drows, *grads, *weights)
    multiply_heads((1, heads, heads), sizes, (cols, 1), (1, cols), None, *arrays)
    dweights = [empty_device((depth * cols,), rows.dtype) for _ in weights]
    sizes, arrays = (heads, depth, cols, count), (*dweights, rows, *grads)
    multiply_heads((heads, 1, heads), sizes, (1, depth), (cols, 1), None, *arrays)
    dbiases = (sum_of_rows(grad, count, cols) for grad in grads if has_bias)
    return drows, *dweights, *dbiases


# -- entry of the table -----------------------------------------------------------------------------


def projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of x in one product; see ``MultiHeadAttention.projected``."""
    linears = layer.q_projection, layer.k_projection, layer.v_projection
    if not _are_joined(x, linears):
        return Operations.plain["MultiHeadAttention.projected"](layer, x)
    weights = [linear.weights.value for linear in linears]
    biases = [linear.bias.value for linear in linears if linear.bias is not None]
    q, k, v = JoinedLinear.apply_several(x, len(linears), *weights, *biases)
    return layer.split_heads(q), layer.split_heads(k), layer.split_heads(v)


def _are_joined(x: Tensor, linears: Any) -> bool:
    """Tell whether one kernel computes linear layers of x, and those of their gradients are needed."""
    if not all(type(one) is Linear and "forward" not in one.__dict__ for one in linears):
        return False
    pairs = [(one.weights.value, one.bias and one.bias.value) for one in linears]
    (weights, bias), *others = pairs
    return (
        modes.recording
        and weights.requires_grad()
        and is_half(x.dtype)
        and is_hopper()
        and all(fits(x, *pair) for pair in pairs)
        and all(w.shape == weights.shape and (b is None) is (bias is None) for w, b in others)
        and fuses_linear(x.dtype, (x.size // x.shape[-1], weights.shape[1], x.shape[-1]))
        and fuses_linear(x.dtype, (x.size // x.shape[-1], x.shape[-1], weights.shape[1]))  # dx
    )
