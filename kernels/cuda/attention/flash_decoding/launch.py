"""The calls that the decoding kernel takes, the division of their keys, and its launch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash3_wgmma.launch_common import readable, tensor_map, widths_of
from kernels.cuda.attention.flash_decoding.kernel import decoding_kernel
from kernels.cuda.attention.flash_decoding.layout import (
    DecodingForm,
    DecodingLayout,
    DecodingShape,
    DecodingWork,
    layout_of,
)
from kernels.cuda.attention.options.cached_rows import CachedRows
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.split_keys import (
    FIXED_PIECE,
    empty_parts,
    merge_parts,
    parts_in_cache,
    tiles_in_cache,
)
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.memory import DeviceMemory, row_major_copy
from kernels.cuda.device.per_device import multiprocessors
from kernels.cuda.runtime.arrays import to_device
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import current_device
from kernels.scores.program import CacheForm

#: Most rows of a tile.
MOST_ROWS = 128
#: Blocks for which the keys are divided, whatever the device, so that results do not depend on it.
BLOCKS = 132
#: What an item costs beside its tiles, and what the kernel that merges parts costs, in key tiles.
ITEM_COST, MERGE_COST = 0.5, 2.0


def pays(problem: Problem, operands: Operands) -> bool:
    """Tell whether a call has few rows and many keys, and no options of training."""
    if problem.dropout_p or problem.block_mask is not None or problem.sequences is not None:
        return False
    if problem.mask_mod is not None or problem.seq_k < 256:
        return False
    return 0 < _group_of(operands) * problem.seq_q <= MOST_ROWS


def _group_of(operands: Operands) -> int:
    """Return the number of heads of q that share a head of k and v."""
    heads, key_heads = operands.q.shape[1], operands.k.shape[1]
    is_shared = key_heads == heads and operands.k.strides[1] == operands.v.strides[1] == 0
    return heads if is_shared else heads // key_heads


def _piece(tiles: int, lines: int) -> int:
    """Return the key tiles of a part: the number with which ``BLOCKS`` blocks end first."""

    def cost(parts: int) -> float:
        waves = ceil_div(lines * parts, BLOCKS)
        return waves * (ceil_div(tiles, parts) + ITEM_COST) + MERGE_COST * (parts > 1)

    return ceil_div(tiles, min(range(1, min(tiles, 2 * BLOCKS) + 1), key=cost))


@lru_cache(maxsize=64)
def full_lengths(batch: int, seq_k: int, device: int) -> Any:
    """Return the lengths of sequences that all have ``seq_k`` keys."""
    return to_device(np.full(batch, seq_k, np.int32))


@lru_cache(maxsize=1024)
def _plan(
    problem: Problem, batch: int, key_heads: int, group: int
) -> tuple[DecodingLayout, dict[str, int]]:
    """Return the layout of a call, and the numbers of its shape that do not depend on its arrays."""
    rows = min(group * problem.seq_q, max(MOST_ROWS // group, 1) * group)
    layout = layout_of(widths_of(problem), rows)
    tokens = min(problem.seq_q, layout.rows // group)
    row_tiles = ceil_div(problem.seq_q, tokens)
    tiles = tiles_in_cache(problem, tokens, layout.block_k)
    lines = batch * key_heads * row_tiles
    piece = FIXED_PIECE if problem.features.is_fixed else _piece(tiles, lines)
    parts = parts_in_cache(problem, tiles, layout.block_k, piece)
    return layout, {
        "seq_q": problem.seq_q, "group": group, "key_heads": key_heads,
        "tokens": tokens, "row_tiles": row_tiles, "piece": piece, "parts": parts,
        "items": lines * parts,
    }  # fmt: skip


def forward(problem: Problem, operands: Operands) -> None:
    """Fill out, lse and lse_rest of a call on a cache, or of one in which the first query is row 0."""
    by_position = problem.cache is not None
    if not by_position:  # all sequences have ``seq_k`` keys
        lengths = full_lengths(len(operands.q), problem.seq_k, current_device())
        problem = replace(problem, cache=CacheForm(is_paged=False, is_fixed=False))
        operands = operands.having(cache=CachedRows(lengths))
    if problem.mask == "float":  # the kernel reads float32
        operands = operands.having(mask=DeviceMemory().convert(operands.mask, FLOAT32))
    q, k, v = readable(operands.q, operands.k, operands.v)
    heads, features = q.shape[1], problem.features
    group = _group_of(operands)
    key_heads = heads // group
    if group > 1 and q.strides[1] == 0:
        q = row_major_copy(q)
    layout, numbers = _plan(problem.unseeded, len(q), key_heads, group)
    page = k.shape[2] if features.is_paged else layout.block_k
    copied, dtype = int(np.gcd(page, layout.block_k)), NAMES[problem.dtype]
    # A tile of q has some tokens of all heads of a group.
    q_map, *q_by = tensor_map(q, numbers["tokens"], dtype, group)
    (k_map, *k_by), (v_map, *v_by) = (tensor_map(x, copied, dtype) for x in (k, v))
    sizes = *numbers.values(), page, copied, int(by_position)
    shape = DecodingShape._make((*sizes, *q_by, *k_by, *v_by))
    # Merging rounds even a single part, and how many there are depends on the capacity.
    is_split, is_positive = features.is_fixed or shape.parts > 1, problem.scale > 0.0
    form = DecodingForm(layout, widths_of(problem), dtype, features, is_positive, is_split)
    extras = make_extras(problem, operands, layout.rows, layout.block_k)
    work = DecodingWork(shape, problem.scale, extras)
    results = operands.out, operands.lse, operands.lse_rest
    written = empty_parts(shape.parts, operands.out, FLOAT32) if is_split else results
    launch = decoding_kernel(form)[min(multiprocessors(), shape.items), layout.threads]
    launch(q_map, k_map, v_map, as_bits(written[0]), *written[1:], work)
    if is_split:
        merge_parts(written, results, features, extras)
