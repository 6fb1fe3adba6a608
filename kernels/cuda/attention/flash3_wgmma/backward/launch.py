"""The backward pass of the rung flash3_wgmma: which kernels a call takes, and what they share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.delta import delta_of
from kernels.cuda.attention.flash3_wgmma.backward.dkdv import dkdv_kernel
from kernels.cuda.attention.flash3_wgmma.backward.dq import dq_kernel
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    PADDING,
    KeyLayout,
    Parts,
    QueryLayout,
    dq_bytes,
    key_layout,
    parts_of,
    query_layout,
)
from kernels.cuda.attention.flash3_wgmma.backward.row_statistics import (
    THREADS,
    round_dq_kernel,
    rows_kernel,
    zero_kernel,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import delta_factor, slope_factor
from kernels.cuda.attention.flash3_wgmma.launch_common import (
    CACHE_BYTES,
    kept_launches,
    memory_layouts,
    readable,
    tensor_map,
    widths_of,
    with_mask_bits,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    Schedule,
    Shape,
    Widths,
    schedule_of,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import has_words, packed_mask
from kernels.cuda.attention.options.extras import lasting_extras, own_extras
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.visits import tiles_of
from kernels.cuda.attention.tensor_cores import lists_whole_tiles
from kernels.cuda.device.half import EIGHT, as_bits
from kernels.cuda.device.per_device import counters, multiprocessors
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import device_view, empty_device
from kernels.cuda.runtime.kernel import WORD
from kernels.cuda.runtime.launcher import LATER
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import current_device
from kernels.scores.program import Features


class _Plan(NamedTuple):
    """What all calls of a problem on a device have in common.

    Attributes:
        widths: Columns that kernels are compiled for.
        dtype: "float16" or "bfloat16".
        features: Options that kernels are compiled for.
        rows: Of lse and delta as ``rows_kernel`` lays them out: each sequence has room for its last tile.
        by_keys: What each kernel by key tiles computes, and its layout.
        by_rows: The layout of the kernel that dq has of its own, or None.
        bounds: What the kernels around the others need: no option but where sequences are.
        keep_scale: What dropout multiplies by.
    """

    widths: Widths
    dtype: str
    features: Features
    rows: int
    by_keys: tuple[tuple[Parts, KeyLayout], ...]
    by_rows: QueryLayout | None
    bounds: Extras
    keep_scale: float


@kept_launches
def _plan(problem: Problem, device: int) -> _Plan:
    """Return what all calls of a problem have in common; it has no seed."""
    features, sequences = problem.features, problem.sequences
    widths = widths_of(problem)
    in_whole = features._replace(whole_tiles=True)
    if _lists_whole_tiles(problem, *_layouts(problem, widths, in_whole)):
        features = in_whole
    by_keys, by_rows = _layouts(problem, widths, features)
    extras = lasting_extras(problem, PADDING, PADDING)
    plain = Extras(*extras[: Extras._fields.index("slopes")])
    return _Plan(
        widths,
        NAMES[problem.dtype],
        features,
        round_up(problem.seq_q, PADDING) + (PADDING * sequences.count if sequences else 0),
        by_keys,
        by_rows,
        plain._replace(seed=0, tiles=extras.tiles),
        extras.keep_scale,
    )


def _layouts(
    problem: Problem, widths: Widths, features: Features
) -> tuple[tuple[tuple[Parts, KeyLayout], ...], QueryLayout | None]:
    """Return ``_Plan.by_keys`` and ``_Plan.by_rows``."""
    kernels = parts_of(widths, not problem.deterministic)
    by_keys = tuple((parts, key_layout(widths, parts, features)) for parts in kernels)
    return by_keys, None if any(parts.dq for parts in kernels) else query_layout(widths)


def _lists_whole_tiles(
    problem: Problem, by_keys: tuple[tuple[Parts, KeyLayout], ...], by_rows: QueryLayout | None
) -> bool:
    """Tell whether lists for the tiles of these layouts say all that is hidden."""
    tiles = [(layout.block_q, layout.block_k, True) for _, layout in by_keys]
    rows = [] if by_rows is None else [(by_rows.block_q, by_rows.block_k, False)]
    return lists_whole_tiles(problem, *tiles, *rows)


class _Call(NamedTuple):
    """What all kernels of a call take.

    Attributes:
        plan: Of its problem.
        problem: The checked call, in 16 bits.
        operands: As given, but q, k, v and dout as the copy engine reads them.
        lse: (batch * heads, padded rows), as ``rows_kernel`` lays it out.
        delta: Likewise.
        own: What the call brings for its options, see ``own_extras``.
    """

    plan: _Plan
    problem: Problem
    operands: Operands
    lse: Any
    delta: Any
    own: tuple[Any, ...]

    def words(self, layout: KeyLayout | QueryLayout, by_keys: bool = False) -> tuple[Any, ...]:
        """Return the words of a mask as a kernel's lanes have them, if it reads any."""
        if not has_words(self.plan.features):
            return ()
        cols = layout.block_q if by_keys else layout.block_k
        return (packed_mask(self.operands.mask, cols, by_keys),)

    def gradient(self, array: Any) -> Any:
        """Return results as kernels write them: by their map, or themselves where sequences end within."""
        if self.plan.features.packed:
            return as_bits(array)
        return tensor_map(array, ROWS, self.plan.dtype)[0]

    def maps(
        self, layout: KeyLayout | QueryLayout
    ) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]:
        """Return the tensor maps of q, k, v and dout in a kernel's tiles, and what differs in each."""
        own, block_q, block_k = self.operands, layout.block_q, layout.block_k
        blocks = (own.q, block_q), (own.k, block_k), (own.v, block_k), (own.dout, block_q)
        found = [tensor_map(array, block, self.plan.dtype) for array, block in blocks]
        return tuple(one[0] for one in found), tuple(one[1:] for one in found)

    def prepared(self, prepare: Any, arrays: tuple[Any, ...], *more: Any) -> Any:
        """Return the launch of a kernel, but for where the arrays are that the call brings."""
        problem, lead = self.problem.unseeded, self.operands.q.shape[:2]
        return prepare(problem, lead, current_device(), memory_layouts(*arrays), *more)


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the first kernel by key tiles."""
    _, layout = _plan(problem.unseeded, current_device()).by_keys[0]
    return layout.block_q, layout.block_k


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; takes memory for delta, and for sums of dq where they may come in any order.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; dq, dk and dv are written.
    """
    problem, operands = with_mask_bits(problem, operands)
    q, k, v, dout = readable(operands.q, operands.k, operands.v, operands.dout)
    operands = operands.having(q=q, k=k, v=v, dout=dout)
    plan, heads = _plan(problem.unseeded, current_device()), math.prod(q.shape[:2])
    lse, delta = (empty_device((heads, plan.rows), FLOAT32) for _ in range(2))
    call = _Call(plan, problem, operands, lse, delta, own_extras(problem, operands))
    arrays = operands.lse, delta_of(problem, operands), lse, delta
    call.prepared(_rows_launch, arrays)(*arrays)
    for number in range(len(plan.by_keys)):
        _by_keys(call, number)
    if plan.by_rows is not None:
        _by_rows(call, plan.by_rows)


@kept_launches
def _rows_launch(problem: Problem, lead: tuple[int, int], device: int, arrays: Any) -> Any:
    """Return the launch that lays out lse and delta."""
    plan = _plan(problem, device)
    grid = tiles_of(problem.seq_q, PADDING, plan.bounds), math.prod(lead)
    factor = delta_factor(plan.features, plan.keep_scale)
    return rows_kernel(plan.features.packed).prepared((grid, PADDING), factor, plan.bounds)


def _by_keys(call: _Call, number: int) -> None:
    """Fill dk, dv or both; with dq that too, by way of its sums."""
    operands, (parts, layout) = call.operands, call.plan.by_keys[number]
    maps, differs = call.maps(layout)
    gradients = (call.gradient(array) for array in (operands.dk, operands.dv))
    # Of dq there are none without its part.
    sums = _zeroed_sums(call, layout) if parts.dq else device_view(call.delta, (1,), (1,))
    own = *call.words(layout, by_keys=True), *call.own
    arrays = *gradients, call.lse, call.delta, sums
    launch = call.prepared(_keys_launch, (*arrays, *own), differs, number)
    launch(*maps, *arrays, counters(), *own)
    if parts.dq:
        arrays = sums, as_bits(operands.dq)
        call.prepared(_round_launch, arrays, number)(*arrays)


def _arguments(
    problem: Problem, plan: _Plan, layout: KeyLayout | QueryLayout, lead: tuple[int, int],
    differs: tuple[tuple[int, ...], ...], schedule: Schedule, extras: Extras,
) -> tuple[Any, ...]:  # fmt: skip
    """Return grid and threads of a kernel by tiles, and its arguments behind the arrays."""
    q, k, v, dout = differs
    shape = Shape(
        problem.seq_q, problem.seq_k, lead[1], *q, *k, *v,
        dout_by_head=dout[0], dout_by_batch=dout[1],
    )  # fmt: skip
    blocks = min(multiprocessors(), schedule.tiles * schedule.heads)
    words = LATER if has_words(plan.features) else 0
    return (blocks, layout.threads), shape, problem.scale, schedule, words, extras


@kept_launches
def _keys_launch(
    problem: Problem, lead: tuple[int, int], device: int, arrays: Any, differs: Any, number: int
) -> Any:
    """Return the launch of a kernel by key tiles."""
    plan, heads = _plan(problem, device), math.prod(lead)
    parts, layout = plan.by_keys[number]
    # Rows of q and dout are what key tiles of a head read again and again, and add to.
    bytes_a_head = problem.seq_q * (2 * sum(plan.widths) + WORD * plan.widths.head * parts.dq)
    extras = lasting_extras(problem, layout.block_q, layout.block_k, by_keys=True)
    tiles = tiles_of(problem.seq_k, layout.block_k, extras)
    schedule = schedule_of(tiles, heads, bytes_a_head, CACHE_BYTES)
    where, *rest = _arguments(problem, plan, layout, lead, differs, schedule, extras)
    return dkdv_kernel(layout, plan.widths, plan.dtype, parts, plan.features).prepared(where, *rest)


@kept_launches
def _round_launch(
    problem: Problem, lead: tuple[int, int], device: int, arrays: Any, number: int
) -> Any:
    """Return the launch that rounds the sums of dq."""
    plan = _plan(problem, device)
    _, layout = plan.by_keys[number]
    pieces = ceil_div(PADDING * problem.head_dim // EIGHT, THREADS)
    grid = tiles_of(problem.seq_q, PADDING, plan.bounds) * pieces, math.prod(lead)
    scale = problem.scale * slope_factor(plan.features, plan.keep_scale)
    rounds = round_dq_kernel(layout, plan.widths, plan.dtype, plan.features.packed)
    return rounds.prepared((grid, THREADS), plan.rows, scale, plan.bounds)


def _zeroed_sums(call: _Call, layout: KeyLayout) -> Any:
    """Return zeros for the kernel by key tiles to add to."""
    shares = call.lse.shape[0] * call.plan.rows // layout.block_q * layout.consumers
    sums = empty_device((shares * dq_bytes(layout, call.plan.widths) // WORD,), FLOAT32)
    blocks = ceil_div(sums.size * WORD, CHUNK * THREADS)
    zero_kernel()[blocks, THREADS](sums)
    return sums


def _by_rows(call: _Call, layout: QueryLayout) -> None:
    """Fill dq by a kernel of its own."""
    maps, differs = call.maps(layout)
    gradient = call.gradient(call.operands.dq)
    own = *call.words(layout), *call.own
    arrays = gradient, call.lse, call.delta
    launch = call.prepared(_query_launch, (*arrays, *own), differs, layout)
    launch(*maps, *arrays, counters(), *own)


@kept_launches
def _query_launch(
    problem: Problem, lead: tuple[int, int], device: int, arrays: Any, differs: Any,
    layout: QueryLayout,
) -> Any:  # fmt: skip
    """Return the launch of the kernel that dq has of its own."""
    plan, heads = _plan(problem, device), math.prod(lead)
    extras = lasting_extras(problem, layout.block_q, layout.block_k)
    tiles = tiles_of(problem.seq_q, layout.block_q, extras)
    schedule = schedule_of(tiles, heads, 2 * problem.seq_k * sum(plan.widths), CACHE_BYTES)
    where, *rest = _arguments(problem, plan, layout, lead, differs, schedule, extras)
    return dq_kernel(layout, plan.widths, plan.dtype, plan.features).prepared(where, *rest)


#: What is kept from call to call.
KEPT = _plan, _rows_launch, _keys_launch, _round_launch, _query_launch
