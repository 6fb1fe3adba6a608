"""The gradient of a floating mask, summed over its broadcast dimensions in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import float64, uint8, void

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.flash2.backward import delta_of
from kernels.cuda.attention.flash2.dq import dq_tiles
from kernels.cuda.attention.flash2.forward import with_own_rows
from kernels.cuda.attention.flash2.register_scores import (
    make_gradients_by_rows,
    make_load_row_values,
)
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import TilePlace, moved
from kernels.cuda.attention.options.visits import make_row_bounds, make_visits
from kernels.cuda.attention.register_tiles import (
    RegisterLayout,
    make_keep_tile,
    make_load_tiles,
    make_multiply,
    pick_layout,
    set_all,
    widths,
)
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.vector import VECTOR, are_vectors
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function, scalar_type
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda
from kernels.scores.program import Features


@cache
def _make_store_sums(
    layout: RegisterLayout, dtype: np.dtype[Any], ds_tile: int
) -> Callable[..., None]:
    """Return ``store_sums(thread, shared, dmask, b, h, seq_q, seq_k, first)``.

    An element that all rows or all columns of the tile share is the sum over them.

    Args:
        layout: Layout of the block.
        dtype: Dtype of the sums.
        ds_tile: Offset in shared memory of the tile (block_q, block_k) whose first place is ``first``.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    ds_stride, zero = block_k + VECTOR, dtype.type(0)

    @device_function
    def store_sums(thread, shared, dmask, b, h, seq_q, seq_k, first):
        rows, cols = dmask.shape[2], dmask.shape[3]
        height, width = min(rows, block_q), min(cols, block_k)
        deep, wide = (block_q if rows != seq_q else 1), (block_k if cols != seq_k else 1)
        for n in range(thread, height * width, threads):
            r, c = n // width, n % width
            total = zero
            for i in range(deep):
                for j in range(wide):
                    total += shared[ds_tile + (r + i) * ds_stride + c + j]
            row = r if rows != seq_q else first[0] + r
            col = c if cols != seq_k else first[1] + c
            if row < rows and col < cols:
                dmask[b, h, row, col] = total

    return store_sums


@device_function
def own_range(is_own, place, count):
    """Return the range over which a block sums: its own index, or all if broadcast."""
    return (place if is_own else 0), (place + 1 if is_own else count)


@cache
def dmask_kernel(
    layout: RegisterLayout,
    head_width: int,
    value_width: int,
    dtype: np.dtype[Any],
    vectors: bool,
    features: Features,
) -> Kernel:
    """Return the kernel that fills dmask; its arguments are those of ``flash2.forward_kernel``."""
    real, block_q, block_k = scalar_type(dtype), layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    tiles = dq_tiles(layout, head_width, value_width)
    q_tile, dout_tile = tiles["q"], tiles["dout"]
    k_tile, v_tile, ds_tile = tiles["k"], tiles["v"], tiles["ds"]
    _, entries, tile_of, is_whole, is_within = make_visits(features, block_q)
    bounds = make_row_bounds(block_q, block_k)
    tile_bits = make_tile_bits(features, layout, dtype, dtype.itemsize * tiles.elements)
    draw, load_row_values = tile_bits.draw, make_load_row_values(layout, dtype)
    to_gradients = make_gradients_by_rows(layout, features, dtype, tile_bits, of_bias=True)
    keep_ds = make_keep_tile(layout, block_q, block_k)
    store_sums = _make_store_sums(layout, dtype, ds_tile)
    loads = make_load_tiles(layout, head_width, value_width, real, vectors)
    load_q, load_dout, load_k, load_v = loads
    multiply_qk = make_multiply(layout, block_q, block_k, head_width, real)
    multiply_dout_v = make_multiply(layout, block_q, block_k, value_width, real)
    zero, one = dtype.type(0), dtype.type(1)

    def flash2_dmask(dout, q, k, v, lse, lse_rest, delta, dmask, scale, extras):
        """Fill one tile of dmask.

        Computes: dmask = the sum of dS over the batches, heads, rows and columns that share an element
        Source: none; S = τ Q Kᵀ + mask, so that dmask is dS of FlashAttention-2, Algorithm 2, line 14
        Grid: (tiles of the mask, its batches * its heads), one block per tile of its own elements
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and of their sum
        Shared: q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector;
            for some options a byte for four columns
        Registers: acc, s and dp (own_rows, own_cols), top, shift, own_delta (own_rows,)
        Global traffic: reads q, k, v, dout, lse, lse_rest, delta once per (batch, head) and tile; writes
            dmask once
        Needs: 128-bit loads, for which the simulator has a plain form
        """
        batch, heads, seq_q, seq_k = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        rows, cols = dmask.shape[2], dmask.shape[3]
        mask_batch, mask_head = cuda.blockIdx.y // dmask.shape[1], cuda.blockIdx.y % dmask.shape[1]
        # What an element was repeated over is a range; else it is the block's own place.
        x, mask_tiles = cuda.blockIdx.x, ceil_div(cols, block_k)
        q_tiles, k_tiles = ceil_div(seq_q, block_q), ceil_div(seq_k, block_k)
        first_head, heads_stop = own_range(dmask.shape[1] == heads, cuda.blockIdx.y % heads, heads)
        q_tiles_start, q_tiles_stop = own_range(rows == seq_q, x // mask_tiles, q_tiles)
        k_tiles_start, k_tiles_stop = own_range(cols == seq_k, x % mask_tiles, k_tiles)
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)  # q_tile, dout_tile, k_tile, v_tile, ds
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        # Rows are ty, ty + rows_of_threads, …, columns tx, tx + lanes, ….
        acc = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: Σ dS
        s = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: S
        dp = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: dP
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, or of dO
        top = cuda.local.array(own_rows, real)  # (own_rows,): lse
        shift = cuda.local.array(own_rows, real)  # (own_rows,): its rest, in base 2
        own_delta = cuda.local.array(own_rows, real)  # (own_rows,): D
        factor = real(scale)
        set_all(acc, zero)
        # Every condition below is the same for all threads of the block.
        own_heads = heads_stop - first_head
        for place in range(batch * own_heads):
            b, h = place // own_heads, first_head + place % own_heads
            flat = b * heads + h
            mod_batch, mod_head = numbers_of_mods(flat, extras)
            tiles_of_place = q_tiles_stop if extras.mask_batch[b] == mask_batch else q_tiles_start
            for t in range(q_tiles_start, tiles_of_place):
                row = t * block_q
                start = TilePlace(b, h, mod_batch, mod_head, row, 0, seq_q, seq_k)
                cuda.syncthreads()  # every thread is done with the last query tile
                load_q(cuda.threadIdx.x, q, b, h, row, seq_q, factor, shared, q_tile)
                load_dout(cuda.threadIdx.x, dout, b, h, row, seq_q, one, shared, dout_tile)
                load_row_values(ty, top, shift, own_delta, lse, lse_rest, delta, b, h, row, seq_q)
                first, stop, full, full_stop = bounds(row, seq_q, seq_k, extras)
                first, stop = max(first, k_tiles_start), min(stop, k_tiles_stop)
                entry, entries_stop = entries(flat, row, seq_q, first, stop, extras)
                for e in range(entry, entries_stop):
                    j = tile_of(e, extras)
                    if is_within(j, first, stop):
                        col = j * block_k
                        whole = full <= j < full_stop and is_whole(e, extras)
                        cuda.syncthreads()  # every thread is done with the last key tile
                        load_k(cuda.threadIdx.x, k, b, h, col, seq_k, one, shared, k_tile)
                        load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_tile)
                        tile = moved(start, 0, col)
                        draw(cuda.threadIdx.x, bits, whole, tile, extras)
                        cuda.syncthreads()  # the tiles are whole
                        # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
                        multiply_qk(tx, ty, s, fragment, shared, q_tile, k_tile)
                        multiply_dout_v(tx, ty, dp, fragment, shared, dout_tile, v_tile)
                        to_gradients(
                            tx, ty, s, dp, top, shift, own_delta, whole, bits, tile, extras
                        )
                        for i in range(own_rows):
                            # dS of rows beyond the end is undefined.
                            if row + ty + i * rows_of_threads < seq_q:
                                for c in range(own_cols):
                                    acc[i, c] += dp[i, c]
        keep_ds(tx, ty, acc, one, shared, ds_tile)
        cuda.syncthreads()  # the sums are whole
        first = q_tiles_start * block_q, k_tiles_start * block_k
        store_sums(cuda.threadIdx.x, shared, dmask, mask_batch, mask_head, seq_q, seq_k, first)

    read, lines = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(*[read] * 4, *[lines] * 3, read, float64, extras_type(features, dtype))
    shared_bytes = dtype.itemsize * tiles.elements + tile_bits.bytes
    return Kernel(flash2_dmask, signature, layout.threads, shared_bytes, layout.resident)


def mask_gradient(problem: Problem, operands: Operands, dmask: Any) -> None:
    """Fill the gradient of a floating mask; allocates delta, and an out, lse and lse_rest of its own.

    Args:
        problem: The checked call.
        operands: The operands of the backward pass.
        dmask: (mask batches, heads or 1, seq_q or 1, seq_k or 1), written.
    """
    operands = with_own_rows(problem, operands)
    layout, features = pick_layout("dq", problem, None), problem.features
    dout, q, k, v = operands.dout, operands.q, operands.k, operands.v
    delta = delta_of(problem, operands)
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    batches, heads, rows, cols = dmask.shape
    tiles = PLAIN.ceil_div(rows, layout.block_q) * PLAIN.ceil_div(cols, layout.block_k)
    kind = (*widths(problem), problem.dtype, are_vectors(dout, q, k, v), features)
    launch = dmask_kernel(layout, *kind)[(tiles, batches * heads), layout.threads]
    rows = operands.lse, operands.lse_rest, delta
    launch(dout, q, k, v, *rows, dmask, problem.scale, extras)
