"""FlashAttention-2 backward on tensor cores, by key columns: dK and dV, and optionally dQ by atomics.

What flash2 left on the table: the same as in its forward pass, and in addition P and dS pass through shared
memory twice, because the products with dO and Q need them transposed.  Here each warp owns keys and
computes Sᵀ = KQᵀ and dPᵀ = VdOᵀ, so that the accumulators already have the layout of the left operands of
Pᵀ·dO and dSᵀ·Q.  Only dQ = dS·K needs dS from other warps, and receives it through shared memory in 16
bits.  Measured on an H200 at N = 16,384, d = 64 in bfloat16, by atomics: 301 TFLOP/s; flash2 reaches 27.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.fragment_scores import make_gradients_by_keys
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.pipeline import INPUTS_TYPE, MmaVariant, make_load_queries
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaKeyLayout, WarpLane
from kernels.cuda.attention.options.tile_scores import moved
from kernels.cuda.attention.options.visits import VisitedTile, rows_from
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_wait_all, recomputed, shared_address
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint8
from kernels.scores.program import PLAIN


def dkdv_tiles(
    layout: MmaKeyLayout, head_width: int, value_width: int, atomics: bool, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes: two each of Q, dO, L and D."""
    k, v = (size * layout.block_k * width for width in (head_width, value_width))
    q, dout = (2 * size * layout.block_q * width for width in (head_width, value_width))
    ds = size * layout.block_q * layout.block_k if atomics else 0
    rows = 2 * FLOAT32.itemsize * layout.block_q
    return SharedTiles(k=k, v=v, q=q, dout=dout, ds=ds, large=rows, shift=rows, delta=rows)


def _make_add_rows(
    variant: MmaVariant, tiles: SharedTiles, tile_bits: TileBits, has_sums: bool
) -> Callable[..., None]:
    """Return ``add_rows(registers, memory, rows, units, tile, has_large, share, extras)``.

    It adds ``step_q`` query rows of a tile to dK and dV.  ``registers`` are dK, dV, S and dP; ``rows`` are
    the stage, the first of these rows in the tile, and the address of the ``large_lse`` of the lane's first
    row.  The ``VisitedTile`` begins at the first element of the lane; ``share.chunk`` is the part of the
    columns.
    """
    layout, head_width, value_width, numbers, _, features = variant
    block_q, block_k, transposed, parts = (
        layout.block_q,
        layout.block_k,
        layout.transposed,
        layout.parts,
    )
    k_columns, v_columns = head_width // parts, value_width // parts
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    ds_offset, q_row, dout_row = tiles["ds"], HALF * head_width, HALF * value_width
    q_bytes, dout_bytes = (numbers.size * block_q * width for width in variant.widths)
    multiply_kq = numbers.multiply(transposed, head_width, b_rows=block_q, is_transposed=True)
    multiply_v_dout = numbers.multiply(transposed, value_width, b_rows=block_q)
    accumulate_dk = numbers.accumulate(transposed, head_width, k_columns, b_rows=block_q)
    accumulate_dv = numbers.accumulate(transposed, value_width, v_columns, b_rows=block_q)
    store_ds = numbers.keep(transposed, block_k, block_q)
    to_gradients = make_gradients_by_keys(layout, features, tile_bits)
    subtract_lse, is_plain = make_subtract_by_keys(transposed), features.of_elements == PLAIN

    @device_function
    def add_rows(registers, memory, rows, units, tile, has_large, share, extras):
        (dk, dv, s, dp), (stage, row, large_row), (lane, key, part) = registers, rows, share
        k_tile, v_tile = memory + k_offset, memory + v_offset
        q_rows = memory + q_offset + stage * q_bytes + q_row * row
        dout_rows = memory + dout_offset + stage * dout_bytes + dout_row * row
        share = WarpLane(lane, key, 0)
        # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
        multiply_kq(s, k_tile, q_rows, share)
        multiply_v_dout(dp, v_tile, dout_rows, share)
        # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
        if is_plain and has_large:
            subtract_lse(s, units[0], large_row + WORD * row)
        to_gradients(s, dp, (large_row, row), units, tile, share, extras)
        if has_sums:
            store_ds(dp, memory + ds_offset, WarpLane(lane, key, row // COLS))
        # 12: dV_j += (P_ij ∘ Z)ᵀ dO_i
        accumulate_dv(dv, s, dout_rows, WarpLane(lane, key, part * (v_columns // COLS)))
        # 16: dK_j += dSᵀ Q_i
        accumulate_dk(dk, dp, q_rows, WarpLane(lane, key, part * (k_columns // COLS)))

    return add_rows


@cache
def dkdv_kernel(variant: MmaVariant, sums: DqSums | None = None) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq."""
    layout, head_width, value_width, numbers, vectors, features = variant
    block_q, block_k, threads, parts = layout.block_q, layout.block_k, layout.threads, layout.parts
    transposed, step_q, key_tiles = layout.transposed, layout.step_q, layout.transposed.row_tiles
    k_columns, v_columns = head_width // parts, value_width // parts
    dk_tiles, dv_tiles = key_tiles * k_columns // COLS, key_tiles * v_columns // COLS
    s_tiles, warp_keys = key_tiles * step_q // COLS, ROWS * key_tiles
    has_sums, is_plain = sums is not None, features.of_elements == PLAIN
    tiles = dkdv_tiles(layout, *variant.widths, has_sums, numbers.size)
    k_offset, v_offset, ds_offset, large_offset = (tiles[x] for x in ("k", "v", "ds", "large"))
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop(by_keys=True)
    tile_bits, (copy_k, copy_v) = variant.bits(tiles), variant.copies(block_k)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_queries, keep_values = make_load_queries(variant, tiles)
    add_rows = _make_add_rows(variant, tiles, tile_bits, has_sums)
    add_dq = make_add_dq(variant, sums, k_columns)
    store_dk = numbers.store(transposed, head_width, vectors, k_columns)
    store_dv = numbers.store(transposed, value_width, vectors, v_columns)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units
    ds_unit_of = numbers.ds_unit
    zero, operand_factor = np.float32(0), np.float32(LOG2_E if is_plain else 1)

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
        start, part, thread = item.start, cuda.blockIdx.x % parts, cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        warp_key = warp * warp_keys
        # k, v, two tiles of q, two of dout, ds, two each of L and D; then option bits
        bits = cuda.shared.array(0, uint8)
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        k_tile, v_tile, ds_tile = memory + k_offset, memory + v_offset, memory + ds_offset
        # In a 16 x 8 tile of sums a lane has keys lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        dk_acc = cuda.local.array((dk_tiles, 4), float32)  # (warp_keys, k_columns) / 32: dK
        dv_acc = cuda.local.array((dv_tiles, 4), float32)  # (warp_keys, v_columns) / 32: dV
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, then (P ∘ Z)ᵀ
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: dPᵀ, then dSᵀ
        registers = dk_acc, dv_acc, s, dp
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        visit = begin(item, bounds_of(item, extras), extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        keys = rows_from(item.k, start.col)
        copy_k(thread, read.k, keys, k_tile)
        copy_v(thread, read.v, keys, v_tile)
        head_units = units_of(scale, start.b, start.h)
        values = load_queries(thread, read, item, visit, memory, 0, head_units, extras)
        keep_values(thread, floats, 0, values)
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        ds_unit, stage = ds_unit_of(scale, start.b, start.h), 0
        units = head_units[0] * operand_factor, head_units[2], ds_unit
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            row, first_row, first_key = tile.place.row, lane_col(lane), warp_key + lane_row(lane)
            cp_async_wait_all()
            draw(thread, tile, extras)
            # The tiles are whole; every warp is done with the other stage and dS.
            has_large = False
            if is_plain:
                has_large = cuda.syncthreads_or(int32(values.large != zero)) != 0
            else:
                cuda.syncthreads()
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            visit = advance(visit, 1, extras)
            # The loads run until the values are stored below.
            values = load_queries(thread, read, item, visit, memory, 1 - stage, head_units, extras)
            large_row = memory + large_offset + WORD * (stage * block_q + first_row)
            of_lane = VisitedTile(moved(tile.place, first_row, first_key), tile.whole, bits)
            for step in range(0, block_q, step_q):
                lane = recomputed(lane)  # addresses of fragments would fill the registers
                rows, share = (stage, step, large_row), WarpLane(lane, warp_key, part)
                # 10 to 14 and 16: dV_j += Pᵀ dO_i, dK_j += dSᵀ Q_i
                add_rows(registers, memory, rows, units, of_lane, has_large, share, extras)
            keep_values(thread, floats, 1 - stage, values)
            if has_sums or has_bits:
                cuda.syncthreads()  # dS is whole, and the bits have been read
            # 15: dQ_i += dS K_j
            lane = recomputed(lane)
            share = WarpLane(lane, warp, part)
            add_dq(dq_sums, ds_tile, k_tile, share, item, row // block_q, extras)
            stage = 1 - stage
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        _, dk_unit, dv_unit = units_of_gradients(scale, start.b, start.h)
        scale_all(dk_acc, dk_unit)
        scale_all(dv_acc, dv_unit)
        store_dk(dk_acc, dk, keys, k_tile, WarpLane(lane, warp_key, part * (k_columns // COLS)))
        store_dv(dv_acc, dv, keys, v_tile, WarpLane(lane, warp_key, part * (v_columns // COLS)))

    result, sums_type = variant.result_type, array_type(FLOAT32, 3)
    signature = variant.signature(INPUTS_TYPE, sums_type, result, result)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(numbers.named(flash2_mma_dkdv), signature, threads, shared_bytes, layout.resident)
