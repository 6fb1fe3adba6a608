"""The rung flash2_mma: the calls that it supports, its tiles, and the launches of its kernels.

``flash2_split`` launches the same kernels with its own layouts and operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from kernels.common.online_softmax import PATIENCE
from kernels.cuda.attention import tensor_cores
from kernels.cuda.attention.delta import delta_of
from kernels.cuda.attention.flash2_mma.arithmetic import HALVES, Arithmetic
from kernels.cuda.attention.flash2_mma.dkdv import dkdv_kernel, dkdv_tiles
from kernels.cuda.attention.flash2_mma.dkdv_wide_heads import role_tiles, roles_kernel
from kernels.cuda.attention.flash2_mma.dq import dq_kernel, dq_tiles
from kernels.cuda.attention.flash2_mma.dq_atomics import dq_end_kernel, dq_sums, slots_of
from kernels.cuda.attention.flash2_mma.forward import forward_kernel, forward_tiles
from kernels.cuda.attention.flash2_mma.pipeline import GradientInputs, MmaVariant
from kernels.cuda.attention.flash2_mma.tiles import (
    HALF,
    ROWS,
    MmaKeyLayout,
    MmaLayout,
    MmaRoleLayout,
)
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.visits import grid_of
from kernels.cuda.attention.register_tiles import widths_in
from kernels.cuda.attention.split_keys import empty_parts, merge_parts, parts_of
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.runtime.arrays import empty_device
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import compute_capability, current_device, dynamic_shared_memory_bytes
from kernels.scores.program import PLAIN

CAPABILITY = (8, 0)
#: The least compute capability that can add four numbers to memory per instruction.
WIDE_ADDS = (9, 0)
#: Maximum number of bytes of shared memory for option bits, in addition to the tiles.
BITS_BYTES = 4096


class Layouts(NamedTuple):
    """The kernel layouts of a rung, by the largest head_dim or value_dim that a layout supports.

    There are tables for calls without options, with options, and with several options that modify a score;
    the last counts for the rest.  With options a lane has fewer scores, because the compiler unrolls only
    short loops.  Of the layouts of a width, the first that fits the shared memory of the device is used.
    Measured on an H200; see docs/notes-cuda.md.  A rung may have one more table for at most 16 query rows.
    """

    forward: tuple[dict[int, tuple[Any, ...]], ...]
    by_rows: tuple[dict[int, tuple[Any, ...]], ...]
    by_keys: tuple[dict[int, tuple[Any, ...]], ...]
    few_rows: dict[int, tuple[Any, ...]] | None = None

    @property
    def widest(self) -> int:
        """Largest head_dim or value_dim."""
        return max(self.forward[0])


def _forward(block_k: int, warps: int = 4, block_q: int = 64, **more: Any) -> MmaLayout:
    return MmaLayout(block_q, block_k, warps, patience=PATIENCE, **more)


_KEYS_WITH_OPTIONS = {
    64: (MmaKeyLayout(64, 64, 4, 32, resident=2),),
    128: (MmaKeyLayout(64, 128, 8, 16, step=32), MmaKeyLayout(32, 64, 4, 16, step=32)),
    256: (
        MmaKeyLayout(64, 64, 4, 16, step=64, parts=2),
        MmaKeyLayout(16, 64, 4, 16, step=128, parts=2),
    ),
    512: tuple(
        MmaKeyLayout(16, ROWS * warps, warps, 16, step=64 * warps, parts=4) for warps in (4, 2, 1)
    ),
}
_FORWARD_512 = (_forward(16, parts=2), _forward(16, 2, block_q=32, parts=2))
_ROWS_512 = tuple(MmaLayout(ROWS * warps, 16, warps, parts=2) for warps in (4, 2, 1))
LAYOUTS = Layouts(
    forward=(
        {
            64: (_forward(64, block_q=128, resident=2),),
            128: (_forward(64, block_q=128, resident=2, skips=True),),
            256: (_forward(64, 8, block_q=128, skips=True), _forward(32)),
            512: (_forward(32, parts=2), *_FORWARD_512),
        },
        {128: (_forward(64, resident=2),), 256: (_forward(32),), 512: _FORWARD_512},
        {256: (_forward(16),), 512: _FORWARD_512},
    ),
    by_rows=(
        {
            64: (MmaLayout(128, 64, 4, resident=2),),
            128: (MmaLayout(64, 64, 4, resident=2),),
            256: (MmaLayout(64, 32, 4), MmaLayout(64, 16, 4)),
            512: _ROWS_512,
        },
        {128: (MmaLayout(64, 32, 4, resident=2),), 256: (MmaLayout(64, 16, 4),), 512: _ROWS_512},
        {128: (MmaLayout(64, 16, 4, resident=2),), 256: (MmaLayout(64, 16, 4),), 512: _ROWS_512},
    ),
    by_keys=(
        {
            64: (MmaKeyLayout(64, 128, 4, 32, resident=2),),
            128: (
                MmaRoleLayout(64, 128, 8, 32, step=32),
                MmaKeyLayout(64, 128, 8, 64, step=32),
                MmaKeyLayout(32, 64, 4, 32, step=32),
            ),
            256: (
                MmaRoleLayout(64, 64, 8, 32, step=32),
                MmaKeyLayout(64, 64, 4, 32, step=64, parts=2),
                MmaKeyLayout(16, 64, 4, 16, step=128, parts=2),
            ),
            512: _KEYS_WITH_OPTIONS[512],
        },
        _KEYS_WITH_OPTIONS,
        {**_KEYS_WITH_OPTIONS, 64: (MmaKeyLayout(64, 64, 4, 16, resident=2),)},
    ),
    few_rows={
        64: (MmaLayout(16, 64, 1, resident=6),),
        128: (MmaLayout(16, 64, 1, resident=3),),
        256: (MmaLayout(16, 32, 1, resident=3),),
        512: (MmaLayout(16, 16, 1, parts=2),),
    },
)


def picked(tables: Any, problem: Problem, shared_bytes: Callable[[Any], float]) -> Any:
    """Return the first layout of a call for which a block has the shared memory, or else the last."""
    if problem.sinkless.features._replace(packed=False, cache=None) == PLAIN:
        level = 0
    else:
        level = 2 if problem.features.modifier_count > 1 else 1
    width, table = max(problem.head_dim, problem.value_dim), tables[min(level, len(tables) - 1)]
    *first, last = next(choices for limit, choices in table.items() if width <= limit)
    limit = dynamic_shared_memory_bytes()
    return next((one for one in first if shared_bytes(one) <= limit), last)


def forward_layout(problem: Problem, layouts: Layouts, size: int) -> MmaLayout:
    """Return tiles and warps of the forward kernel, for numbers of ``size`` bytes."""
    is_small = problem.seq_q <= ROWS or problem.features.is_fixed
    tables = (layouts.few_rows,) if is_small and layouts.few_rows else layouts.forward
    return picked(tables, problem, lambda one: bytes_by_rows(forward_tiles, one, problem, size))


@lru_cache(maxsize=1024)
def _layout(problem: Problem, device: int) -> MmaLayout:
    """Return tiles and warps of the forward kernel on a device."""
    layout = forward_layout(problem, LAYOUTS, HALF)
    # With patience, a row depends on the others of its warp.
    return replace(layout, patience=0) if problem.features.is_fixed else layout


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = _layout(problem.unseeded, current_device())
    return layout.block_q, layout.block_k


def tile_by_keys(layouts: Layouts, problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel by key columns, where shared memory is large."""
    layout = picked(layouts.by_keys[:1], problem, lambda one: 0)
    return layout.block_q, layout.block_k


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel by key columns, where shared memory is large."""
    return tile_by_keys(LAYOUTS, problem)


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    return tensor_cores.why_not_here(problem, tile, CAPABILITY, LAYOUTS.widest)


class MmaCall(NamedTuple):
    """The arguments that all flash2_mma kernels of one call share.

    ``tensors`` are q, k, v, and in the backward pass dout, as the kernels see them; ``vectors`` tells
    whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces.
    """

    problem: Problem
    operands: Operands
    tensors: tuple[Any, ...]
    numbers: Arithmetic
    vectors: bool
    scale: Any
    delta: Any = None

    def extras(self, layout: MmaLayout | MmaKeyLayout, by_keys: bool = False) -> Extras:
        """Return the option arguments of a kernel."""
        blocks = layout.block_q, layout.block_k
        extras = make_extras(self.problem, self.operands, *blocks, by_keys=by_keys)
        if self.problem.learns_table:  # each part of the columns adds the terms of all scores
            extras = extras._replace(table_unit=extras.table_unit / layout.parts)
        return extras

    def variant(self, layout: MmaLayout | MmaKeyLayout) -> MmaVariant:
        """Return what a kernel is compiled for."""
        problem, kind = self.problem, (self.numbers, self.vectors)
        return MmaVariant(layout, *widths_in(problem, layout.step), *kind, problem.features)


def tensors_of(operands: Operands) -> tuple[Any, ...]:
    """Return q, k, v, and in the backward pass dout; 16-bit numbers as uint16."""
    names = ("q", "k", "v") if operands.dout is None else ("q", "k", "v", "dout")
    return tuple(as_bits(getattr(operands, name)) for name in names)


def call_of_halves(
    problem: Problem, operands: Operands, results: tuple[Any, ...], delta: Any = None
) -> MmaCall:
    """Return the common arguments of the kernels that write results."""
    tensors, numbers = tensors_of(operands), HALVES[NAMES[problem.dtype]]
    vectors = all(map(are_vectors, (*tensors, *results)))
    return MmaCall(problem, operands, tensors, numbers, vectors, problem.scale, delta)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest of a call in 16 bits."""
    out = as_bits(operands.out)
    layout = _layout(problem.unseeded, current_device())
    launch_forward(call_of_halves(problem, operands, (out,)), layout, out)


def launch_forward(call: MmaCall, layout: MmaLayout, out: Any) -> None:
    """Fill out, as the kernel sees it, and lse and lse_rest of a call."""
    problem, operands, (q, k, v), _, _, scale, _ = call
    extras = call.extras(layout)
    tiles, lines = grid_of(q, out.shape[2], layout.block_q, extras)
    tiles *= layout.parts
    parts = parts_of(problem, layout, (tiles, lines))
    kernel = forward_kernel(call.variant(layout), problem.scale > 0.0, parts > 1)
    launch, rows = kernel[(tiles * parts, lines), layout.threads], (operands.lse, operands.lse_rest)
    if parts == 1:
        launch(q, k, v, out, *rows, scale, extras)
        return
    of_parts = empty_parts(parts, out, FLOAT32)
    launch(q, k, v, *of_parts, scale, extras)
    merge_parts(of_parts, (operands.out, *rows), problem.features, extras)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv of a call in 16 bits; allocates delta, and sums of dq if not deterministic."""
    launch_backward(problem, operands, LAYOUTS, HALVES[NAMES[problem.dtype]], call_of_halves)


def launch_backward(
    problem: Problem,
    operands: Operands,
    layouts: Layouts,
    numbers: Arithmetic,
    call_of: Callable[..., MmaCall],
) -> None:
    """Fill dq, dk and dv; ``call_of`` returns the common arguments, as :func:`call_of_halves` does."""
    results = dq, dk, dv = tuple(as_bits(x) for x in (operands.dq, operands.dk, operands.dv))
    layout = picked(
        layouts.by_keys, problem, lambda one: _bytes_by_keys(one, problem, numbers.size)
    )
    sums, shares = None, None
    if not problem.deterministic:
        sequences = 1 if problem.sequences is None else problem.sequences.count
        head, _ = widths_in(problem, layout.step)
        slots = slots_of(dq.shape[2], layout.block_q, sequences)
        sums = empty_device((math.prod(dq.shape[:2]), slots, layout.block_q * head), FLOAT32)
        shares = dq_sums(layout, head // layout.parts, compute_capability() >= WIDE_ADDS)
    call = call_of(problem, operands, results, delta_of(problem, operands, sums))
    q, k, v, dout = call.tensors
    read = GradientInputs(dout, q, k, v, operands.lse, operands.lse_rest, call.delta)
    if shares is None:
        _launch_by_rows(call, layouts, read, dq)
    extras = call.extras(layout, by_keys=True)
    tiles, lines = grid_of(k, dk.shape[2], layout.block_k, extras)
    variant = call.variant(layout)
    make_kernel = roles_kernel if isinstance(layout, MmaRoleLayout) else dkdv_kernel
    launch = make_kernel(variant, shares)[(tiles * layout.parts, lines), layout.threads]
    launch(read, call.delta if sums is None else sums, dk, dv, call.scale, extras)
    if shares is not None:
        extras = call.extras(layout)
        grid = grid_of(q, dq.shape[2], layout.block_q, extras)
        end = dq_end_kernel(variant, shares)
        end[grid, layout.threads](sums, q, k, dq, call.scale, extras)


def bytes_by_rows(tiles: Any, layout: MmaLayout, problem: Problem, size: int) -> int:
    """Return an upper bound of the shared memory of a kernel by query rows."""
    return tiles(layout, *widths_in(problem, layout.step), size).elements + BITS_BYTES


def _bytes_by_keys(layout: MmaKeyLayout, problem: Problem, size: int) -> float:
    """Return an upper bound of the shared memory of the kernel; infinite if it cannot run the call."""
    head, value = widths_in(problem, layout.step)
    if isinstance(layout, MmaRoleLayout):
        return role_tiles(layout, head, size).elements if head == value else math.inf
    atomics = not problem.deterministic
    return dkdv_tiles(layout, head, value, atomics, size).elements + BITS_BYTES


def _launch_by_rows(call: MmaCall, layouts: Layouts, read: GradientInputs, dq: Any) -> None:
    """Fill dq by a separate kernel."""
    problem, size = call.problem, call.numbers.size
    layout = picked(
        layouts.by_rows, problem, lambda one: bytes_by_rows(dq_tiles, one, problem, size)
    )
    extras = call.extras(layout)
    tiles, lines = grid_of(dq, dq.shape[2], layout.block_q, extras)
    kernel = dq_kernel(call.variant(layout))
    kernel[(tiles * layout.parts, lines), layout.threads](read, dq, call.scale, extras)
