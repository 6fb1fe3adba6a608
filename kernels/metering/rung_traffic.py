"""The memory traffic of a CUDA rung by the formulas, and counted, for the tiles of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kernels import launch
from kernels.cuda.attention import flash1, naive, split_keys
from kernels.cuda.attention.register_tiles import RegisterLayout, pick_layout
from kernels.cuda.matmul import cuda_cores
from kernels.cuda.runtime.arrays import to_device
from kernels.cuda.runtime.sizes import SIZES
from kernels.metering.io_meter import IOMeter
from kernels.problem.operands import make_operands
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
#: The variants with formulas: their rung and further options.
RUNGS: dict[str, dict[str, Any]] = {
    "naive": {"rung": "naive"},
    "flash1": {"rung": "flash1"},
    "flash2": {"rung": "flash2"},
    "flash2 atomic": {"rung": "flash2", "deterministic": False},
}


class PassTraffic(NamedTuple):
    """The memory traffic of one head of a call, by array."""

    forward: Counts  #: The forward pass.
    backward: Counts  #: The backward pass.


def head_shape(problem: Problem) -> HeadShape:
    """Return the sizes and bounds of one head of a call."""
    p = problem
    return HeadShape(p.seq_q, p.seq_k, p.head_dim, p.value_dim, p.lower, p.upper)


def problem_of(
    name: str, batch_heads: int, seq_q: int, seq_k: int, head_dim: int, **options: Any
) -> Problem:
    """Return the problem of a call of one of RUNGS in float32 for (batch, heads), without its arrays."""
    q, k = (np.broadcast_to(np.float32(0), (batch_heads, n, head_dim)) for n in (seq_q, seq_k))
    return make_problem(q, k, k, **RUNGS[name], **options)


def call_traffic(name: str, problem: Problem, tile: Tile | None = None) -> PassTraffic:
    """Return the traffic of one of many heads of a call, where sums are not divided among blocks.

    The name is one of RUNGS, or a ValueError is raised, and the call has no mask, dropout or packed
    sequences.  A tile of None is the rung's default.
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


@contextmanager
def one_of_many_heads() -> Iterator[None]:
    """Make kernels compute one head as they compute many, without dividing sums among blocks."""
    sizes, merged = cuda_cores.SIZES, split_keys.SIZES
    cuda_cores.SIZES = replace(sizes, product_blocks=0)
    split_keys.SIZES = replace(merged, split_blocks=0)
    try:
        yield
    finally:
        cuda_cores.SIZES, split_keys.SIZES = sizes, merged


def metered(
    name: str, shape: HeadShape, tile: Tile | None = None, seed: int = 0, **options: Any
) -> tuple[PassTraffic, PassTraffic]:
    """Run one head forward and backward on the emulated GPU; return its measured and expected traffic.

    The name is one of RUNGS, and the bounds of the head come from the options: is_causal,
    causal_offset, window_size.
    """
    rng = np.random.default_rng(seed)
    keys, values = (shape.seq_k, shape.head_dim), (shape.seq_k, shape.value_dim)
    sizes = (shape.seq_q, shape.head_dim), keys, values, (shape.seq_q, shape.value_dim)
    q, k, v, dout = (to_device(rng.standard_normal((1, *x), dtype=np.float32)) for x in sizes)
    problem = make_problem(q, k, v, **RUNGS[name], **options)
    operands = make_operands(launch.CUDA.memory, problem, q, k, v)
    with one_of_many_heads():
        with IOMeter() as meter:
            out, lse, rest = launch.forward(launch.CUDA, problem, operands, tile)
        forward = meter.counts(q=q, k=k, v=v, out=out, lse=lse)
        operands = operands.having(dout=dout, out=out, lse=lse, lse_rest=rest)
        with IOMeter() as meter:
            dq, dk, dv, *_ = launch.backward(launch.CUDA, problem, operands, tile)
        backward = meter.counts(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv)
    return PassTraffic(forward, backward), call_traffic(name, problem, tile)
