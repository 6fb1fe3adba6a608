"""Attention as a ladder of kernels, on arrays: the textbook, FlashAttention-1 and -2, tensor cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import array_call, launch
from kernels.array_call import Call
from kernels.call_plan import CallPlan
from kernels.common.arguments import whole
from kernels.problem.argument_types import check_types
from kernels.problem.option_values import check_dropout
from kernels.problem.options import Options
from kernels.problem.question import Problem, make_problem
from kernels.problem.signature import by_name, takes_attention_options
from kernels.reference.scores import kept
from kernels.sparsity.block_mask import BlockMask
from kernels.varlen import flash_attention_varlen_backward, flash_attention_varlen_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BlockMask",
    "CallPlan",
    "Problem",
    "available_rungs",
    "dropout_mask",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attention_varlen_backward",
    "flash_attention_varlen_forward",
    "make_problem",
    "plan",
    "takes_attention_options",
]


@takes_attention_options
def flash_attention_forward(
    q: Any, k: Any, v: Any, *args: Any, tile: launch.Tile | None = None, **options: Unpack[Options]
) -> tuple[Any, Any]:
    """Compute attention on arrays, where they lie: NumPy arrays, or arrays on a CUDA device.

    Args:
        q: (…, heads, seq_q, head_dim) or (seq_q, head_dim), float16, bfloat16 (``ml_dtypes``), float32 or
            float64, any strides; NumPy, or anything with ``__cuda_array_interface__`` or DLPack, as CuPy
            and PyTorch have.
        k: (…, heads, seq_k, head_dim); leading dimensions broadcast against those of q.
        v: (…, heads, seq_k, value_dim).
        args: As in :func:`kernels.problem.question.make_problem`, whose names and order are those of
            PyTorch's ``scaled_dot_product_attention``.
        tile: (block_q, block_k); the rung's own when None.
        options: Likewise.

    Returns:
        out (…, heads, seq_q, value_dim), and lse (…, heads, seq_q), the natural logarithm of the
        sum of the exponentials of each row's scores; lse is float32 for operands of 16 bits.  NumPy
        arrays, or numba's device arrays.  The dimensions of out have the same order in memory as those
        of q.

    Raises:
        TypeError: For operands that are no floating arrays, or an option of the wrong type.
        ValueError: For shapes or values that do not fit.

    Source: FlashAttention-2, Algorithm 1.
    """
    return array_call.forward(q, k, v, by_name("flash_attention_forward", args, options), tile)


@takes_attention_options
def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *args: Any,
    dlse: Any = None,
    mask_gradient: bool = False,
    sink_gradient: bool = False,
    tile: launch.Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Compute the gradients of attention on arrays; probabilities are recomputed from lse.

    Args:
        dout: Gradient of out.
        q: As in the forward pass.
        k: As in the forward pass.
        v: As in the forward pass.
        out: As the forward pass returned it, in any layout.
        lse: As the forward pass returned it, in any layout.
        args: The options of the forward pass.
        dlse: Gradient of lse; zeros when None.
        mask_gradient: Also return the gradient of a floating ``attn_mask``.
        sink_gradient: Also return the gradient of ``sink``, last.
        tile: (block_q, block_k); the rung's own when None.
        options: The options of the forward pass.

    Returns:
        dq, dk and dv, of the shapes of q, k and v; with ``mask_gradient`` also that of the mask, and
        with ``sink_gradient`` that of the sinks, (heads,) and of the dtype of lse.  The
        dimensions of each gradient have the same order in memory as those of its operand.

    Raises:
        TypeError: As in the forward pass, or if dout, out or lse is no array or has another dtype.
        ValueError: As in the forward pass, or if dout, out or lse has another shape.

    Source: FlashAttention-2, Algorithm 2.
    """
    options = by_name("flash_attention_backward", args, options)
    results = dout, out, lse, dlse
    return array_call.backward((q, k, v), results, options, tile, mask_gradient, sink_gradient)


@takes_attention_options
def plan(
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    backward: bool = False,
    tile: launch.Tile | None = None,
    **options: Unpack[Options],
) -> CallPlan:
    """Return what a call of this kind runs: rung, tile, launches, operations, bytes.

    ``print(kernels.plan(q, k, v, is_causal=True))`` shows it, with the reason for each faster rung that
    cannot run the call.  The call is run once, so that its launches can be shown.

    Args:
        q: As in :func:`flash_attention_forward`.
        k: Likewise.
        v: Likewise.
        args: The options of the call.
        backward: Plan the backward pass instead of the forward pass.
        tile: (block_q, block_k); the rung's own when None.
        options: The options of the call.

    Raises:
        TypeError: As :func:`flash_attention_forward`.
        ValueError: Likewise.
    """
    return Call(q, k, v, by_name("plan", args, options)).plan(tile, backward)


def dropout_mask(
    shape: Sequence[int], dropout_p: float, seed: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which probabilities attention keeps: the bits that every rung draws.

    Args:
        shape: (…, heads, seq_q, seq_k).
        dropout_p: Probability of dropping, in [0, 1).
        seed: From 0 to 2⁶⁴ - 1.

    Returns:
        A boolean array of that shape, True where a probability is kept.

    Raises:
        TypeError: If one of them is no number, or the shape holds something else than whole numbers.
        ValueError: If one of them is out of range.

    Source: Philox4x32-7, keyed by the seed; the counter is (column / 8, row, batch · heads + head), and
    each half of the four words of a counter decides one column.  The rate is rounded to a multiple of 2⁻¹⁶,
    and attention multiplies what it keeps by ``kernels.common.philox.keep_scale`` of it.
    """
    check_types(dropout_p=dropout_p, seed=seed)
    seed = check_dropout(dropout_p, seed)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape must be (…, heads, seq_q, seq_k), got {shape!r}; pass a tuple")
    if len(shape) < 2:
        raise ValueError(
            f"shape must be (…, heads, seq_q, seq_k), two sizes or more, got {tuple(shape)}"
        )
    *lead, seq_q, seq_k = (whole("a size of the shape", size, 0) for size in shape)
    batch_head = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
    return kept(seed, dropout_p, batch_head, np.arange(seq_q)[:, None], np.arange(seq_k))


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
            reason = missing or rung.why_no_device()
            reasons[rung.name] = reasons.get(rung.name, reason) and reason
    return reasons
