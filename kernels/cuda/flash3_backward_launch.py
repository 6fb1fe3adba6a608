"""The backward pass of the rung flash3_wgmma: which kernels a call takes, and what they share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.arrays import device_view, empty_device
from kernels.cuda.extras import make_extras
from kernels.cuda.flash3_backward import dkdv_kernel
from kernels.cuda.flash3_backward_layout import (
    BOTH_WIDTH,
    PADDING,
    WORD,
    KeyLayout,
    Parts,
    QueryLayout,
    dq_bytes,
    is_guarded,
    key_layout,
    parts_of,
    query_layout,
)
from kernels.cuda.flash3_backward_options import delta_factor, slope_factor
from kernels.cuda.flash3_backward_rows import (
    THREADS,
    round_dq_kernel,
    rows_kernel,
    zero_kernel,
)
from kernels.cuda.flash3_dq import dq_kernel
from kernels.cuda.flash3_launch import CACHE_BYTES, readable, tensor_map
from kernels.cuda.flash3_layout import Widths, schedule_of
from kernels.cuda.flash3_mask import packed_mask
from kernels.cuda.half import EIGHT, as_bits
from kernels.cuda.half_delta import delta_of
from kernels.cuda.mma_guard import flag_of
from kernels.cuda.per_device import counters, multiprocessors, no_flag
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.register_tiles import round_up
from kernels.cuda.scores import PLAIN, Extras, Features, features_of
from kernels.cuda.visits import tiles_of
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
        features: Options that kernels are compiled for.
        flag: Whether an operand has numbers that are not finite, or 0 where no option hides any.
    """

    problem: Problem
    operands: Operands
    widths: Widths
    dtype: str
    seq_k: int
    lse: Any
    delta: Any
    features: Features
    flag: Any

    def extras(self, layout: KeyLayout | QueryLayout, by_keys: bool = False) -> Extras:
        """Return what options need in a kernel."""
        blocks = layout.block_q, layout.block_k
        return make_extras(self.problem, self.operands, *blocks, by_keys)

    def words(self, layout: KeyLayout | QueryLayout, by_keys: bool = False) -> Any:
        """Return the bits of a boolean mask as a kernel's lanes have them, or 0."""
        if self.features.mask != "bool":
            return 0
        cols = layout.block_q if by_keys else layout.block_k
        return packed_mask(self.operands.mask, cols, by_keys)

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
    parts = parts_of(widths, not problem.deterministic)[0]
    layout = key_layout(widths, parts, features_of(problem))
    return layout.block_q, layout.block_k


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; takes memory for delta, and for sums of dq where they may come in any order.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; dq, dk and dv are written.
    """
    q, k, v, dout = readable(operands.q, operands.k, operands.v, operands.dout)
    operands = operands.having(q=q, k=k, v=v, dout=dout)
    batch, heads, seq_q = operands.q.shape[:3]
    features, sequences = features_of(problem), problem.sequences
    rows = round_up(seq_q, PADDING) + (PADDING * sequences.count if sequences else 0)
    lse, delta = (empty_device((batch * heads, rows), FLOAT32) for _ in range(2))
    seq_k, widths, dtype = problem.seq_k, _widths(problem), NAMES[problem.dtype]
    if not sequences and not features.block_mask:
        seq_k = max(min(seq_k, seq_q + problem.upper), 1)
    flag = _flag_of(problem, operands, widths, features) if is_guarded(features) else 0
    call = _Call(problem, operands, widths, dtype, seq_k, lse, delta, features, flag)
    extras = call.extras(QueryLayout(PADDING, 1, 1))
    launch = rows_kernel(features.packed)[
        (tiles_of(seq_q, PADDING, extras), batch * heads), PADDING
    ]
    factor = delta_factor(features, extras.keep_scale)
    launch(operands.lse, delta_of(problem, operands), lse, delta, factor, _bounds(extras))
    kernels = parts_of(widths, not problem.deterministic)
    for parts in kernels:
        _by_keys(call, parts)
    if not any(parts.dq for parts in kernels):
        _by_rows(call)


def _flag_of(problem: Problem, operands: Operands, widths: Widths, features: Features) -> Any:
    """Return whether what is multiplied by zeros of hidden elements has numbers that are not finite."""
    if features.block_mask and features._replace(block_mask=False) == PLAIN:
        layouts: list[tuple[KeyLayout | QueryLayout, bool]] = [
            (key_layout(widths, parts, features), True)
            for parts in parts_of(widths, not problem.deterministic)
        ]
        if problem.deterministic or max(widths) > BOTH_WIDTH:
            layouts.append((query_layout(widths), False))
        if all(_is_full(problem.block_mask, x.block_q, x.block_k, keys) for x, keys in layouts):
            return no_flag()  # no visited tile has elements that the mask hides
    read = [as_bits(getattr(operands, name)) for name in ("k", "q", "dout")]
    return flag_of(NAMES[problem.dtype], *read)


@lru_cache(maxsize=256)
def _is_full(mask: Any, block_q: int, block_k: int, by_keys: bool) -> bool:
    """Tell whether a block mask hides no element of the tiles that it lets be visited."""
    return bool(np.all(mask.tile_list(block_q, block_k, by_keys).tile_full))


def _bounds(extras: Extras) -> Extras:
    """Return what the kernels around the others need: no option but where sequences are."""
    plain = Extras(*extras[: Extras._fields.index("slopes")])
    return plain._replace(tiles=extras.tiles)


def _by_keys(call: _Call, parts: Parts) -> None:
    """Fill dk, dv or both; with dq that too, by way of its sums."""
    problem, operands, widths = call.problem, call.operands, call.widths
    features = call.features
    layout = key_layout(widths, parts, features)
    maps, shape = call.maps(layout.block_q, layout.block_k)
    gradients = [
        as_bits(array) if features.packed else tensor_map(array, problem.seq_k, ROWS, call.dtype)[0]
        for array in (operands.dk, operands.dv)
    ]
    sums = device_view(call.delta, (1,), (1,))  # of dq there are none
    if parts.dq:
        sums = _no_sums(call, layout)
    # Rows of q and dout are what key tiles of a head read again and again, and add to.
    bytes_a_head = problem.seq_q * (2 * sum(widths) + WORD * widths.head * parts.dq)
    extras = call.extras(layout, by_keys=True)
    tiles = tiles_of(problem.seq_k, layout.block_k, extras)
    schedule = schedule_of(tiles, call.heads, bytes_a_head, CACHE_BYTES)
    blocks = min(multiprocessors(), tiles * call.heads)
    dkdv_kernel(layout, widths, call.dtype, parts, features)[blocks, layout.threads](
        *maps, *gradients, call.lse, call.delta, sums, counters(), shape, problem.scale, schedule,
        call.flag, call.words(layout, by_keys=True), extras,
    )  # fmt: skip
    if parts.dq:
        extras = call.extras(QueryLayout(PADDING, 1, 1))
        pieces = ceil_div(PADDING * problem.head_dim // EIGHT, THREADS)
        grid = tiles_of(problem.seq_q, PADDING, extras) * pieces, call.heads
        launch = round_dq_kernel(layout, widths, call.dtype, features.packed)[grid, THREADS]
        scale = problem.scale * slope_factor(features, extras.keep_scale)
        launch(sums, as_bits(operands.dq), call.lse.shape[1], scale, _bounds(extras))


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
    layout, features = query_layout(widths), call.features
    maps, shape = call.maps(layout.block_q, layout.block_k)
    gradient = as_bits(operands.dq)
    if not features.packed:
        gradient, *_ = tensor_map(operands.dq, problem.seq_q, ROWS, call.dtype)
    extras = call.extras(layout)
    tiles = tiles_of(problem.seq_q, layout.block_q, extras)
    schedule = schedule_of(tiles, call.heads, 2 * call.seq_k * sum(widths), CACHE_BYTES)
    blocks = min(multiprocessors(), tiles * call.heads)
    dq_kernel(layout, widths, call.dtype, features)[blocks, layout.threads](
        *maps, gradient, call.lse, call.delta, counters(), shape, problem.scale, schedule, call.flag,
        call.words(layout), extras,
    )  # fmt: skip
