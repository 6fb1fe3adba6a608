"""Attention within chunks of positions, as bounds, a block mask or a ``mask_mod`` that every rung knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.scores.mods import as_mask_mod
from kernels.sparsity.block_mask import BlockMask
from kernels.sparsity.states import FULL, PARTIAL, Grid

#: Rows and columns of a block of the mask, where the call has no block mask of its own.
BLOCK = (128, 64)


def within_chunks(chunk: int, offset: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem whose rows see only the columns of their own chunk.

    Row ``row`` is at the position ``row + offset``, and column ``col`` at ``col``; position p is in chunk
    p // chunk.

    Args:
        chunk: Positions of a chunk.
        offset: The option ``causal_offset``.
        fields: The fields of a ``Problem`` with all other options.

    Raises:
        ValueError: If the call has packed sequences and a ``mask_mod``.
    """
    seq_q, seq_k, lower, upper = (fields[name] for name in ("seq_q", "seq_k", "lower", "upper"))
    if offset >= 0 and max(offset + seq_q, seq_k) <= chunk:
        return fields
    if offset // chunk * chunk >= seq_k or offset + seq_q <= 0:  # no row has a column in its chunk
        return {**fields, "lower": seq_k}
    if fields["sequences"] is not None and fields["mask_mod"] is not None:
        raise ValueError(
            f"packed sequences support chunk_size={chunk} or a mask_mod, but not both; leave chunk_size "
            f"out, and let mask_mod test (row + {offset}) // {chunk} == col // {chunk} too"
        )
    if (
        excess := chunk - seq_q - seq_k
    ) > 0:  # keep integers small; only the first chunk has columns
        chunk, offset = chunk - excess, offset - excess if offset > 0 else offset
    if fields["sequences"] is not None:
        bounds = max(lower, offset - chunk + 1), min(upper, offset + chunk - 1)
        mod = _same_chunk(chunk, offset)
        return {**fields, "lower": bounds[0], "upper": bounds[1], "mask_mod": mod}
    if seq_q == 1:  # as in decoding: bounds are enough
        first = offset // chunk * chunk
        return {**fields, "lower": max(lower, first), "upper": min(upper, first + chunk - 1)}
    return {**fields, "block_mask": _masked(fields["block_mask"], seq_q, seq_k, chunk, offset)}


@lru_cache(maxsize=64)
def _same_chunk(chunk: int, offset: int) -> Callable[..., Any] | None:
    def same_chunk(batch: int, head: int, row: int, col: int) -> bool:
        return (row + offset) // chunk == col // chunk

    return as_mask_mod(same_chunk)


@lru_cache(maxsize=64)
def _masked(mask: BlockMask | None, seq_q: int, seq_k: int, chunk: int, offset: int) -> BlockMask:
    """Return the block mask of chunks, combined with another one."""
    grid = Grid(seq_q, seq_k, *(BLOCK if mask is None else (mask.block_q, mask.block_k)))
    row, col = grid.starts
    # The chunks of the first and of the last element of each block.
    row_chunks = [
        (row + offset) // chunk,
        (np.minimum(row + grid.block_q, seq_q) - 1 + offset) // chunk,
    ]
    col_chunks = [col // chunk, (np.minimum(col + grid.block_k, seq_k) - 1) // chunk]
    states = (row_chunks[0] <= col_chunks[1]) & (col_chunks[0] <= row_chunks[1])
    states = states.astype(np.int32)  # (query blocks, key blocks)
    is_one = (row_chunks[0] == row_chunks[1]) & (col_chunks[0] == col_chunks[1])
    partial = (states == FULL) & ~is_one
    # A pattern depends on where the first chunks begin, and on how many lie between them.
    places = (
        row + offset - row_chunks[0] * chunk,
        col - col_chunks[0] * chunk,
        row_chunks[0] - col_chunks[0],
    )
    kinds, number = np.unique(
        np.stack([np.broadcast_to(x, states.shape)[partial] for x in places]),
        axis=1, return_inverse=True,
    )  # fmt: skip
    states[partial] = PARTIAL + number.reshape(-1)
    in_row, in_col, between = kinds[:, :, None, None]  # (patterns, 1, 1) each
    in_row = (in_row + np.arange(grid.block_q)[:, None]) // chunk + between
    patterns = in_row == (in_col + np.arange(grid.block_k)) // chunk
    chunks = BlockMask(states, seq_q, seq_k, grid.block, patterns)
    return chunks if mask is None else mask & chunks
