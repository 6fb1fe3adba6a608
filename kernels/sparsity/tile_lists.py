"""Lists of the tiles that a kernel visits under a block-sparse mask, for tiles of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.sparsity.states import FULL, PARTIAL, BlockGrid, Blocks, Bools, shows

Ints = npt.NDArray[np.int64]
#: Number of patterns that are packed at a time, which bounds the memory they take.
_PACKED_TOGETHER = 64


class TileList(NamedTuple):
    """The tiles that each query tile (or each key tile) visits; all heads are concatenated."""

    #: (heads · lines + 1,) int32: line i has the entries from ``tile_ptr[i]`` up to, but excluding,
    #: ``tile_ptr[i + 1]``.
    tile_ptr: Any
    tile_ids: Any  #: (entries,) int32: indices of the tiles, ascending.
    tile_full: Any  #: (entries,) bool: whether all elements of the tile are visible.


class BlockParts(NamedTuple):
    """The rows (or columns) of the scores, divided wherever a mask block or a tile begins."""

    block: Ints  #: (parts,) the block of each part.
    place: Ints  #: (parts,) the index in ``places`` of its range within that block.
    places: Ints  #: (distinct places, 2): begin and end of a range within a block.
    first: Ints  #: (tiles,) first part of each tile.
    counts: Ints  #: (tiles,) number of parts of each tile.


def cut(total: int, block: int, tile: int) -> BlockParts:
    """Return the parts of ``total`` rows (or columns), for blocks and tiles of these sizes."""
    tiles = np.arange(0, total, tile)
    start = np.union1d(np.arange(0, total, block), tiles)  # (parts,)
    stop = np.append(start[1:], total)[: len(start)]
    number = start // block
    within = np.stack([start, stop], axis=1) - (number * block)[:, None]
    places, place = np.unique(within, axis=0, return_inverse=True)
    first = np.searchsorted(start, tiles)
    counts = np.diff(np.append(first, len(start)))
    return BlockParts(number, place.reshape(-1), places, first, counts)


def make_tile_list(
    blocks: Blocks, grid: BlockGrid, tile_q: int, tile_k: int, by_keys: bool = False
) -> TileList:
    """Return the tile list of a mask, without the tiles that have no visible element.

    With ``by_keys`` it lists the query tiles that visit each key tile.
    """
    rows = cut(grid.seq_q, grid.block_q, tile_q)
    cols = cut(grid.seq_k, grid.block_k, tile_k)
    kept = _spread(blocks.states == FULL, rows, cols)  # (heads, row parts, column parts)
    some, every = kept, kept.copy()
    head, i, j = np.nonzero(_spread(blocks.states >= PARTIAL, rows, cols))
    if len(head):
        pattern = blocks.states[head, rows.block[i], cols.block[j]] - PARTIAL
        where = pattern, rows.place[i], cols.place[j]
        for out, function in ((some, np.any), (every, np.all)):
            out[head, i, j] = _of_places(blocks.patterns, rows, cols, function)[where]
    visited = _gather(some, rows, cols, np.logical_or)  # (heads, query tiles, key tiles)
    full = _gather(every, rows, cols, np.logical_and)
    if by_keys:
        visited, full = visited.swapaxes(1, 2), full.swapaxes(1, 2)
    heads, lines, tiles = visited.shape
    visited = visited.reshape(heads * lines, tiles)
    # TASK 5.9: Compressed rows: running counts, the columns of what is visited, and whether full.
    ptr = np.append(0, np.cumsum(np.count_nonzero(visited, axis=1)))
    return TileList(
        ptr.astype(np.int32),
        np.nonzero(visited)[1].astype(np.int32),
        full.reshape(visited.shape)[visited],
    )
    # END TASK 5.9


def make_tile_patterns(
    blocks: Blocks,
    grid: BlockGrid,
    tiles: tuple[int, int],
    listed: TileList,
    by_keys: bool,
    pack: Callable[[Bools], Any],
) -> tuple[Any, list[Any]]:
    """Return the pattern of each tile of a list of :func:`make_tile_list`, and the packed patterns.

    ``tiles`` are the rows and columns of a tile.  ``pack`` packs patterns, (count, rows, columns)
    bool: True where an element of the tile is visible, False beyond the last row and column.  The
    first result is (entries,) int32, 0 for a tile in which every place is visible, otherwise 1 + the
    index of its pattern; the second is a list of what ``pack`` returned.
    """
    tile_q, tile_k = tiles
    rows, cols = cut(grid.seq_q, grid.block_q, tile_q), cut(grid.seq_k, grid.block_k, tile_k)
    numbers = np.zeros(len(listed.tile_ids), np.int32)
    lines = len(cols.first if by_keys else rows.first)
    line = np.repeat(np.arange(len(listed.tile_ptr) - 1), np.diff(listed.tile_ptr))  # (entries,)
    head, own = line // max(lines, 1), line % max(lines, 1)
    i, j = (listed.tile_ids, own) if by_keys else (own, listed.tile_ids)
    is_short = ((i + 1) * tile_q > grid.seq_q) | ((j + 1) * tile_k > grid.seq_k)
    chosen = np.flatnonzero(~listed.tile_full | is_short)
    if not len(chosen):
        return numbers, []
    row_parts, col_parts = _parts_of(rows, i[chosen]), _parts_of(cols, j[chosen])
    states = blocks.states[  # (chosen, row parts, column parts)
        head[chosen, None, None], rows.block[row_parts][:, :, None], cols.block[col_parts][:, None]
    ]
    # Tiles that agree in these are alike.
    counts = rows.counts[i[chosen], None], cols.counts[j[chosen], None]
    places = rows.place[row_parts], cols.place[col_parts]
    key = np.concatenate([*counts, *places, states.reshape(len(chosen), -1)], axis=1)
    _, first, number = np.unique(key, axis=0, return_index=True, return_inverse=True)
    numbers[chosen] = 1 + number.reshape(-1)
    packed = []
    for start in range(0, len(first), _PACKED_TOGETHER):
        some = chosen[first[start : start + _PACKED_TOGETHER], None, None]
        row = i[some] * tile_q + np.arange(tile_q)[:, None]  # (some, tile_q, 1)
        col = j[some] * tile_k + np.arange(tile_k)  # (some, 1, tile_k)
        inside = (row < grid.seq_q) & (col < grid.seq_k)
        row, col = np.minimum(row, grid.seq_q - 1), np.minimum(col, grid.seq_k - 1)
        packed.append(pack(inside & shows(blocks, grid, head[some], row, col)))
    return numbers, packed


def _parts_of(side: BlockParts, tile: Ints) -> Ints:
    """Return the parts of tiles, (tiles, most parts); the last one repeats where there are fewer."""
    step = np.arange(side.counts.max(initial=1))
    return side.first[tile][:, None] + np.minimum(step, side.counts[tile][:, None] - 1)


def _spread(blocks: Bools, rows: BlockParts, cols: BlockParts) -> Bools:
    """Spread a value per block to its parts, (heads, row parts, column parts)."""
    return blocks.take(rows.block, axis=1).take(cols.block, axis=2)


def _of_places(patterns: Bools, rows: BlockParts, cols: BlockParts, function: Any) -> Bools:
    """Return whether any or all elements of a range are kept, (patterns, row places, column places)."""
    out = np.empty((len(patterns), len(rows.places), len(cols.places)), bool)
    for i, (top, bottom) in enumerate(rows.places):
        for j, (left, right) in enumerate(cols.places):
            out[:, i, j] = function(patterns[:, top:bottom, left:right], axis=(1, 2))
    return out


def _gather(parts: Bools, rows: BlockParts, cols: BlockParts, operation: Any) -> Bools:
    """Reduce (heads, row parts, column parts) to (heads, query tiles, key tiles)."""
    for axis, side in ((1, rows), (2, cols)):
        out = parts.take(side.first, axis=axis)
        for step in range(1, int(side.counts.max(initial=0))):
            # A tile with fewer parts repeats its last one.
            next_part = side.first + np.minimum(step, side.counts - 1)
            operation(out, parts.take(next_part, axis=axis), out=out)
        parts = out
    return parts
