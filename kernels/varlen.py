"""Attention on packed sequences: several sequences of unequal length in one call, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.array_call import attend, heads_first, results_of
from kernels.cuda.attention.options.packed_tiles import sequences_of_call
from kernels.interop.libraries import context_of, library_of
from kernels.launch import Tile, Wanted
from kernels.operand_types import as_operand
from kernels.problem.options import Options
from kernels.problem.packed_problem import PackedMaker, check_packed
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
    """Compute attention within each of several sequences that are packed into one array.

    Row and column indices are relative to the start of their sequence, for ``is_causal``,
    ``window_size``, ``alibi_slopes``, the dropout mask and the arguments of ``mask_mod`` and
    ``score_mod``, whose ``batch`` is the index of the sequence.

    Args:
        q: Queries of all sequences, (total_q, heads, head_dim), an array of any type that
            :func:`kernels.flash_attention_forward` accepts.
        k: Keys of all sequences, (total_k, heads, head_dim), of the dtype of q.
        v: Values of all sequences, (total_k, heads, value_dim), of the dtype of q.
        cu_seqlens_q: Cumulative query lengths, (count + 1,) integers on the host, starting at 0: sequence
            i has the query rows from ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i + 1]``.
        cu_seqlens_k: Cumulative key lengths, (count + 1,) integers on the host, starting at 0.
        args: Options by position: attn_mask (which must be None), dropout_p, is_causal, scale and
            enable_gqa.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; :func:`kernels.make_problem` describes each.  ``attn_mask`` and
            ``block_mask`` must be None.

    Returns:
        out (total_q, heads, value_dim), a view of (heads, total_q, value_dim), and lse (heads, total_q).

    Raises:
        TypeError: If an operand is not a floating-point array, or an option has the wrong type.
        ValueError: If a shape or a value is invalid, or a mask is given.

    Source: FlashAttention-2, Algorithm 1; the layout is that of FlashAttention.
    """
    own = by_name("flash_attention_varlen_forward", args, options)
    with context_of(q):
        make = PackedMaker(cu_seqlens_q, cu_seqlens_k, sequences_of_call)
        out, lse = attend(_all_heads_first(q, k, v), own, tile, make=make, count=2)
        return results_of(library_of(q), (heads_first(out), lse))


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
        dout: Gradient of out, (total_q, heads, value_dim), of the dtype of out.
        q: Queries of the forward pass, (total_q, heads, head_dim).
        k: Keys of the forward pass, (total_k, heads, head_dim).
        v: Values of the forward pass, (total_k, heads, value_dim).
        out: Result of the forward pass, (total_q, heads, value_dim).
        lse: The forward pass's lse, (heads, total_q); see ``flash_attention_backward`` for large scores.
        cu_seqlens_q: Cumulative query lengths, (count + 1,) integers on the host, starting at 0.
        cu_seqlens_k: Cumulative key lengths, (count + 1,) integers on the host, starting at 0.
        args: Options by position; the same values as in the forward pass.
        dlse: Gradient of lse, (heads, total_q); zeros when None.
        sink_gradient: Also return the gradient of the sinks, last.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; the same values as in the forward pass.

    Returns:
        dq, dk and dv, of the shapes of q, k and v, views of arrays with the heads first; with
        ``sink_gradient`` also that of the sinks, (heads,).

    Raises:
        TypeError: If an operand is not a floating-point array, an option has the wrong type, or dout, out
            or lse is not an array of the expected dtype.
        ValueError: If a shape or a value is invalid, or a mask is given.

    Source: FlashAttention-2, Algorithm 2.
    """
    with context_of(q):
        dout, out = (_heads_first(name, array) for name, array in (("dout", dout), ("out", out)))
        results = out, as_operand(lse), None, dout, as_operand(dlse)
        dq, dk, dv, *others = attend(
            _all_heads_first(q, k, v),
            by_name("flash_attention_varlen_backward", args, options),
            tile,
            Wanted(True, sink=sink_gradient),
            results,
            PackedMaker(cu_seqlens_q, cu_seqlens_k, sequences_of_call),
        )
        return results_of(library_of(q), (*map(heads_first, (dq, dk, dv)), *others))


def _heads_first(name: str, operand: Any) -> Any:
    operand = as_operand(operand)
    check_packed(name, operand)
    return heads_first(operand)


def _all_heads_first(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    return _heads_first("q", q), _heads_first("k", k), _heads_first("v", v)
