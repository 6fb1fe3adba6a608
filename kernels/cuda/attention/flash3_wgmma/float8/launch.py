"""The launches of float8 attention on Hopper: operands are rounded first, then multiplied."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from kernels.cuda.attention.flash3_wgmma.float8.kernel import forward_kernel, layout_of
from kernels.cuda.attention.flash3_wgmma.float8.quantise import quantise
from kernels.cuda.attention.flash3_wgmma.launch_common import readable, tensor_map, work_of
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Widths
from kernels.cuda.device.per_device import map_of
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
    """Fill out, lse and lse_rest."""
    how, dtype = FLOAT8[problem.precision], NAMES[problem.dtype]
    layout, widths = layout_for(problem)
    # Copies live until kernels are launched.
    arrays = readable(operands.q, operands.k, operands.v)
    numbers, units = quantise(arrays, widths, dtype, how)
    rows = layout.block_q, layout.block_k, widths.value
    maps = [byte_map(array, count) for array, count in zip(numbers, rows, strict=True)]
    own, lines = (operands.lse, operands.lse_rest), math.prod(operands.out.shape[:2])
    lse, rest = (reshaped(array, (lines, problem.seq_q)) for array in own)
    repeats = (int(size > 1) for x in numbers for size in reversed(x.shape[:2]))
    blocks, work = work_of(problem, operands, layout, (*repeats,), problem.seq_k * sum(widths))
    if how.has_hadamard:  # its matrix is not normalized
        work = work._replace(scale=problem.scale / widths.head)
    forward_kernel(layout, widths, dtype, how.has_blocks)[blocks, layout.threads](
        *maps, tensor_map(operands.out, ROWS, dtype)[0], lse, rest, units, work
    )
