"""The rung flash3_wgmma: which calls it takes, and what a launch takes beside the operands."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from kernels.cuda import tensor_cores
from kernels.cuda.arrays import device_pointer, device_view, to_device
from kernels.cuda.flash3_layout import LINE, PANEL, Layout, Widths, layout_of, schedule_of
from kernels.cuda.flash3_wgmma import forward_kernel
from kernels.cuda.memory import contiguous
from kernels.cuda.ptx.tensor_map import encode_tensor_map
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.register_tiles import round_up
from kernels.cuda.scores import make_extras
from kernels.dtypes import NAMES
from kernels.geometry import ceil_div
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
    shape, strides = list(array.shape), list(array.strides)
    shape[2] = seq
    for axis in (0, 1):
        if strides[axis] == 0 or shape[axis] == 1:
            # One head that all share; the engine asks for a stride all the same.
            shape[axis], strides[axis] = 1, LINE
    differs = (int(shape[1] > 1), int(shape[0] > 1))
    address = device_pointer(array)
    return _tensor_map(address, tuple(shape), tuple(strides), rows, dtype), *differs


def layout_for(problem: Problem) -> tuple[Layout, Widths]:
    """Return who works on a problem, and the widths its kernel is compiled for."""
    widths = Widths(round_up(problem.head_dim, 16), round_up(problem.value_dim, 16))
    return layout_of(widths), widths


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
    return tensor_cores.why_not(problem, tile, CAPABILITY)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; out and lse are written.
    """
    # What the copy engine cannot read where it lies is copied once.
    q, k, v = (
        array if tensor_cores.is_aligned(array) else contiguous(array)
        for array in (operands.q, operands.k, operands.v)
    )
    layout, widths = layout_for(problem)
    dtype, out = NAMES[problem.dtype], operands.out
    batch, heads, seq_q, value_dim = out.shape
    # Keys that nobody sees are outside of the tensor: zeros, whatever they are.
    seq_k = max(min(problem.seq_k, problem.seq_q + problem.upper), 1)
    q_map, *q_differs = tensor_map(q, seq_q, layout.block_q, dtype)
    k_map, *k_differs = tensor_map(k, seq_k, layout.block_k, dtype)
    v_map, *v_differs = tensor_map(v, seq_k, layout.block_k, dtype)
    out_map, *_ = tensor_map(out, seq_q, ROWS, dtype)
    shape = (seq_q, seq_k, heads, batch, *q_differs, *k_differs, *v_differs)
    tiles = ceil_div(seq_q, layout.block_q)
    bytes_a_head = 2 * seq_k * (problem.head_dim + value_dim)
    schedule = schedule_of(tiles, batch * heads, bytes_a_head, CACHE_BYTES)
    blocks = min(multiprocessors(), tiles * batch * heads)
    lse = device_view(operands.lse, (batch * heads, seq_q), (seq_q, 1))
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    forward_kernel(layout, widths, dtype)[blocks, layout.threads](
        q_map, k_map, v_map, out_map, lse, counters(), shape, problem.scale, schedule, extras
    )
