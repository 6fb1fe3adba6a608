"""The rung flash2_split: the kernels of flash2_mma on float32 operands, scaled and split before.

What flash2 left on the table: tensor cores, which multiply float16 but not float32.  Three products of
float16 terms are as accurate as one of float32 (``products``), and splitting an operand takes one pass over
it (``operands``).  Measured on an H200 at N = 16,384, d = 64: 124 TFLOP/s forward and 107 backward by
atomics; flash2 reaches 30 and 27.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kernels.common.philox import keep_scale
from kernels.cuda.attention import tensor_cores
from kernels.cuda.attention.flash2 import backward as flash2_backward
from kernels.cuda.attention.flash2.forward import with_own_rows
from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.launch import (
    CAPABILITY,
    Layouts,
    MmaCall,
    forward_layout,
    launch_backward,
    launch_forward,
    tensors_of,
    tile_by_keys,
)
from kernels.cuda.attention.flash2_mma.tiles import (
    HALF,
    ROWS,
    MmaKeyLayout,
    MmaLayout,
    MmaRoleLayout,
)
from kernels.cuda.attention.flash2_split.arithmetic import TF32, TOP, TWO_TERMS, SplitUnits
from kernels.cuda.attention.flash2_split.operands import first_terms, split_operands
from kernels.cuda.attention.register_tiles import widths_in
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.runtime.arrays import reshaped
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import current_device

_KEYS_256 = (
    MmaKeyLayout(16, 64, 4, 16, step=128, parts=2),
    MmaKeyLayout(16, 16, 1, 16, step=64, parts=2),
)
#: Layouts for two terms: tiles take twice the shared memory, and products three times as long.
LAYOUTS = Layouts(
    forward=(
        {
            64: (MmaLayout(128, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
            128: (MmaLayout(64, 32, 4, resident=2),),
            256: (MmaLayout(128, 16, 8), MmaLayout(64, 16, 4), MmaLayout(32, 16, 2)),
        },
        {
            64: (MmaLayout(64, 64, 4, resident=2),),
            128: (MmaLayout(64, 32, 4, resident=2),),
            256: (MmaLayout(64, 16, 4), MmaLayout(32, 16, 2)),
        },
    ),
    by_rows=(
        {
            64: (MmaLayout(64, 32, 4, resident=2),),
            128: (MmaLayout(128, 32, 8), MmaLayout(32, 32, 2)),
            256: (MmaLayout(64, 16, 4), MmaLayout(16, 16, 1)),
        },
    ),
    by_keys=(
        {
            64: (
                MmaKeyLayout(64, 128, 8, 32, step=32),
                MmaKeyLayout(32, 64, 4, 32, resident=2, step=32),
            ),
            128: (
                MmaKeyLayout(32, 128, 8, 32, step=64),
                MmaKeyLayout(16, 32, 2, 16, step=32),
            ),
            256: (MmaRoleLayout(16, 64, 8, 16, step=128), *_KEYS_256),
        },
        {
            64: (MmaKeyLayout(32, 64, 4, 16, resident=2, step=32),),
            128: (
                MmaKeyLayout(32, 128, 8, 16, step=64),
                MmaKeyLayout(16, 32, 2, 16, step=32),
            ),
            256: _KEYS_256,
        },
    ),
)
#: Query rows, and multiplications of one product, from which splitting into terms pays.
LEAST_ROWS, LEAST_WORK = 128, 1 << 28


def _kind(problem: Problem) -> tuple[Arithmetic, Layouts]:
    """Return arithmetic and layouts; numbers of one term have the size of those of flash2_mma."""
    if problem.precision == "tf32":
        return TF32, flash2_mma.LAYOUTS
    return TWO_TERMS, LAYOUTS


@lru_cache(maxsize=1024)
def _layout(problem: Problem, device: int) -> MmaLayout:
    """Return tiles and warps of the forward kernel on a device."""
    numbers, layouts = _kind(problem)
    # Scaled probabilities are as large as 16 bits hold: maxima must not grow.
    return replace(forward_layout(problem, layouts, numbers.size), patience=0)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = _layout(problem.unseeded, current_device())
    return layout.block_q, layout.block_k


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel by key columns, where shared memory is large."""
    return tile_by_keys(_kind(problem)[1], problem)


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    _, layouts = _kind(problem)
    if (reason := tensor_cores.why_not_here(problem, tile, CAPABILITY, layouts.widest)) is not None:
        return reason
    work = math.prod(problem.scores_shape) * max(problem.head_dim, problem.value_dim)
    if problem.rung == "auto" and (problem.seq_q < LEAST_ROWS or work < LEAST_WORK):
        return "so small a call of float32 takes less time on CUDA cores, which need not split it"
    return None


def _call(
    problem: Problem, operands: Operands, results: tuple[Any, ...], delta: Any = None
) -> MmaCall:
    """Return the common arguments of the kernels; the forward kernel splits q itself."""
    tensors, (numbers, _) = tensors_of(operands), _kind(problem)
    (head, value), terms = widths_in(problem, ROWS), numbers.size // HALF
    scale = keep_scale(problem.dropout_p)
    top = float(TOP - math.ceil(math.log2(scale)))
    keys = tensor_cores.keys_in_bounds(problem)
    rows = tensor_cores.rows_in_bounds(problem)
    if delta is None:
        q, k, v = tensors
        splits = split_operands((k, v, q), (head, value), terms, (keys, keys, rows))
        bits = q, *(first_terms(one, terms) for one in splits[:2])
        units = SplitUnits(problem.scale, top, scale, *(one.unit for one in splits))
        vectors = are_vectors(*results, q)
        return MmaCall(problem, operands, bits, numbers, vectors, units)
    q, k, v, dout = tensors
    arrays = k, v, q, dout, reshaped(delta, (*delta.shape, 1))
    counting = keys, keys, rows, rows, rows
    splits = split_operands(arrays, (head, value, head, value), terms, counting, has_norms=True)
    k, v, q, dout = (first_terms(one, terms) for one in splits[:4])
    of_heads = [*(one.unit for one in splits), splits[1].norm, splits[3].norm]
    units = SplitUnits(problem.scale, top, scale, *of_heads)
    vectors = are_vectors(*results)
    return MmaCall(problem, operands, (q, k, v, dout), numbers, vectors, units, delta)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest; allocates the terms of k and v."""
    layout = _layout(problem.unseeded, current_device())
    launch_forward(_call(problem, operands, (operands.out,)), layout, operands.out)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; allocates terms, delta, and sums of dq if not deterministic."""
    if problem.score_mod is not None and not problem.score_mod.only_adds:
        # Its derivative may be anything, and dS has to be bounded before it is scaled to float16.
        operands = with_own_rows(problem, operands)
        flash2_backward.backward(problem, flash2_backward.tile(problem), operands)
        return
    numbers, layouts = _kind(problem)
    launch_backward(problem, operands, layouts, numbers, _call)
