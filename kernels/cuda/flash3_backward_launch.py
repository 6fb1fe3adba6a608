"""The backward pass of the rung flash3_wgmma: which kernels a call takes, and what they share."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cuda import tensor_cores
from kernels.cuda.arrays import device_view, empty_device
from kernels.cuda.flash3_backward import dkdv_kernel
from kernels.cuda.flash3_backward_layout import (
    PADDING,
    WORD,
    KeyLayout,
    Parts,
    dq_bytes,
    key_layout,
    parts_of,
    query_layout,
)
from kernels.cuda.flash3_backward_rows import THREADS, round_dq_kernel, rows_kernel, zero_kernel
from kernels.cuda.flash3_dq import dq_kernel
from kernels.cuda.flash3_launch import CACHE_BYTES, counters, multiprocessors, tensor_map
from kernels.cuda.flash3_layout import Widths, schedule_of
from kernels.cuda.half import EIGHT, as_bits
from kernels.cuda.half_delta import delta_of
from kernels.cuda.memory import contiguous
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.register_tiles import round_up
from kernels.cuda.scores import make_extras
from kernels.dtypes import FLOAT32, NAMES
from kernels.geometry import ceil_div
from kernels.operands import Operands
from kernels.problem import Problem


class _Call(NamedTuple):
    """What all kernels of a call take.

    Attributes:
        problem: The checked call, in 16 bits.
        operands: As given, but q, k, v and dout as the copy engine reads them.
        widths: Columns that kernels are compiled for.
        dtype: "float16" or "bfloat16".
        seq_k: Keys that some row sees: those beyond are outside of the tensor, zeros whatever they are.
        lse: (batch * heads, padded rows), as ``rows_kernel`` lays it out.
        delta: Likewise.
    """

    problem: Problem
    operands: Operands
    widths: Widths
    dtype: str
    seq_k: int
    lse: Any
    delta: Any

    @property
    def heads(self) -> int:
        """Batch times heads."""
        return self.lse.shape[0]

    def maps(self, block_q: int, block_k: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return the tensor maps of q, k, v and dout in some tiles, and the kernels' ``SHAPE``."""
        own, seq_q = self.operands, self.problem.seq_q
        found = [
            tensor_map(array, seq, block, self.dtype)
            for array, seq, block in (
                (own.q, seq_q, block_q),
                (own.k, self.seq_k, block_k),
                (own.v, self.seq_k, block_k),
                (own.dout, seq_q, block_q),
            )
        ]
        differs = (number for _, *numbers in found for number in numbers)
        return tuple(one[0] for one in found), (seq_q, self.seq_k, own.q.shape[1], *differs)


def _widths(problem: Problem) -> Widths:
    return Widths(round_up(problem.head_dim, 16), round_up(problem.value_dim, 16))


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the first kernel by key tiles."""
    widths = _widths(problem)
    layout = key_layout(widths, parts_of(widths, not problem.deterministic)[0])
    return layout.block_q, layout.block_k


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; takes memory for delta, and for sums of dq where they may come in any order.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; dq, dk and dv are written.
    """
    aligned = {
        name: array if tensor_cores.is_aligned(array) else contiguous(array)
        for name in ("q", "k", "v", "dout")
        for array in [getattr(operands, name)]
    }
    operands = operands.having(**aligned)
    batch, heads, seq_q = operands.q.shape[:3]
    rows = round_up(seq_q, PADDING)
    lse, delta = (empty_device((batch * heads, rows), FLOAT32) for _ in range(2))
    launch = rows_kernel()[(ceil_div(rows, THREADS), batch * heads), THREADS]
    launch(operands.lse, delta_of(problem, operands), lse, delta)
    seq_k = max(min(problem.seq_k, seq_q + problem.upper), 1)
    widths = _widths(problem)
    call = _Call(problem, operands, widths, NAMES[problem.dtype], seq_k, lse, delta)
    kernels = parts_of(widths, not problem.deterministic)
    for parts in kernels:
        _by_keys(call, parts)
    if not any(parts.dq for parts in kernels):
        _by_rows(call)


def _by_keys(call: _Call, parts: Parts) -> None:
    """Fill dk, dv or both; with dq that too, by way of its sums."""
    problem, operands, widths = call.problem, call.operands, call.widths
    layout = key_layout(widths, parts)
    maps, shape = call.maps(layout.block_q, layout.block_k)
    gradients = [
        tensor_map(array, problem.seq_k, ROWS, call.dtype)[0]
        for array in (operands.dk, operands.dv)
    ]
    sums = device_view(call.delta, (1,), (1,))  # of dq there are none
    if parts.dq:
        sums = _no_sums(call, layout)
    # Rows of q and dout are what key tiles of a head read again and again, and add to.
    bytes_a_head = problem.seq_q * (2 * sum(widths) + WORD * widths.head * parts.dq)
    tiles = ceil_div(problem.seq_k, layout.block_k)
    schedule = schedule_of(tiles, call.heads, bytes_a_head, CACHE_BYTES)
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    blocks = min(multiprocessors(), tiles * call.heads)
    dkdv_kernel(layout, widths, call.dtype, parts)[blocks, layout.threads](
        *maps, *gradients, call.lse, call.delta, sums, counters(), shape, problem.scale, schedule,
        extras,
    )  # fmt: skip
    if parts.dq:
        pieces = ceil_div(problem.seq_q * problem.head_dim // EIGHT, THREADS)
        launch = round_dq_kernel(layout, widths, call.dtype)[(pieces, call.heads), THREADS]
        launch(sums, as_bits(operands.dq), call.lse.shape[1], problem.scale)


def _no_sums(call: _Call, layout: KeyLayout) -> Any:
    """Return zeros for the kernel by key tiles to add to."""
    shares = call.heads * call.lse.shape[1] // layout.block_q * layout.consumers
    sums = empty_device((shares * dq_bytes(layout, call.widths) // WORD,), FLOAT32)
    blocks = ceil_div(sums.size * WORD, CHUNK * THREADS)
    zero_kernel()[blocks, THREADS](sums)
    return sums


def _by_rows(call: _Call) -> None:
    """Fill dq by a kernel of its own."""
    problem, operands, widths = call.problem, call.operands, call.widths
    layout = query_layout(widths)
    maps, shape = call.maps(layout.block_q, layout.block_k)
    dq_map, *_ = tensor_map(operands.dq, problem.seq_q, ROWS, call.dtype)
    tiles = ceil_div(problem.seq_q, layout.block_q)
    schedule = schedule_of(tiles, call.heads, 2 * call.seq_k * sum(widths), CACHE_BYTES)
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    blocks = min(multiprocessors(), tiles * call.heads)
    dq_kernel(layout, widths, call.dtype)[blocks, layout.threads](
        *maps, dq_map, call.lse, call.delta, counters(), shape, problem.scale, schedule, extras
    )
