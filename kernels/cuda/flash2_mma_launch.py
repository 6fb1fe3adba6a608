"""The rung flash2_mma: which calls it takes, its tiles, its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from kernels.cuda import tensor_cores
from kernels.cuda.arrays import empty_device
from kernels.cuda.flash2_merge import merge_parts, parts_of
from kernels.cuda.flash2_mma import forward_kernel
from kernels.cuda.flash2_mma_backward import dkdv_kernel, dkdv_tiles
from kernels.cuda.flash2_mma_dq import dq_kernel, dq_tiles
from kernels.cuda.half import as_bits
from kernels.cuda.half_delta import delta_of
from kernels.cuda.memory import fill
from kernels.cuda.mma_dq import dq_end_kernel, dq_sums, slots_of
from kernels.cuda.mma_guard import flag_of
from kernels.cuda.mma_tiles import ROWS, KeyLayout, MmaLayout
from kernels.cuda.register_tiles import SharedTiles, round_up
from kernels.cuda.scores import PLAIN, Extras, Features, features_of, make_extras
from kernels.cuda.visits import grid_of
from kernels.dtypes import FLOAT32, NAMES
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.targets import compute_capability, dynamic_shared_memory_bytes

CAPABILITY = (8, 0)
#: From which on four numbers are added to memory at a time.
WIDE_ADDS = (9, 0)
#: At most, beside the tiles: what options keep of each element of a tile.
BITS_BYTES = 4096
_T = TypeVar("_T")


class ByKeys(NamedTuple):
    """How the kernel by key columns is compiled.

    Attributes:
        layout: Tiles and warps.
        step: What head_dim and value_dim are rounded up to a multiple of.
        parts: Blocks that share the columns of a key tile.
    """

    layout: KeyLayout
    step: int
    parts: int = 1


#: Largest head_dim or value_dim → layouts, the first that the device has the shared memory for; measured
#: on an H200, docs/notes-cuda.md.
_FORWARD: dict[int, tuple[MmaLayout, ...]] = {
    128: (MmaLayout(128, 64, 4, resident=2),),
    256: (MmaLayout(64, 32, 4, resident=2),),
}
#: With options a lane has fewer scores: the compiler unrolls only short loops.
_FORWARD_WITH_OPTIONS: dict[int, tuple[MmaLayout, ...]] = {
    128: (MmaLayout(64, 64, 4, resident=2),),
    256: (MmaLayout(64, 32, 4),),
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
    64: (ByKeys(KeyLayout(64, 128, 4, 32, resident=2), 16),),
    128: (ByKeys(KeyLayout(64, 128, 8, 64), 32), ByKeys(KeyLayout(32, 64, 4, 32), 32)),
    256: (ByKeys(KeyLayout(64, 64, 4, 32), 64, 2), ByKeys(KeyLayout(16, 64, 4, 16), 128, 2)),
}
#: Where options make much of a score.
_FORWARD_WITH_MUCH: dict[int, tuple[MmaLayout, ...]] = {
    256: (MmaLayout(64, 16, 4),),
}
_BY_KEYS_WITH_MUCH: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(KeyLayout(64, 64, 4, 16, resident=2), 16),),
    128: (ByKeys(KeyLayout(64, 128, 8, 16), 32), ByKeys(KeyLayout(32, 64, 4, 16), 32)),
    256: (ByKeys(KeyLayout(64, 64, 4, 16), 64, 2), ByKeys(KeyLayout(16, 64, 4, 16), 128, 2)),
}
#: Likewise smaller tiles with options.
_BY_KEYS_WITH_OPTIONS: dict[int, tuple[ByKeys, ...]] = {
    64: (ByKeys(KeyLayout(64, 64, 4, 32, resident=2), 16),),
    128: (ByKeys(KeyLayout(64, 128, 8, 16), 32), ByKeys(KeyLayout(32, 64, 4, 32), 32)),
    256: (ByKeys(KeyLayout(64, 64, 4, 16), 64, 2), ByKeys(KeyLayout(16, 64, 4, 16), 128, 2)),
}


def _first(table: dict[int, _T], problem: Problem) -> _T:
    width = max(problem.head_dim, problem.value_dim)
    return next(layouts for limit, layouts in table.items() if width <= limit)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = _forward_layout(problem)
    return layout.block_q, layout.block_k


def _forward_layout(problem: Problem) -> MmaLayout:
    if problem.seq_q <= ROWS:
        return _first(_FORWARD_OF_FEW_ROWS, problem)[0]
    tables = _FORWARD, _FORWARD_WITH_OPTIONS, _FORWARD_WITH_MUCH
    return _first(tables[_made_of_scores(problem)], problem)[0]


def _made_of_scores(problem: Problem) -> int:
    """Return how much options make of a score: 0 nothing but bounds, 1, or 2 for several that bend it."""
    if problem.is_plain or (
        problem.sequences is not None and replace(problem, sequences=None).is_plain
    ):
        return 0
    bends = (problem.softcap > 0.0) + problem.slopes + (problem.mask == "float")
    return 2 if bends + (problem.score_mod is not None) > 1 else 1


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel by key columns, where shared memory is large."""
    layout = _first(_BY_KEYS, problem)[0].layout
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    return tensor_cores.why_not_here(tile, CAPABILITY)


class _Call(NamedTuple):
    """What all kernels of a call take.

    Attributes:
        problem: With the dtype of sums where options need numbers of it.
        operands: As given.
        features: Of the kernels.
        dtype: "float16" or "bfloat16".
        vectors: Rows of all tensors are aligned for pieces of 16 bytes and are whole pieces.
        flag: Whether an operand has numbers that are not finite, or 0 where no option hides any.
    """

    problem: Problem
    operands: Operands
    features: Features
    dtype: str
    vectors: bool
    flag: Any

    def extras(self, layout: MmaLayout | KeyLayout, by_keys: bool = False) -> Extras:
        """Return what the options need in a kernel."""
        blocks = layout.block_q, layout.block_k
        return make_extras(self.problem, self.operands, *blocks, by_keys=by_keys)


def _call(problem: Problem, operands: Operands, tensors: tuple[Any, ...], read: Any) -> _Call:
    """Return what kernels take.

    Args:
        problem: The checked call, in 16 bits.
        operands: As kernels take them.
        tensors: All of 16 bits, as uint16.
        read: Those that are multiplied by probabilities or their gradients.
    """
    dtype, vectors = NAMES[problem.dtype], all(map(tensor_cores.is_aligned, tensors))
    if problem.is_plain:
        return _Call(problem, operands, PLAIN, dtype, vectors, 0)
    features = features_of(problem)
    flag = flag_of(dtype, *read) if features.hides else 0
    return _Call(replace(problem, dtype=FLOAT32), operands, features, dtype, vectors, flag)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; out and lse are written.
    """
    q, k, v, out = (as_bits(array) for array in (operands.q, operands.k, operands.v, operands.out))
    call = _call(problem, operands, (q, k, v, out), (v,))
    layout = _forward_layout(problem)
    extras = call.extras(layout)
    tiles, lines = grid_of(q, q.shape[2], layout.block_q, extras)
    parts = parts_of(problem, layout, (tiles, lines))
    widths = round_up(problem.head_dim, 16), round_up(problem.value_dim, 16)
    kind = call.dtype, call.vectors, call.features, problem.scale > 0.0, parts > 1
    launch = forward_kernel(layout, *widths, *kind)[(tiles * parts, lines), layout.threads]
    if parts == 1:
        launch(q, k, v, out, operands.lse, problem.scale, call.flag, extras)
        return
    batch, heads, seq_q, value_dim = out.shape
    part_out = empty_device((parts * batch, heads, seq_q, value_dim), FLOAT32)
    part_lse = empty_device((parts * batch, heads, seq_q), FLOAT32)
    launch(q, k, v, part_out, part_lse, problem.scale, call.flag, extras)
    merge_parts(part_out, part_lse, operands.out, operands.lse)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; takes memory for delta, and for sums of dq where it is not deterministic.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; dq, dk and dv are written.
    """
    names = ("dout", "q", "k", "v", "dq", "dk", "dv")
    tensors = tuple(as_bits(getattr(operands, name)) for name in names)
    dout, q, k, v, dq, dk, dv = tensors
    call = _call(problem, operands, tensors, (k, q, dout))
    read = dout, q, k, v, operands.lse, delta_of(problem, operands)
    compiled = call.dtype, call.vectors
    layout, step, parts = _by_keys(problem, call)
    head, value = round_up(problem.head_dim, step), round_up(problem.value_dim, step)
    extras = call.extras(layout, by_keys=True)
    grid = grid_of(k, k.shape[2], layout.block_k, extras)
    grid = grid[0] * parts, grid[1]
    if problem.deterministic:
        _by_rows(problem, call, read, dq)
        kernel = dkdv_kernel(layout, head, value, *compiled, None, call.features, parts)
        kernel[grid, layout.threads](*read, read[-1], dk, dv, problem.scale, call.flag, extras)
        return
    shares = dq_sums(layout, head // parts, compute_capability() >= WIDE_ADDS)
    sequences = 1 if problem.sequences is None else problem.sequences.count
    slots = slots_of(q.shape[2], layout.block_q, sequences)
    sums = empty_device((grid[1], slots, layout.block_q * head), FLOAT32)
    fill(sums, 0.0)
    kernel = dkdv_kernel(layout, head, value, *compiled, shares, call.features, parts)
    kernel[grid, layout.threads](*read, sums, dk, dv, problem.scale, call.flag, extras)
    extras = call.extras(layout)
    grid = grid_of(q, q.shape[2], layout.block_q, extras)
    end = dq_end_kernel(layout, head, *compiled, shares, call.features, parts)
    end[grid, layout.threads](sums, q, k, dq, problem.scale, extras)


def _by_keys(problem: Problem, call: _Call) -> ByKeys:
    """Return how the kernel by key columns is compiled: what the device has the memory for."""

    def tiles_of(one: ByKeys) -> SharedTiles:
        widths = round_up(problem.head_dim, one.step), round_up(problem.value_dim, one.step)
        return dkdv_tiles(one.layout, *widths, not problem.deterministic)

    tables = _BY_KEYS, _BY_KEYS_WITH_OPTIONS, _BY_KEYS_WITH_MUCH
    return _fitting(_first(tables[_made_of_scores(problem)], problem), tiles_of)


def _fitting(choices: tuple[_T, ...], tiles_of: Callable[[_T], SharedTiles]) -> _T:
    """Return the first choice whose tiles fit into shared memory, or else the last."""
    *first, last = choices
    limit = dynamic_shared_memory_bytes() - BITS_BYTES
    return next((one for one in first if tiles_of(one).elements <= limit), last)


def _by_rows(problem: Problem, call: _Call, read: tuple[Any, ...], dq: Any) -> None:
    """Fill dq by a kernel of its own."""
    choices = _first(_BY_ROWS_WITH_OPTIONS if _made_of_scores(problem) else _BY_ROWS, problem)
    widths = round_up(problem.head_dim, 16), round_up(problem.value_dim, 16)
    layout = _fitting(choices, lambda one: dq_tiles(one, *widths))
    extras = call.extras(layout)
    grid = grid_of(dq, dq.shape[2], layout.block_q, extras)
    kernel = dq_kernel(layout, *widths, call.dtype, call.vectors, call.features)
    kernel[grid, layout.threads](*read, dq, problem.scale, call.flag, extras)
