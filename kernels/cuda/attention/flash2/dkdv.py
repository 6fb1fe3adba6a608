"""FlashAttention-2 backward by key columns: dK and dV, and optionally dQ by atomics."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cuda.attention.flash2.register_scores import (
    backward_types,
    kernel_of,
    make_loop,
    make_share_row_values,
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
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint8


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


def _make_add_ds(variant: Variant, tiles: SharedTiles, atomics: bool) -> Callable[..., None]:
    """Return ``add_ds(lane, registers, factor, shared, dq, rows)``: add dSᵀ·Q to dK, and dS·K to dQ.

    ``registers`` are dSᵀ, dK and a fragment; dQ gets its part times ``factor``, with ``atomics`` only.
    """
    (layout, width, _, dtype, *_), block_q = variant, variant.layout.block_q
    real, zero, one, block_k = scalar_type(dtype), dtype.type(0), dtype.type(1), layout.block_k
    # A kernel without atomics never reads these; registers need a positive size.
    dq_rows, dq_width = max(block_q // layout.rows_of_threads, 1), layout.columns(width)
    q_tile, k_tile, ds_tile = tiles["q"], tiles["k"], tiles["p"]
    keep, keep_turned = (make_keep_tile(layout, block_k, block_q, x) for x in (False, True))
    accumulate_dk = make_accumulate(layout, block_k, block_q, width)
    accumulate_dq = make_accumulate(layout, block_q, block_k, width)
    add_dq = make_store_tile(layout, block_q, width, add_atomically)

    @device_function
    def add_ds(lane, registers, factor, shared, dq, rows):
        ds, dk_acc, fragment = registers
        cuda.syncthreads()  # every thread is done with P: dS takes its place
        keep(lane, ds, one, shared, ds_tile)
        cuda.syncthreads()  # dS is whole
        accumulate_dk(lane, dk_acc, fragment, shared, ds_tile, q_tile)
        if atomics:
            dq_acc = cuda.local.array((dq_rows, dq_width), real)  # (block_q, head_dim) / threads
            row_fragment = cuda.local.array((dq_rows, VECTOR), real)  # (dq_rows, 4): scratch
            cuda.syncthreads()  # every thread is done with dSᵀ: dS takes its place
            keep_turned(lane, ds, factor, shared, ds_tile)
            set_all(dq_acc, zero)
            cuda.syncthreads()  # dS is whole
            accumulate_dq(lane, dq_acc, row_fragment, shared, ds_tile, k_tile)
            add_dq(lane, dq_acc, dq, rows)

    return add_ds


@cache
def dkdv_kernel(variant: Variant, atomics: bool) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``atomics`` adds to dq."""
    layout, head_width, value_width, dtype, *_ = variant
    real, zero, one = scalar_type(dtype), dtype.type(0), dtype.type(1)
    block_q, block_k, lanes = layout.block_q, layout.block_k, layout.lanes
    own_keys, own_rows = block_k // layout.rows_of_threads, block_q // lanes
    k_width, v_width = layout.columns(head_width), layout.columns(value_width)
    k_tile, v_tile, q_tile, dout_tile, p_tile, *_ = tiles = dkdv_tiles(*variant[:3])
    item_of, bounds_of, begin, advance, tile_at, *_ = make_loop(variant, by_keys=True)
    load_queries, load_keys, draw, *steps = make_steps(variant, tiles, by_keys=True)
    multiply_kq, multiply_v_dout, to_gradients = steps
    share_values = make_share_row_values(variant, tiles)
    keep_p = make_keep_tile(layout, block_k, block_q)
    accumulate_dv = make_accumulate(layout, block_k, block_q, value_width)
    add_ds = _make_add_ds(variant, tiles, atomics)
    store_dk = make_store_tile(layout, block_k, head_width, assign)
    store_dv = make_store_tile(layout, block_k, value_width, assign)

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
            dp (own_keys, own_rows), with atomics a share of dQ (block_q, head_dim)
        Global traffic: reads k and v once, q, dout, lse, lse_rest and delta once per key tile; writes
            dk and dv once; with atomics adds to dq once per key tile
        Needs: 128-bit loads
        """
        dout, q, k, v = inputs
        # 5: for 1 <= j <= T_c
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, q, k, extras)
        thread, keys = cuda.threadIdx.x, rows_from(item.k, item.start.col)
        lane, factor = Lane(thread % lanes, thread // lanes), real(scale)
        shared = cuda.shared.array(0, real)  # k, v, q and dout tiles, P or dS, lse, rest, delta
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        dk_acc = cuda.local.array((own_keys, k_width), real)  # (block_k, head_dim) / threads: dK
        dv_acc = cuda.local.array((own_keys, v_width), real)  # (block_k, value_dim) / threads: dV
        s = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: Sᵀ, Pᵀ
        dp = cuda.local.array((own_keys, own_rows), real)  # (block_k, block_q) / threads: dPᵀ, dSᵀ
        fragment = cuda.local.array((own_keys, VECTOR), real)  # (own_keys, 4): of K, V, P or dS
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        load_keys(thread, (k, v), keys, one, shared)
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        # 8: for 1 <= i <= T_r, but only tiles to which a key of this tile is visible
        visit = begin(item, bounds_of(item, extras), extras)
        while visit.entry < visit.stop:  # the same for all threads of the block
            tile = tile_at(item, visit, bits, extras)
            cuda.syncthreads()  # every thread is done with the last query tile
            # 9: load Q_i, dO_i, L_i, D_i
            rows = rows_from(item.q, tile.place.row)
            # Q is scaled, and not K, so that S is what it was in the forward pass, bit for bit.
            load_queries(thread, (q, dout), rows, factor, shared)
            draw(thread, tile, extras)
            share_values(thread, shared, values, rows)
            cuda.syncthreads()  # the tiles are whole
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply_kq(lane, s, fragment, shared, k_tile, q_tile)
            multiply_v_dout(lane, dp, fragment, shared, v_tile, dout_tile)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            to_gradients(lane, (s, dp, shared), tile, extras)
            keep_p(lane, s, one, shared, p_tile)
            cuda.syncthreads()  # P is whole
            # 12: dV_j += (P_ij ∘ Z)ᵀ dO_i
            accumulate_dv(lane, dv_acc, fragment, shared, p_tile, dout_tile)
            # 15: dQ_i += τ dS K_j     16: dK_j += dSᵀ Q_i, where Q_i is scaled by τ already
            add_ds(lane, (dp, dk_acc, fragment), factor, shared, dq, rows)
            visit = advance(visit, 1, extras)
        # 18: write dK_j, dV_j
        store_dk(lane, dk_acc, dk, keys)
        store_dv(lane, dv_acc, dv, keys)

    return kernel_of(variant, flash2_dkdv, backward_types(dtype, 3), tiles)
