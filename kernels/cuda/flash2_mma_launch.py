"""The rung flash2_mma: which calls it takes, its tiles, its launch."""

from __future__ import annotations

from kernels.cuda import tensor_cores
from kernels.cuda.flash2_mma import forward_kernel
from kernels.cuda.half import as_bits
from kernels.cuda.mma_tiles import MmaLayout
from kernels.cuda.register_tiles import round_up
from kernels.cuda.scores import make_extras
from kernels.cuda.visits import grid_of
from kernels.dtypes import NAMES
from kernels.operands import Operands
from kernels.problem import Problem

CAPABILITY = (8, 0)
#: Largest head_dim or value_dim → layout, the first that fits; measured on an H200, docs/notes-cuda.md.
_LAYOUTS = {
    64: MmaLayout(128, 64, 4, resident=2),
    128: MmaLayout(128, 64, 4, resident=2),
    256: MmaLayout(64, 32, 4, resident=2),
}


def layout_of(problem: Problem) -> MmaLayout:
    """Return tiles and warps for a problem."""
    width = max(problem.head_dim, problem.value_dim)
    return next(layout for limit, layout in _LAYOUTS.items() if width <= limit)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k)."""
    layout = layout_of(problem)
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    return tensor_cores.why_not(problem, tile, CAPABILITY)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; out and lse are written.
    """
    layout = layout_of(problem)
    q, k, v, out = (as_bits(array) for array in (operands.q, operands.k, operands.v, operands.out))
    vectors = all(map(tensor_cores.is_aligned, (q, k, v, out)))
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    grid = grid_of(q, q.shape[2], layout.block_q, extras)
    widths = round_up(problem.head_dim, 16), round_up(problem.value_dim, 16)
    kind = NAMES[problem.dtype], vectors
    kernel = forward_kernel(layout, *widths, *kind, is_folded=problem.scale > 0.0)
    kernel[grid, layout.threads](q, k, v, out, operands.lse, problem.scale, extras)
