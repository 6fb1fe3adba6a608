"""Attention on packed sequences: several of unequal length in one call, and no padding computed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kernels.array_call import Call, as_operand, heads_first
from kernels.launch import Tile
from kernels.problem.options import Options
from kernels.problem.packed_problem import check_packed, make_packed_problem
from kernels.problem.signature import by_name, takes_attention_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_attention_options
def flash_attention_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *args: Any,
    tile: Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, Any]:
    """Compute attention within each of several sequences that lie one after the other.

    Rows and columns count from the start of their sequence: so do ``is_causal``, ``window_size``,
    ``alibi_slopes``, the dropout bits and what a mod gets; its batch is the sequence's number.

    Args:
        q: (total_q, heads, head_dim); arrays as in :func:`kernels.flash_attention_forward`.
        k: (total_k, heads, head_dim).
        v: (total_k, heads, value_dim).
        cu_seqlens_q: (count + 1,) whole numbers, on the host: 0 and the sums of the lengths, so that
            sequence i has the query rows from ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]``.
        cu_seqlens_k: Likewise of key columns.
        args: As in :func:`kernels.problem.question.make_problem`; ``attn_mask`` and ``block_mask``
            must be None.
        tile: (block_q, block_k); the rung's own when None.
        options: Likewise.

    Returns:
        out (total_q, heads, value_dim), a view of (heads, total_q, value_dim), and lse (heads, total_q).

    Raises:
        TypeError: For operands that are no floating arrays, or an option of the wrong type.
        ValueError: For shapes or values that do not fit, or a mask.

    Source: FlashAttention-2, Algorithm 1; the layout is that of FlashAttention.
    """
    call = _call(
        (q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        by_name("flash_attention_varlen_forward", args, options),
    )
    out, lse = call.forward(tile)
    return heads_first(out), lse


@takes_attention_options
def flash_attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *args: Any,
    dlse: Any = None,
    sink_gradient: bool = False,
    tile: Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Compute the gradients of attention on packed sequences.

    Args:
        dout: Gradient of out, (total_q, heads, value_dim).
        q: As in the forward pass.
        k: As in the forward pass.
        v: As in the forward pass.
        out: As the forward pass returned it.
        lse: As the forward pass returned it.
        cu_seqlens_q: As in the forward pass.
        cu_seqlens_k: As in the forward pass.
        args: The options of the forward pass.
        dlse: Gradient of lse; zeros when None.
        sink_gradient: Also return the gradient of ``sink``, last.
        tile: (block_q, block_k); the rung's own when None.
        options: The options of the forward pass.

    Returns:
        dq, dk and dv, of the shapes of q, k and v, views of arrays with the heads first; with
        ``sink_gradient`` also that of the sinks, (heads,).

    Raises:
        TypeError: As in the forward pass, or if dout, out or lse is no array or has another dtype.
        ValueError: As in the forward pass, or if dout, out or lse has another shape.

    Source: FlashAttention-2, Algorithm 2.
    """
    dout, out = (_heads_first(name, array) for name, array in (("dout", dout), ("out", out)))
    results = dout, out, as_operand(lse), as_operand(dlse)
    call = _call(
        (q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        by_name("flash_attention_varlen_backward", args, options),
        results,
    )
    dq, dk, dv, *others = call.backward(tile, with_sink=sink_gradient)
    return *map(heads_first, (dq, dk, dv)), *others


def _heads_first(name: str, operand: Any) -> Any:
    operand = as_operand(operand)
    check_packed(name, operand)
    return heads_first(operand)


def _call(
    operands: tuple[Any, Any, Any],
    cu_q: Any,
    cu_k: Any,
    options: Options,
    results: Any = None,
) -> Call:
    q, k, v = (_heads_first(name, x) for name, x in zip("qkv", operands, strict=True))
    make = partial(make_packed_problem, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return Call(q, k, v, options, results, make)
