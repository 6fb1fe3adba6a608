"""Attention as a ladder of kernels, on arrays: the textbook, FlashAttention-1 and -2, tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import launch
from kernels.cuda.arrays import is_device_array
from kernels.dlpack import as_array
from kernels.options import takes_attention_options
from kernels.problem import Problem, check_gradient_operands, make_problem

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
    """Compute attention on arrays, where they lie: NumPy arrays, or arrays on a CUDA device.

    Args:
        q: (…, heads, seq_q, head_dim) or (seq_q, head_dim), float32 or float64, any strides; NumPy,
            or anything with ``__cuda_array_interface__`` or DLPack, as CuPy and PyTorch have.
        k: (…, heads, seq_k, head_dim); leading dimensions broadcast against those of q.
        v: (…, heads, seq_k, value_dim).
        args: As in :func:`kernels.problem.make_problem`, whose names and order are those of
            PyTorch's ``scaled_dot_product_attention``.
        tile: (block_q, block_k); the rung's own when None.
        options: Likewise.

    Returns:
        out (…, heads, seq_q, value_dim), and lse (…, heads, seq_q), the natural logarithm of the
        sum of the exponentials of each row's scores.  NumPy arrays, or numba's device arrays.

    Raises:
        TypeError: For operands that are no floating arrays, or an option of the wrong type.
        ValueError: For shapes or values that do not fit.
        NotImplementedError: For a valid option that this version does not have yet.

    Source: FlashAttention-2, Algorithm 1.
    """
    q, k, v = (_operand(operand) for operand in (q, k, v))
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
        TypeError: As in the forward pass, or if dout, out or lse is no array or has another dtype.
        ValueError: As in the forward pass, or if dout, out or lse has another shape.
        NotImplementedError: As in the forward pass.

    Source: FlashAttention-2, Algorithm 2.
    """
    dout, q, k, v, out, lse = (_operand(array) for array in (dout, q, k, v, out, lse))
    problem = make_problem(q, k, v, *args, **options)
    check_gradient_operands(problem, dout, out, lse)
    target = _target(q, k, v, dout, out, lse)
    gradients = launch.backward(target, problem, dout, q, k, v, out, lse, tile)
    dq, dk, dv = (
        target.memory.sum_to(gradient, tuple(operand.shape))
        for gradient, operand in zip(gradients, (q, k, v), strict=True)
    )
    return dq, dk, dv


def available_rungs() -> dict[str, str | None]:
    """Return which rungs of the ladder this machine has, the fastest first.

    Any of them may be asked for by name: ``rung="flash1"`` for a call, the environment variable
    ``MINITORCH_RUNG`` for a whole run.

    Returns:
        Name → None if it runs on the CPU or the GPU of this machine, else the reason why not and
        what to do about it.
    """
    reasons: dict[str, str | None] = {}
    for target in (launch.CUDA, launch.CPU):
        missing = target.memory.why_not()
        for rung in target.rungs:
            reasons[rung.name] = reasons.get(rung.name, missing) and missing
    return reasons


def _operand(array: Any) -> Any:
    """Return an operand as NumPy's or numba's array; of NumPy's subclasses only the array is taken.

    A ``numpy.matrix`` would stay of two dimensions however it is reshaped.
    """
    return np.asarray(array) if isinstance(array, np.ndarray) else as_array(array)


def _target(*operands: Any) -> launch.Target:
    if all(isinstance(operand, np.ndarray) for operand in operands):
        return launch.CPU
    if all(is_device_array(operand) for operand in operands):
        return launch.CUDA
    kinds = ", ".join(dict.fromkeys(type(operand).__name__ for operand in operands))
    raise TypeError(
        f"kernels take NumPy arrays, or arrays on one CUDA device, got {kinds}; convert them with "
        "numpy.asarray or numba.cuda.to_device"
    )
