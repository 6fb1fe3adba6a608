"""Attention as a ladder of kernels, on arrays: the textbook, FlashAttention-1 and -2, tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import launch
from kernels.problem import (
    Problem,
    check_gradient_operands,
    make_problem,
    takes_attention_options,
)

__all__ = [
    "Problem",
    "available_rungs",
    "flash_attention_backward",
    "flash_attention_forward",
    "make_problem",
    "takes_attention_options",
]


@takes_attention_options
def flash_attention_forward(
    q: Any, k: Any, v: Any, *args: Any, tile: launch.Tile | None = None, **options: Any
) -> tuple[Any, Any]:
    """Compute attention on arrays.

    Args:
        q: (…, heads, seq_q, head_dim) or (seq_q, head_dim), float32 or float64, any strides.
        k: (…, heads, seq_k, head_dim); leading dimensions broadcast against those of q.
        v: (…, heads, seq_k, value_dim).
        args: As in :func:`kernels.problem.make_problem`, whose names and order are those of
            PyTorch's ``scaled_dot_product_attention``.
        tile: (block_q, block_k); the rung's own when None.
        options: Likewise.

    Returns:
        out (…, heads, seq_q, value_dim), and lse (…, heads, seq_q), the natural logarithm of the
        sum of the exponentials of each row's scores.

    Raises:
        TypeError: For operands that are no floating arrays, or an option of the wrong type.
        ValueError: For shapes or values that do not fit.

    Source: FlashAttention-2, Algorithm 1.
    """
    problem = make_problem(q, k, v, *args, **options)
    return launch.forward(_target(q, k, v), problem, q, k, v, tile)


@takes_attention_options
def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *args: Any,
    tile: launch.Tile | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Compute the gradients of attention on arrays; probabilities are recomputed from lse.

    Args:
        dout: Gradient of out.
        q: As in the forward pass.
        k: As in the forward pass.
        v: As in the forward pass.
        out: As the forward pass returned it.
        lse: As the forward pass returned it.
        args: The options of the forward pass.
        tile: (block_q, block_k); the rung's own when None.
        options: The options of the forward pass.

    Returns:
        dq, dk and dv, of the shapes of q, k and v.

    Raises:
        TypeError: As in the forward pass.
        ValueError: As in the forward pass, or if dout, out or lse has another shape.

    Source: FlashAttention-2, Algorithm 2.
    """
    problem = make_problem(q, k, v, *args, **options)
    check_gradient_operands(problem, dout, out, lse)
    gradients = launch.backward(_target(q, k, v), problem, dout, q, k, v, out, lse, tile)
    dq, dk, dv = (
        _sum_to(gradient, tuple(operand.shape))
        for gradient, operand in zip(gradients, (q, k, v), strict=True)
    )
    return dq, dk, dv


def available_rungs() -> dict[str, str | None]:
    """Return rung → None if it runs here, else the reason why not."""
    return {rung.name: None for rung in launch.CPU.rungs}


def _target(*operands: Any) -> launch.Target:
    for operand in operands:
        if not isinstance(operand, np.ndarray):
            raise TypeError(
                f"kernels take NumPy arrays, got {type(operand).__name__}; convert it with "
                "numpy.asarray"
            )
    return launch.CPU


def _sum_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the dimensions along which its operand was broadcast."""
    extra = gradient.ndim - len(shape)
    repeated = tuple(
        axis
        for axis, size in enumerate(gradient.shape)
        if axis < extra or (shape[axis - extra] == 1 and size != 1)
    )
    return gradient.sum(axis=repeated).reshape(shape) if repeated else gradient
