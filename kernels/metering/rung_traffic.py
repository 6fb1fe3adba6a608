"""What a call of a CUDA rung moves by the formulas, with the tiles and threads that it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention import flash1, naive
from kernels.cuda.attention.register_tiles import RegisterLayout, pick_layout
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.question import Problem, make_problem
from kernels.traffic.formulas import (
    Counts,
    HeadShape,
    flash1_backward_traffic,
    flash1_traffic,
    flash2_atomic_traffic,
    flash2_backward_traffic,
    flash2_traffic,
    naive_backward_traffic,
    naive_traffic,
)

Tile = tuple[int, int]
#: The rungs that have formulas, and what tells them apart beside the rung.
RUNGS: dict[str, dict[str, Any]] = {
    "naive": {"rung": "naive"},
    "flash1": {"rung": "flash1"},
    "flash2": {"rung": "flash2"},
    "flash2 atomic": {"rung": "flash2", "deterministic": False},
}


class PassTraffic(NamedTuple):
    """What one head of a call moves, array by array.

    Attributes:
        forward: From q, k and v to out and lse.
        backward: From those, out, lse and dout to dq, dk and dv.
    """

    forward: Counts
    backward: Counts


def head_shape(problem: Problem) -> HeadShape:
    """Return the sizes and bounds of one head of a call."""
    p = problem
    return HeadShape(p.seq_q, p.seq_k, p.head_dim, p.value_dim, p.lower, p.upper)


def problem_of(
    name: str, batch_heads: int, seq_q: int, seq_k: int, head_dim: int, **options: Any
) -> Problem:
    """Return the problem of a call in float32 without its arrays.

    Args:
        name: One of RUNGS.
        batch_heads: Of q, k and v.
        seq_q: Query rows.
        seq_k: Key columns.
        head_dim: Of all three.
        options: Of ``make_problem``.
    """
    q, k = (np.broadcast_to(np.float32(0), (batch_heads, n, head_dim)) for n in (seq_q, seq_k))
    return make_problem(q, k, k, **RUNGS[name], **options)


def call_traffic(name: str, problem: Problem, tile: Tile | None = None) -> PassTraffic:
    """Return what one head of a call moves, one of many heads: no sum is divided among blocks.

    Args:
        name: One of RUNGS.
        problem: The checked call, without a mask, dropout or packed sequences.
        tile: (block_q, block_k); the rung's own when None.

    Raises:
        ValueError: If there are no formulas for the name.
    """
    shape = head_shape(problem)
    if name == "naive":
        blocks = naive.product_blocks(tile)
        backward = naive_backward_traffic(shape, blocks, SIZES.row_threads)
        return PassTraffic(naive_traffic(shape, blocks), backward)
    if name == "flash1":
        # Every GPU has the bytes of the table, so that this needs no device.
        own = flash1.paper_tiles(
            SIZES.flash1_bytes // problem.dtype.itemsize, problem.head_dim, problem.value_dim
        )
        first, second = (tile, tile) if tile else own
        return PassTraffic(flash1_traffic(shape, first), flash1_backward_traffic(shape, second))
    if name not in RUNGS:
        raise ValueError(f"there are no formulas for {name!r}; there are for {', '.join(RUNGS)}")
    forward = flash2_traffic(shape, _blocks(pick_layout("forward", problem, tile)))
    if name == "flash2 atomic":
        blocks = _blocks(pick_layout("atomic", problem, tile))
        return PassTraffic(forward, flash2_atomic_traffic(shape, blocks))
    rows, keys = (pick_layout(kernel, problem, tile) for kernel in ("dq", "dkdv"))
    backward = flash2_backward_traffic(shape, _blocks(rows), rows.lanes, _blocks(keys))
    return PassTraffic(forward, backward)


def _blocks(layout: RegisterLayout) -> Tile:
    return layout.block_q, layout.block_k
