"""The gradient of an array added to scores, such as a mask: dS, summed over its broadcast dimensions.

Computes   dmask.
Source     FlashAttention-2, Algorithm 2, lines 8-14: dmask = dS, before the derivatives of the earlier
           steps of a score.
Work item  one tile of the mask's own elements; S and dP are recomputed for every batch, head, row and
           column that reads them.  Small masks first get a result for each (batch, head), so that all
           threads have work.
One lane   one key, as in the backward pass.
Buffers    per work item, in the first- and second-level cache.
"""

from __future__ import annotations

from typing import Any

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
from kernels.cpu.attention.tile_scores import TilePosition, blocks_hide, rows_of, view
from kernels.cpu.attention.tiles import ceil_div, lanes_for, pack_rows, pack_transposed
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.jit import FASTMATH, njit_cached

#: (block_q, block_k).
TILE = (64, 64)
#: Minimum number of tiles of a mask that are enough work items.
FEW_TILES = 16


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
        batch, heads = o.q.shape[0], o.q.shape[1]
        seq_q, seq_k, dim, value_dim = o.q.shape[2], o.k.shape[2], o.q.shape[3], o.v.shape[3]
        row_start, row_stop = tile_range(row_tile, o.block_q, size[2], seq_q)
        col_start, col_stop = tile_range(col_tile, o.block_k, size[3], seq_k)
        lower, upper, block_q, block_k = o.lower, o.upper, o.block_q, o.block_k
        lanes = lanes_for(col_stop - col_start)
        total = np.zeros((min(size[2], block_q), min(size[3], block_k)), real)
        k_t, v_t = np.empty((dim, lanes), real), np.empty((value_dim, lanes), real)
        q_tile = np.empty((block_q, dim), real)  # (block_q, head_dim)
        s_tile, dp_tile = np.empty((block_q, lanes), real), np.empty((block_q, lanes), real)
        slope = np.empty((0, lanes), real)
        z_tile = np.zeros((block_q if o.keep_pass != 0 else 0, lanes), real)  # (block_q, lanes)
        number = view(o.mask_batch, np.int64)
        for flat in range(batch * heads):
            b, h = flat // heads, flat % heads
            mask_batch = b if size[0] == batch else number[b, 0, 0, 0]
            if mask_batch != batch_own or (size[1] > 1 and h != head_own):
                continue
            for col in range(col_start, col_stop, block_k):
                cols = min(block_k, col_stop - col)
                pack_transposed(rows_of(o.k, b, h, col, cols, real), real(1), k_t)
                pack_transposed(rows_of(o.v, b, h, col, cols, real), real(1), v_t)
                for row in range(row_start, row_stop, block_q):
                    rows = min(block_q, row_stop - row)
                    if row + lower > col + cols - 1 or row + rows - 1 + upper < col:
                        continue  # all columns are masked
                    place = TilePosition(b, h, flat, np.int64(0), row, col, cols, np.int64(1))
                    if blocks_hide(o, place, rows):
                        continue
                    piece = ScorePiece(s_tile[:rows], dp_tile[:rows], slope, z_tile[:rows])
                    q = q_tile[:rows]  # (rows, head_dim)
                    own = query_rows(o, b, h, row, rows, real)
                    pack_rows(own.q, real(o.scale), q)
                    bounded = is_bounded(row, row + rows, col, col + cols, lower, upper)
                    fill_scores(piece, q, k_t, settings, place, bounded)
                    fill_gradient(piece, own, v_t, settings, place)
                    ds = piece.dp  # the same memory
                    add_repeated(ds, cols, total)
        out = rows_of(o.out, batch_own, head_own, row_tile * block_q, total.shape[0], real)
        for r in range(min(total.shape[0], size[2] - row_tile * block_q)):
            for c in range(min(total.shape[1], size[3] - col_tile * block_k)):
                out[r, col_tile * block_k + c] = total[r, c]

    return mask_item


def mask_gradient(problem: Problem, operands: Operands, dmask: Any) -> None:
    """Fill dmask, the gradient of an array that is added to scores; see ``Target.mask_gradient``."""
    o = with_scores_by_tiles(problem, operands)
    rows, cols = dmask.shape[2:]
    tiles = PLAIN.ceil_div(rows, TILE[0]) * PLAIN.ceil_div(cols, TILE[1])
    few = dmask.shape[0] * dmask.shape[1] * tiles < FEW_TILES
    filled = np.empty((*o.q.shape[:2], rows, cols), dmask.dtype) if few else dmask
    options = CallOptions(problem, o, TILE, by_keys=True, listed=False)
    delta = np.einsum("bhrd,bhrd->bhr", o.dout, o.out)
    delta = delta if o.dlse is None else delta - o.dlse
    options.name(
        q=o.q, k=o.k, v=o.v, dout=o.dout, lse=o.lse[..., None], lse_rest=o.lse_rest[..., None],
        delta=delta[..., None], out=filled,
    )  # fmt: skip
    options.run(make_mask_gradient, filled.shape[0] * filled.shape[1] * tiles)
    if few:
        if dmask.shape[1] == 1:
            filled = filled.sum(axis=1, keepdims=True)
        dmask[...] = 0
        batches = range(len(filled)) if len(filled) == len(dmask) else o.mask_batch
        np.add.at(dmask, batches, filled)
