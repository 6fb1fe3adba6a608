"""The backward pass of the rung flash3_wgmma: the kernels of a call, and their common arguments."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.delta import THREADS, no_sums
from kernels.cuda.attention.flash3_wgmma.backward.dkdv import dkdv_kernel
from kernels.cuda.attention.flash3_wgmma.backward.dq import dq_kernel
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    KeyGradients,
    KeyLayout,
    QueryLayout,
    dq_bytes,
    key_layout,
    parts_of,
    query_layout,
)
from kernels.cuda.attention.flash3_wgmma.backward.row_passes import (
    blocks_a_tile,
    lanes_a_row,
    preprocess_kernel,
    round_dq_kernel,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import delta_factor, slope_factor
from kernels.cuda.attention.flash3_wgmma.launch_common import (
    read_maps,
    readable,
    tensor_map,
    widths_of,
    with_mask_bits,
    with_scale,
    within_blocks,
    work_of,
)
from kernels.cuda.attention.flash3_wgmma.layout import PADDING, Widths
from kernels.cuda.attention.options.extras import numbers_of
from kernels.cuda.attention.options.packed_tiles import device_tiles
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.visits import tiles_of
from kernels.cuda.attention.tensor_cores import lists_whole_tiles
from kernels.cuda.device.half import EIGHT, as_bits
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import WORD, Kernel
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import current_device
from kernels.scores.program import Features

#: The largest softcap whose scores may be off by 2⁻¹¹.
SMALL_CAP = 64.0


class BackwardPlan(NamedTuple):
    """The properties that all flash3_wgmma backward calls of one problem on one device share."""

    widths: Widths  # Widths that kernels are compiled for
    dtype: str  # "float16" or "bfloat16"
    features: Features  # Options that kernels are compiled for
    #: Rows of shifts and delta as ``preprocess_kernel`` lays them out: each sequence, and an empty one
    #: behind the last, is padded to whole tiles.
    rows: int
    #: For each kernel by key tiles, the gradients that it computes, and its layout.
    by_keys: tuple[tuple[KeyGradients, KeyLayout], ...]
    by_rows: QueryLayout | None  # The layout of the separate kernel of dq, or None
    #: Options of the kernels before and after the others: only the bounds of sequences.
    bounds: Extras


@lru_cache(maxsize=64)
def _plan(problem: Problem, device: int) -> BackwardPlan:
    """Return the common properties of all calls of a problem without a seed."""
    features, sequences = problem.features, problem.sequences
    features = with_scale(features, problem)._replace(large_cap=problem.softcap > SMALL_CAP)
    widths = widths_of(problem)
    in_whole = features._replace(whole_tiles=True)
    by_keys, by_rows = _layouts(problem, widths, in_whole)
    tiles = [(layout.block_q, layout.block_k, True) for _, layout in by_keys]
    tiles += [] if by_rows is None else [(by_rows.block_q, by_rows.block_k, False)]
    if lists_whole_tiles(problem, *tiles):
        features = in_whole
    by_keys, by_rows = _layouts(problem, widths, features)
    bounds = numbers_of(problem)
    if sequences is not None:
        bounds = bounds._replace(tiles=device_tiles(sequences, PADDING, False, device))
    return BackwardPlan(
        widths, NAMES[problem.dtype], features,
        round_up(problem.seq_q, PADDING) + (PADDING * (sequences.count + 1) if sequences else 0),
        by_keys, by_rows, bounds,
    )  # fmt: skip


def _layouts(
    problem: Problem, widths: Widths, features: Features
) -> tuple[tuple[tuple[KeyGradients, KeyLayout], ...], QueryLayout | None]:
    """Return ``BackwardPlan.by_keys`` and ``BackwardPlan.by_rows``."""
    kernels = parts_of(widths, problem.deterministic, features.block_mask)
    by_keys = tuple((parts, key_layout(widths, parts, features)) for parts in kernels)
    return by_keys, None if any(parts.dq for parts in kernels) else query_layout(widths)


class BackwardCall(NamedTuple):
    """The arguments that all kernels of one flash3_wgmma backward call share."""

    plan: BackwardPlan  # Plan of the problem
    problem: Problem  # The checked call, in 16 bits
    #: The operands, with q, k, v and dout in a form that the copy engine can read.
    operands: Operands
    shifts: Any  # (batch * heads, 2 · padded rows), as ``preprocess_kernel`` lays them out
    delta: Any  # (batch * heads, padded rows), as ``preprocess_kernel`` lays it out
    #: Sums of dq in float32, and the turns of their shares, initially zeros; a single element if no kernel
    #: adds to dq.
    sums: Any

    @property
    def heads(self) -> int:
        """Batches times heads."""
        return math.prod(self.operands.q.shape[:2])

    def gradient(self, array: Any) -> Any:
        """Return a result as kernels write it: a tensor map, or the array if sequences are packed."""
        if self.plan.features.packed:
            return as_bits(array)
        return tensor_map(array, ROWS, self.plan.dtype)[0]

    def launch(
        self, kernel: Kernel, layout: KeyLayout | QueryLayout, results: tuple[Any, ...],
        bytes_a_head: int, by_keys: bool = False,
    ) -> None:  # fmt: skip
        """Launch a kernel by tiles.

        It reads ``bytes_a_head`` bytes of a head repeatedly, and ``results`` beside the operands.
        """
        own, block_q, block_k = self.operands, layout.block_q, layout.block_k
        tiles = (own.q, block_q), (own.k, block_k), (own.v, block_k), (own.dout, block_q)
        maps, differs = read_maps(tiles, self.plan.dtype)
        blocks, work = work_of(self.problem, self.operands, layout, differs, bytes_a_head, by_keys)
        kernel[blocks, layout.threads](*maps, *results, work)


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the first kernel by key tiles."""
    _, layout = _plan(within_blocks(problem.unseeded), current_device()).by_keys[0]
    return layout.block_q, layout.block_k


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; allocates delta, and sums of dq if a kernel by key tiles adds to them."""
    problem = within_blocks(problem)
    problem, operands = with_mask_bits(problem, operands)
    q, k, v, dout = readable(operands.q, operands.k, operands.v, operands.dout)
    operands = operands.having(q=q, k=k, v=v, dout=dout)
    call = _preprocessed(_plan(problem.unseeded, current_device()), problem, operands)
    plan = call.plan
    for parts, layout in plan.by_keys:
        _by_keys(call, parts, layout)
    if (rows := plan.by_rows) is not None:
        kernel = dq_kernel(rows, plan.widths, plan.dtype, plan.features)
        results = call.gradient(operands.dq), call.shifts, call.delta
        call.launch(kernel, rows, results, 2 * problem.seq_k * sum(plan.widths))


def _preprocessed(plan: BackwardPlan, problem: Problem, operands: Operands) -> BackwardCall:
    """Return the common arguments of the kernels, with shifts, delta and zeros for the sums of dq."""
    heads = math.prod(operands.q.shape[:2])
    shifts, delta = (empty_device((heads, n * plan.rows), FLOAT32) for n in (2, 1))
    sums = no_sums(delta)
    for parts, layout in plan.by_keys:
        if parts.dq:
            shares = heads * plan.rows // layout.block_q * layout.consumers
            size = shares * dq_bytes(layout, plan.widths) // WORD
            # A share has a turn behind the sums.
            sums = empty_device((size + parts.ordered * round_up(shares, 4),), FLOAT32)
    dout, out, dlse = as_bits(operands.dout), as_bits(operands.out), operands.dlse
    lanes = lanes_a_row(problem.value_dim)
    kind = plan.dtype, are_vectors(dout, out), dlse is not None, plan.features.packed
    grid = tiles_of(problem.seq_q, PADDING, plan.bounds) * blocks_a_tile(lanes), heads
    kernel = preprocess_kernel(lanes, *kind)
    kernel[grid, kernel.threads](
        dout, out, (operands.lse, operands.lse_rest, operands.lse if dlse is None else dlse),
        shifts, delta, sums, delta_factor(plan.features, plan.bounds.keep_scale), plan.bounds,
    )  # fmt: skip
    return BackwardCall(plan, problem, operands, shifts, delta, sums)


def _by_keys(call: BackwardCall, parts: KeyGradients, layout: KeyLayout) -> None:
    """Fill dk, dv or both, and dq through its sums if it is one of the parts."""
    plan, problem, operands = call.plan, call.problem, call.operands
    gradients = (call.gradient(array) for array in (operands.dk, operands.dv))
    results = *gradients, (call.shifts, call.delta, call.sums)
    # Rows of q and dout are what key tiles of a head read again and again, and add to.
    bytes_a_head = problem.seq_q * (2 * sum(plan.widths) + WORD * plan.widths.head * parts.dq)
    kernel = dkdv_kernel(layout, plan.widths, plan.dtype, parts, plan.features)
    call.launch(kernel, layout, results, bytes_a_head, by_keys=True)
    if not parts.dq:
        return
    pieces = ceil_div(PADDING * problem.head_dim // EIGHT, THREADS)
    grid = tiles_of(problem.seq_q, PADDING, plan.bounds) * pieces, call.heads
    scale = problem.scale * slope_factor(plan.features, plan.bounds.keep_scale)
    rounds = round_dq_kernel(layout, plan.widths, plan.dtype, plan.features.packed)
    rounds[grid, THREADS](call.sums, as_bits(operands.dq), plan.rows, scale, plan.bounds)
