"""FlashAttention-2 backward by query rows: delta, and dQ, which each block sums in registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float64, uint8, void

from kernels.cuda.attention.flash2.register_scores import (
    make_gradients_by_rows,
    make_load_row_values,
)
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import TilePlace, moved
from kernels.cuda.attention.options.visits import make_row_bounds, make_visits
from kernels.cuda.attention.register_tiles import (
    RegisterLayout,
    assign,
    make_accumulate,
    make_keep_tile,
    make_load_tiles,
    make_multiply,
    make_store_tile,
    scale_all,
    set_all,
)
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.one_source import batch_and_head
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


def dq_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the dq kernel."""
    return SharedTiles(
        q=layout.block_q * layout.row_stride(head_width),
        dout=layout.block_q * layout.row_stride(value_width),
        k=layout.block_k * layout.row_stride(head_width),
        v=layout.block_k * layout.row_stride(value_width),
        ds=layout.block_q * (layout.block_k + VECTOR),
    )


@cache
def delta_kernel(threads: int, dtype: np.dtype[Any], has_dlse: bool = False) -> Kernel:
    """Return the kernel that fills delta, for one dtype, with or without a gradient of lse."""
    zero = dtype.type(0)

    def flash2_delta(dout, out, dlse, delta):
        """Fill delta.

        Computes: D = rowsum(dO ∘ O) - dL, which serves as D does: dS = P ∘ (dP - D) + P dL
        Source: FlashAttention-2, Algorithm 2, line 4
        Grid: ceil(batch * heads * seq_q / threads)
        Block: (threads,)
        One thread does: one row
        Shared: none
        Registers: one sum
        Global traffic: reads dout and out once, and dlse if there is one; writes delta once
        Needs: nothing
        """
        heads, seq_q = delta.shape[1], delta.shape[2]
        i = cuda.grid(1)
        if i < delta.shape[0] * heads * seq_q:
            b, h, row = i // seq_q // heads, i // seq_q % heads, i % seq_q
            total = zero
            for c in range(out.shape[3]):
                total += dout[b, h, row, c] * out[b, h, row, c]
            if has_dlse:
                total -= dlse[b, h, row]
            delta[b, h, row] = total

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    return Kernel(flash2_delta, void(read, read, rows, rows), threads)


@cache
def dq_kernel(
    layout: RegisterLayout,
    head_width: int,
    value_width: int,
    dtype: np.dtype[Any],
    vectors: bool,
    features: Features = PLAIN,
) -> Kernel:
    """Return the kernel that fills dq; its arguments are those of ``flash2.forward_kernel``."""
    real = scalar_type(dtype)
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    own_width = layout.columns(head_width)
    tiles = dq_tiles(layout, head_width, value_width)
    q_tile, dout_tile = tiles["q"], tiles["dout"]
    k_tile, v_tile, ds_tile = tiles["k"], tiles["v"], tiles["ds"]
    place, entries, tile_of, is_whole, is_within = make_visits(features, block_q)
    bounds = make_row_bounds(block_q, block_k)
    tile_bits = make_tile_bits(features, layout, dtype, dtype.itemsize * tiles.elements)
    draw, load_row_values = tile_bits.draw, make_load_row_values(layout, dtype)
    to_gradients = make_gradients_by_rows(layout, features, dtype, tile_bits)
    keep_ds = make_keep_tile(layout, block_q, block_k)
    loads = make_load_tiles(layout, head_width, value_width, real, vectors)
    load_q, load_dout, load_k, load_v = loads
    multiply_qk = make_multiply(layout, block_q, block_k, head_width, real)
    multiply_dout_v = make_multiply(layout, block_q, block_k, value_width, real)
    accumulate = make_accumulate(layout, block_q, block_k, head_width)
    store_dq = make_store_tile(layout, block_q, head_width, assign)
    zero, one = dtype.type(0), dtype.type(1)

    def flash2_dq(dout, q, k, v, lse, lse_rest, delta, dq, scale, extras):
        """Fill one query tile of dq.

        Computes: dq for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows; FlashAttention,
            Algorithm 4, for mask and dropout
        Grid: (num_q_tiles, batch * heads), one block per query tile, the longest first
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and own_rows x own_width of dQ
        Shared: q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector;
            for some options a byte for four columns
        Registers: acc (own_rows, own_width), s and dp (own_rows, own_cols), top, shift,
            own_delta (own_rows,)
        Global traffic: reads q, dout, lse, lse_rest and delta once, k and v once per query tile; writes dq
            once
        Needs: 128-bit loads, for which the simulator has a plain form
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        flat, row, first_q, seq_q, first_k, seq_k = place(
            cuda.blockIdx.x, cuda.blockIdx.y, q.shape[2], k.shape[2], extras
        )
        batch, head = numbers_of_mods(flat, extras)
        start = TilePlace(b, h, batch, head, row, 0, seq_q, seq_k)
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)  # q_tile, dout_tile, k_tile, v_tile, ds
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        # A thread owns the rows ty, ty + rows_of_threads, …; of S the columns tx, tx + lanes, …; of dQ the
        # four columns from 4 · tx, the four from 4 · (tx + lanes), ….
        acc = cuda.local.array((own_rows, own_width), real)  # (block_q, head_dim) / threads: dQ
        s = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: S
        dp = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: dP, dS
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, dO or dS
        top = cuda.local.array(own_rows, real)  # (own_rows,): lse
        shift = cuda.local.array(own_rows, real)  # (own_rows,): its rest, in base 2
        own_delta = cuda.local.array(own_rows, real)  # (own_rows,): D
        q_row, q_stop = first_q + row, first_q + seq_q
        load_q(cuda.threadIdx.x, q, b, h, q_row, q_stop, real(scale), shared, q_tile)
        load_dout(cuda.threadIdx.x, dout, b, h, q_row, q_stop, one, shared, dout_tile)
        load_row_values(ty, top, shift, own_delta, lse, lse_rest, delta, b, h, q_row, q_stop)
        set_all(acc, zero)
        first, stop, full, full_stop = bounds(row, seq_q, seq_k, extras)
        entry, entries_stop = entries(flat, row, seq_q, first, stop, extras)
        for e in range(entry, entries_stop):
            j = tile_of(e, extras)
            if is_within(j, first, stop):  # the same for all threads of the block
                col = j * block_k
                whole = full <= j < full_stop and is_whole(e, extras)
                cuda.syncthreads()  # every thread is done with the last key tile
                k_row, k_stop = first_k + col, first_k + seq_k
                load_k(cuda.threadIdx.x, k, b, h, k_row, k_stop, one, shared, k_tile)
                load_v(cuda.threadIdx.x, v, b, h, k_row, k_stop, one, shared, v_tile)
                tile = moved(start, 0, col)
                draw(cuda.threadIdx.x, bits, whole, tile, extras)
                cuda.syncthreads()  # the tiles are whole
                # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
                multiply_qk(tx, ty, s, fragment, shared, q_tile, k_tile)
                multiply_dout_v(tx, ty, dp, fragment, shared, dout_tile, v_tile)
                # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                to_gradients(tx, ty, s, dp, top, shift, own_delta, whole, bits, tile, extras)
                keep_ds(tx, ty, dp, one, shared, ds_tile)
                cuda.syncthreads()  # dS is whole
                # 15: dQ_i += dS K_j
                accumulate(tx, ty, acc, fragment, shared, ds_tile, k_tile)
        scale_all(acc, real(scale))
        store_dq(tx, ty, acc, dq, b, h, q_row, q_stop)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(*[read] * 4, *[rows] * 3, read, float64, extras_type(features, dtype))
    shared_bytes = dtype.itemsize * tiles.elements + tile_bits.bytes
    return Kernel(flash2_dq, signature, layout.threads, shared_bytes, layout.resident)
