"""The gradients of arrays that scores depend on, such as a mask: dS, summed where one element is read.

Computes   dmask, and the gradient of the table that a ``score_mod`` reads.
Source     FlashAttention-2, Algorithm 2, lines 8-14: dmask = dS, before the derivatives of the earlier
           steps of a score.
Work item  one tile of the mask's own elements; S and dP are recomputed for every batch, head, row and
           column that reads them.  Small masks first get a result for each (batch, head), so that all
           threads have work.
One lane   one key, as in the backward pass.
Buffers    per work item, in the first- and second-level cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.geometry import PLAIN
from kernels.cpu.attention.call_record import CallOptions
from kernels.cpu.attention.flash2 import with_scores_by_tiles
from kernels.cpu.attention.gradient_tiles import (
    ScorePiece,
    fill_gradient,
    fill_scores,
    is_bounded,
    query_rows,
)
from kernels.cpu.attention.mods import table_pass_address, why_not_compiled
from kernels.cpu.attention.tile_scores import TilePosition, blocks_hide, rows_of, view
from kernels.cpu.attention.tiles import (
    ceil_div,
    empty_tile,
    lanes_for,
    pack_rows,
    pack_transposed,
    zero_tile,
)
from kernels.cpu.runtime.function_pointers import call
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.reference import attention as reference
from kernels.runtime.jit import FASTMATH, njit_cached

#: (block_q, block_k).
TILE = (64, 64)
#: Minimum number of tiles of a mask that are enough work items.
FEW_TILES = 16
#: Maximum number of work items of a table's gradient, and of the elements of their sums together.
PARTS, MOST_SUMS = 16, 1 << 22


@njit(fastmath=FASTMATH)
def add_repeated(source, width, target):
    """Add the valid lanes of a tile to (rows or 1, width or 1) elements, summed where these are one."""
    for r in range(source.shape[0]):
        row, own = source[r], target[r if target.shape[0] > 1 else 0]  # (lanes,), (width or 1,)
        if target.shape[1] > 1:
            for lane in range(width):
                own[lane] += row[lane]
        else:
            total = own[0]
            for lane in range(width):
                total += row[lane]
            own[0] = total


@njit(fastmath=FASTMATH)
def tile_range(tile, block, own, total):
    """Return the start and end of a tile of mask elements among ``total`` rows or columns."""
    return (0, total) if own == 1 else (tile * block, min((tile + 1) * block, total))


class Columns(NamedTuple):
    """Buffers for the tiles of some key columns, and the loaded keys and values of the current tile."""

    k_t: Any  #: (head_dim, lanes).
    v_t: Any  #: (value_dim, lanes).
    q: Any  #: (block_q, head_dim), times the scale.
    pieces: Any  #: A ``ScorePiece`` of (block_q, lanes).


@njit(fastmath=FASTMATH)
def make_columns(o, cols, keeps_scores, real):
    """Return the buffers for tiles of so many columns; ``keeps_scores`` as in ``CallOptions``."""
    size, lanes = o.block_q, lanes_for(cols)
    return Columns(
        empty_tile(o.q.shape[3], lanes, real), empty_tile(o.v.shape[3], lanes, real),
        empty_tile(size, o.q.shape[3], real),
        ScorePiece(
            empty_tile(size, lanes, real), empty_tile(size, lanes, real),
            zero_tile(size if keeps_scores else 0, lanes, real),
            zero_tile(size if o.keep_pass != 0 else 0, lanes, real),
        ),
    )  # fmt: skip


@njit(fastmath=FASTMATH)
def load_columns(o, columns, b, h, col, cols, real):
    """Load the keys and values of a tile."""
    pack_transposed(rows_of(o.k, b, h, col, cols, real), real(1), columns.k_t)
    pack_transposed(rows_of(o.v, b, h, col, cols, real), real(1), columns.v_t)


@njit(fastmath=FASTMATH)
def fill_ds(settings, columns, place, rows, real):
    """Return the tile at a ``TilePosition`` with its dS, a ``ScorePiece``; no rows if all is masked."""
    o = settings[0]
    row, col, cols, lower, upper = place.line, place.lane, place.width, o.lower, o.upper
    s, dp, slope, z = columns.pieces
    if row + lower > col + cols - 1 or row + rows - 1 + upper < col or blocks_hide(o, place, rows):
        rows = 0  # all columns are masked
    piece = ScorePiece(s[:rows], dp[:rows], slope[:rows], z[:rows])
    if rows == 0:
        return piece
    own = query_rows(o, place.batch, place.head, row, rows, real)
    pack_rows(own.q, real(o.scale), columns.q[:rows])
    bounded = is_bounded(row, row + rows, col, col + cols, lower, upper)
    fill_scores(piece, columns.q[:rows], columns.k_t, settings, place, bounded)
    fill_gradient(piece, own, columns.v_t, settings, place)
    return piece


def make_mask_gradient(real):
    """Return the kernel for one dtype."""

    @njit_cached(fastmath=FASTMATH)
    def mask_item(settings, item):
        """Fill one tile of dmask; ``item`` numbers its (batch, head, tile of rows, tile of columns).

        dmask is ``out`` of the record: (batches, heads, rows, columns), each its own number or 1,
        or with a batch for each of the call's.
        """
        o = settings[0]
        size = o.out.shape
        row_tiles, col_tiles = ceil_div(size[2], o.block_q), ceil_div(size[3], o.block_k)
        col_tile, rest = item % col_tiles, item // col_tiles
        row_tile, flat_mask = rest % row_tiles, rest // row_tiles
        batch_own, head_own = flat_mask // size[1], flat_mask % size[1]
        batch, heads, block_q, block_k = o.q.shape[0], o.q.shape[1], o.block_q, o.block_k
        row_start, row_stop = tile_range(row_tile, block_q, size[2], o.q.shape[2])
        col_start, col_stop = tile_range(col_tile, block_k, size[3], o.k.shape[2])
        total = np.zeros((min(size[2], block_q), min(size[3], block_k)), real)
        columns = make_columns(o, min(block_k, col_stop - col_start), False, real)
        number = view(o.mask_batch, np.int64)
        for flat in range(batch * heads):
            b, h = flat // heads, flat % heads
            mask_batch = b if size[0] == batch else number[b, 0, 0, 0]
            if mask_batch != batch_own or (size[1] > 1 and h != head_own):
                continue
            for col in range(col_start, col_stop, block_k):
                cols = min(block_k, col_stop - col)
                load_columns(o, columns, b, h, col, cols, real)
                for row in range(row_start, row_stop, block_q):
                    place = TilePosition(b, h, flat, np.int64(0), row, col, cols, np.int64(1))
                    piece = fill_ds(settings, columns, place, min(block_q, row_stop - row), real)
                    add_repeated(piece.dp, cols, total)  # dS, in the memory of dP
        out = rows_of(o.out, batch_own, head_own, row_tile * block_q, total.shape[0], real)
        for r in range(min(total.shape[0], size[2] - row_tile * block_q)):
            for c in range(min(total.shape[1], size[3] - col_tile * block_k)):
                out[r, col_tile * block_k + c] = total[r, c]

    return mask_item


def make_table_gradient(real):
    """Return the kernel for one dtype."""

    @njit_cached(fastmath=FASTMATH)
    def table_item(settings, item):
        """Add every ``parts``-th tile of columns to the item's sum, (n, m, l), in ``out`` of the record."""
        o = settings[0]
        heads, seq_q, seq_k, block_k = o.q.shape[1], o.q.shape[2], o.k.shape[2], o.block_k
        col_tiles, total = ceil_div(seq_k, block_k), view(o.out, np.float64)[item]
        columns = make_columns(o, block_k, True, real)
        for number in range(item, o.q.shape[0] * heads * col_tiles, o.parts):
            flat, col = number // col_tiles, number % col_tiles * block_k
            b, h, cols = flat // heads, flat % heads, min(block_k, seq_k - col)
            load_columns(o, columns, b, h, col, cols, real)
            for row in range(0, seq_q, o.block_q):
                place = TilePosition(b, h, flat, np.int64(0), row, col, cols, np.int64(1))
                piece = fill_ds(settings, columns, place, min(o.block_q, seq_q - row), real)
                call(o.table_pass, (
                    piece.dp, piece.slope, total, flat // o.heads, flat % o.heads, row, col, cols,
                    o.by_keys, settings,
                ))  # fmt: skip

    return table_item


def table_gradient(problem: Problem, operands: Operands, dtable: Any) -> None:
    """Fill dtable, the gradient of the table that a ``score_mod`` reads; see ``Target.table_gradient``.

    Each of ``parts`` work items, whose number does not depend on the threads, has its own sum in float64.
    """
    table_pass = table_pass_address(problem)
    if not table_pass:
        reference.table_gradient(problem, operands, dtable)
        return
    o = with_scores_by_tiles(problem, operands)
    tiles = o.q.shape[0] * o.q.shape[1] * PLAIN.ceil_div(problem.seq_k, TILE[1])
    parts = max(1, min(PARTS, tiles, MOST_SUMS // max(dtable.size, 1)))
    sums = np.zeros((parts, *dtable.shape, *[1] * (3 - dtable.ndim)))
    options = CallOptions(problem, o, TILE, by_keys=True, listed=False, keeps_scores=True)
    options.settings["parts"] = parts
    options.settings["table_pass"] = table_pass
    _run(options, o, sums, make_table_gradient, parts if dtable.size else 0)
    dtable[...] = sums.sum(axis=0).reshape(dtable.shape)


def _run(options: CallOptions, o: Operands, out: Any, make: Any, items: int) -> None:
    """Run a kernel of gradients of scores, which fills ``out``."""
    delta = np.einsum("bhrd,bhrd->bhr", o.dout, o.out)
    delta = delta if o.dlse is None else delta - o.dlse
    options.name(
        q=o.q, k=o.k, v=o.v, dout=o.dout, lse=o.lse[..., None], lse_rest=o.lse_rest[..., None],
        delta=delta[..., None], out=out,
    )  # fmt: skip
    options.run(make, items)


def mask_gradient(problem: Problem, operands: Operands, dmask: Any) -> None:
    """Fill dmask, the gradient of an array that is added to scores; see ``Target.mask_gradient``."""
    if why_not_compiled(problem) is not None:  # the naive rung runs the user's functions as Python
        reference.mask_gradient(problem, operands, dmask)
        return
    o = with_scores_by_tiles(problem, operands)
    rows, cols = dmask.shape[2:]
    tiles = PLAIN.ceil_div(rows, TILE[0]) * PLAIN.ceil_div(cols, TILE[1])
    few = dmask.shape[0] * dmask.shape[1] * tiles < FEW_TILES
    filled = np.empty((*o.q.shape[:2], rows, cols), dmask.dtype) if few else dmask
    options = CallOptions(problem, o, TILE, by_keys=True, listed=False)
    _run(options, o, filled, make_mask_gradient, filled.shape[0] * filled.shape[1] * tiles)
    if few:
        if dmask.shape[1] == 1:
            filled = filled.sum(axis=1, keepdims=True)
        dmask[...] = 0
        batches = range(len(filled)) if len(filled) == len(dmask) else o.mask_batch
        np.add.at(dmask, batches, filled)
