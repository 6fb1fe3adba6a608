"""FlashAttention-2 backward on tensor cores, by key columns: dK and dV, and optionally dQ by atomics.

What flash2 left on the table: the same as in its forward pass, and in addition P and dS pass through shared
memory twice, because the products with dO and Q need them transposed.  Here each warp owns keys and
computes Sᵀ = KQᵀ and dPᵀ = VdOᵀ, so that the accumulators already have the layout of the left operands of
Pᵀ·dO and dSᵀ·Q.  Only dQ = dS·K needs dS from other warps, and receives it through shared memory in 16
bits.  Measured on an H200 at N = 16,384, d = 64 in bfloat16, by atomics: 301 TFLOP/s; flash2 reaches 27.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float32, int32, uint8, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.block_item import (
    INPUTS_TYPE,
    LseAndDelta,
    make_item,
    make_row_values,
)
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.fragment_scores import ScoreTile, make_gradients_by_keys
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    HALF,
    ROWS,
    MmaKeyLayout,
    WarpLane,
    rows_from,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import edge_of, moved
from kernels.cuda.attention.options.visits import make_key_bounds, make_next_entry, make_visits
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    recomputed,
    shared_address,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


def dkdv_tiles(
    layout: MmaKeyLayout, head_width: int, value_width: int, atomics: bool, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes: two each of Q, dO, L and D."""
    k, v = (size * layout.block_k * width for width in (head_width, value_width))
    q, dout = (2 * size * layout.block_q * width for width in (head_width, value_width))
    ds = size * layout.block_q * layout.block_k if atomics else 0
    rows = 2 * FLOAT32.itemsize * layout.block_q
    return SharedTiles(k=k, v=v, q=q, dout=dout, ds=ds, large=rows, shift=rows, delta=rows)


@cache
def dkdv_kernel(
    layout: MmaKeyLayout,
    head_width: int,
    value_width: int,
    numbers: Arithmetic,
    vectors: bool,
    sums: DqSums | None = None,
    features: Features = PLAIN,
) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq.

    The widths are head_dim and value_dim rounded up to multiples of 16 · parts, or more.  ``vectors`` tells
    whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    transposed, step_q, widths = layout.transposed, layout.step_q, (head_width, value_width)
    key_tiles, col_tiles, parts = transposed.row_tiles, step_q // COLS, layout.parts
    k_own, v_own = head_width // parts, value_width // parts
    dk_tiles, dv_tiles = key_tiles * k_own // COLS, key_tiles * v_own // COLS
    s_tiles, warp_keys = key_tiles * col_tiles, ROWS * key_tiles
    has_sums, is_plain = sums is not None, features.of_elements == PLAIN
    tiles = dkdv_tiles(layout, *widths, has_sums, numbers.size)
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    ds_offset, rows_offset = tiles["ds"], tiles["large"]
    q_bytes, dout_bytes = (numbers.size * block_q * width for width in widths)
    visits = make_visits(features, block_k, by_keys=True)
    _, entries, tile_of, is_whole, _ = visits
    item_of, next_entry = make_item(visits, by_keys=True), make_next_entry(visits)
    bounds, is_inside = make_key_bounds(block_q, block_k)
    tile_bits = make_tile_bits(features, layout, FLOAT32, tiles.elements)  # type: ignore[arg-type]
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    to_gradients = make_gradients_by_keys(layout, features, tile_bits)
    copy_k, copy_v = (numbers.copy(threads, block_k, width, vectors) for width in widths)
    copy_q, copy_dout = (numbers.copy(threads, block_q, width, vectors) for width in widths)
    multiply_kq = numbers.multiply(transposed, head_width, b_rows=block_q, is_transposed=True)
    multiply_v_dout = numbers.multiply(transposed, value_width, b_rows=block_q)
    accumulate_dk = numbers.accumulate(transposed, head_width, k_own, b_rows=block_q)
    accumulate_dv = numbers.accumulate(transposed, value_width, v_own, b_rows=block_q)
    store_ds = numbers.keep(transposed, block_k, block_q)
    add_dq = make_add_dq(layout, sums, head_width, k_own, numbers)
    store_dk = numbers.store(transposed, head_width, vectors, k_own)
    store_dv = numbers.store(transposed, value_width, vectors, v_own)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units
    load_values, keep_values = make_row_values(layout, tiles)
    subtract_lse, zero = make_subtract_by_keys(transposed), np.float32(0)
    operand_factor = np.float32(LOG2_E if is_plain else 1)

    def flash2_mma_dkdv(read, dq_sums, dk, dv, scale, extras):
        """Fill one key tile of dk and dv; with sums, add its part of dq to the sums, which are zero before.

        Computes: dk and dv for one tile of keys of one (batch, head), and its part of dq / τ
        Source: FlashAttention-2, Algorithm 2, lines 5-18; without sums all but line 15;
            FlashAttention, Algorithm 4, for mask and dropout
        Grid: (num_k_tiles * parts, batch * heads), one block per key tile and part of the columns
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for the keys of its warp, two neighbouring query rows of
            two keys: of Sᵀ and dPᵀ step_q / 8 tiles, of dK and dV their columns / 8
        Shared: k_tile, v_tile (block_k, dim), two each of q_tile, dout_tile (block_q, dim),
            large_lse, shift and delta (block_q,); with sums dSᵀ (block_k, block_q); swizzled; for
            some options a byte for four columns
        Registers: dk_acc, dv_acc (key_tiles * columns / 8, 4), s, dp (key_tiles * step_q / 8, 4),
            with sums those of dq, a share of (block_q, columns)
        Global traffic: reads k and v once, q, dout, lse, lse_rest and delta once per key tile; writes
            dk and dv once; with sums adds to those of dq once per key tile
        Needs: compute capability 8.0
        """
        # 5: for 1 <= j <= T_c
        item = item_of(cuda.blockIdx.x // parts, cuda.blockIdx.y, read.q, read.k, extras)
        start, queries = item.start, item.q
        b, h, _, _, _, col, seq_q, seq_k = start
        part = cuda.blockIdx.x % parts
        k_chunk, v_chunk = part * (k_own // COLS), part * (v_own // COLS)
        thread = cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        warp_key = warp * warp_keys
        # k, v, two each of q and dout, ds, two each of L and D of rows; then bits
        bits = cuda.shared.array(0, uint8)
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        k_tile, v_tile, ds_tile = memory + k_offset, memory + v_offset, memory + ds_offset
        q_tile, dout_tile = memory + q_offset, memory + dout_offset
        # In a 16 x 8 tile of sums a lane has keys lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        dk_acc = cuda.local.array((dk_tiles, 4), float32)  # (warp_keys, k_own) / 32: dK
        dv_acc = cuda.local.array((dv_tiles, 4), float32)  # (warp_keys, v_own) / 32: dV
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, then (P ∘ Z)ᵀ
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: dPᵀ, then dSᵀ
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        first, stop = bounds(col, seq_q, seq_k, extras)
        entry, entries_stop = entries(item.flat, col, seq_k, first, stop, extras)
        entry = next_entry(entry, entries_stop, first, stop, extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        keys = rows_from(item.k, col)
        copy_k(thread, read.k, keys, k_tile)
        copy_v(thread, read.v, keys, v_tile)
        factor, top, dp_unit, delta_unit = units_of(scale, b, h)
        values = LseAndDelta(zero, zero, zero)
        if entry < entries_stop:
            span = rows_from(queries, tile_of(entry, extras) * block_q)
            copy_q(thread, read.q, span, q_tile)
            copy_dout(thread, read.dout, span, dout_tile)
            values = load_values(thread, read, span, top, delta_unit)
            keep_values(thread, floats, 0, values)
        cp_async_commit_group()
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        factor *= operand_factor
        units, stage = (factor, dp_unit), 0
        while entry < entries_stop:
            t = tile_of(entry, extras)
            row = t * block_q
            whole = is_inside(row, col, seq_q, seq_k, extras) and is_whole(entry, extras)
            cp_async_wait_all()
            draw(thread, bits, whole, moved(start, row, 0), extras)
            # The tiles are whole; every warp is done with the other stage and dS.
            has_large = False
            if is_plain:
                has_large = cuda.syncthreads_or(int32(values.large != zero)) != 0
            else:
                cuda.syncthreads()
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            entry = next_entry(entry + 1, entries_stop, first, stop, extras)
            other = 1 - stage
            if entry < entries_stop:
                span = rows_from(queries, tile_of(entry, extras) * block_q)
                copy_q(thread, read.q, span, q_tile + other * q_bytes)
                copy_dout(thread, read.dout, span, dout_tile + other * dout_bytes)
                # On their way until they are kept below.
                values = load_values(thread, read, span, top, delta_unit)
            cp_async_commit_group()
            large_row = memory + rows_offset + WORD * (stage * block_q + lane_col(lane))
            place = moved(start, row + lane_col(lane), warp_key + lane_row(lane))
            tile = ScoreTile(whole, bits, place, edge_of(place, extras))
            for step in range(0, block_q, step_q):
                lane = recomputed(lane)  # addresses of fragments would fill the registers
                own = WarpLane(lane, warp_key, 0)
                q_stage = q_tile + stage * q_bytes + HALF * head_width * step
                dout_stage = dout_tile + stage * dout_bytes + HALF * value_width * step
                # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
                multiply_kq(s, k_tile, q_stage, own)
                multiply_v_dout(dp, v_tile, dout_stage, own)
                # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                if is_plain and has_large:
                    subtract_lse(s, factor, large_row + WORD * step)
                to_gradients(s, dp, (large_row, step), units, tile, own, extras)
                if has_sums:
                    store_ds(dp, ds_tile, WarpLane(lane, warp_key, step // COLS))
                # 12: dV_j += (P_ij ∘ Z)ᵀ dO_i
                accumulate_dv(dv_acc, s, dout_stage, WarpLane(lane, warp_key, v_chunk))
                # 16: dK_j += dSᵀ Q_i
                accumulate_dk(dk_acc, dp, q_stage, WarpLane(lane, warp_key, k_chunk))
            keep_values(thread, floats, other, values)
            if has_sums or has_bits:
                cuda.syncthreads()  # dS is whole, and the bits have been read
            # 15: dQ_i += dS K_j
            lane = recomputed(lane)
            add_dq(dq_sums, ds_tile, k_tile, WarpLane(lane, warp, part), item, t, extras)
            stage = other
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        _, dk_unit, dv_unit = units_of_gradients(scale, b, h)
        scale_all(dk_acc, dk_unit)
        scale_all(dv_acc, dv_unit)
        store_dk(dk_acc, dk, keys, k_tile, WarpLane(lane, warp_key, k_chunk))
        store_dv(dv_acc, dv, keys, v_tile, WarpLane(lane, warp_key, v_chunk))

    written = array_type(FLOAT32 if numbers.is_wide else BITS, 4)
    rest = numbers.scale_type(True), extras_type(features, FLOAT32)
    signature = void(INPUTS_TYPE, array_type(FLOAT32, 3), written, written, *rest)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(flash2_mma_dkdv, signature, threads, shared_bytes, layout.resident)
