"""The tangent of flash2's dQ, which each block sums by query rows."""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash2.register_scores import (
    RowValues,
    bits_of,
    kernel_of,
    make_load_row_values,
    make_loop,
)
from kernels.cuda.attention.flash2.tangents.products import make_loads, make_products
from kernels.cuda.attention.flash2.tangents.scores import (
    RowTangents,
    gradient_types,
    make_gradient_tangents,
    make_row_tangents,
)
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import (
    Lane,
    RegisterLayout,
    Variant,
    assign,
    make_accumulate,
    make_keep_tile,
    make_load_tile,
    make_store_tile,
    scale_all,
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint8


def dq_tangent_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the kernel of the tangent of dq."""
    block_q, block_k = layout.block_q, layout.block_k
    head, value = layout.row_stride(head_width), layout.row_stride(value_width)
    return SharedTiles(
        q=block_q * head,
        q_tangent=block_q * head,
        dout=block_q * value,
        k=block_k * head,
        k_tangent=block_k * head,
        v=block_k * value,
        v_tangent=block_k * value,
        dx=block_q * (block_k + VECTOR),
        dx_tangent=block_q * (block_k + VECTOR),
    )


@cache
def dq_tangent_kernel(variant: Variant) -> Kernel:
    """Return the kernel that fills dq with its tangent."""
    layout, head_width, value_width, dtype, *_ = variant
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes = layout.block_q, layout.block_k, layout.lanes
    rows_of_threads = layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    own_width = layout.columns(head_width)
    tiles = dq_tangent_tiles(layout, head_width, value_width)
    _, _, dout_tile, k_tile, k_tangent_tile, _, _, dx_tile, dx_tangent_tile = tiles
    item_of, bounds_of, begin, advance, tile_at, *_ = make_loop(variant)
    tile_bits = bits_of(variant, tiles)
    draw, to_tangents = tile_bits.draw, make_gradient_tangents(variant, tile_bits)
    load_queries, load_keys = make_loads(variant, tiles)
    load_dout = make_load_tile(variant, block_q, value_width)
    load_row_values, tangents_at = make_load_row_values(variant), make_row_tangents(dtype)
    multiply_qk = make_products(variant, tiles)
    multiply_dout_v = make_products(variant, tiles, of_values=True)
    keep_dx = make_keep_tile(layout, block_q, block_k)
    accumulate = make_accumulate(layout, block_q, block_k, head_width)
    store_dq = make_store_tile(layout, block_q, head_width, assign)

    def flash2_dq_tangent(inputs, tangents, values, row_tangents, dq, scale, extras):
        """Fill one query tile of dq with the tangent of dq.

        Computes: the derivative of dq along the tangents of q, k and v, for one tile of query rows of one
            (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows, and the derivative of
            each
        Grid: (num_q_tiles, batch * heads), one block per query tile, the longest first
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of X, dP, dX and their tangents, and own_rows x own_width of
            the tangent of dQ
        Shared: tiles of q, its tangent and dout (block_q, head_dim or value_dim), of k, v and their
            tangents (block_k, head_dim or value_dim), dX and its tangent (block_q, block_k); rows padded
            by one vector; for some options a byte for four columns
        Registers: acc (own_rows, own_width), x, x_tangent, dp and dp_tangent (own_rows, own_cols),
            row_values and own_tangents 5 · (own_rows,)
        Global traffic: reads q, its tangent, dout and the numbers of rows once, k, v and their tangents
            once per query tile; writes dq once
        Needs: 128-bit loads
        """
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, inputs.q, inputs.k, extras)
        thread, rows = cuda.threadIdx.x, rows_from(item.q, item.start.row)
        lane, factor = Lane(thread % lanes, thread // lanes), real(scale)
        shared = cuda.shared.array(0, real)  # the tiles
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        acc = cuda.local.array((own_rows, own_width), real)  # (block_q, head_dim) / threads: ḋQ
        x = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: X
        x_tangent = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: Ẋ
        dp = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: dP, dX
        dp_tangent = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, Q̇, dO or dX
        # (own_rows,) each: lse, its rest in base 2, D; and the tangents of lse and D
        lse, rest = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        row_values = RowValues(lse, rest, cuda.local.array(own_rows, real))
        lse_tangent = cuda.local.array(own_rows, real)
        own_tangents = RowTangents(lse_tangent, cuda.local.array(own_rows, real))
        load_queries(thread, inputs, tangents, rows, factor, shared)
        load_dout(thread, inputs.dout, rows, one, shared, dout_tile)
        load_row_values(lane.ty, row_values, values, rows)
        for i in range(own_rows):
            at_row = tangents_at(row_tangents, rows, lane.ty + i * rows_of_threads)
            own_tangents.lse[i], own_tangents.delta[i] = at_row
        products = x, x_tangent, dp, dp_tangent
        set_all(acc, zero)
        visit = begin(item, bounds_of(item, extras), extras)
        while visit.entry < visit.stop:  # the same for all threads of the block
            tile = tile_at(item, visit, bits, extras)
            cuda.syncthreads()  # every thread is done with the last key tile
            load_keys(thread, inputs, tangents, rows_from(item.k, tile.place.col), shared)
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole
            # 10: X = τ Q_i K_jᵀ     Ẋ = τ (Q̇_i K_jᵀ + Q_i K̇_jᵀ)
            multiply_qk(lane, (x, x_tangent), shared)
            # 13: dP = dO_i V_jᵀ     ḋP = dO_i V̇_jᵀ
            multiply_dout_v(lane, (dp, dp_tangent), shared)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i)     and their tangents
            to_tangents(lane, (products, row_values, own_tangents), tile, extras)
            keep_dx(lane, dp, one, shared, dx_tile)
            keep_dx(lane, dp_tangent, one, shared, dx_tangent_tile)
            cuda.syncthreads()  # dX and ḋX are whole
            # 15: dQ_i += τ dX K_j     ḋQ_i += τ (ḋX K_j + dX K̇_j)
            accumulate(lane, acc, fragment, shared, dx_tangent_tile, k_tile)
            accumulate(lane, acc, fragment, shared, dx_tile, k_tangent_tile)
            visit = advance(visit, 1, extras)
        scale_all(acc, factor)
        store_dq(lane, acc, dq, rows)

    return kernel_of(variant, flash2_dq_tangent, gradient_types(variant, 1), tiles)
