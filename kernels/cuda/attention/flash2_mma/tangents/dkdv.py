"""The tangents of dK and dV on tensor cores, which each block sums by key columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from kernels.cuda.attention.flash2.tangents.scores import make_row_tangents
from kernels.cuda.attention.flash2_mma.fragment_scores import TangentRows, make_gradient_tangents
from kernels.cuda.attention.flash2_mma.pipeline import INPUTS_TYPE, MmaVariant, make_load_queries
from kernels.cuda.attention.flash2_mma.products import make_multiply_tangents
from kernels.cuda.attention.flash2_mma.tangents.dq import ROWS_TYPE, TANGENTS_TYPE
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaKeyLayout, WarpLane
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    recomputed,
    shared_address,
)
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint8


def dkdv_tangent_tiles(
    layout: MmaKeyLayout, head_width: int, value_width: int, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes; those of query rows have two stages."""
    k, v = (size * layout.block_k * width for width in (head_width, value_width))
    q, dout = (2 * size * layout.block_q * width for width in (head_width, value_width))
    rows = dict.fromkeys(TangentRows._fields, 2 * WORD * layout.block_q)
    return SharedTiles(k=k, k_tangent=k, v=v, v_tangent=v, q=q, q_tangent=q, dout=dout, **rows)


def _make_load_tangents(
    variant: MmaVariant, tiles: SharedTiles
) -> tuple[Callable[..., tuple[float, float]], Callable[..., None]]:
    """Return the functions that load Q̇ of a visit, and keep L̇ and Ḋ; see ``make_load_queries``."""
    block_q, tile_of = variant.layout.block_q, variant.loop(by_keys=True).tile_of
    copy_q, _ = variant.copies(block_q)
    tangents_at, zero = make_row_tangents(FLOAT32), FLOAT32.type(0)
    offset, q_bytes = tiles["q_tangent"], HALF * block_q * variant.head_width
    lse, delta = tiles["lse_tangent"] // WORD, tiles["delta_tangent"] // WORD

    @device_function
    def load(thread, arrays, item, visit, memory, stage, extras):
        q_tangent, row_tangents = arrays
        found = zero, zero
        if visit.entry < visit.stop:
            rows = rows_from(item.q, tile_of(visit.entry, extras) * block_q)
            copy_q(thread, q_tangent, rows, memory + offset + stage * q_bytes)
            if thread < block_q:
                found = tangents_at(row_tangents, rows, thread)
        cp_async_commit_group()
        return found

    @device_function
    def keep(thread, floats, stage, found):
        if thread < block_q:
            at = stage * block_q + thread
            floats[lse + at], floats[delta + at] = found

    return load, keep


@cache
def dkdv_tangent_kernel(variant: MmaVariant) -> Kernel:
    """Return the kernel that fills dk and dv with their tangents."""
    layout, head_width, value_width, numbers, vectors, features = variant
    block_q, block_k, parts = layout.block_q, layout.block_k, layout.parts
    transposed = replace(layout, step_q=block_q).transposed  # whole tiles at a time
    key_tiles, (k_columns, v_columns) = transposed.row_tiles, (x // parts for x in variant.widths)
    dk_tiles, dv_tiles = key_tiles * k_columns // COLS, key_tiles * v_columns // COLS
    s_tiles, warp_keys = key_tiles * block_q // COLS, ROWS * key_tiles
    tiles = dkdv_tangent_tiles(layout, *variant.widths)
    k_offset, moved_k_offset, v_offset, moved_v_offset, *of_rows = tiles
    q_offset, moved_q_offset, dout_offset, *_ = of_rows
    q_bytes, dout_bytes = (HALF * block_q * width for width in variant.widths)
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop(by_keys=True)
    tile_bits, (copy_k, copy_v) = variant.bits(tiles), variant.copies(block_k)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_queries, keep_values = make_load_queries(variant, tiles)
    load_moved, keep_moved = _make_load_tangents(variant, tiles)
    multiply_kq = make_multiply_tangents(numbers.dtype, transposed, head_width, by_keys=True)
    multiply_v_dout = numbers.multiply(transposed, value_width)
    accumulate_dk = numbers.accumulate(transposed, head_width, k_columns)
    accumulate_dv = numbers.accumulate(transposed, value_width, v_columns)
    to_tangents = make_gradient_tangents(transposed, features, tile_bits, tiles)
    store_dk = numbers.store(transposed, head_width, vectors, k_columns)
    store_dv = numbers.store(transposed, value_width, vectors, v_columns)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units

    def flash2_mma_dkdv_tangent(read, tangents, row_tangents, dk, dv, scale, extras):
        """Fill one key tile of dk and dv with the tangents of dk and dv.

        Computes: the derivatives of dk and dv along the tangents of q, k and v, for one tile of keys of
            one (batch, head)
        Source: FlashAttention-2, Algorithm 2, lines 5-18 without 15, and the derivative of each
        Grid: (num_k_tiles * parts, batch * heads), one block per key tile and part of the columns
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for the keys of its warp, two neighbouring query rows of two
            keys: of Xᵀ, dPᵀ and their tangents block_q / 8 tiles, of dK and dV their columns / 8
        Shared: tiles of k, v and their tangents (block_k, dim), of each stage tiles of q, its tangent and
            dout (block_q, dim), and five numbers a row; swizzled; for some options a byte for four columns
        Registers: dk_acc, dv_acc (key_tiles * columns / 8, 4), x, x_tangent, dp and dp_tangent
            (key_tiles * block_q / 8, 4)
        Global traffic: reads k, v and their tangents once, q, its tangent, dout and the numbers of rows
            once per key tile; writes dk and dv once
        Needs: compute capability 8.0
        """
        # 5: for 1 <= j <= T_c
        item = item_of(cuda.blockIdx.x // parts, cuda.blockIdx.y, read.q, read.k, extras)
        start, part, thread = item.start, cuda.blockIdx.x % parts, cuda.threadIdx.x
        lane, warp_key = thread % WARP, thread // WARP * warp_keys
        bits = cuda.shared.array(0, uint8)  # the tiles and numbers of rows; then bits
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        dk_acc = cuda.local.array((dk_tiles, 4), float32)  # (warp_keys, k_columns) / 32: ḋK
        dv_acc = cuda.local.array((dv_tiles, 4), float32)  # (warp_keys, v_columns) / 32: ḋV
        x = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, block_q) / 32: Xᵀ, (Ṗ ∘ Z)ᵀ
        x_tangent = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, block_q) / 32: Ẋᵀ
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, block_q) / 32: dPᵀ, dXᵀ
        dp_tangent = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, block_q) / 32: ḋPᵀ, ḋXᵀ
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        visit = begin(item, bounds_of(item, extras), extras)
        # 6: load K_j, V_j, K̇_j, V̇_j     7: ḋK_j = 0, ḋV_j = 0
        keys = rows_from(item.k, start.col)
        k_tiles = memory + k_offset, memory + moved_k_offset
        copy_k(thread, read.k, keys, k_tiles[0])
        copy_k(thread, tangents.k, keys, k_tiles[1])
        copy_v(thread, read.v, keys, memory + v_offset)
        copy_v(thread, tangents.v, keys, memory + moved_v_offset)
        units, of_tangents = units_of(scale, start.b, start.h), (tangents.q, row_tangents)
        values = load_queries(thread, read, item, visit, memory, 0, units, extras)
        moved = load_moved(thread, of_tangents, item, visit, memory, 0, extras)
        keep_values(thread, floats, 0, values)
        keep_moved(thread, floats, 0, moved)
        set_all(dk_acc, 0)
        set_all(dv_acc, 0)
        stage = 0
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the other stage
            # 9: load Q_i, Q̇_i, dO_i, L_i, D_i, L̇_i, Ḋ_i: those of the next iteration
            visit = advance(visit, 1, extras)
            # On their way until they are kept below.
            values = load_queries(thread, read, item, visit, memory, 1 - stage, units, extras)
            moved = load_moved(thread, of_tangents, item, visit, memory, 1 - stage, extras)
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            share = WarpLane(lane, warp_key, 0)
            at_q, dout_tile = memory + stage * q_bytes, memory + dout_offset + stage * dout_bytes
            # 10: Xᵀ = τ K_j Q_iᵀ     Ẋᵀ = τ (K_j Q̇_iᵀ + K̇_j Q_iᵀ)
            q_tiles = at_q + q_offset, at_q + moved_q_offset
            multiply_kq((x, x_tangent), k_tiles, q_tiles, share)
            # 13: dPᵀ = V_j dO_iᵀ     ḋPᵀ = V̇_j dO_iᵀ
            multiply_v_dout(dp, memory + v_offset, dout_tile, share)
            multiply_v_dout(dp_tangent, memory + moved_v_offset, dout_tile, share)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i)     and their tangents
            registers = x, x_tangent, dp, dp_tangent, (floats, stage * block_q)
            to_tangents(registers, units[0], tile, share, extras)
            # 12: dV_j += (P ∘ Z)ᵀ dO_i     ḋV_j += (Ṗ ∘ Z)ᵀ dO_i
            of_values = WarpLane(lane, warp_key, part * (v_columns // COLS))
            accumulate_dv(dv_acc, x, dout_tile, of_values)
            # 16: dK_j += τ dXᵀ Q_i     ḋK_j += τ (ḋXᵀ Q_i + dXᵀ Q̇_i)
            of_keys = WarpLane(lane, warp_key, part * (k_columns // COLS))
            accumulate_dk(dk_acc, dp_tangent, q_tiles[0], of_keys)
            accumulate_dk(dk_acc, dp, q_tiles[1], of_keys)
            keep_values(thread, floats, 1 - stage, values)
            keep_moved(thread, floats, 1 - stage, moved)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        # 18: write ḋK_j, ḋV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        _, dk_unit, dv_unit = units_of_gradients(scale, start.b, start.h)
        scale_all(dk_acc, dk_unit)
        scale_all(dv_acc, dv_unit)
        of_keys = WarpLane(lane, warp_key, part * (k_columns // COLS))
        of_values = WarpLane(lane, warp_key, part * (v_columns // COLS))
        store_dk(dk_acc, dk, keys, memory + k_offset, of_keys)
        store_dv(dv_acc, dv, keys, memory + v_offset, of_values)

    types_of = INPUTS_TYPE, TANGENTS_TYPE, ROWS_TYPE, variant.result_type, variant.result_type
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(
        flash2_mma_dkdv_tangent,
        variant.signature(*types_of),
        layout.threads,
        shared_bytes,
        layout.resident,
    )
