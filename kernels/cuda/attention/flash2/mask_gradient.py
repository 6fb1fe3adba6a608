"""The gradient of a floating mask, summed over its broadcast dimensions in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.flash2.backward import delta_of
from kernels.cuda.attention.flash2.dq import dq_tiles
from kernels.cuda.attention.flash2.forward import with_own_rows
from kernels.cuda.attention.flash2.register_scores import (
    RowValues,
    backward_types,
    kernel_of,
    make_load_row_values,
    make_loop,
    make_steps,
)
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.tile_scores import TilePlace
from kernels.cuda.attention.options.visits import BlockItem, HeadRows, rows_from
from kernels.cuda.attention.register_tiles import (
    BackwardInputs,
    Lane,
    RegisterLayout,
    Variant,
    make_keep_tile,
    pick_layout,
    set_all,
    variant_of,
)
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint8


@cache
def _make_store_sums(
    layout: RegisterLayout, dtype: np.dtype[Any], ds_tile: int
) -> Callable[..., None]:
    """Return ``store_sums(thread, shared, dmask, place, seq_q, seq_k)``.

    An element that all rows or all columns of the tile share is the sum over them.  ``place`` is the batch,
    head, row and column of dmask at which the tile begins, and ``ds_tile`` its offset in shared memory.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    ds_stride, zero = block_k + VECTOR, dtype.type(0)

    @device_function
    def store_sums(thread, shared, dmask, place, seq_q, seq_k):
        b, h, first_row, first_col = place
        rows, cols = dmask.shape[2], dmask.shape[3]
        height, width = min(rows, block_q), min(cols, block_k)
        deep, wide = (block_q if rows != seq_q else 1), (block_k if cols != seq_k else 1)
        for n in range(thread, height * width, threads):
            r, c = n // width, n % width
            total = zero
            for i in range(deep):
                for j in range(wide):
                    total += shared[ds_tile + (r + i) * ds_stride + c + j]
            row = r if rows != seq_q else first_row + r
            col = c if cols != seq_k else first_col + c
            if row < rows and col < cols:
                dmask[b, h, row, col] = total

    return store_sums


@device_function
def own_range(is_own, place, count):
    """Return the range over which a block sums: its own index, or all if broadcast."""
    return (place if is_own else 0), (place + 1 if is_own else count)


@cache
def _make_block_of(layout: RegisterLayout) -> Callable[..., Any]:
    """Return ``block_of(x, mask_head, q, k, dmask)``: the ranges of heads, query tiles and key tiles.

    An index over which an element of the mask is repeated is a range; else it is the block's own.
    """
    block_q, block_k = layout.block_q, layout.block_k

    @device_function
    def block_of(x, mask_head, q, k, dmask):
        heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
        mask_tiles = ceil_div(dmask.shape[3], block_k)
        q_tiles, k_tiles = ceil_div(seq_q, block_q), ceil_div(seq_k, block_k)
        return (
            own_range(dmask.shape[1] == heads, mask_head, heads),
            own_range(dmask.shape[2] == seq_q, x // mask_tiles, q_tiles),
            own_range(dmask.shape[3] == seq_k, x % mask_tiles, k_tiles),
        )

    return block_of


@cache
def _make_add_rows(layout: RegisterLayout) -> Callable[..., None]:
    """Return ``add_rows(lane, acc, ds, rows)``: add dS, which is undefined beyond the last of ``rows``."""
    rows_of_threads = layout.rows_of_threads

    @device_function
    def add_rows(lane, acc, ds, rows):
        for i in range(acc.shape[0]):
            if rows.first + lane.ty + i * rows_of_threads < rows.stop:
                for c in range(acc.shape[1]):
                    acc[i, c] += ds[i, c]

    return add_rows


@cache
def dmask_kernel(variant: Variant, by_mask: bool) -> Kernel:
    """Return the kernel that fills dmask, whose batches are those of the mask, or else of the call."""
    layout, dtype = variant.layout, variant.dtype
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes = layout.block_q, layout.block_k, layout.lanes
    own_rows, own_cols = block_q // layout.rows_of_threads, block_k // lanes
    q_tile, dout_tile, k_tile, v_tile, ds_tile = tiles = dq_tiles(*variant[:3])
    _, bounds_of, begin, advance, tile_at, *_ = make_loop(variant)
    load_queries, load_keys, draw, *steps = make_steps(variant, tiles, of_bias=True)
    multiply_qk, multiply_dout_v, to_gradients = steps
    load_row_values = make_load_row_values(variant)
    keep_ds = make_keep_tile(layout, block_q, block_k)
    store_sums, add_rows = _make_store_sums(layout, dtype, ds_tile), _make_add_rows(layout)
    block_of = _make_block_of(layout)

    def flash2_dmask(inputs, values, dmask, scale, extras):
        """Fill one tile of dmask.

        Computes: dmask = the sum of dS over the batches, heads, rows and columns that share an element
        Source: none; S = τ Q Kᵀ + mask, so that dmask is dS of FlashAttention-2, Algorithm 2, line 14
        Grid: (tiles of the mask, its batches * its heads), one block per tile of its own elements
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and of their sum
        Shared: q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector;
            for some options a byte for four columns
        Registers: acc, s and dp (own_rows, own_cols), row_values 3 · (own_rows,)
        Global traffic: reads q, k, v, dout, lse, lse_rest, delta once per (batch, head) and tile; writes
            dmask once
        Needs: 128-bit loads
        """
        dout, q, k, v = inputs
        batch, seq_q, seq_k = q.shape[0], q.shape[2], k.shape[2]
        mask_batch, mask_head = cuda.blockIdx.y // dmask.shape[1], cuda.blockIdx.y % dmask.shape[1]
        heads, q_tiles, k_tiles = block_of(cuda.blockIdx.x, mask_head, q, k, dmask)
        thread, factor, own_heads = cuda.threadIdx.x, real(scale), heads[1] - heads[0]
        lane = Lane(thread % lanes, thread // lanes)
        shared = cuda.shared.array(0, real)  # q_tile, dout_tile, k_tile, v_tile, ds
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        # Rows are ty, ty + rows_of_threads, …, columns tx, tx + lanes, ….
        acc = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: Σ dS
        s = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: S
        dp = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: dP
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, or of dO
        # (own_rows,) each: lse, its rest in base 2, D.  As one array they would not stay in registers.
        lse, rest = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        row_values = RowValues(lse, rest, cuda.local.array(own_rows, real))
        set_all(acc, zero)
        # Every condition below is the same for all threads of the block.
        for number in range(batch * own_heads):
            b, h = number // own_heads, heads[0] + number % own_heads
            flat = b * q.shape[1] + h
            mod_batch, mod_head = numbers_of_mods(flat, extras)
            is_read = (extras.mask_batch[b] if by_mask else b) == mask_batch
            for t in range(q_tiles[0], q_tiles[1] if is_read else q_tiles[0]):
                start = TilePlace(b, h, mod_batch, mod_head, t * block_q, 0, seq_q, seq_k)
                item = BlockItem(flat, start, HeadRows(b, h, 0, seq_q), HeadRows(b, h, 0, seq_k))
                rows = rows_from(item.q, start.row)
                cuda.syncthreads()  # every thread is done with the last query tile
                load_queries(thread, (q, dout), rows, factor, shared)
                load_row_values(lane.ty, row_values, values, rows)
                first, stop, full, full_stop = bounds_of(item, extras)
                bounds = max(first, k_tiles[0]), min(stop, k_tiles[1]), full, full_stop
                visit = begin(item, bounds, extras)
                while visit.entry < visit.stop:
                    tile = tile_at(item, visit, bits, extras)
                    cuda.syncthreads()  # every thread is done with the last key tile
                    load_keys(thread, (k, v), rows_from(item.k, tile.place.col), one, shared)
                    draw(thread, tile, extras)
                    cuda.syncthreads()  # the tiles are whole
                    # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
                    multiply_qk(lane, s, fragment, shared, q_tile, k_tile)
                    multiply_dout_v(lane, dp, fragment, shared, dout_tile, v_tile)
                    to_gradients(lane, (s, dp, row_values), tile, extras)
                    add_rows(lane, acc, dp, rows)
                    visit = advance(visit, 1, extras)
        keep_ds(lane, acc, one, shared, ds_tile)
        cuda.syncthreads()  # the sums are whole
        place = mask_batch, mask_head, q_tiles[0] * block_q, k_tiles[0] * block_k
        store_sums(thread, shared, dmask, place, seq_q, seq_k)

    return kernel_of(variant, flash2_dmask, backward_types(dtype, 1), tiles)


def mask_gradient(problem: Problem, operands: Operands, dmask: Any) -> None:
    """Fill dmask, the gradient of an array that is added to scores; see ``Target.mask_gradient``.

    Allocates delta, and an out, lse and lse_rest of its own.
    """
    operands = with_own_rows(problem, operands)
    layout = pick_layout("dq", problem, None)
    inputs = BackwardInputs(operands.dout, operands.q, operands.k, operands.v)
    values = RowValues(operands.lse, operands.lse_rest, delta_of(problem, operands))
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    batches, heads, rows, cols = dmask.shape
    tiles = PLAIN.ceil_div(rows, layout.block_q) * PLAIN.ceil_div(cols, layout.block_k)
    by_mask = bool(problem.mask) and operands.mask.shape[0] == batches
    kernel = dmask_kernel(variant_of(problem, layout, *inputs), by_mask)
    launch = kernel[(tiles, batches * heads), layout.threads]
    launch(inputs, values, dmask, problem.scale, extras)
