"""Attention over a sequence that is spread over the ranks of a group.

ring         Keys and values travel from rank to rank.  While a rank multiplies those that it has, the next
             ones arrive, and results are merged by their log-sum-exp.  Large ones go round in shares of
             their heads, one after the other, so that a rank never holds more than two blocks of keys and
             values besides its own part.
all-gather   Every rank gathers all keys and values before it begins: one exchange, and memory for all of
             them.
ulysses      Every rank gets all rows of some heads for some rows of all heads, attends alone, and
             exchanges the result back: traffic does not grow with the number of ranks, which cannot
             exceed that of key heads.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023); Brandon et al., Striped
Attention (2023), for balanced causal work; the Llama 3 herd of models (2024), section 3.3.2, for the
all-gather; Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kernels.common.arguments import as_host_array
from kernels.problem.options import Options
from kernels.problem.packed_problem import check_packed
from kernels.problem.packed_sequences import sequences_of
from kernels.problem.question import problem_of
from kernels.runtime.dtypes import acc_dtype

from ..autodiff import Context
from ..functions.base import Function, check_tensor
from ..functions.dropout_seeds import dropout_seed
from ..functions.joining import Cat
from ..functions.subscripts import Slice, sliced
from ..tensor import Tensor
from .exchange import Gathered, Shift, ToHeads, ToSequence, circulate
from .group import Group
from .local_attention import (
    Part,
    attend,
    gradients,
    heads_first,
    part_of,
    rows_of,
    sequence_first,
    view_of,
)
from .row_sums import RowMerge, RowSums
from .sequence_parts import Segment, pair, segments

METHODS = ("ring", "all-gather", "ulysses")
#: Length of the description of a call that the ranks compare, in bytes.
DESCRIPTION = 1024
#: Length of a seed, in bytes.
SEED_BYTES = 8
#: In how many shares of their heads keys and values go round at most, and bytes of a share at least, on the
#: host and on a device: less would take less time than the launches for it.
SHARES, LEAST = 4, {True: 1 << 20, False: 1 << 24}


class Call(NamedTuple):
    """A checked call of :func:`ring_attention`.

    Attributes:
        group: The ranks that share the sequence.
        layout: Which rows a rank holds.
        sums: Cumulative lengths of packed sequences; (0, seq) for one.
        packed: Whether the caller has packed them.
        heads: Number of query heads.
        options: Of the whole attention; with dropout there is a seed.
        head: The first query head, of a share of them.
    """

    group: Group
    layout: str
    sums: tuple[int, ...]
    packed: bool
    heads: int
    options: Options
    head: int = 0

    @property
    def window(self) -> tuple[int, int]:
        """Columns that a row sees on either side of its own, -1 for all."""
        left, right = self.options.get("window_size") or (-1, -1)
        return left, 0 if self.options.get("is_causal") else right

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the segments of the rows that a rank holds."""
        return segments(self.sums[-1], rank, self.group.size, self.layout, self.sums)

    def parts(self, owner: int) -> Iterator[tuple[int, Segment, Part]]:
        """Yield the calls by which this rank attends to the keys of another.

        Args:
            owner: The other rank.

        Returns:
            The number of the segment of query rows, the segment of keys, and the call.
        """
        for number, queries in enumerate(self.segments(self.group.rank)):
            for keys in self.segments(owner):
                if (found := pair(queries, keys, *self.window)) is not None:
                    part = self._part(found.row, found.col, found.sums, found.sequence)
                    yield number, keys, part

    def part_of_all_keys(self, queries: Segment) -> tuple[Part, range]:
        """Return the call by which a segment attends to all keys that it sees, and where they lie."""
        stop = queries.place + queries.rows
        if queries.sums:
            return self._part(0, 0, queries.sums, queries.sequence), range(queries.begin, stop)
        part = self._part(queries.first, 0, (), queries.sequence)
        end = next(end for end in self.sums if end > queries.place)
        return part, range(queries.begin, stop if self.window[1] == 0 else end)

    def _part(self, row: int, col: int, sums: tuple[int, ...], sequence: int) -> Part:
        batch_head = sequence * self.heads + self.head
        sums = sums if self.packed else ()
        return part_of(self.options, row, col, sums, self.heads, batch_head)

    def part_of_own_heads(self) -> Part:
        """Return the call of the heads of this rank, on all rows."""
        first = self.group.rank * (self.heads // self.group.size)
        sums = self.sums if self.packed else ()
        return part_of(self.options, 0, 0, sums, self.heads, first)


class Share(NamedTuple):
    """Some of the heads, whose keys and values go round together.

    Attributes:
        heads: The query heads.
        call: Of these heads.
        keys: (…, key heads, rows, head_dim).
        values: (…, key heads, rows, value_dim).
    """

    heads: range
    call: Call
    keys: Tensor
    values: Tensor

    def of(self, a: Tensor) -> Tensor:
        """View these heads of (…, heads, rows, dim)."""
        return view_of(a, a.dims - 3, self.heads)


def _shares(k: Tensor, v: Tensor, call: Call) -> Iterator[Share]:
    """Yield shares of the heads of a call."""
    dim, size = k.dims - 3, k.size * k.dtype.itemsize + v.size * v.dtype.itemsize
    heads, each = k.shape[dim], call.heads // k.shape[dim]
    count = max(1, min(SHARES, heads, size // LEAST[call.group.on_host]))
    for first, end in pairwise(i * heads // count for i in range(count + 1)):
        own = (sliced(x, dim, range(first, end)) for x in (k, v))
        queries = range(first * each, end * each)
        yield Share(queries, call._replace(head=queries.start), *own)


def _joined(shares: list[Tensor]) -> Tensor:
    """Return the heads of all shares, (…, heads, rows, dim); the list is empty afterwards."""
    whole: Any = shares[0]
    if len(shares) > 1:
        whole = Cat.forward(Context(), whole.dims - 3, *shares)
    shares.clear()
    return whole


def _attended(q: Tensor, share: Share) -> tuple[Tensor, list[Tensor]]:
    """Merge the attention of some heads to the keys of each rank, in the order in which they arrive.

    Args:
        q: Of these heads, (…, heads, rows, head_dim).
        share: The heads.

    Returns:
        (…, heads, rows, value_dim), and the log-sum-exp of each segment, (…, heads, rows).
    """
    call = share.call
    own = call.segments(call.group.rank)
    # Sums of 16 bits are those of float32.
    found = RowMerge(q, acc_dtype(q.dtype), share.values.shape[-1])

    def visit(owner: int, block: Sequence[Tensor]) -> None:
        for i, b, part in call.parts(owner):
            keys, values = (rows_of(x, b.here) for x in block)
            found.add(own[i].here, *attend(rows_of(q, own[i].here), keys, values, part))

    circulate(call.group, (share.keys, share.values), visit)
    return found.finished([a.here for a in own]), [found.lses[a.here] for a in own]


def _gradients(
    q: Tensor, out: Tensor, dout: Tensor, lses: list[Tensor], share: Share
) -> tuple[Tensor, Shift]:
    """Send dk and dv of some heads after their keys; behind the last rank they are at home.

    Args:
        q: Of these heads, (…, heads, rows, head_dim).
        out: The result, (…, heads, rows, value_dim).
        dout: Its gradient.
        lses: The log-sum-exp of each segment.
        share: The heads.

    Returns:
        dq, and dk and dv on their way home, all (rows, …, heads, dim).
    """
    call = share.call
    own, wide = call.segments(call.group.rank), lses[0].dtype
    dq = RowSums(q, wide)
    arriving: list[Shift] = []

    def add(i: int, b: Segment, part: Part, block: Sequence[Tensor], sums: list[RowSums]) -> None:
        rows, (keys, values) = own[i].here, (rows_of(x, b.here) for x in block)
        results = rows_of(dout, rows), rows_of(out, rows), lses[i]
        added = gradients(rows_of(q, rows), keys, values, part, *results)
        for total, place, new in zip((dq, *sums), (rows, b.here, b.here), added, strict=True):
            total.add(place, new)

    def visit(owner: int, block: Sequence[Tensor]) -> None:
        sums = [RowSums(x, wide) for x in block]
        for i, b, part in call.parts(owner):
            add(i, b, part, block, sums)
        every = [b.here for b in call.segments(owner)]
        done = [x.finished(every) for x in sums]
        if arriving:
            for total, others in zip(sums, arriving.pop().wait(), strict=True):
                total.add_all(others)
        arriving.append(Shift(call.group, done))

    circulate(call.group, (share.keys, share.values), visit)
    return dq.finished([a.here for a in own]), arriving.pop()


class RingAttention(Function):
    """Attention while keys and values go round the ring once, and once more for the gradients."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Attend, with one share of the heads after the other.

        Args:
            ctx: Keeps the arguments, out and lse.
            q: (…, heads, rows, head_dim).
            k: (…, key heads, rows, head_dim).
            v: (…, key heads, rows, value_dim).
            call: The call.

        Returns:
            (…, heads, rows, value_dim).
        """
        outs, lses = list[Tensor](), list[list[Tensor]]()
        for share in _shares(k, v, call):
            out, lse = _attended(share.of(q), share)
            outs.append(out.to(q.dtype))
            lses.append(lse)
        out = _joined(outs)
        ctx.save_for_backward(q, k, v, out, lses, call)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Compute the gradients of each share, while those of the share before it travel home."""
        q, k, v, out, lses, call = ctx.saved_values
        dout = grad_output.to(q.dtype)
        found: tuple[list[Tensor], ...] = [], [], []
        on_way_home = list[Shift]()

        def keep(*which: int, totals: Sequence[Tensor]) -> None:
            for i, total in zip(which, totals, strict=True):
                found[i].append(heads_first(total).to(q.dtype))

        for share, lse in zip(_shares(k, v, call), lses, strict=True):
            dq, shift = _gradients(share.of(q), share.of(out), share.of(dout), lse, share)
            keep(0, totals=[dq])
            on_way_home.append(shift)
            if len(on_way_home) > 1:
                keep(1, 2, totals=on_way_home.pop(0).wait())
        keep(1, 2, totals=on_way_home.pop().wait())
        dq, dk, dv = (_joined(x) for x in found)
        return dq, dk, dv, None


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


def _agreed(group: Group, text: str, seed: int) -> int:
    """Return the seed of rank 0, after a look at whether all ranks make the same call.

    Args:
        group: The ranks.
        text: The call in words.
        seed: What this rank has drawn.

    Raises:
        ValueError: It names the first rank whose call is another one.
    """
    own = np.zeros(DESCRIPTION, np.uint8)
    words = text.encode()[: DESCRIPTION - SEED_BYTES]
    own[: len(words)] = np.frombuffer(words, np.uint8)
    own[-SEED_BYTES:] = np.frombuffer(seed.to_bytes(SEED_BYTES, "little"), np.uint8)
    every = np.empty((group.size, DESCRIPTION), np.uint8)
    group.host.all_gather(own, every).wait()
    calls = [bytes(each[:-SEED_BYTES]).rstrip(b"\0").decode(errors="replace") for each in every]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise ValueError(
                f"all ranks must make the same call of ring_attention: rank 0 has {calls[0]}; rank {rank} "
                f"has {other}; give every rank an equal part, and the same options"
            )
    return int.from_bytes(bytes(every[0, -SEED_BYTES:]), "little")


def _check(q: Tensor, k: Tensor, v: Tensor, options: Options, method: str, size: int) -> None:
    """Check a call.

    Args:
        q: (…, heads, rows, head_dim).
        k: (…, key heads, rows, head_dim).
        v: (…, key heads, rows, value_dim).
        options: Of the whole attention.
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
    """Return the cumulative lengths of the sequences in a whole one, which is one if None are given."""
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

    Every rank of the group calls it, with tensors of the same shape and the same options, and calls
    ``backward`` in the same order.  The results are those of one device with the whole sequence, to
    rounding, and the same bits in each run.  :func:`positions` gives the rows of a rank.

    Args:
        q: Queries of this rank, (…, heads, rows, head_dim); with ``cu_seqlens`` (rows, heads, head_dim).
        k: Keys of this rank, (…, key heads, rows, head_dim), or (rows, key heads, head_dim).
        v: Values of this rank, (…, key heads, rows, value_dim), or (rows, key heads, value_dim).
        group: The ranks that share the sequence.
        method: How the ranks exchange keys and values: "ring", from neighbour to neighbour during the
            computation; "all-gather", all before it; or "ulysses", rows for heads, whose number must
            divide by that of the ranks.
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
        seed: Seed of the dropout mask; when None, that which rank 0 draws from the generator of
            ``manual_seed``.
        precision: See :func:`kernels.make_problem`.
        deterministic: See :func:`kernels.make_problem`.
        rung: Name of the kernel, or "auto".

    Returns:
        The part of the result of this rank, (…, heads, rows, value_dim); with ``cu_seqlens``
        (rows, heads, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or an option has the wrong type.
        ValueError: If the ranks' shapes or options differ, the sequence or the heads do not divide, or a
            shape or a value is invalid.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, operand)
    options: Options = {
        "is_causal": is_causal, "window_size": window_size, "scale": scale, "enable_gqa": enable_gqa,
        "softcap": softcap, "dropout_p": dropout_p, "precision": precision,
        "deterministic": deterministic, "rung": rung,
    }  # fmt: skip
    sums = None if cu_seqlens is None else as_host_array("cu_seqlens", cu_seqlens)
    drawn = dropout_seed() if dropout_p and seed is None else 0
    shapes = ", ".join(f"{n} {x.shape} {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v)))
    crc = None if sums is None else zlib.crc32(sums.astype(np.int64).tobytes())
    own = {
        **options,
        "seed": seed,
        "method": method,
        "layout": layout,
        "checksum of cu_seqlens": crc,
    }
    drawn = _agreed(group, f"{shapes}, {', '.join(f'{n}={x}' for n, x in own.items())}", drawn)
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
