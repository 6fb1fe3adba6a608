"""FlashAttention-2 backward on tensor cores, by query rows: dQ, which each block sums in registers.

Atomics add in any order; here gradients are bitwise equal on every run.  Measured on an H200 at N = 16,384,
d = 64 in bfloat16, together with the kernel by keys: 238 TFLOP/s; atomics reach 301.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.fragment_scores import LaneRows, make_gradients_by_rows
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_rows
from kernels.cuda.attention.flash2_mma.pipeline import (
    INPUTS_TYPE,
    MmaVariant,
    make_load_keys,
    values_of_row,
)
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaLayout, WarpLane
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_wait_all, recomputed, shared_address
from kernels.cuda.ptx.fragments import lane_row
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, WORD, Kernel, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint8
from kernels.scores.program import PLAIN


def dq_tiles(layout: MmaLayout, head_width: int, value_width: int, size: int = HALF) -> SharedTiles:
    """Return the offsets of the tiles of the dq kernel, in bytes: two each of K and V."""
    q, dout = (size * layout.block_q * width for width in (head_width, value_width))
    k, v = (2 * size * layout.block_k * width for width in (head_width, value_width))
    return SharedTiles(q=q, dout=dout, k=k, v=v, large=WORD * layout.block_q)


def _make_load_values(variant: MmaVariant) -> Callable[..., Any]:
    """Return ``load_values(read, rows, lane_rows, units, share)``: the ``LseAndDelta`` of a lane's rows.

    ``rows`` are those of the tile.  The values go to ``LaneRows``; the result tells whether a row of the
    warp is large.
    """
    count, zero = 2 * variant.layout.row_tiles, np.float32(0)

    @device_function
    def load_values(read, rows, lane_rows, units, share):
        floats, large_at, shift, delta = lane_rows
        has_large = False
        for i in range(count):
            values = values_of_row(read, rows, share.row + lane_row(share.lane) + 8 * i, units)
            floats[large_at + 8 * i] = values.large  # read by this lane alone
            shift[i], delta[i] = values.shift, values.delta
            has_large = has_large or values.large != zero
        return cuda.ballot_sync(ALL_LANES, has_large) != 0

    return load_values


def _make_add_keys(
    variant: MmaVariant, tiles: SharedTiles, tile_bits: TileBits
) -> Callable[..., None]:
    """Return ``add_keys(registers, memory, stage, units, tile, has_large, share, extras)``.

    It adds the part of a tile of keys to dQ.  ``registers`` are dQ, S, dP and ``LaneRows``, and ``units``
    the factors of S and dP and the unit of dS.
    """
    layout, head_width, _, numbers, _, features = variant
    columns = head_width // layout.parts
    q_offset, dout_offset, k_offset, v_offset = (tiles[name] for name in ("q", "dout", "k", "v"))
    k_bytes, v_bytes = (numbers.size * layout.block_k * width for width in variant.widths)
    multiply_qk, multiply_dout_v = (numbers.multiply(layout, width) for width in variant.widths)
    to_gradients = make_gradients_by_rows(layout, features, tile_bits)
    subtract_lse, is_plain = make_subtract_by_rows(layout), features.of_elements == PLAIN
    accumulate = numbers.accumulate(layout, head_width, columns)

    @device_function
    def add_keys(registers, memory, stage, units, tile, has_large, share, extras):
        dq, s, dp, values = registers
        k_tile, v_tile = memory + k_offset + stage * k_bytes, memory + v_offset + stage * v_bytes
        # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
        multiply_qk(s, memory + q_offset, k_tile, share)
        multiply_dout_v(dp, memory + dout_offset, v_tile, share)
        # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
        if is_plain and has_large:
            subtract_lse(s, units[0], values.floats, values.large_at)
        to_gradients(s, dp, values, units, tile, share, extras)
        # 15: dQ_i += dS K_j
        accumulate(dq, dp, k_tile, share)

    return add_keys


@cache
def dq_kernel(variant: MmaVariant) -> Kernel:
    """Return the kernel that fills dq."""
    layout, head_width, _, numbers, vectors, features = variant
    block_q, block_k, row_tiles = layout.block_q, layout.block_k, layout.row_tiles
    warp_rows, lane_rows = ROWS * row_tiles, 2 * row_tiles
    parts, columns = layout.parts, head_width // layout.parts
    s_tiles, own_tiles = row_tiles * block_k // COLS, columns // COLS
    acc_tiles = row_tiles * own_tiles
    tiles = dq_tiles(layout, *variant.widths, numbers.size)
    q_offset, dout_offset, large_index = tiles["q"], tiles["dout"], tiles["large"] // WORD
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop()
    tile_bits, (copy_q, copy_dout) = variant.bits(tiles), variant.copies(block_q)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_keys, load_values = make_load_keys(variant, tiles), _make_load_values(variant)
    add_keys = _make_add_keys(variant, tiles, tile_bits)
    store_dq = numbers.store(layout, head_width, vectors, columns)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units
    ds_unit_of = numbers.ds_unit
    operand_factor = np.float32(LOG2_E if features.of_elements == PLAIN else 1)

    def flash2_mma_dq(read, dq, scale, extras):
        """Fill one query tile of dq.

        Computes: dq for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows; FlashAttention,
            Algorithm 4, for mask and dropout
        Grid: (num_q_tiles * parts, batch * heads), one block per query tile and part of the columns, the
            longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring
            columns of two rows: of S and dP block_k / 8 tiles, of dQ columns / 8
        Shared: q_tile (block_q, head_dim), dout_tile (block_q, value_dim), two
            k_tile (block_k, head_dim), two v_tile (block_k, value_dim), swizzled; large_lse
            (block_q,); at the end dq in the place of q; for some options a byte for four columns
        Registers: acc (row_tiles * columns / 8, 4), s, dp (row_tiles * block_k / 8, 4),
            shift, own_delta (2 * row_tiles,)
        Global traffic: reads q, dout, lse, lse_rest and delta once, k and v once per query tile; writes dq
            once
        Needs: compute capability 8.0
        """
        x, chunk = cuda.blockIdx.x, 0
        if parts > 1:
            x, chunk = x // parts, x % parts * own_tiles
        item = item_of(x, cuda.blockIdx.y, read.q, read.k, extras)
        thread, rows = cuda.threadIdx.x, rows_from(item.q, item.start.row)
        lane = thread % WARP
        share = WarpLane(lane, thread // WARP * warp_rows, chunk)
        bits = cuda.shared.array(0, uint8)  # q, dout, two each of k and v, lse; then bits
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        # In a 16 x 8 tile of sums a lane has rows lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, columns) / 32: dQ
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: dP, then dS
        shift = cuda.local.array(lane_rows, float32)  # (warp_rows,) / 8: L, less large_lse
        delta = cuda.local.array(lane_rows, float32)  # (warp_rows,) / 8: D
        visit = begin(item, bounds_of(item, extras), extras)
        copy_q(thread, read.q, rows, memory + q_offset)
        copy_dout(thread, read.dout, rows, memory + dout_offset)
        load_keys(thread, read.k, read.v, item, visit, memory, 0, extras)
        head_units = units_of(scale, item.start.b, item.start.h)
        values = LaneRows(floats, large_index + share.row + lane_row(share.lane), shift, delta)
        has_large = load_values(read, rows, values, head_units, share)
        ds_unit = ds_unit_of(scale, item.start.b, item.start.h)
        units = head_units[0] * operand_factor, head_units[2], ds_unit
        registers = acc, s, dp, values
        set_all(acc, 0)
        stage = 0
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the other stage
            visit = advance(visit, 1, extras)
            load_keys(thread, read.k, read.v, item, visit, memory, 1 - stage, extras)
            if parts > 1:
                lane = recomputed(lane)  # addresses of fragments would fill the registers
            own = WarpLane(lane, share.row, share.chunk)
            # 10 to 15: dQ_i += dS K_j
            add_keys(registers, memory, stage, units, tile, has_large, own, extras)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # Q has arrived everywhere, for dQ takes its place
        dq_unit, _, _ = units_of_gradients(scale, item.start.b, item.start.h)
        scale_all(acc, dq_unit)
        store_dq(acc, dq, rows, memory + q_offset, share)

    signature = variant.signature(INPUTS_TYPE, variant.result_type)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(
        numbers.named(flash2_mma_dq), signature, layout.threads, shared_bytes, layout.resident
    )
