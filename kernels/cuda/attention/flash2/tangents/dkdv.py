"""The tangents of flash2's dK and dV, which each block sums by key columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cuda.attention.flash2.register_scores import (
    bits_of,
    kernel_of,
    make_loop,
    make_share_row_values,
)
from kernels.cuda.attention.flash2.tangents.products import make_loads, make_products
from kernels.cuda.attention.flash2.tangents.scores import (
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
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint8


def dkdv_tangent_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the kernel of the tangents of dk and dv."""
    block_q, block_k = layout.block_q, layout.block_k
    head, value = layout.row_stride(head_width), layout.row_stride(value_width)
    return SharedTiles(
        k=block_k * head,
        k_tangent=block_k * head,
        v=block_k * value,
        v_tangent=block_k * value,
        q=block_q * head,
        q_tangent=block_q * head,
        dout=block_q * value,
        p=block_k * (block_q + VECTOR),
        lse=block_q,
        rest=block_q,
        delta=block_q,
        lse_tangent=block_q,
        delta_tangent=block_q,
    )


def _make_add_product(variant: Variant, width: int, tile: int) -> Callable[..., None]:
    """Return ``add_product(lane, (s, acc, fragment), shared, b)``: acc += S·B, for S in registers.

    S takes the place of another matrix at ``tile`` in shared memory; B is ``width`` wide.
    """
    (layout, *_), one = variant, variant.dtype.type(1)
    sides = layout.block_k, layout.block_q
    keep, accumulate = make_keep_tile(layout, *sides), make_accumulate(layout, *sides, width)

    @device_function
    def add_product(lane, registers, shared, b):
        s, acc, fragment = registers
        cuda.syncthreads()  # every thread is done with the matrix before
        keep(lane, s, one, shared, tile)
        cuda.syncthreads()  # the matrix is whole
        accumulate(lane, acc, fragment, shared, tile, b)

    return add_product


@cache
def dkdv_tangent_kernel(variant: Variant) -> Kernel:
    """Return the kernel that fills dk and dv with their tangents."""
    layout, head_width, value_width, dtype, *_ = variant
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes, threads = layout.block_q, layout.block_k, layout.lanes, layout.threads
    own_keys, own_rows = block_k // layout.rows_of_threads, block_q // lanes
    k_width, v_width = layout.columns(head_width), layout.columns(value_width)
    tiles = dkdv_tangent_tiles(layout, head_width, value_width)
    *_, q_tile, q_tangent_tile, dout_tile, p_tile, _, _, _, lse_tile, delta_tile = tiles
    item_of, bounds_of, begin, advance, tile_at, *_ = make_loop(variant, by_keys=True)
    tile_bits = bits_of(variant, tiles)
    draw, to_tangents = tile_bits.draw, make_gradient_tangents(variant, tile_bits, tiles)
    load_queries, load_keys = make_loads(variant, tiles)
    load_dout = make_load_tile(variant, block_q, value_width)
    share_values, tangents_at = make_share_row_values(variant, tiles), make_row_tangents(dtype)
    multiply_kq = make_products(variant, tiles, by_keys=True)
    multiply_v_dout = make_products(variant, tiles, of_values=True, by_keys=True)
    add_to_dk, add_to_dv = (_make_add_product(variant, width, p_tile) for width in variant[1:3])
    store_dk = make_store_tile(layout, block_k, head_width, assign)
    store_dv = make_store_tile(layout, block_k, value_width, assign)

    def flash2_dkdv_tangent(inputs, tangents, values, row_tangents, dk, dv, scale, extras):
        """Fill one key tile of dk and dv with the tangents of dk and dv.

        Computes: the derivatives of dk and dv along the tangents of q, k and v, for one tile of keys of
            one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 5-18 without 15, and the derivative of each
        Grid: (num_k_tiles, batch * heads), one block per key tile
        Block: (lanes * rows_of_threads,)
        One thread does: own_keys x own_rows of Xᵀ, dPᵀ, dXᵀ and their tangents, and own_keys rows of the
            tangents of dK and dV
        Shared: tiles of k, v and their tangents (block_k, head_dim or value_dim), of q, its tangent and
            dout (block_q, head_dim or value_dim), one after another ṖZ, ḋX and dX transposed (block_k,
            block_q), five numbers a row; rows padded by one vector; for some options a byte for four
            columns
        Registers: dk_acc (own_keys, k_width), dv_acc (own_keys, v_width), x, x_tangent, dp and dp_tangent
            (own_keys, own_rows)
        Global traffic: reads k, v and their tangents once, q, its tangent, dout and the numbers of rows
            once per key tile; writes dk and dv once
        Needs: 128-bit loads
        """
        # 5: for 1 <= j <= T_c
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, inputs.q, inputs.k, extras)
        thread, keys = cuda.threadIdx.x, rows_from(item.k, item.start.col)
        lane, factor = Lane(thread % lanes, thread // lanes), real(scale)
        shared = cuda.shared.array(0, real)  # the tiles, and the numbers of rows
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        dk_acc = cuda.local.array((own_keys, k_width), real)  # (block_k, head_dim) / threads: ḋK
        dv_acc = cuda.local.array((own_keys, v_width), real)  # (block_k, value_dim) / threads: ḋV
        x = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: Xᵀ, ṖᵀZ
        x_tangent = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads
        dp = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: dPᵀ, dXᵀ
        dp_tangent = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads
        fragment = cuda.local.array((own_keys, VECTOR), real)  # (own_keys, 4): of a tile of keys
        products = x, x_tangent, dp, dp_tangent
        # 6: load K_j, V_j, K̇_j, V̇_j     7: ḋK_j = 0, ḋV_j = 0
        load_keys(thread, inputs, tangents, keys, shared)
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        # 8: for 1 <= i <= T_r, but only tiles to which a key of this tile is visible
        visit = begin(item, bounds_of(item, extras), extras)
        while visit.entry < visit.stop:  # the same for all threads of the block
            tile = tile_at(item, visit, bits, extras)
            cuda.syncthreads()  # every thread is done with the last query tile
            # 9: load Q_i, Q̇_i, dO_i, L_i, D_i, L̇_i, Ḋ_i
            rows = rows_from(item.q, tile.place.row)
            load_queries(thread, inputs, tangents, rows, factor, shared)
            load_dout(thread, inputs.dout, rows, one, shared, dout_tile)
            draw(thread, tile, extras)
            share_values(thread, shared, values, rows)
            for r in range(thread, block_q, threads):
                at_row = tangents_at(row_tangents, rows, r)
                shared[lse_tile + r], shared[delta_tile + r] = at_row
            cuda.syncthreads()  # the tiles are whole
            # 10: Xᵀ = τ K_j Q_iᵀ     Ẋᵀ = τ (K_j Q̇_iᵀ + K̇_j Q_iᵀ)
            multiply_kq(lane, (x, x_tangent), shared)
            # 13: dPᵀ = V_j dO_iᵀ     ḋPᵀ = V̇_j dO_iᵀ
            multiply_v_dout(lane, (dp, dp_tangent), shared)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i)     and their tangents
            to_tangents(lane, (products, shared, shared), tile, extras)
            # 12: dV_j += (P ∘ Z)ᵀ dO_i     ḋV_j += (Ṗ ∘ Z)ᵀ dO_i
            add_to_dv(lane, (x, dv_acc, fragment), shared, dout_tile)
            # 16: dK_j += τ dXᵀ Q_i     ḋK_j += τ (ḋXᵀ Q_i + dXᵀ Q̇_i), where τ is in Q_i and Q̇_i
            add_to_dk(lane, (dp_tangent, dk_acc, fragment), shared, q_tile)
            add_to_dk(lane, (dp, dk_acc, fragment), shared, q_tangent_tile)
            visit = advance(visit, 1, extras)
        # 18: write ḋK_j, ḋV_j
        store_dk(lane, dk_acc, dk, keys)
        store_dv(lane, dv_acc, dv, keys)

    return kernel_of(variant, flash2_dkdv_tangent, gradient_types(variant, 2), tiles)
