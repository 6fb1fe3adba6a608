"""The JVP and the double backward of flash2 on CUDA cores.

The double backward is the JVP of the backward pass: two kernels recompute P from lse, and each block adds
up only its own rows of a result, so that results are bitwise equal on every run.  There are 15 products,
after 6 of the JVP, where the backward pass has 7.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda.attention.flash2.backward import delta_of
from kernels.cuda.attention.flash2.forward import Results
from kernels.cuda.attention.flash2.register_scores import RowValues
from kernels.cuda.attention.flash2.tangents.dkdv import dkdv_tangent_kernel, dkdv_tangent_tiles
from kernels.cuda.attention.flash2.tangents.dq import dq_tangent_kernel, dq_tangent_tiles
from kernels.cuda.attention.flash2.tangents.forward import ResultTangents, jvp_kernel, jvp_tiles
from kernels.cuda.attention.flash2.tangents.scores import Inputs, RowTangents
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.visits import grid_of
from kernels.cuda.attention.register_tiles import (
    BY_ROWS,
    BackwardInputs,
    pick_layout,
    variant_of,
    why_not_layout,
)
from kernels.problem.operands import Operands
from kernels.problem.question import Problem

#: Kernel → the function that makes it, and the one that returns its tiles.
_KERNELS = {
    "jvp": (jvp_kernel, jvp_tiles),
    "dq_tangent": (dq_tangent_kernel, dq_tangent_tiles),
    "dkdv_tangent": (dkdv_tangent_kernel, dkdv_tangent_tiles),
}


def _tile(name: str, problem: Problem) -> tuple[int, int]:
    layout = pick_layout(name, problem, None)
    return layout.block_q, layout.block_k


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the JVP kernel."""
    return _tile("jvp", problem)


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel of the tangent of dq."""
    return _tile("dq_tangent", problem)


def _launch(
    name: str, problem: Problem, tile: tuple[int, int] | None, operands: Operands, *arrays: Any
) -> None:
    """Launch a kernel; the first two of ``arrays`` are records of those of which it loads tiles."""
    layout, by_keys, (make, _) = (
        pick_layout(name, problem, tile),
        name not in BY_ROWS,
        _KERNELS[name],
    )
    block_q, block_k = layout.block_q, layout.block_k
    extras = make_extras(problem, operands, block_q, block_k, by_keys)
    seq, block = (operands.k.shape[2], block_k) if by_keys else (operands.q.shape[2], block_q)
    kernel = make(variant_of(problem, layout, *arrays[0], *arrays[1]))
    launch = kernel[grid_of(operands.q, seq, block, extras), layout.threads]
    launch(*arrays, problem.scale, extras)


def jvp(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse, lse_rest and the tangents of out and lse.

    The sides of a tile are multiples of four.
    """
    o = operands
    inputs, tangents = Inputs(o.q, o.k, o.v), Inputs(o.q_tangent, o.k_tangent, o.v_tangent)
    results = Results(o.out, o.lse, o.lse_rest), ResultTangents(o.out_tangent, o.lse_tangent)
    _launch("jvp", problem, tile, operands, inputs, tangents, *results)


def double_backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv with their tangents, from the results of :func:`jvp`; allocates D and Ḋ.

    The sides of a tile are multiples of four.
    """
    o = operands
    inputs = BackwardInputs(o.dout, o.q, o.k, o.v), Inputs(o.q_tangent, o.k_tangent, o.v_tangent)
    values = RowValues(o.lse, o.lse_rest, delta_of(problem, operands))
    # D = rowsum(dO ∘ O) - dL     Ḋ = rowsum(dO ∘ Ȯ)
    delta_tangent = delta_of(problem, operands.having(out=o.out_tangent, dlse=None))
    read = *inputs, values, RowTangents(o.lse_tangent, delta_tangent)
    _launch("dq_tangent", problem, tile, operands, *read, o.dq)
    # dK and dV have a layout of their own, unless the caller asked for a tile.
    own = None if tile == backward_tile(problem) else tile
    _launch("dkdv_tangent", problem, own, operands, *read, o.dk, o.dv)


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why the kernels cannot run a problem with a tile, or None."""
    for name, (_, tiles) in _KERNELS.items():
        reason = why_not_layout(name, problem, tile, tiles)
        if reason is not None:
            return reason
    return None
