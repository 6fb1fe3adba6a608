"""Attention on arrays: a ladder of kernels, from the textbook formula to FlashAttention on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import array_call, launch
from kernels.array_call import Call
from kernels.call_plan import CallPlan  # beyond module 5
from kernels.common.arguments import shown, whole
from kernels.decoding import flash_attention_with_cache  # beyond module 5
from kernels.derivatives import (  # beyond module 5
    flash_attention_double_backward,
    flash_attention_jvp,
)
from kernels.problem.option_values import check_dropout
from kernels.problem.options import Options, check_types
from kernels.problem.question import Problem, make_problem
from kernels.problem.signature import by_name, takes_attention_options
from kernels.reference.scores import kept
from kernels.scores.mods import score_derivative, varying  # beyond module 5
from kernels.sparsity.block_mask import BlockMask
from kernels.varlen import (  # beyond module 5
    flash_attention_varlen_backward,
    flash_attention_varlen_forward,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BlockMask",
    "CallPlan",  # beyond module 5
    "Problem",
    "available_rungs",
    "dropout_mask",
    "flash_attention_backward",
    "flash_attention_double_backward",  # beyond module 5
    "flash_attention_forward",
    "flash_attention_jvp",  # beyond module 5
    "flash_attention_varlen_backward",  # beyond module 5
    "flash_attention_varlen_forward",  # beyond module 5
    "flash_attention_with_cache",  # beyond module 5
    "make_problem",
    "plan",  # beyond module 5
    "score_derivative",  # beyond module 5
    "takes_attention_options",
    "varying",  # beyond module 5
]


@takes_attention_options
def flash_attention_forward(
    q: Any, k: Any, v: Any, *args: Any, tile: launch.Tile | None = None, **options: Unpack[Options]
) -> tuple[Any, Any]:
    """Compute attention on NumPy arrays, or on arrays in the memory of a CUDA device.

    Args:
        q: Queries, (…, heads, seq_q, head_dim) or (seq_q, head_dim), float16, bfloat16 (``ml_dtypes``),
            float32 or float64, with any strides: a NumPy array, or an object that supports
            ``__cuda_array_interface__`` or DLPack, such as CuPy arrays and PyTorch tensors.
        k: Keys, (…, heads, seq_k, head_dim), of the dtype of q; leading dimensions broadcast against
            those of q.
        v: Values, (…, heads, seq_k, value_dim), of the dtype of q.
        args: Options by position, in the order of PyTorch's ``scaled_dot_product_attention``:
            attn_mask, dropout_p, is_causal, scale and enable_gqa.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; :func:`make_problem` describes each.

    Returns:
        out (…, heads, seq_q, value_dim), and lse (…, heads, seq_q), the natural logarithm of the
        sum of the exponentials of each row's scores; lse is float32 for fp16 and bf16 operands.  Both are
        arrays of the library of q, on its device: NumPy, PyTorch, CuPy, numba.  The dimensions of out have
        the same order in memory as those of q.

    Raises:
        TypeError: If an operand is not a floating-point array, or an option has the wrong type.
        ValueError: If a shape or a value is invalid, or a PyTorch tensor requires grad.

    Source: FlashAttention-2, Algorithm 1.
    """
    own = by_name("flash_attention_forward", args, options)
    out, lse = array_call.attend((q, k, v), own, tile, count=2)
    return out, lse


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
    score_table_gradient: bool = False,  # beyond module 5
    tile: launch.Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Compute the gradients of attention on arrays, recomputing the probabilities from lse.

    Args:
        dout: Gradient of out, (…, heads, seq_q, value_dim), of the dtype of out.
        q: Queries of the forward pass, (…, heads, seq_q, head_dim) or (seq_q, head_dim).
        k: Keys of the forward pass, (…, heads, seq_k, head_dim).
        v: Values of the forward pass, (…, heads, seq_k, value_dim).
        out: Result of the forward pass, (…, heads, seq_q, value_dim), with any strides.
        lse: The forward pass's lse, (…, heads, seq_q), with any strides.  Where the largest score of a row
            is beyond about 10⁷ in float32, such as in a row of the mask that holds the least number, lse
            has lost the logarithm of the row's sum, and the probabilities do not add up to 1.  Tensors
            and the PyTorch operator keep what lse loses.
        args: Options by position; the same values as in the forward pass.
        dlse: Gradient of lse, (…, heads, seq_q); zeros when None.
        mask_gradient: Also return the gradient of a floating ``attn_mask``, after dv.
        sink_gradient: Also return the gradient of the sinks, after the others.
        score_table_gradient: Also return the gradient of ``score_table``, after the others.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; the same values as in the forward pass.

    Returns:
        dq, dk and dv, of the shapes of q, k and v; with ``mask_gradient`` also that of the mask, with
        ``sink_gradient`` that of the sinks, (heads,), and with ``score_table_gradient`` that of the
        table, both of the dtype of lse.  All are arrays of the library of q.  The dimensions of each
        gradient have the same order in memory as those of its operand.

    Raises:
        TypeError: If an operand is not a floating-point array, an option has the wrong type, or dout, out
            or lse is not an array of the expected dtype.
        ValueError: If a shape or a value is invalid.

    Source: FlashAttention-2, Algorithm 2.
    """
    options = by_name("flash_attention_backward", args, options)
    wanted = launch.Wanted(True, mask=mask_gradient, sink=sink_gradient)
    wanted = wanted._replace(score_table=score_table_gradient)  # beyond module 5
    return array_call.attend((q, k, v), options, tile, wanted, (out, lse, None, dout, dlse))


@takes_attention_options  # beyond module 5
def plan(  # beyond module 5
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    backward: bool = False,
    tile: launch.Tile | None = None,
    **options: Unpack[Options],
) -> CallPlan:
    """Return the execution plan of a call: its rung, tile, kernel launches, operations and bytes.

    ``print(kernels.plan(q, k, v, is_causal=True))`` also prints why each faster rung cannot run the call.
    The call is run once to record its launches.

    Args:
        q: Queries, (…, heads, seq_q, head_dim) or (seq_q, head_dim), an array of any type that
            :func:`flash_attention_forward` accepts.
        k: Keys, (…, heads, seq_k, head_dim), of the dtype of q.
        v: Values, (…, heads, seq_k, value_dim), of the dtype of q.
        args: Options of the call by position: attn_mask, dropout_p, is_causal, scale and enable_gqa.
        backward: Plan the backward pass instead of the forward pass.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options of the call by name; :func:`make_problem` describes each.

    Raises:
        TypeError: If an operand is not a floating-point array, or an option has the wrong type.
        ValueError: If a shape or a value is invalid.
    """
    return Call(q, k, v, by_name("plan", args, options)).plan(tile, backward)


def dropout_mask(
    shape: Sequence[int], dropout_p: float, seed: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the dropout mask of attention, which is the same on every rung and device.

    Args:
        shape: Shape of the probabilities, (…, heads, seq_q, seq_k).
        dropout_p: Probability of dropping an element, in [0, 1), rounded to a multiple of 2⁻¹⁶.
        seed: A whole number from 0 to 2⁶⁴ - 1.

    Returns:
        A boolean array of that shape, True where a probability is kept.

    Raises:
        TypeError: If ``dropout_p`` or ``seed`` is not a number, or a size of the shape is not an integer.
        ValueError: If an argument is out of range.

    Source: Philox4x32-7, keyed by the seed; the counter is (column / 8, row, batch · heads + head), and
    a counter yields four words, whose eight halves decide one column each.  Attention multiplies the kept
    probabilities by ``kernels.common.philox.keep_scale(dropout_p)``.
    """
    check_types(dropout_p=dropout_p, seed=seed)
    seed = check_dropout(dropout_p, seed)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape must be (…, heads, seq_q, seq_k), got {shown(shape)}; pass a tuple")
    if len(shape) < 2:
        raise ValueError(
            f"shape must be (…, heads, seq_q, seq_k), at least two sizes, got {shown(shape)}"
        )
    *lead, seq_q, seq_k = (whole("a size of the shape", size, 0) for size in shape)
    batch_head = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
    return kept(seed, float(dropout_p), batch_head, np.arange(seq_q)[:, None], np.arange(seq_k))


def available_rungs() -> dict[str, str | None]:
    """Return the rungs of the ladder, fastest first, and whether each can run on this machine.

    To choose one, pass ``rung="flash1"`` to a call, or set the environment variable ``MINITORCH_RUNG``
    for a whole run.

    Returns:
        A dictionary that maps each name to None if the rung runs on the CPU or the GPU of this machine,
        otherwise to the reason why it does not and how to fix it.
    """
    reasons: dict[str, str | None] = {}
    for target in (launch.CUDA, launch.CPU):
        missing = target.memory.why_not()
        for rung in target.rungs:
            reason = missing or rung.why_no_device()
            reasons[rung.name] = reasons.get(rung.name, reason) and reason
    return reasons
