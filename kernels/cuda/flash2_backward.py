"""FlashAttention-2 backward on CUDA cores: dQ by query rows, dK and dV by key columns.

By default two kernels recompute P from lse.  Each owns what it adds up, so nothing is added by two blocks
and the result is the same bit for bit on every run; the price is seven products where five would do.
With ``deterministic=False`` the second one adds its part of dQ to global memory by atomics, in any order,
and the first is not needed.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda.arrays import empty_device
from kernels.cuda.flash2 import forward_tiles
from kernels.cuda.flash2_dkdv import dkdv_kernel, dkdv_tiles
from kernels.cuda.flash2_dq import delta_kernel, dq_kernel, dq_tiles
from kernels.cuda.memory import fill
from kernels.cuda.register_tiles import Layout, pick_layout, why_not_layout, widths
from kernels.cuda.sizes import SIZES
from kernels.cuda.vector import are_vectors
from kernels.geometry import PLAIN
from kernels.problem import Problem


def _own_layout(problem: Problem) -> Layout:
    return pick_layout("dq", problem, None)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the dq kernel."""
    layout = _own_layout(problem)
    return layout.block_q, layout.block_k


def backward(
    problem: Problem,
    tile: tuple[int, int],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """Fill dq, dk and dv; takes memory for delta.  Arguments as in the forward pass."""
    batch, heads, seq_q, _ = q.shape
    delta = empty_device((batch, heads, seq_q), problem.dtype)
    threads = SIZES.flat_threads
    rows = PLAIN.ceil_div(batch * heads * seq_q, threads)
    delta_kernel(threads, problem.dtype)[rows, threads](dout, out, delta)
    kind = (*widths(problem), problem.dtype, are_vectors(dout, q, k, v))
    numbers = problem.scale, problem.diagonal
    if problem.deterministic:
        layout = pick_layout("dq", problem, tile)
        grid = (PLAIN.ceil_div(seq_q, layout.block_q), batch * heads)
        launch = dq_kernel(layout, *kind)[grid, layout.threads]
        launch(dout, q, k, v, lse, delta, dq, *numbers)
        # dK and dV have a layout of their own, unless the caller asked for a tile.
        own = layout == _own_layout(problem)
        layout = pick_layout("dkdv", problem, None if own else tile)
    else:
        fill(dq, 0.0)
        layout = pick_layout("atomic", problem, tile)
    grid = (PLAIN.ceil_div(problem.seq_k, layout.block_k), batch * heads)
    launch = dkdv_kernel(layout, *kind, not problem.deterministic)[grid, layout.threads]
    launch(dout, q, k, v, lse, delta, dq, dk, dv, *numbers)


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
