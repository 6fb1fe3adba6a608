"""Ring attention: keys and values go round the ring, and their gradients after them.

Large ones go round in shares of their heads, one after the other, so that a rank never holds more than two
blocks of keys and values besides its own part.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kernels.runtime.dtypes import acc_dtype

from ..autodiff import Context
from ..functions.base import Function
from ..functions.joining import Cat
from ..functions.subscripts import sliced
from ..tensor import Tensor
from .calls import Call
from .exchange import Shift, circulate
from .local_attention import Part, attend, gradients, heads_first, rows_of, view_of
from .row_sums import RowMerge, RowSums
from .sequence_parts import Segment

#: In how many shares of their heads keys and values go round at most, and bytes of a share at least, on the
#: host and on a device: less would take less time than the launches for it.
SHARES, LEAST = 4, {True: 1 << 20, False: 1 << 24}


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
