"""The calls that the decoding kernel takes, the division of their keys, and its launch."""

from __future__ import annotations

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
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.split_keys import empty_parts, merge_parts
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.memory import row_major_copy
from kernels.cuda.device.per_device import multiprocessors
from kernels.cuda.runtime.arrays import to_device
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32, NAMES
from kernels.runtime.targets import current_device

#: Most rows of a tile.
MOST_ROWS = 128
#: Blocks for which the keys are divided, whatever the device, so that results do not depend on it.
BLOCKS = 132
#: Key tiles of a part where a row must not depend on the call that it is in.
FIXED_PIECE = 16
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
    problem: Problem, batch: int, key_heads: int, group: int, is_fixed: bool
) -> tuple[DecodingLayout, dict[str, int]]:
    """Return the layout of a call, and the numbers of its shape that do not depend on its arrays."""
    rows = min(group * problem.seq_q, max(MOST_ROWS // group, 1) * group)
    layout = layout_of(widths_of(problem), rows)
    tokens = min(problem.seq_q, layout.rows // group)
    row_tiles = ceil_div(problem.seq_q, tokens)
    seen = min(problem.seq_k, problem.upper - problem.lower + tokens)
    tiles = ceil_div(seen, layout.block_k) + (seen < problem.seq_k)
    lines = batch * key_heads * row_tiles
    piece = FIXED_PIECE if is_fixed else _piece(tiles, lines)
    # A window may begin within a part.
    parts = ceil_div(tiles, piece) + (seen < problem.seq_k and tiles > 1)
    return layout, {
        "seq_q": problem.seq_q, "group": group, "key_heads": key_heads,
        "tokens": tokens, "row_tiles": row_tiles, "piece": piece, "parts": parts,
        "items": lines * parts,
    }  # fmt: skip


def forward(
    problem: Problem,
    operands: Operands,
    lengths: Any = None,
    added: int = 0,
    table: Any = None,
    drafts: Any = None,
    is_fixed: bool = False,
) -> None:
    """Fill out, lse and lse_rest.

    Args:
        problem: The call.
        operands: Its arrays.  With a table, k and v are (pages, key heads, page size, dim).
        lengths: (batch,) int32, the keys of each sequence, whose rows are then positions: query ``i`` is
            row length - seq_q + i.  If None, all have ``seq_k`` keys, and the first query is row 0.
        added: The number of keys of each sequence beside those that its length counts.
        table: (batch, pages) int32, the pages of each sequence, or None.
        drafts: (batch, heads, seq_q, seq_q) bool, a mask of the last ``seq_q`` keys, or None.
        is_fixed: Whether a row must have the same bits in every call that has its keys.
    """
    q, k, v = readable(operands.q, operands.k, operands.v)
    is_paged, heads = table is not None, q.shape[1]
    group = _group_of(operands)
    key_heads = heads // group
    if group > 1 and q.strides[1] == 0:
        q = row_major_copy(q)
    layout, numbers = _plan(problem.unseeded, len(q), key_heads, group, is_fixed)
    page = k.shape[2] if is_paged else layout.block_k
    copied, dtype = int(np.gcd(page, layout.block_k)), NAMES[problem.dtype]
    # A tile of q has some tokens of all heads of a group.
    q_map, *q_by = tensor_map(q, numbers["tokens"], dtype, group)
    (k_map, *k_by), (v_map, *v_by) = (tensor_map(x, copied, dtype) for x in (k, v))
    sizes = *numbers.values(), page, copied, added, int(lengths is not None)
    shape = DecodingShape._make((*sizes, *q_by, *k_by, *v_by))
    widths, device = widths_of(problem), current_device()
    has_drafts, features = drafts is not None, problem.features
    # Merging rounds even a single part, and how many there are depends on the capacity.
    is_split = is_fixed or shape.parts > 1
    form = DecodingForm(
        layout, widths, dtype, features, is_paged, has_drafts, problem.scale > 0.0, is_split
    )
    extras = make_extras(problem, operands, layout.rows, layout.block_k)
    if lengths is None:
        lengths = full_lengths(len(q), problem.seq_k, device)
    work = DecodingWork(
        shape, problem.scale, lengths, table if is_paged else 0, drafts if has_drafts else 0, extras
    )
    results = operands.out, operands.lse, operands.lse_rest
    written = empty_parts(shape.parts, operands.out, FLOAT32) if is_split else results
    launch = decoding_kernel(form)[min(multiprocessors(), shape.items), layout.threads]
    launch(q_map, k_map, v_map, as_bits(written[0]), *written[1:], work)
    if is_split:
        merge_parts(written, results, features, extras)
