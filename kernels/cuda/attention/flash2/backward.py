"""FlashAttention-2 backward on CUDA cores: dQ by query rows, dK and dV by key columns.

By default two kernels recompute P from lse.  Each block adds up only its own rows of a gradient, so the
result is bitwise equal on every run, but there are seven products instead of five.  With
``deterministic=False``, the second kernel adds its part of dQ to global memory by atomics, in any order,
and the first kernel is not needed.  Measured on an H200 (float32, N = 4096, d = 64, 64 heads): 33.9 ms, and
27.5 ms by atomics; flash1 takes 899 ms and naive 38.9 ms.
"""

from __future__ import annotations

import math
from typing import Any

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.flash2.dkdv import dkdv_kernel, dkdv_tiles
from kernels.cuda.attention.flash2.dq import delta_kernel, dq_kernel, dq_tiles
from kernels.cuda.attention.flash2.forward import forward_tiles
from kernels.cuda.attention.flash2.register_scores import RowValues
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.visits import grid_of
from kernels.cuda.attention.register_tiles import (
    BackwardInputs,
    RegisterLayout,
    pick_layout,
    variant_of,
    why_not_layout,
)
from kernels.cuda.device.memory import fill
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.operands import Operands
from kernels.problem.question import Problem


def _own_layout(problem: Problem) -> RegisterLayout:
    return pick_layout("dq" if problem.deterministic else "atomic", problem, None)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the dq kernel, or of the one that adds to dq by atomics."""
    layout = _own_layout(problem)
    return layout.block_q, layout.block_k


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; allocates delta.  The sides of a tile are multiples of four."""
    dq, usual = operands.dq, _own_layout(problem)
    inputs = BackwardInputs(operands.dout, operands.q, operands.k, operands.v)
    values = RowValues(operands.lse, operands.lse_rest, delta_of(problem, operands))
    if problem.deterministic:
        variant = variant_of(problem, pick_layout("dq", problem, tile), *inputs)
        layout = variant.layout
        extras = make_extras(problem, operands, layout.block_q, layout.block_k)
        grid = grid_of(inputs.q, inputs.q.shape[2], layout.block_q, extras)
        launch = dq_kernel(variant)[grid, layout.threads]
        launch(inputs, values, dq, problem.scale, extras)
        # dK and dV have a layout of their own, unless the caller asked for a tile.
        layout = pick_layout("dkdv", problem, None if layout == usual else tile)
    else:
        fill(dq, 0.0)
        layout = pick_layout("atomic", problem, tile)
    variant = variant_of(problem, layout, *inputs)
    extras = make_extras(problem, operands, layout.block_q, layout.block_k, by_keys=True)
    grid = grid_of(inputs.q, inputs.k.shape[2], layout.block_k, extras)
    launch = dkdv_kernel(variant, not problem.deterministic)[grid, layout.threads]
    launch(inputs, values, dq, operands.dk, operands.dv, problem.scale, extras)


def delta_of(problem: Problem, operands: Operands) -> Any:
    """Return D = rowsum(dO ∘ O), minus the gradient of lse if there is one, (batch, heads, seq_q)."""
    dout, out, dlse = operands.dout, operands.out, operands.dlse
    shape = tuple(out.shape[:3])
    delta = empty_device(shape, problem.dtype)
    threads, has_dlse = SIZES.flat_threads, dlse is not None
    blocks = PLAIN.ceil_div(math.prod(shape), threads)
    launch = delta_kernel(threads, problem.dtype, has_dlse)[blocks, threads]
    launch(dout, out, dlse if has_dlse else delta, delta)
    return delta


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why the forward or the backward kernels cannot run a problem with a tile, or None."""
    kernels = {"forward": forward_tiles, "dq": dq_tiles, "dkdv": dkdv_tiles}
    if not problem.deterministic:
        kernels = {"forward": forward_tiles, "atomic": dkdv_tiles}
    for name, tiles in kernels.items():
        reason = why_not_layout(name, problem, tile, tiles)
        if reason is not None:
            return reason
    return None
