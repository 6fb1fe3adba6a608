"""FlashAttention-2 backward by key columns: dK and dV, and optionally dQ by atomics."""

from __future__ import annotations

from functools import cache

from numba import uint8

from kernels.cuda.attention.flash2.register_scores import (
    VisitedTile,
    backward_types,
    kernel_of,
    make_row_values,
    make_steps,
    make_walk,
    rows_of,
)
from kernels.cuda.attention.options.tile_scores import moved
from kernels.cuda.attention.options.visits import make_key_bounds
from kernels.cuda.attention.register_tiles import (
    Lane,
    RegisterLayout,
    Variant,
    assign,
    make_accumulate,
    make_keep_tile,
    make_store_tile,
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.runtime.targets import cuda


def dkdv_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the dk and dv kernel; P, dS and the transpose of dS share one."""
    block_q, block_k = layout.block_q, layout.block_k
    return SharedTiles(
        k=block_k * layout.row_stride(head_width),
        v=block_k * layout.row_stride(value_width),
        q=block_q * layout.row_stride(head_width),
        dout=block_q * layout.row_stride(value_width),
        p=max(block_k * (block_q + VECTOR), block_q * (block_k + VECTOR)),
        lse=block_q,
        rest=block_q,
        delta=block_q,
    )


@device_function
def add_atomically(target, index, value):
    """Add atomically to an element of dq: the ``put`` of a shared tile."""
    cuda.atomic.add(target, index, value)


@cache
def dkdv_kernel(variant: Variant, atomics: bool) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``atomics`` adds to dq."""
    layout, dtype, head_width = variant.layout, variant.dtype, variant.head_width
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes, threads = layout.block_q, layout.block_k, layout.lanes, layout.threads
    own_keys, own_rows = block_k // layout.rows_of_threads, block_q // lanes
    k_width, v_width = layout.columns(head_width), layout.columns(variant.value_width)
    # A kernel without atomics never reads these; registers need a positive size.
    dq_rows = max(block_q // layout.rows_of_threads, 1) if atomics else 1
    fragment_rows = max(own_keys, dq_rows)
    tiles = dkdv_tiles(layout, head_width, variant.value_width)
    k_tile, v_tile, q_tile, dout_tile, p_tile, lse, rest, delta = tiles
    own_tile, entries, tile_of, is_whole, is_within = make_walk(variant, by_keys=True)
    bounds, is_inside = make_key_bounds(block_q, block_k)
    values_of, threads = make_row_values(variant), layout.threads
    load_q, load_dout, load_k, load_v, draw, *steps = make_steps(variant, tiles, by_keys=True)
    multiply_kq, multiply_v_dout, to_gradients = steps
    keep_p, keep_ds = (make_keep_tile(layout, block_k, block_q, is_ds) for is_ds in (False, True))
    accumulate_dk = make_accumulate(layout, block_k, block_q, head_width)
    accumulate_dv = make_accumulate(layout, block_k, block_q, variant.value_width)
    accumulate_dq = make_accumulate(layout, block_q, block_k, head_width)
    store_dk = make_store_tile(layout, block_k, head_width, assign)
    store_dv = make_store_tile(layout, block_k, variant.value_width, assign)
    add_dq = make_store_tile(layout, block_q, head_width, add_atomically)

    def flash2_dkdv(inputs, values, dq, dk, dv, scale, extras):
        """Fill one key tile of dk and dv; with atomics, add its part of dq, which is zero before.

        Computes: dk and dv for one tile of keys of one (batch, head), and its part of dq
        Source: FlashAttention-2, Algorithm 2, lines 5-18; without atomics all but line 15;
            FlashAttention, Algorithm 4, for mask and dropout
        Grid: (num_k_tiles, batch * heads), one block per key tile
        Block: (lanes * rows_of_threads,)
        One thread does: own_keys x own_rows of Sᵀ, dPᵀ and dSᵀ, and own_keys rows of dK and dV
        Shared: k_tile, v_tile, q_tile, dout_tile, first P and then dS
            transposed (block_k, block_q), lse, its rest and delta (block_q,); rows padded by one
            vector; for some options a byte for four columns
        Registers: dk_acc (own_keys, k_width), dv_acc (own_keys, v_width), s and
            dp (own_keys, own_rows), with atomics dq_acc (dq_rows, k_width)
        Global traffic: reads k and v once, q, dout, lse, lse_rest and delta once per key tile; writes
            dk and dv once; with atomics adds to dq once per key tile
        Needs: 128-bit loads, for which the simulator has a plain form
        """
        dout, q, k, v = inputs
        # 5: for 1 <= j <= T_c
        flat, start, first_q, first_k = own_tile(cuda.blockIdx.x, cuda.blockIdx.y, q, k, extras)
        col, seq_q, seq_k = start.col, start.seq_q, start.seq_k
        thread, keys = cuda.threadIdx.x, rows_of(start, first_k + col, first_k + seq_k)
        lane, factor = Lane(thread % lanes, thread // lanes), real(scale)
        shared = cuda.shared.array(0, real)  # k, v, q and dout tiles, P or dS, lse, rest, delta
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        # A thread owns the keys (and the rows of dQ) ty, ty + rows_of_threads, …; of Sᵀ the columns, which
        # are query rows, tx, tx + lanes, …; of the sums the four columns from 4 · tx, and so on.
        dk_acc = cuda.local.array((own_keys, k_width), real)  # (block_k, head_dim) / threads: dK
        dv_acc = cuda.local.array((own_keys, v_width), real)  # (block_k, value_dim) / threads: dV
        s = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: Sᵀ, Pᵀ
        dp = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: dPᵀ, dSᵀ
        dq_acc = cuda.local.array((dq_rows, k_width), real)  # (block_q, head_dim) / threads: dQ
        fragment = cuda.local.array((fragment_rows, VECTOR), real)  # (fragment_rows, 4): scratch
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        load_k(thread, k, keys, one, shared, k_tile)
        load_v(thread, v, keys, one, shared, v_tile)
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        # 8: for 1 <= i <= T_r, but only tiles to which a key of this tile is visible
        first, stop = bounds(col, seq_q, seq_k, extras)
        entry, entries_stop = entries(flat, col, seq_k, first, stop, extras)
        for e in range(entry, entries_stop):
            t = tile_of(e, extras)
            if is_within(t, first, stop):  # the same for all threads of the block
                row = t * block_q
                whole = is_inside(row, col, seq_q, seq_k, extras) and is_whole(e, extras)
                cuda.syncthreads()  # every thread is done with the last query tile
                # 9: load Q_i, dO_i, L_i, D_i
                rows = rows_of(start, first_q + row, first_q + seq_q)
                # Q is scaled, and not K, so that S is what it was in the forward pass, bit for bit.
                load_q(thread, q, rows, factor, shared, q_tile)
                load_dout(thread, dout, rows, one, shared, dout_tile)
                tile = VisitedTile(moved(start, row, 0), whole, bits)
                draw(thread, bits, whole, tile.place, extras)
                for r in range(thread, block_q, threads):
                    top, less, own_delta = values_of(values, rows, r)
                    shared[lse + r], shared[rest + r], shared[delta + r] = top, less, own_delta
                cuda.syncthreads()  # the tiles are whole
                # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
                multiply_kq(lane, s, fragment, shared, k_tile, q_tile)
                multiply_v_dout(lane, dp, fragment, shared, v_tile, dout_tile)
                # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                to_gradients(lane, s, dp, shared, tile, extras)
                keep_p(lane, s, one, shared, p_tile)
                cuda.syncthreads()  # P is whole
                # 12: dV_j += (P_ij ∘ Z)ᵀ dO_i
                accumulate_dv(lane, dv_acc, fragment, shared, p_tile, dout_tile)
                cuda.syncthreads()  # every thread is done with P: dS takes its place
                keep_p(lane, dp, one, shared, p_tile)
                cuda.syncthreads()  # dS is whole
                # 16: dK_j += dSᵀ Q_i, where Q_i is scaled by τ already
                accumulate_dk(lane, dk_acc, fragment, shared, p_tile, q_tile)
                if atomics:
                    cuda.syncthreads()  # every thread is done with dSᵀ: dS takes its place
                    keep_ds(lane, dp, factor, shared, p_tile)
                    set_all(dq_acc, zero)
                    cuda.syncthreads()  # dS is whole
                    # 15: dQ_i += τ dS K_j
                    accumulate_dq(lane, dq_acc, fragment, shared, p_tile, k_tile)
                    add_dq(lane, dq_acc, dq, rows)
        # 18: write dK_j, dV_j
        store_dk(lane, dk_acc, dk, keys)
        store_dv(lane, dv_acc, dv, keys)

    return kernel_of(variant, flash2_dkdv, backward_types(dtype, 3), tiles)
