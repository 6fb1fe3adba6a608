"""FlashAttention-2 backward by query rows: delta, and dQ, which each block sums in registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.attention.flash2.register_scores import (
    RowValues,
    backward_types,
    kernel_of,
    make_load_row_values,
    make_loop,
    make_steps,
)
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import (
    Lane,
    RegisterLayout,
    Variant,
    assign,
    make_accumulate,
    make_keep_tile,
    make_store_tile,
    scale_all,
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint8, void


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
def dq_kernel(variant: Variant) -> Kernel:
    """Return the kernel that fills dq."""
    layout, dtype, head_width = variant.layout, variant.dtype, variant.head_width
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes = layout.block_q, layout.block_k, layout.lanes
    own_rows, own_cols = block_q // layout.rows_of_threads, block_k // lanes
    own_width = layout.columns(head_width)
    q_tile, dout_tile, k_tile, v_tile, ds_tile = tiles = dq_tiles(*variant[:3])
    item_of, bounds_of, begin, advance, tile_at, *_ = make_loop(variant)
    load_queries, load_keys, draw, *products, to_gradients = make_steps(variant, tiles)
    multiply_qk, multiply_dout_v = products
    load_row_values = make_load_row_values(variant)
    keep_ds = make_keep_tile(layout, block_q, block_k)
    accumulate = make_accumulate(layout, block_q, block_k, head_width)
    store_dq = make_store_tile(layout, block_q, head_width, assign)

    def flash2_dq(inputs, values, dq, scale, extras):
        """Fill one query tile of dq.

        Computes: dq for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows; FlashAttention,
            Algorithm 4, for mask and dropout
        Grid: (num_q_tiles, batch * heads), one block per query tile, the longest first
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and own_rows x own_width of dQ
        Shared: q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector;
            for some options a byte for four columns
        Registers: acc (own_rows, own_width), s and dp (own_rows, own_cols), row_values 3 · (own_rows,)
        Global traffic: reads q, dout, lse, lse_rest and delta once, k and v once per query tile; writes dq
            once
        Needs: 128-bit loads
        """
        dout, q, k, v = inputs
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, q, k, extras)
        thread, rows = cuda.threadIdx.x, rows_from(item.q, item.start.row)
        lane = Lane(thread % lanes, thread // lanes)
        shared = cuda.shared.array(0, real)  # q_tile, dout_tile, k_tile, v_tile, ds
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        # A thread owns the rows ty, ty + rows_of_threads, …; of S the columns tx, tx + lanes, …; of dQ the
        # four columns from 4 · tx, the four from 4 · (tx + lanes), ….
        acc = cuda.local.array((own_rows, own_width), real)  # (block_q, head_dim) / threads: dQ
        s = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: S
        dp = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: dP, dS
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, dO or dS
        # (own_rows,) each: lse, its rest in base 2, D.  As one array they would not stay in registers.
        lse, rest = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        row_values = RowValues(lse, rest, cuda.local.array(own_rows, real))
        load_queries(thread, (q, dout), rows, real(scale), shared)
        load_row_values(lane.ty, row_values, values, rows)
        set_all(acc, zero)
        visit = begin(item, bounds_of(item, extras), extras)
        while visit.entry < visit.stop:  # the same for all threads of the block
            tile = tile_at(item, visit, bits, extras)
            cuda.syncthreads()  # every thread is done with the last key tile
            load_keys(thread, (k, v), rows_from(item.k, tile.place.col), one, shared)
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole
            # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
            multiply_qk(lane, s, fragment, shared, q_tile, k_tile)
            multiply_dout_v(lane, dp, fragment, shared, dout_tile, v_tile)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            to_gradients(lane, (s, dp, row_values), tile, extras)
            keep_ds(lane, dp, one, shared, ds_tile)
            cuda.syncthreads()  # dS is whole
            # 15: dQ_i += dS K_j
            accumulate(lane, acc, fragment, shared, ds_tile, k_tile)
            visit = advance(visit, 1, extras)
        scale_all(acc, real(scale))
        store_dq(lane, acc, dq, rows)

    return kernel_of(variant, flash2_dq, backward_types(dtype, 1), tiles)
