"""FlashAttention-2 backward on tensor cores, by query rows: dQ, which each block sums in registers.

Atomics add in any order; here gradients are bitwise equal on every run.  Measured on an H200 at N = 16,384,
d = 64 in bfloat16, together with the kernel by keys: 238 TFLOP/s; atomics reach 301.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, uint8, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.block_item import INPUTS_TYPE, make_item
from kernels.cuda.attention.flash2_mma.fragment_scores import (
    LaneRows,
    ScoreTile,
    make_gradients_by_rows,
)
from kernels.cuda.attention.flash2_mma.large_rows import lse_and_shift, make_subtract_by_rows
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaLayout, WarpLane, rows_from
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import moved
from kernels.cuda.attention.options.visits import make_next_entry, make_row_bounds, make_visits
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_commit_group, cp_async_wait_all, shared_address
from kernels.cuda.ptx.fragments import lane_row
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, WORD, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


def dq_tiles(layout: MmaLayout, head_width: int, value_width: int, size: int = HALF) -> SharedTiles:
    """Return the offsets of the tiles of the dq kernel, in bytes: two each of K and V."""
    q, dout = (size * layout.block_q * width for width in (head_width, value_width))
    k, v = (2 * size * layout.block_k * width for width in (head_width, value_width))
    return SharedTiles(q=q, dout=dout, k=k, v=v, large=WORD * layout.block_q)


@cache
def dq_kernel(
    layout: MmaLayout,
    head_width: int,
    value_width: int,
    numbers: Arithmetic,
    vectors: bool,
    features: Features = PLAIN,
) -> Kernel:
    """Return the kernel that fills dq; its arguments are those of ``flash2_mma.forward_kernel``."""
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    widths = head_width, value_width
    row_tiles, col_tiles, own_tiles = layout.row_tiles, block_k // COLS, head_width // COLS
    warp_rows, own_rows = ROWS * row_tiles, 2 * row_tiles
    s_tiles, acc_tiles = row_tiles * col_tiles, row_tiles * own_tiles
    tiles = dq_tiles(layout, *widths, numbers.size)
    q_offset, dout_offset, k_offset, v_offset = (tiles[name] for name in ("q", "dout", "k", "v"))
    large_index = tiles["large"] // WORD
    k_bytes, v_bytes = (numbers.size * block_k * width for width in widths)
    visits = make_visits(features, block_q)
    _, entries, tile_of, is_whole, _ = visits
    item_of, next_entry = make_item(visits), make_next_entry(visits)
    bounds = make_row_bounds(block_q, block_k)
    tile_bits = make_tile_bits(features, layout, FLOAT32, tiles.elements)  # type: ignore[arg-type]
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    to_gradients = make_gradients_by_rows(layout, features, tile_bits)
    copy_q, copy_dout = (numbers.copy(threads, block_q, width, vectors) for width in widths)
    copy_k, copy_v = (numbers.copy(threads, block_k, width, vectors) for width in widths)
    multiply_qk, multiply_dout_v = (numbers.multiply(layout, width) for width in widths)
    accumulate = numbers.accumulate(layout, head_width)
    store_dq = numbers.store(layout, head_width, vectors)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units
    subtract_lse, is_plain = make_subtract_by_rows(layout), features.of_elements == PLAIN
    zero, inf = np.float32(0), np.float32(math.inf)
    operand_factor = np.float32(LOG2_E if is_plain else 1)

    def flash2_mma_dq(read, dq, scale, extras):
        """Fill one query tile of dq.

        Computes: dq for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows; FlashAttention,
            Algorithm 4, for mask and dropout
        Grid: (num_q_tiles, batch * heads), one block per query tile, the longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring
            columns of two rows: of S and dP block_k / 8 tiles, of dQ head_dim / 8
        Shared: q_tile (block_q, head_dim), dout_tile (block_q, value_dim), two
            k_tile (block_k, head_dim), two v_tile (block_k, value_dim), swizzled; large_lse
            (block_q,); at the end dq in the place of q; for some options a byte for four columns
        Registers: acc (row_tiles * head_dim / 8, 4), s, dp (row_tiles * block_k / 8, 4),
            shift, own_delta (2 * row_tiles,)
        Global traffic: reads q, dout, lse, lse_rest and delta once, k and v once per query tile; writes dq
            once
        Needs: compute capability 8.0
        """
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, read.q, read.k, extras)
        start, keys = item.start, item.k
        b, h, _, _, row, _, seq_q, seq_k = start
        thread = cuda.threadIdx.x
        lane, warp_row = thread % WARP, thread // WARP * warp_rows
        own = WarpLane(lane, warp_row, 0)
        bits = cuda.shared.array(0, uint8)  # q, dout, two each of k and v, lse; then bits
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        q_tile, dout_tile = memory + q_offset, memory + dout_offset
        k_tile, v_tile = memory + k_offset, memory + v_offset
        # In a 16 x 8 tile of sums a lane has rows lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, head_dim) / 32: dQ
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: dP, then dS
        shift = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: L, less large_lse
        own_delta = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: D
        first, stop, full, full_stop = bounds(row, seq_q, seq_k, extras)
        entry, entries_stop = entries(item.flat, row, seq_q, first, stop, extras)
        entry = next_entry(entry, entries_stop, first, stop, extras)
        q_rows = rows_from(item.q, row)
        copy_q(thread, read.q, q_rows, q_tile)
        copy_dout(thread, read.dout, q_rows, dout_tile)
        if entry < entries_stop:
            span = rows_from(keys, tile_of(entry, extras) * block_k)
            copy_k(thread, read.k, span, k_tile)
            copy_v(thread, read.v, span, v_tile)
        cp_async_commit_group()
        factor, top, dp_unit, delta_unit = units_of(scale, b, h)
        # A row beyond the end has an infinite shift, and so no probabilities.
        has_large, large_at = False, large_index + warp_row + lane_row(lane)
        for i in range(own_rows):
            this_row = q_rows.first + warp_row + lane_row(lane) + 8 * i
            large_lse, shift[i], own_delta[i] = zero, inf, zero
            if this_row < q_rows.stop:
                own_lse, own_rest = read.lse[b, h, this_row], read.lse_rest[b, h, this_row]
                large_lse, shift[i] = lse_and_shift(own_lse, own_rest, top)
                own_delta[i] = read.delta[b, h, this_row] * delta_unit
            floats[large_at + 8 * i] = large_lse  # read by this lane alone
            has_large = has_large or large_lse != zero
        has_large = cuda.ballot_sync(ALL_LANES, has_large) != 0
        set_all(acc, zero)
        factor *= operand_factor
        rows, units = LaneRows(floats, large_at, shift, own_delta), (factor, dp_unit)
        stage = 0
        while entry < entries_stop:
            j = tile_of(entry, extras)
            whole = full <= j < full_stop and is_whole(entry, extras)
            tile = ScoreTile(whole, bits, moved(start, 0, j * block_k), 0)
            cp_async_wait_all()
            draw(thread, bits, whole, tile.place, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the other stage
            entry = next_entry(entry + 1, entries_stop, first, stop, extras)
            if entry < entries_stop:
                span, other = rows_from(keys, tile_of(entry, extras) * block_k), 1 - stage
                copy_k(thread, read.k, span, k_tile + other * k_bytes)
                copy_v(thread, read.v, span, v_tile + other * v_bytes)
            cp_async_commit_group()
            # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
            k_stage = k_tile + stage * k_bytes
            multiply_qk(s, q_tile, k_stage, own)
            multiply_dout_v(dp, dout_tile, v_tile + stage * v_bytes, own)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            if is_plain and has_large:
                subtract_lse(s, factor, floats, large_at)
            to_gradients(s, dp, rows, units, tile, own, extras)
            # 15: dQ_i += dS K_j
            accumulate(acc, dp, k_stage, own)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # Q has arrived everywhere, for dQ takes its place
        dq_unit, _, _ = units_of_gradients(scale, b, h)
        scale_all(acc, dq_unit)
        store_dq(acc, dq, q_rows, q_tile, own)

    written = array_type(FLOAT32 if numbers.is_wide else BITS, 4)
    rest = numbers.scale_type(True), extras_type(features, FLOAT32)
    shared_bytes = tiles.elements + tile_bits.bytes
    signature = void(INPUTS_TYPE, written, *rest)
    return Kernel(flash2_mma_dq, signature, threads, shared_bytes, layout.resident)
