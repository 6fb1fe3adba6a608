"""The rung flash3_wgmma: which calls it takes, and what a launch takes beside the operands."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda import tensor_cores
from kernels.cuda.arrays import device_pointer, device_view, to_device
from kernels.cuda.flash3_layout import LINE, PANEL, Layout, Widths, layout_of, schedule_of
from kernels.cuda.flash3_mask import packed_mask
from kernels.cuda.flash3_wgmma import forward_kernel, is_guarded
from kernels.cuda.half import as_bits
from kernels.cuda.memory import contiguous
from kernels.cuda.mma_guard import flag_of
from kernels.cuda.ptx.tensor_map import encode_tensor_map
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.register_tiles import round_up
from kernels.cuda.scores import PLAIN, Extras, Features, features_of, make_extras
from kernels.cuda.vector import are_vectors
from kernels.cuda.visits import grid_of
from kernels.dtypes import FLOAT32, NAMES
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.targets import cuda

CAPABILITY = (9, 0)

#: Of the L2 cache: what keys and values of the heads in work may take.
CACHE_BYTES = 24 << 20


@cache
def multiprocessors() -> int:
    """Return how many the device has."""
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


@cache
def counters() -> Any:
    """Return the number of items taken, and of blocks that are done: 0 between two launches.

    Launches on one stream share them; they come one after the other.
    """
    return to_device(np.zeros(2, np.int32))


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    dtype: str,
) -> Any:
    # Arrays come and go at the same addresses: a training step finds all its maps here.
    box = (1, 1, rows, PANEL)
    return to_device(encode_tensor_map(address, shape, strides, box, dtype))


def tensor_map(array: Any, seq: int, rows: int, dtype: str) -> tuple[Any, int, int]:
    """Return what tells the copy engine of an array, and whether its heads and its batches differ.

    Args:
        array: (batch, heads, seq, dim) on the device; a stride of 0 repeats.
        seq: How many of its rows there are for the engine.
        rows: Of a tile.
        dtype: "float16" or "bfloat16".

    Returns:
        The tensor map on the device, 1 or 0 for the heads, 1 or 0 for the batches.
    """
    shape, strides, differs = _as_copied(tuple(array.shape), tuple(array.strides), seq)
    return _tensor_map(device_pointer(array), shape, strides, rows, dtype), *differs


@lru_cache(maxsize=4096)
def _as_copied(
    shape: tuple[int, ...], strides: tuple[int, ...], seq: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """Return shape and strides for the copy engine, and 1 or 0 for heads and batches that differ."""
    sizes, steps = [*shape[:2], seq, *shape[3:]], list(strides)
    for axis in (0, 1):
        if steps[axis] == 0 or sizes[axis] == 1:
            # One head that all share; the engine asks for a stride all the same.
            sizes[axis], steps[axis] = 1, LINE
    return tuple(sizes), tuple(steps), (int(sizes[1] > 1), int(sizes[0] > 1))


@lru_cache(maxsize=1024)
def layout_for(problem: Problem) -> tuple[Layout, Widths]:
    """Return who works on a problem, and the widths its kernel is compiled for."""
    widths = Widths(round_up(problem.head_dim, 16), round_up(problem.value_dim, 16))
    return layout_of(widths, not problem.is_plain), widths


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k)."""
    layout, _ = layout_for(problem)
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    if problem.head_dim % 8 or problem.value_dim % 8:
        dims = problem.head_dim, problem.value_dim
        return f"its copies need a head_dim and a value dim that are multiples of 8, got {dims}"
    if problem.scale <= 0.0:
        return f"it takes a positive scale, got {problem.scale}"
    return tensor_cores.why_not_here(tile, CAPABILITY)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; out and lse are written.
    """
    # What the copy engine cannot read where it lies is copied once.
    q, k, v = (
        array if are_vectors(array) else contiguous(array)
        for array in (operands.q, operands.k, operands.v)
    )
    layout, widths = layout_for(problem)
    dtype, out = NAMES[problem.dtype], operands.out
    batch, heads, seq_q, value_dim = out.shape
    # Keys that nobody sees are outside of the tensor: zeros, whatever they are.
    bound = problem.seq_k if problem.sequences else problem.seq_q + problem.upper
    seq_k = max(min(problem.seq_k, bound), 1)
    q_map, *q_differs = tensor_map(q, seq_q, layout.block_q, dtype)
    k_map, *k_differs = tensor_map(k, seq_k, layout.block_k, dtype)
    v_map, *v_differs = tensor_map(v, seq_k, layout.block_k, dtype)
    shape = (seq_q, seq_k, heads, batch, *q_differs, *k_differs, *v_differs)
    own = _own_arguments(problem, operands, v, layout)
    tiles, lines = grid_of(out, seq_q, layout.block_q, own.extras)
    schedule = schedule_of(tiles, lines, 2 * seq_k * (problem.head_dim + value_dim), CACHE_BYTES)
    blocks = min(multiprocessors(), tiles * lines)
    lse = device_view(operands.lse, (lines, seq_q), (seq_q, 1))
    forward_kernel(layout, widths, dtype, own.features)[blocks, layout.threads](
        q_map, k_map, v_map, own.out, lse, counters(), shape, problem.scale, schedule,
        own.flag, own.mask_words, own.extras,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plain_extras(problem: Problem) -> Extras:
    """Return the numbers of a call without options: no array is among them."""
    return make_extras(problem, Operands(None, None, None), 1, 1)


class _Own(NamedTuple):
    """What options need in the kernel; the number 0 stands for an array that is not there.

    Attributes:
        features: Of the kernel.
        extras: Of the kernel.
        out: Its tensor map; the array itself where tiles of packed sequences end within it.
        flag: Whether a value is not finite.
        mask_words: Bits of a boolean mask.
    """

    features: Features
    extras: Extras
    out: Any
    flag: Any = 0
    mask_words: Any = 0


def _own_arguments(problem: Problem, operands: Operands, v: Any, layout: Layout) -> _Own:
    """Return what the options of a call need."""
    blocks, dtype = (layout.block_q, layout.block_k), NAMES[problem.dtype]
    if problem.sequences is None:
        out, *_ = tensor_map(operands.out, problem.seq_q, ROWS, dtype)
    else:
        out = as_bits(operands.out)
    if problem.is_plain:
        return _Own(PLAIN, _plain_extras(problem), out)
    features = features_of(problem)
    return _Own(
        features,
        make_extras(replace(problem, dtype=FLOAT32), operands, *blocks),
        out,
        flag_of(dtype, as_bits(v)) if is_guarded(features) else 0,
        packed_mask(operands.mask, layout.block_k) if features.mask == "bool" else 0,
    )
