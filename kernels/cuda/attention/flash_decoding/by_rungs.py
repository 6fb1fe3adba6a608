"""Calls on a cache by the forward kernels of flash2_mma and flash2, whose tiles are read page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernels.cuda.attention.flash2 import forward as flash2
from kernels.cuda.attention.flash2.forward import forward_tiles
from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.register_tiles import why_not_layout
from kernels.cuda.device.half import convert_flat
from kernels.cuda.device.memory import DeviceMemory
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.arrays import device_view, element_strides, empty_device, flattened
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.scores.program import PLAIN

MEMORY = DeviceMemory()


def on_tensor_cores(problem: Problem, operands: Operands) -> None:
    """Fill out and lse of a call in 16 bits."""
    flash2_mma.forward(*_grouped(problem, operands, flash2_mma.tile))


def on_cuda_cores(problem: Problem, operands: Operands) -> None:
    """Fill out and lse of a call; 16-bit keys and values are converted as they are read."""
    out, sums = operands.out, problem.acc_dtype
    own = empty_device(out.shape, sums) if out.dtype != sums else out
    q = MEMORY.convert(operands.q, sums)
    wide, operands = replace(problem, dtype=sums), operands.having(q=q, out=own)
    flash2.forward(*_grouped(wide, operands, _fitting_tile))
    if own is not out:
        convert_flat(flattened(own), flattened(out))


def _grouped(problem: Problem, operands: Operands, tile: Any) -> tuple[Problem, Any, Operands]:
    """Return a call, with the query heads that share a key head as the rows of a tile, and its tile.

    This is so if the call has one query token, and no option or window that depends on rows or heads.
    """
    q, key_heads = operands.q, operands.k.shape[1]
    batch, heads, seq_q, _ = q.shape
    is_open = problem.lower <= 1 - problem.seq_k and problem.upper >= 0
    is_plain = problem.features._replace(softcap=False, cache=None) == PLAIN
    if seq_q == 1 < heads // key_heads and is_open and is_plain:
        rows, most = heads // key_heads, problem.seq_k + heads // key_heads
        problem = replace(problem, lead=(batch, key_heads), seq_q=rows, lower=-most, upper=most)
        views = {}
        for name in ("q", "out", "lse", "lse_rest"):
            array = getattr(operands, name)
            (b, h, *_), rest = element_strides(array), array.shape[3:]
            steps = b, rows * h, h, *element_strides(array)[3:]
            views[name] = device_view(array, (batch, key_heads, rows, *rest), steps)
        operands = operands.having(**views)
    return problem, tile(problem), operands


def _fitting_tile(problem: Problem) -> tuple[int, int]:
    """Return the largest (block_q, block_k) of flash2 for which a block has the shared memory."""
    block_q, block_k = flash2.tile(problem)
    tiles = [(block_q, block_k >> n) for n in range(block_k.bit_length() - VECTOR.bit_length() + 1)]
    fitting = (one for one in tiles if not why_not_layout("forward", problem, one, forward_tiles))
    return next(fitting, tiles[-1])
