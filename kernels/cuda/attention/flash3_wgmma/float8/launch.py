"""The launches of float8 attention on Hopper: operands are rounded first, then multiplied."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.flash3_wgmma.float8.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.float8.layout import layout_of
from kernels.cuda.attention.flash3_wgmma.float8.quantise import quantise
from kernels.cuda.attention.flash3_wgmma.launch_common import CACHE_BYTES, readable, tensor_map
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Shape, Widths, schedule_of
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.device.per_device import counters, map_of, multiprocessors
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import reshaped
from kernels.problem.float8 import FLOAT8, padded
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import NAMES


@lru_cache(maxsize=1024)
def layout_for(problem: Problem) -> tuple[ForwardLayout, Widths]:
    """Return the layout for a problem, and the widths its kernel is compiled for."""
    widths = Widths(padded(problem.head_dim), padded(problem.value_dim))
    return layout_of(widths), widths


def byte_map(array: Any, rows: int) -> Any:
    """Return the tensor map of an array of bytes (batch, heads, rows, columns), in boxes of 128 columns."""
    return map_of(array, tuple(array.shape), tuple(array.strides), (1, 1, rows, LINE), "uint8")


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest.

    Args:
        problem: The checked call, in 16 bits.
        tile: Not used: the layout has its own.
        operands: The operands, on the device; out, lse and lse_rest are written.
    """
    how, dtype = FLOAT8[problem.precision], NAMES[problem.dtype]
    layout, widths = layout_for(problem)
    arrays = readable(
        operands.q, operands.k, operands.v
    )  # copies are there until kernels are launched
    q, k, v = quantise(arrays, widths, dtype, how)
    maps = (
        byte_map(q.numbers, layout.block_q),
        byte_map(k.numbers, layout.block_k),
        byte_map(v.numbers, widths.value),
    )
    batch, heads = operands.out.shape[:2]
    lines, tiles = batch * heads, PLAIN.ceil_div(problem.seq_q, layout.block_q)
    own = operands.lse, operands.lse_rest
    lse, rest = (reshaped(array, (lines, problem.seq_q)) for array in own)
    repeats = (int(size > 1) for x in (q, k, v) for size in reversed(x.numbers.shape[:2]))
    shape = Shape(problem.seq_q, problem.seq_k, heads, *repeats)
    schedule = schedule_of(tiles, lines, problem.seq_k * sum(widths), CACHE_BYTES)
    # The Hadamard matrix is not normalized.
    scale = problem.scale / widths.head if how.has_hadamard else problem.scale
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    kernel = forward_kernel(layout, widths, dtype, how.has_blocks)
    kernel[min(multiprocessors(), tiles * lines), layout.threads](
        *maps, tensor_map(operands.out, ROWS, dtype)[0], lse, rest, q.units, k.units, v.units, counters(),
        shape, scale, schedule, extras,
    )  # fmt: skip
