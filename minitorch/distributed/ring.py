"""Ring attention: keys and values go round the ring, and their gradients after them.

Large keys and values go round in shares of their heads, one share after the other, so that a rank never
holds more than two blocks of keys and values besides its own part.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..autodiff import Context
from ..functions.base import Function
from ..functions.joining import Cat
from ..functions.subscripts import sliced
from ..tensor import Tensor
from .calls import Call
from .exchange import Shift, circulate
from .local_attention import Lse, attend, gradients, rows_of, view_of
from .row_sums import RowSums

#: Minimum bytes of a share, on the host and on a device.  Less would take less time than its launches.
LEAST = {True: 1 << 20, False: 1 << 24}


class Share(NamedTuple):
    """Some of the heads, whose keys and values go round together.

    Attributes:
        heads: The query heads.
        call: The call for these heads.
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


def _rounds(call: Call) -> int:
    """Return the number of shares of heads in which keys and values go round in the forward pass.

    With two ranks, the keys of one other rank and the result of a call are one and a half blocks.  With
    more, the next keys arrive meanwhile, and 16-bit results are added in float32.  Gradients of keys, which
    arrive and leave, take about twice the memory in the backward pass.
    """
    return 1 if call.group.size <= 2 else 2


def _shares(k: Tensor, v: Tensor, call: Call, most: int) -> Iterator[Share]:
    """Yield at most ``most`` shares of the heads of a call."""
    dim, size = k.dims - 3, k.size * k.dtype.itemsize + v.size * v.dtype.itemsize
    heads, each = k.shape[dim], call.heads // k.shape[dim]
    count = max(1, min(most, heads, size // LEAST[call.group.on_host]))
    for first, end in pairwise(i * heads // count for i in range(count + 1)):
        own = (sliced(x, dim, range(first, end)) for x in (k, v))
        queries = range(first * each, end * each)
        yield Share(queries, call._replace(head=queries.start), *own)


def _joined(shares: list[Tensor], dim: int) -> Tensor:
    """Return the heads of all shares, joined along ``dim``; the list is empty afterwards."""
    whole: Any = shares[0]
    if len(shares) > 1:
        whole = Cat.forward(Context(), dim, *shares)
    shares.clear()
    return whole


def _attended(q: Tensor, share: Share) -> tuple[Tensor, Lse]:
    """Merge the attention of some heads to the keys of each rank, in the order in which they arrive.

    Args:
        q: Queries of these heads, (…, heads, rows, head_dim).
        share: The heads.

    Returns:
        (…, heads, rows, value_dim) and the log-sum-exp.
    """
    call = share.call
    found = RowSums(call.rows, call.counts_of_rows(), q, share.values.shape[-1])

    def visit(owner: int, block: Sequence[Tensor]) -> None:
        for near, part in call.parts(owner):
            keys, values = (rows_of(x, near.cols) for x in block)
            found.add(near.queries, *attend(rows_of(q, near.rows), keys, values, part))

    circulate(call.group, (share.keys, share.values), visit)
    return found.finished(), found.lse


def _gradients(
    q: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Lse,
    share: Share,
    meanwhile: Callable[[], None],
) -> tuple[Tensor, Shift]:
    """Send dk and dv of some heads after their keys; after the last rank they are back at their own.

    Args:
        q: Queries of these heads, (…, heads, rows, head_dim).
        out: The result, (…, heads, rows, value_dim).
        dout: Its gradient.
        lse: The log-sum-exp.
        share: The heads.
        meanwhile: Called once the gradients of this rank's own keys are computed.

    Returns:
        dq, and dk and dv on their way home, all (…, heads, rows, dim).
    """
    call, group = share.call, share.call.group
    dq = RowSums(call.rows, call.counts_of_rows(), q)
    done, arriving = list[Tensor](), list[Shift]()

    def sums_of(owner: int, block: Sequence[Tensor]) -> list[RowSums]:
        """Return the sums for dk and dv of a rank, with those of the ranks before this one."""
        rows = [a.here for a in call.segments(owner)]
        counts = call.counts_of_keys(group.rank, owner)
        is_wide = call.has_sums((group.rank - owner) % group.size)
        starts = arriving.pop().wait() if arriving else [None, None]
        return [
            RowSums(rows, counts, x, is_wide=is_wide, start=start)
            for x, start in zip(block, starts, strict=True)
        ]

    def visit(owner: int, block: Sequence[Tensor]) -> None:
        sums = list[RowSums]()
        if owner != group.rank:
            meanwhile()
            # Not before these keys were waited for, which would have waited for these sums, too.
            arriving.append(Shift(group, done))
        for near, part in call.parts(owner):
            keys, values = (rows_of(x, near.cols) for x in block)
            logs, rest = (view_of(x, x.dims - 1, near.rows) for x in lse)
            results = rows_of(dout, near.rows), rows_of(out, near.rows)
            added = gradients(rows_of(q, near.rows), keys, values, part, *results, (logs, rest))
            # After the first gradients, so that those of other ranks arrive meanwhile.
            sums = sums or sums_of(owner, block)
            dq.add(near.queries, added[0])
            for total, new in zip(sums, added[1:], strict=True):
                total.add(near.keys, new)
        done[:] = [x.finished() for x in sums or sums_of(owner, block)]

    circulate(group, (share.keys, share.values), visit)
    return dq.finished(), Shift(group, done)


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
        outs, lses, rests = list[Tensor](), list[Tensor](), list[Tensor]()
        for share in _shares(k, v, call, _rounds(call)):
            out, (lse, rest) = _attended(share.of(q), share)
            outs.append(out)
            lses.append(lse)
            rests.append(rest)
        out, lse, rest = (_joined(x, q.dims - 3) for x in (outs, lses, rests))
        ctx.save_for_backward(q, k, v, out, lse, rest, call)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Compute the gradients of each share, while those of the share before it travel home."""
        q, k, v, out, lse, rest, call = ctx.saved_values
        dout = grad_output.to(q.dtype)
        found: tuple[list[Tensor], ...] = [], [], []
        on_way_home = list[Shift]()

        def arrive() -> None:
            while on_way_home:
                for totals, total in zip(found[1:], on_way_home.pop(0).wait(), strict=True):
                    totals.append(total)

        for share in _shares(k, v, call, 2 * _rounds(call)):
            own = share.of(q), share.of(out), share.of(dout)
            logs, own_rest = (view_of(x, x.dims - 2, share.heads) for x in (lse, rest))
            dq, shift = _gradients(*own, (logs, own_rest), share, arrive)
            found[0].append(dq)
            on_way_home.append(shift)
        arrive()
        dq, dk, dv = (_joined(x, q.dims - 3) for x in found)
        return dq, dk, dv, None
