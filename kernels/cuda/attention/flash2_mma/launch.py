"""The rung flash2_mma: the calls that it supports, its tiles and its launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from kernels.common.online_softmax import PATIENCE
from kernels.common.philox import keep_scale
from kernels.cuda.attention import tensor_cores
from kernels.cuda.attention.delta import delta_of
from kernels.cuda.attention.flash2 import backward as flash2_backward
from kernels.cuda.attention.flash2.forward import with_own_rows
from kernels.cuda.attention.flash2_mma.dkdv import dkdv_kernel, dkdv_tiles
from kernels.cuda.attention.flash2_mma.dkdv_wide_heads import role_tiles, roles_kernel
from kernels.cuda.attention.flash2_mma.dq import dq_kernel, dq_tiles
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, dq_end_kernel, dq_sums, slots_of
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, TOP, Numbers, SplitUnits
from kernels.cuda.attention.flash2_mma.forward import forward_kernel, forward_tiles
from kernels.cuda.attention.flash2_mma.split_operands import split_operands
from kernels.cuda.attention.flash2_mma.tiles import ROWS, MmaKeyLayout, MmaLayout, MmaRoleLayout
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.visits import grid_of
from kernels.cuda.attention.register_tiles import widths_in
from kernels.cuda.attention.split_keys import empty_parts, merge_parts, parts_of
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.runtime.arrays import empty_device, reshaped
from kernels.cuda.runtime.kernel import Kernel
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import compute_capability, current_device, dynamic_shared_memory_bytes
from kernels.scores.program import PLAIN, Features

CAPABILITY = (8, 0)
#: The least compute capability that can add four numbers to memory per instruction.
WIDE_ADDS = (9, 0)
#: Maximum number of bytes of shared memory for option bits, in addition to the tiles.
BITS_BYTES = 4096
_T = TypeVar("_T")


class ByKeys(NamedTuple):
    """The compile-time parameters of the kernel by key columns.

    Attributes:
        layout: Tiles and warps; the layout of two halves requires equal rounded head_dim and value_dim.
        step: head_dim and value_dim are rounded up to a multiple of this.
        parts: Blocks that share the columns of a key tile.
    """

    layout: MmaKeyLayout | MmaRoleLayout
    step: int
    parts: int = 1

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Return head_dim and value_dim, rounded up."""
        return widths_in(problem, self.step)

    def is_for(self, problem: Problem) -> bool:
        """Tell whether the layout can run a problem, apart from its shared memory."""
        head, value = self.widths(problem)
        return head == value or not isinstance(self.layout, MmaRoleLayout)

    def shared_bytes(self, problem: Problem, terms: int) -> int:
        """Return an upper bound of the shared memory of the kernel, in bytes."""
        head, value = self.widths(problem)
        if isinstance(self.layout, MmaRoleLayout):
            return role_tiles(self.layout, head, terms).elements
        atomics = not problem.deterministic
        return dkdv_tiles(self.layout, head, value, atomics, terms).elements + BITS_BYTES


#: Largest head_dim or value_dim → layouts, of which the first that fits the shared memory of the device is
#: used.  Measured on an H200; see docs/notes-cuda.md.
_FORWARD: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(128, 64, 4, resident=2, patience=PATIENCE),),
    128: (MmaLayout(128, 64, 4, resident=2, patience=PATIENCE, skips=True),),
    256: (
        MmaLayout(128, 64, 8, patience=PATIENCE, skips=True),
        MmaLayout(64, 32, 4, resident=2, patience=PATIENCE),
    ),
}
#: Layouts with options: a lane has fewer scores, because the compiler unrolls only short loops.
_FORWARD_WITH_OPTIONS: dict[int, tuple[MmaLayout, ...]] = {
    128: (MmaLayout(64, 64, 4, resident=2, patience=PATIENCE),),
    256: (MmaLayout(64, 32, 4, patience=PATIENCE),),
}
_FORWARD_OF_FEW_ROWS: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(16, 64, 1, resident=6),),
    128: (MmaLayout(16, 64, 1, resident=3),),
    256: (MmaLayout(16, 32, 1, resident=3),),
}
_BY_ROWS: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(128, 64, 4, resident=2),),
    128: (MmaLayout(64, 64, 4, resident=2),),
    256: (MmaLayout(64, 32, 4), MmaLayout(32, 32, 2)),
}
_BY_ROWS_WITH_OPTIONS: dict[int, tuple[MmaLayout, ...]] = {
    128: (MmaLayout(64, 32, 4, resident=2),),
    256: (MmaLayout(64, 16, 4), MmaLayout(32, 32, 2)),
}
_BY_KEYS: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(MmaKeyLayout(64, 128, 4, 32, resident=2), 16),),
    128: (
        ByKeys(MmaRoleLayout(64, 128, 8, 32), 32),
        ByKeys(MmaKeyLayout(64, 128, 8, 64), 32),
        ByKeys(MmaKeyLayout(32, 64, 4, 32), 32),
    ),
    256: (
        ByKeys(MmaRoleLayout(64, 64, 8, 32), 32),
        ByKeys(MmaKeyLayout(64, 64, 4, 32), 64, 2),
        ByKeys(MmaKeyLayout(16, 64, 4, 16), 128, 2),
    ),
}
#: Layouts where several options modify a score.
_FORWARD_WITH_BENDS: dict[int, tuple[MmaLayout, ...]] = {
    256: (MmaLayout(64, 16, 4, patience=PATIENCE),),
}
_BY_KEYS_WITH_BENDS: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(MmaKeyLayout(64, 64, 4, 16, resident=2), 16),),
    128: (ByKeys(MmaKeyLayout(64, 128, 8, 16), 32), ByKeys(MmaKeyLayout(32, 64, 4, 16), 32)),
    256: (ByKeys(MmaKeyLayout(64, 64, 4, 16), 64, 2), ByKeys(MmaKeyLayout(16, 64, 4, 16), 128, 2)),
}
#: Smaller tiles for several options.
_BY_KEYS_WITH_OPTIONS: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(MmaKeyLayout(64, 64, 4, 32, resident=2), 16),),
    128: (ByKeys(MmaKeyLayout(64, 128, 8, 16), 32), ByKeys(MmaKeyLayout(32, 64, 4, 32), 32)),
    256: (ByKeys(MmaKeyLayout(64, 64, 4, 16), 64, 2), ByKeys(MmaKeyLayout(16, 64, 4, 16), 128, 2)),
}


#: Layouts for float32: tiles take twice the shared memory, and products three times as long.
_FORWARD_OF_TERMS: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(128, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
    128: (MmaLayout(64, 32, 4, resident=2),),
    256: (MmaLayout(128, 16, 8), MmaLayout(64, 16, 4), MmaLayout(32, 16, 2)),
}
_FORWARD_OF_TERMS_WITH_OPTIONS: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(64, 64, 4, resident=2),),
    128: (MmaLayout(64, 32, 4, resident=2),),
    256: (MmaLayout(64, 16, 4), MmaLayout(32, 16, 2)),
}
_BY_ROWS_OF_TERMS: dict[int, tuple[MmaLayout, ...]] = {
    64: (MmaLayout(64, 32, 4, resident=2),),
    128: (MmaLayout(128, 32, 8), MmaLayout(32, 32, 2)),
    256: (MmaLayout(64, 16, 4), MmaLayout(16, 16, 1)),
}
_BY_KEYS_OF_TERMS: dict[int, tuple[ByKeys, ...]] = {
    64: (
        ByKeys(MmaKeyLayout(64, 128, 8, 32), 32),
        ByKeys(MmaKeyLayout(32, 64, 4, 32, resident=2), 32),
    ),
    128: (ByKeys(MmaKeyLayout(32, 128, 8, 32), 64), ByKeys(MmaKeyLayout(16, 32, 2, 16), 32)),
    256: (
        ByKeys(MmaRoleLayout(16, 64, 8, 16), 128),
        ByKeys(MmaKeyLayout(16, 64, 4, 16), 128, 2),
        ByKeys(MmaKeyLayout(16, 16, 1, 16), 64, 2),
    ),
}
_BY_KEYS_OF_TERMS_WITH_OPTIONS: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(MmaKeyLayout(32, 64, 4, 16, resident=2), 32),),
    128: (ByKeys(MmaKeyLayout(32, 128, 8, 16), 64), ByKeys(MmaKeyLayout(16, 32, 2, 16), 32)),
    256: (ByKeys(MmaKeyLayout(16, 64, 4, 16), 128, 2), ByKeys(MmaKeyLayout(16, 16, 1, 16), 64, 2)),
}
#: Query rows, and multiplications of one product, from which splitting into terms pays.
LEAST_ROWS, LEAST_WORK = 128, 1 << 28


def _first(table: dict[int, _T], problem: Problem) -> _T:
    width = max(problem.head_dim, problem.value_dim)
    return next(layouts for limit, layouts in table.items() if width <= limit)


def _compiled_for(problem: Problem) -> str:
    """Return the name of the representation of operands, see ``float32_terms.NUMBERS``."""
    if problem.dtype != FLOAT32:
        return NAMES[problem.dtype]
    return "tf32" if problem.precision == "tf32" else "float32"


def _numbers(problem: Problem) -> Numbers:
    return NUMBERS[_compiled_for(problem)]


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = _forward_layout(problem.unseeded, current_device())
    return layout.block_q, layout.block_k


@lru_cache(maxsize=1024)
def _forward_layout(problem: Problem, device: int) -> MmaLayout:
    """Return tiles and warps of the forward kernel on a device."""
    if problem.seq_q <= ROWS and _numbers(problem).terms == 1:
        return _first(_FORWARD_OF_FEW_ROWS, problem)[0]
    if (terms := _numbers(problem).terms) > 1:
        own = _FORWARD_OF_TERMS, _FORWARD_OF_TERMS_WITH_OPTIONS
        tables = own[0], own[1], own[1]
    else:
        tables = _FORWARD, _FORWARD_WITH_OPTIONS, _FORWARD_WITH_BENDS
    widths = _widths(problem)

    def shared_bytes(layout: MmaLayout) -> int:
        return forward_tiles(layout, *widths, terms).elements + BITS_BYTES

    return _fitting(_first(tables[_table_of(problem)], problem), shared_bytes)


def _widths(problem: Problem) -> tuple[int, int]:
    """Return head_dim and value_dim, rounded up for the kernels by query rows."""
    return widths_in(problem, 16)


def _table_of(problem: Problem) -> int:
    """Return the table of layouts: 0 without options, 1 with options, 2 if several modify a score."""
    if problem.sinkless.features._replace(packed=False) == PLAIN:
        return 0
    return 2 if problem.features.modifier_count > 1 else 1


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel by key columns, where shared memory is large."""
    table = _BY_KEYS if _numbers(problem).terms == 1 else _BY_KEYS_OF_TERMS
    layout = _first(table, problem)[0].layout
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    if (reason := tensor_cores.why_not_here(tile, CAPABILITY)) is not None:
        return reason
    if problem.rung == "auto" and problem.dtype == FLOAT32 and _is_small(problem):
        return "so small a call of float32 takes less time on CUDA cores, which need not split it"
    return None


def _is_small(problem: Problem) -> bool:
    scores = math.prod(problem.scores_shape)
    work = scores * max(problem.head_dim, problem.value_dim)
    return problem.seq_q < LEAST_ROWS or work < LEAST_WORK


class MmaBackwardCall(NamedTuple):
    """The common arguments of the kernels of a call.

    Attributes:
        problem: The checked call.
        operands: The operands.
        tensors: The multiplied operands, 16-bit numbers as uint16: q, k, v, and in the backward pass dout;
            a float32 q of the forward pass stays float32.
        features: Options of the kernels.
        compiled: The name of the numbers, and whether rows of all tensors are aligned for pieces of 16
            bytes and are whole pieces; with float32, only rows of results and, in the forward pass, of q
            count.
        scale: Scale of the scores, or units.
        delta: delta in the backward pass, else None.
    """

    problem: Problem
    operands: Operands
    tensors: tuple[Any, ...]
    features: Features
    compiled: tuple[str, bool]
    scale: Any
    delta: Any = None

    def extras(self, layout: MmaLayout | MmaKeyLayout, by_keys: bool = False) -> Extras:
        """Return the option arguments of a kernel."""
        blocks = layout.block_q, layout.block_k
        return make_extras(self.problem, self.operands, *blocks, by_keys=by_keys)


def _call(
    problem: Problem, operands: Operands, results: tuple[Any, ...], sums: Any = None
) -> MmaBackwardCall:
    """Return the common arguments of the kernels.

    Args:
        problem: The checked call.
        operands: The operands; with dout, gradients are computed.
        results: The results that are written in the dtype of the problem, as kernels see them.
        sums: Sums of dq, to fill with zeros, or None.
    """
    is_backward = operands.dout is not None
    names = ("q", "k", "v", "dout") if is_backward else ("q", "k", "v")
    tensors = tuple(as_bits(getattr(operands, name)) for name in names)
    delta = delta_of(problem, operands, sums) if is_backward else None
    features, name = problem.features, _compiled_for(problem)
    if NUMBERS[name].is_scaled:
        bits, units = _split(problem, tensors, delta, NUMBERS[name])
        compiled = name, are_vectors(*results, *bits[: not is_backward])
        return MmaBackwardCall(problem, operands, bits, features, compiled, units, delta)
    compiled = name, all(map(are_vectors, (*tensors, *results)))
    return MmaBackwardCall(problem, operands, tensors, features, compiled, problem.scale, delta)


def _split(
    problem: Problem, tensors: tuple[Any, ...], delta: Any, numbers: Numbers
) -> tuple[tuple[Any, ...], SplitUnits]:
    """Return float32 operands split into terms, and their units; the forward kernel splits q itself."""
    head, value = _widths(problem)
    scale = keep_scale(problem.dropout_p)
    top = float(TOP - math.ceil(math.log2(scale)))
    keys = tensor_cores.keys_in_bounds(problem)
    rows = tensor_cores.rows_in_bounds(problem)
    if delta is None:
        q, *others = tensors
        k, v, of_q = split_operands((*others, q), (head, value), numbers, (keys, keys, rows))
        return (q, k.bits, v.bits), SplitUnits(problem.scale, top, scale, k.unit, v.unit, of_q.unit)
    tensors = (*tensors, reshaped(delta, (*delta.shape, 1)))
    counting = rows, keys, keys, rows, rows
    splits = split_operands(tensors, (head, head, value, value), numbers, counting, has_norms=True)
    q, k, v, dout, of_delta = splits
    units = SplitUnits(
        problem.scale, top, scale, k.unit, v.unit, q.unit, dout.unit, of_delta.unit, v.norm, dout.norm
    )  # fmt: skip
    return tuple(one.bits for one in splits[:4]), units


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest; for float32 it allocates the terms of k and v.

    Args:
        problem: The checked call, in 16 bits or float32.
        tile: (block_q, block_k), always that of the rung.
        operands: The operands, on the device; out, lse and lse_rest are
            written.
    """
    out = as_bits(operands.out)
    call = _call(problem, operands, (out,))
    q, k, v = call.tensors
    layout = _forward_layout(problem.unseeded, current_device())
    extras = call.extras(layout)
    tiles, lines = grid_of(q, out.shape[2], layout.block_q, extras)
    parts = parts_of(problem, layout, (tiles, lines))
    widths = _widths(problem)
    kind = *call.compiled, call.features, problem.scale > 0.0, parts > 1
    launch = forward_kernel(layout, *widths, *kind)[(tiles * parts, lines), layout.threads]
    rows = operands.lse, operands.lse_rest
    if parts == 1:
        launch(q, k, v, out, *rows, call.scale, extras)
        return
    of_parts = empty_parts(parts, out, FLOAT32)
    launch(q, k, v, *of_parts, call.scale, extras)
    merge_parts(of_parts, (operands.out, *rows), call.features, extras)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; allocates delta, and sums of dq if not deterministic.

    Args:
        problem: The checked call, in 16 bits or float32.
        tile: (block_q, block_k), always that of the rung.
        operands: The operands, on the device; dq, dk and dv are written.
    """
    if problem.dtype == FLOAT32 and problem.score_mod is not None:
        # Its derivative may be anything, and dS has to be bounded before it is scaled to float16.
        operands = with_own_rows(problem, operands)
        flash2_backward.backward(problem, flash2_backward.tile(problem), operands)
        return
    dq, dk, dv = (as_bits(x) for x in (operands.dq, operands.dk, operands.dv))
    by_keys = _by_keys(problem)
    layout, _, parts = by_keys
    head, _ = by_keys.widths(problem)
    sums = None if problem.deterministic else _dq_sums(problem, by_keys, dq)
    call = _call(problem, operands, (dq, dk, dv), sums)
    q, k, v, dout = call.tensors
    read = dout, q, k, v, operands.lse, operands.lse_rest, call.delta
    extras = call.extras(layout, by_keys=True)
    grid = grid_of(k, dk.shape[2], layout.block_k, extras)
    grid = grid[0] * parts, grid[1]
    if problem.deterministic:
        _by_rows(problem, call, read, dq)
        kernel = _keys_kernel(by_keys, call, None)
        kernel[grid, layout.threads](*read, call.delta, dk, dv, call.scale, extras)
        return
    shares = dq_sums(layout, head // parts, compute_capability() >= WIDE_ADDS)
    kernel = _keys_kernel(by_keys, call, shares)
    kernel[grid, layout.threads](*read, sums, dk, dv, call.scale, extras)
    extras = call.extras(layout)
    grid = grid_of(q, dq.shape[2], layout.block_q, extras)
    end = dq_end_kernel(layout, head, *call.compiled, shares, call.features, parts)
    end[grid, layout.threads](sums, q, k, dq, call.scale, extras)


def _dq_sums(problem: Problem, by_keys: ByKeys, dq: Any) -> Any:
    """Return memory for the sums of dq: (batch * heads, slots, block_q * head)."""
    sequences = 1 if problem.sequences is None else problem.sequences.count
    slots = slots_of(dq.shape[2], by_keys.layout.block_q, sequences)
    head, _ = by_keys.widths(problem)
    shape = math.prod(dq.shape[:2]), slots, by_keys.layout.block_q * head
    return empty_device(shape, FLOAT32)


def _by_keys(problem: Problem) -> ByKeys:
    """Return the variant of the kernel by key columns for the device's shared memory."""
    terms = _numbers(problem).terms

    tables = _BY_KEYS, _BY_KEYS_WITH_OPTIONS, _BY_KEYS_WITH_BENDS
    if terms > 1:
        tables = _BY_KEYS_OF_TERMS, *[_BY_KEYS_OF_TERMS_WITH_OPTIONS] * 2
    choices = _first(tables[_table_of(problem)], problem)
    fitting = tuple(one for one in choices if one.is_for(problem))
    return _fitting(fitting, lambda one: one.shared_bytes(problem, terms))


def _keys_kernel(by_keys: ByKeys, call: MmaBackwardCall, shares: DqSums | None) -> Kernel:
    """Return the kernel by key columns."""
    layout, widths = by_keys.layout, by_keys.widths(call.problem)
    if isinstance(layout, MmaRoleLayout):
        return roles_kernel(layout, widths[0], *call.compiled, shares, call.features)
    return dkdv_kernel(layout, *widths, *call.compiled, shares, call.features, by_keys.parts)


def _fitting(choices: tuple[_T, ...], shared_bytes: Callable[[_T], int]) -> _T:
    """Return the first choice for which a block has the shared memory, or else the last."""
    *first, last = choices
    limit = dynamic_shared_memory_bytes()
    return next((one for one in first if shared_bytes(one) <= limit), last)


def _by_rows(problem: Problem, call: MmaBackwardCall, read: tuple[Any, ...], dq: Any) -> None:
    """Fill dq by a separate kernel."""
    terms, widths = _numbers(problem).terms, _widths(problem)
    tables = _BY_ROWS, _BY_ROWS_WITH_OPTIONS, _BY_ROWS_WITH_OPTIONS
    table = tables[_table_of(problem)] if terms == 1 else _BY_ROWS_OF_TERMS
    layout = _fitting(
        _first(table, problem),
        lambda one: dq_tiles(one, *widths, terms).elements + BITS_BYTES,
    )
    extras = call.extras(layout)
    grid = grid_of(dq, dq.shape[2], layout.block_q, extras)
    kernel = dq_kernel(layout, *widths, *call.compiled, call.features)
    kernel[grid, layout.threads](*read, dq, call.scale, extras)
