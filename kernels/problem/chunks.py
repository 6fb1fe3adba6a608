"""Attention within chunks of positions, as bounds, a block mask or a ``mask_mod``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.scores.mods import as_mask_mod
from kernels.sparsity.block_mask import BlockMask
from kernels.sparsity.states import FULL, HIDDEN, PARTIAL, BlockGrid

#: Rows and columns of a block of the mask, where the call has no block mask of its own.
BLOCK = (128, 64)


def within_chunks(chunk: int, offset: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem whose rows see only the columns of their own chunk.

    Row ``row`` is at the position ``row + offset``, and column ``col`` at ``col``; position p is in
    chunk p // chunk.  Packed sequences with a ``mask_mod`` raise a ValueError.
    """
    seq_q, seq_k, lower, upper = (fields[name] for name in ("seq_q", "seq_k", "lower", "upper"))
    if fields["sequences"] is not None:
        if fields["mask_mod"] is not None:
            raise ValueError(
                f"packed sequences support chunk_size={chunk} or a mask_mod, but not both; leave "
                f"chunk_size out, and let mask_mod test (row + {offset}) // {chunk} == col // {chunk} too"
            )
        lower = max(lower, min(offset - chunk + 1, seq_k))
        upper = min(upper, max(offset + chunk - 1, -seq_q))
        return {**fields, "lower": lower, "upper": upper, "mask_mod": _same_chunk(chunk, offset)}
    if seq_q == 1:  # as in decoding: bounds are enough
        first = offset // chunk * chunk
        lower, upper = max(lower, min(first, seq_k)), min(upper, max(first + chunk - 1, -1))
        return {**fields, "lower": lower, "upper": upper}
    if offset >= 0 and max(offset + seq_q, seq_k) <= chunk:
        return fields
    return {**fields, "block_mask": _masked(fields["block_mask"], seq_q, seq_k, chunk, offset)}


@lru_cache(maxsize=64)
def _same_chunk(chunk: int, offset: int) -> Callable[..., Any] | None:
    def same_chunk(batch: int, head: int, row: int, col: int) -> bool:
        return (row + offset) // chunk == col // chunk

    return as_mask_mod(same_chunk)


@lru_cache(maxsize=64)
def _masked(mask: BlockMask | None, seq_q: int, seq_k: int, chunk: int, offset: int) -> BlockMask:
    """Return the block mask of chunks, combined with another one."""
    grid = BlockGrid(seq_q, seq_k, *(BLOCK if mask is None else (mask.block_q, mask.block_k)))
    # The chunk of each row or column of a block: (query blocks, block_q) and (key blocks, block_k).
    rows, cols = (
        (start.reshape(-1, 1) + np.arange(size) + shift) // chunk
        for start, size, shift in zip(grid.starts, grid.block, (offset, 0), strict=True)
    )
    has_some = (rows[:, :1] <= cols[:, -1]) & (cols[:, 0] <= rows[:, -1:])
    is_one = (rows[:, :1] == rows[:, -1:]) & (cols[:, 0] == cols[:, -1])
    states = np.where(has_some, FULL, HIDDEN)  # (query blocks, key blocks)
    i, j = np.nonzero(has_some & ~is_one)
    states[i, j] = PARTIAL + np.arange(len(i))
    patterns = rows[i][:, :, None] == cols[j][:, None, :]
    chunks = BlockMask(states, seq_q, seq_k, grid.block, patterns)
    return chunks if mask is None else mask & chunks
