"""Attention over a sequence that is spread over the ranks of a group.

There are three methods:

- ring: Keys and values travel from rank to rank.  While a rank computes with those that it has, the next
  ones arrive.  Results are merged by their log-sum-exp.
- all-gather: Every rank gathers all keys and values before it begins.  This takes one exchange, and memory
  for all of them.
- ulysses: Every rank exchanges its rows of all heads for all rows of some heads, computes their attention,
  and exchanges the result back.  Traffic does not grow with the number of ranks, which cannot exceed the
  number of key heads.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023); Brandon et al., Striped
Attention (2023), for balanced causal work; the Llama 3 herd of models (2024), section 3.3.2, for the
all-gather; Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array
from kernels.cuda.backend import refuse
from kernels.problem.options import Options
from kernels.problem.packed_problem import check_packed
from kernels.problem.packed_sequences import sequences_of
from kernels.problem.question import problem_of

from ..functions.base import check_tensor
from ..functions.dropout_seeds import dropout_seed
from ..functions.joining import Cat
from ..functions.subscripts import Slice
from ..tensor import Tensor
from .calls import Call, agreed
from .exchange import Gathered, ToHeads, ToSequence
from .group import Group
from .local_attention import attend, heads_first, sequence_first
from .ring import RingAttention

METHODS = ("ring", "all-gather", "ulysses")


def _by_gathering(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attend to the keys and values of all ranks at once; see :class:`RingAttention`."""
    place = call.group, call.layout
    keys, values = (Gathered.apply(sequence_first(x).contiguous(), *place) for x in (k, v))
    outs = []
    for a in call.segments(call.group.rank):
        part, columns = call.part_of_all_keys(a)
        its_keys, its_values = (heads_first(Slice.apply(x, 0, columns)) for x in (keys, values))
        outs.append(attend(Slice.apply(q, q.dims - 2, a.here), its_keys, its_values, part)[0])
    return Cat.apply(q.dims - 2, *outs)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Exchange rows for heads, attend, and exchange back; see :class:`RingAttention`."""
    place = call.group, call.layout
    q, k, v = (heads_first(ToHeads.apply(sequence_first(x), *place)) for x in (q, k, v))
    out, _ = attend(q, k, v, call.part_of_own_heads())
    return heads_first(ToSequence.apply(sequence_first(out), *place))


def _check(q: Tensor, k: Tensor, v: Tensor, options: Options, method: str, size: int) -> None:
    """Check a call.

    Args:
        q: (…, heads, rows, head_dim).
        k: (…, key heads, rows, head_dim).
        v: (…, key heads, rows, value_dim).
        options: Options of the whole attention.
        method: How keys and values are exchanged.
        size: Number of ranks.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if q.dims < 3 or not _beside_heads(q) == _beside_heads(k) == _beside_heads(v):
        raise ValueError(
            "ring_attention is self-attention: q, k and v, (…, heads, rows, dim), must agree in all sizes "
            f"but heads and dim, got {q.shape}, {k.shape} and {v.shape}; expand what broadcasts"
        )
    problem_of(q, k, v, options)
    heads, key_heads = q.shape[-3], k.shape[-3]
    if method == "ulysses" and (heads % size or key_heads % size):
        raise ValueError(
            f"method='ulysses' spreads the heads over the ranks, and {heads} query heads and {key_heads} "
            f"key heads do not both divide by {size}; use method='ring'"
        )


def _beside_heads(a: Tensor) -> tuple[int, ...]:
    return (*a.shape[:-3], a.shape[-2])


def _whole_sums(sums: Any, seq: int) -> tuple[int, ...]:
    """Return the cumulative lengths of the packed sequences; (0, seq) if None are given."""
    if sums is None:
        return 0, seq
    return tuple(sequences_of(sums, sums, seq, seq).cu_seqlens_q.tolist())


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    method: str = "ring",
    layout: str = "zigzag",
    cu_seqlens: Any = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    rung: str = "auto",
) -> Tensor:
    """Compute self-attention over a sequence of which each rank holds a part; differentiable.

    All ranks of the group must call it, with tensors of the same shape and the same options, and must call
    ``backward`` in the same order.  The results equal those of one device with the whole sequence, up to
    rounding, and have the same bits in each run.  :func:`positions` returns the rows of a rank.

    Args:
        q: Queries of this rank, (…, heads, rows, head_dim); with ``cu_seqlens`` (rows, heads, head_dim).
        k: Keys of this rank, (…, key heads, rows, head_dim), or (rows, key heads, head_dim).
        v: Values of this rank, (…, key heads, rows, value_dim), or (rows, key heads, value_dim).
        group: The ranks that share the sequence.
        method: How the ranks exchange keys and values: "ring", from neighbour to neighbour during the
            computation; "all-gather", all of them before it; or "ulysses", which exchanges rows for heads
            and needs numbers of query and key heads that the number of ranks divides.
        layout: Which rows a rank holds, "zigzag" or "contiguous"; see :func:`positions`.
        cu_seqlens: Cumulative lengths of the sequences that are packed in the whole sequence,
            (count + 1,) whole numbers that begin with 0; rows attend within their sequence.
        is_causal: Rows attend to positions up to their own.
        window_size: (left, right), see :func:`kernels.make_problem`.
        scale: Factor of the scores; 1/sqrt(head_dim) when None.
        enable_gqa: Let groups of adjacent query heads share one head of k and v.
        softcap: Scores become cap · tanh(score / cap); 0 turns it off.
        dropout_p: Probability of dropping an attention weight; the same weights are dropped as on one
            device.
        seed: Seed of the dropout mask; when None, rank 0 draws one from the generator of
            ``manual_seed``.
        precision: See :func:`kernels.make_problem`.
        deterministic: See :func:`kernels.make_problem`.
        rung: Name of the kernel, or "auto".

    Returns:
        The part of the result of this rank, (…, heads, rows, value_dim); with ``cu_seqlens``
        (rows, heads, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or an option has the wrong type.
        ValueError: If the ranks' shapes or options differ, the sequence or the heads cannot be divided
            evenly, or a shape or a value is invalid.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, operand)
    options: Options = {
        "is_causal": is_causal, "window_size": window_size, "scale": scale, "enable_gqa": enable_gqa,
        "softcap": softcap, "dropout_p": dropout_p, "precision": precision,
        "deterministic": deterministic, "rung": rung,
    }  # fmt: skip
    sums = None if cu_seqlens is None else as_host_array("cu_seqlens", cu_seqlens)
    drawn = 0
    if dropout_p and seed is None:
        refuse("takes the seed of its dropout from rank 0", "pass a seed, or leave dropout out")
        drawn = dropout_seed()
    shapes = ", ".join(f"{n} {x.shape} {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v)))
    crc = None if sums is None else zlib.crc32(sums.astype(np.int64).tobytes())
    own = {
        **options,
        "seed": seed,
        "method": method,
        "layout": layout,
        "checksum of cu_seqlens": crc,
    }
    drawn = agreed(group, f"{shapes}, {', '.join(f'{n}={x}' for n, x in own.items())}", drawn)
    if dropout_p:
        options["seed"] = drawn if seed is None else seed
    packed = sums is not None
    if packed:
        for name, operand in (("q", q), ("k", k), ("v", v)):
            check_packed(name, operand)
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
    _check(q, k, v, options, method, group.size)
    whole = _whole_sums(sums, q.shape[-2] * group.size)
    call = Call(group, layout, whole, packed, q.shape[-3], options)
    call.segments(group.rank)  # whether the sequence divides
    if method == "ring":
        out = RingAttention.apply(q, k, v, call)
    else:
        out = (_by_gathering if method == "all-gather" else _by_heads)(q, k, v, call)
    return sequence_first(out) if packed else out
