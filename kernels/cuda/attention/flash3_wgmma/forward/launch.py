"""The rung flash3_wgmma: the calls that it supports, and the arguments of its launches."""

from __future__ import annotations

import math
from functools import lru_cache

from kernels.cuda.attention import tensor_cores
from kernels.cuda.attention.flash3_wgmma.forward.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.launch_common import (
    WIDEST,
    read_maps,
    readable,
    tensor_map,
    widths_of,
    with_mask_bits,
    with_scale,
    within_blocks,
    work_of,
)
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Widths, layout_of
from kernels.cuda.attention.flash_decoding import launch as flash_decoding
from kernels.cuda.attention.tensor_cores import lists_whole_tiles
from kernels.cuda.device.half import as_bits
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import reshaped
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import NAMES
from kernels.scores.program import Features

CAPABILITY = (9, 0)


@lru_cache(maxsize=1024)
def layout_for(problem: Problem) -> tuple[ForwardLayout, Widths]:
    """Return the layout for a problem, and the widths its kernel is compiled for."""
    widths = widths_of(problem)
    return layout_of(widths, not problem.sinkless.is_plain), widths


@lru_cache(maxsize=64)
def features_for(problem: Problem) -> Features:
    """Return the options of the kernel for a problem, without element tests in whole tiles."""
    problem = within_blocks(problem)
    features, (layout, _) = with_scale(problem.features, problem), layout_for(problem)
    tiles = layout.block_q, layout.block_k, False
    return features._replace(whole_tiles=lists_whole_tiles(problem, tiles))


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k)."""
    layout, _ = layout_for(problem.unseeded)
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    if problem.head_dim % 8 or problem.value_dim % 8:
        dims = problem.head_dim, problem.value_dim
        return f"its copies need a head_dim and a value dim that are multiples of 8, got {dims}"
    if problem.scale <= 0.0:
        return f"it takes a positive scale, got {problem.scale}"
    if problem.features.moved:
        return "it draws the dropout bits of whole attentions only"
    return tensor_cores.why_not_here(problem, tile, CAPABILITY, WIDEST)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest."""
    if flash_decoding.pays(problem, operands):
        return flash_decoding.forward(problem, operands)
    problem = within_blocks(problem)
    problem, operands = with_mask_bits(problem, operands)
    # Copies live until the kernel is launched.
    q, k, v = readable(operands.q, operands.k, operands.v)
    (layout, widths), dtype = layout_for(problem.unseeded), NAMES[problem.dtype]
    features = features_for(problem.unseeded)
    tiles = (q, layout.block_q), (k, layout.block_k), (v, layout.block_k)
    maps, differs = read_maps(tiles, dtype)
    out, lead = operands.out, operands.out.shape[:2]
    own = operands.lse, operands.lse_rest
    lse, rest = (reshaped(array, (math.prod(lead), problem.seq_q)) for array in own)
    # Packed sequences have tiles that end within the copy engine's box.
    out = as_bits(out) if features.packed else tensor_map(out, ROWS, dtype)[0]
    bytes_a_head = 2 * problem.seq_k * (problem.head_dim + problem.value_dim)
    blocks, work = work_of(problem, operands, layout, differs, bytes_a_head)
    forward_kernel(layout, widths, dtype, features)[blocks, layout.threads](
        *maps, out, lse, rest, work
    )
