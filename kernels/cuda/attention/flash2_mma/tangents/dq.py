"""The tangent of dQ on tensor cores, which each block sums by query rows."""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash2.tangents.scores import Inputs, RowTangents, make_row_tangents
from kernels.cuda.attention.flash2_mma.fragment_scores import TangentRows, make_gradient_tangents
from kernels.cuda.attention.flash2_mma.pipeline import (
    INPUTS_TYPE,
    MmaVariant,
    make_load_keys,
    values_of_row,
)
from kernels.cuda.attention.flash2_mma.products import make_multiply_tangents
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaLayout, WarpLane
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_wait_all, recomputed, shared_address
from kernels.cuda.ptx.fragments import lane_row
from kernels.cuda.runtime.kernel import WARP, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, types, uint8

#: Numba's types of ``Inputs`` in 16 bits and of ``RowTangents``.
TANGENTS_TYPE = types.NamedTuple([array_type(BITS, 4)] * 3, Inputs)
ROWS_TYPE = types.NamedTuple([array_type(FLOAT32, 3)] * 2, RowTangents)


def dq_tangent_tiles(
    layout: MmaLayout, head_width: int, value_width: int, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes; those of keys have two stages."""
    q, dout = (size * layout.block_q * width for width in (head_width, value_width))
    k, v = (2 * size * layout.block_k * width for width in (head_width, value_width))
    return SharedTiles(q=q, q_tangent=q, dout=dout, k=k, v=v, k_tangent=k, v_tangent=v)


@cache
def dq_tangent_kernel(variant: MmaVariant) -> Kernel:
    """Return the kernel that fills dq with its tangent."""
    layout, head_width, value_width, numbers, vectors, features = variant
    block_q, block_k, row_tiles = layout.block_q, layout.block_k, layout.row_tiles
    warp_rows, lane_rows = ROWS * row_tiles, 2 * row_tiles
    parts, columns = layout.parts, head_width // layout.parts
    s_tiles, own_tiles = row_tiles * block_k // COLS, columns // COLS
    acc_tiles = row_tiles * own_tiles
    tiles = dq_tangent_tiles(layout, *variant.widths)
    q_offset, moved_q_offset, dout_offset, *of_keys = tiles
    k_offset, v_offset, moved_k_offset, moved_v_offset = of_keys
    k_bytes, v_bytes = (HALF * block_k * width for width in variant.widths)
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop()
    tile_bits, (copy_q, copy_dout) = variant.bits(tiles), variant.copies(block_q)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_keys, load_moved = (make_load_keys(variant, tiles, of) for of in ("", "_tangent"))
    multiply_qk = make_multiply_tangents(numbers.dtype, layout, head_width)
    multiply_dout_v = numbers.multiply(layout, value_width)
    accumulate = numbers.accumulate(layout, head_width, columns)
    to_tangents = make_gradient_tangents(layout, features, tile_bits)
    store_dq = numbers.store(layout, head_width, vectors, columns)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units
    tangents_at = make_row_tangents(FLOAT32)

    def flash2_mma_dq_tangent(read, tangents, row_tangents, dq, scale, extras):
        """Fill one query tile of dq with the tangent of dq.

        Computes: the derivative of dq along the tangents of q, k and v, for one tile of query rows of one
            (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows, and the derivative of
            each
        Grid: (num_q_tiles * parts, batch * heads), one block per query tile and part of the columns, the
            longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring columns of
            two rows: of X, dP and their tangents block_k / 8 tiles, of dQ columns / 8
        Shared: tiles of q, its tangent and dout (block_q, dim), of each stage tiles of k, v and their
            tangents (block_k, dim), swizzled; at the end dq in the place of q; for some options a byte
            for four columns
        Registers: acc (row_tiles * columns / 8, 4), x, x_tangent, dp and dp_tangent
            (row_tiles * block_k / 8, 4), five numbers a row
        Global traffic: reads q, its tangent, dout and the numbers of rows once, k, v and their tangents
            once per query tile; writes dq once
        Needs: compute capability 8.0
        """
        x_block, chunk = cuda.blockIdx.x, 0
        if parts > 1:
            x_block, chunk = x_block // parts, x_block % parts * own_tiles
        item = item_of(x_block, cuda.blockIdx.y, read.q, read.k, extras)
        thread, rows = cuda.threadIdx.x, rows_from(item.q, item.start.row)
        lane, warp_row = thread % WARP, thread // WARP * warp_rows
        bits = cuda.shared.array(0, uint8)  # the tiles; then bits
        memory = shared_address(bits)
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, columns) / 32: ḋQ
        x = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: X
        x_tangent = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: Ẋ
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: dP, dX
        dp_tangent = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: ḋP, ḋX
        # (warp_rows,) / 8 each: the numbers of TangentRows
        large, shift = cuda.local.array(lane_rows, float32), cuda.local.array(lane_rows, float32)
        delta, of_lse = cuda.local.array(lane_rows, float32), cuda.local.array(lane_rows, float32)
        of_delta = cuda.local.array(lane_rows, float32)
        visit = begin(item, bounds_of(item, extras), extras)
        copy_q(thread, read.q, rows, memory + q_offset)
        copy_q(thread, tangents.q, rows, memory + moved_q_offset)
        copy_dout(thread, read.dout, rows, memory + dout_offset)
        load_keys(thread, read.k, read.v, item, visit, memory, 0, extras)
        load_moved(thread, tangents.k, tangents.v, item, visit, memory, 0, extras)
        units = units_of(scale, item.start.b, item.start.h)
        for i in range(lane_rows):
            number = warp_row + lane_row(lane) + 8 * i
            values = values_of_row(read, rows, number, units)
            large[i], shift[i], delta[i] = values.large, values.shift, values.delta
            of_lse[i], of_delta[i] = tangents_at(row_tangents, rows, number)
        registers = x, x_tangent, dp, dp_tangent, TangentRows(large, shift, delta, of_lse, of_delta)
        set_all(acc, 0)
        stage = 0
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the other stage
            visit = advance(visit, 1, extras)
            load_keys(thread, read.k, read.v, item, visit, memory, 1 - stage, extras)
            load_moved(thread, tangents.k, tangents.v, item, visit, memory, 1 - stage, extras)
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            share = WarpLane(lane, warp_row, chunk)
            at_k, at_v = memory + stage * k_bytes, memory + stage * v_bytes
            # 10: X = τ Q_i K_jᵀ     Ẋ = τ (Q̇_i K_jᵀ + Q_i K̇_jᵀ)
            of_q = memory + q_offset, memory + moved_q_offset
            of_k = at_k + k_offset, at_k + moved_k_offset
            multiply_qk((x, x_tangent), of_q, of_k, share)
            # 13: dP = dO_i V_jᵀ     ḋP = dO_i V̇_jᵀ
            multiply_dout_v(dp, memory + dout_offset, at_v + v_offset, share)
            multiply_dout_v(dp_tangent, memory + dout_offset, at_v + moved_v_offset, share)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i)     and their tangents
            to_tangents(registers, units[0], tile, share, extras)
            # 15: dQ_i += τ dX K_j     ḋQ_i += τ (ḋX K_j + dX K̇_j)
            accumulate(acc, dp_tangent, of_k[0], share)
            accumulate(acc, dp, of_k[1], share)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # Q has arrived everywhere, for dQ takes its place
        dq_unit, _, _ = units_of_gradients(scale, item.start.b, item.start.h)
        scale_all(acc, dq_unit)
        store_dq(acc, dq, rows, memory + q_offset, WarpLane(lane, warp_row, chunk))

    types_of = INPUTS_TYPE, TANGENTS_TYPE, ROWS_TYPE, variant.result_type
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(
        flash2_mma_dq_tangent,
        variant.signature(*types_of),
        layout.threads,
        shared_bytes,
        layout.resident,
    )
