"""FlashAttention-2 backward on tensor cores, by key columns: dK and dV, and optionally dQ by atomics.

What flash2 left on the table: the same as in its forward pass, and in addition P and dS pass through shared
memory twice, because the products with dO and Q need them transposed.  Here each warp owns keys and
computes Sᵀ = KQᵀ and dPᵀ = VdOᵀ, so that the accumulators already have the layout of the left operands of
Pᵀ·dO and dSᵀ·Q.  Only dQ = dS·K needs dS from other warps, and receives it through shared memory in 16
bits.  Measured on an H200 at N = 16,384, d = 64, by atomics: 301 TFLOP/s in bfloat16 and 107 in split
float32; flash2 reaches 27.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, make_units, scale_type
from kernels.cuda.attention.flash2_mma.fragment_scores import make_gradients_by_keys
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.products import make_accumulate, make_multiply
from kernels.cuda.attention.flash2_mma.row_values import make_row_values
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    HALF,
    ROWS,
    WARP,
    MmaKeyLayout,
    make_copy_tile,
    make_keep_tile,
    make_store_sums,
    make_store_tile,
)
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import (
    TilePlace,
    edge_of,
    moved,
)
from kernels.cuda.attention.options.visits import make_key_bounds, make_next_entry, make_visits
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.one_source import batch_and_head
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    recomputed,
    shared_address,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.runtime.kernel import WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


def dkdv_tiles(
    layout: MmaKeyLayout, head_width: int, value_width: int, atomics: bool, terms: int = 1
) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes: two each of Q, dO, L and D."""
    size = terms * HALF
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
    dtype: str,
    vectors: bool,
    sums: DqSums | None = None,
    features: Features = PLAIN,
    parts: int = 1,
) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq.

    Args:
        layout: Tiles and warps.
        head_width: head_dim rounded up to a multiple of 16 · parts, or more.
        value_width: value_dim rounded up in the same way.
        dtype: See ``float32_terms.NUMBERS``.
        vectors: Whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces; if
            operands are scaled, only the results count.
        sums: Layout of the sums of dq in memory, or None.
        features: Options of the call.
        parts: Blocks that share the columns of dk, dv and dq of one key tile.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    transposed, step_q = layout.transposed, layout.step_q
    key_tiles, col_tiles = transposed.row_tiles, step_q // COLS
    k_own, v_own = head_width // parts, value_width // parts
    dk_tiles, dv_tiles = key_tiles * k_own // COLS, key_tiles * v_own // COLS
    s_tiles, warp_keys = key_tiles * col_tiles, ROWS * key_tiles
    numbers = NUMBERS[dtype]
    terms, units = numbers.terms, make_units(numbers)
    copied = vectors or numbers.is_scaled
    a_tiles, b_tiles = terms * key_tiles, 2 * terms
    unit_of_scores, unit_of_dp, unit_of_delta = units.scores, units.dp, units.delta
    unit_of_dk, unit_of_dv, top_of = units.dk, units.dv, units.top
    tiles = dkdv_tiles(layout, head_width, value_width, sums is not None, terms)
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    ds_offset, rows_offset = tiles["ds"], tiles["large"]
    large_index, shift_index, delta_index = (tiles[n] // WORD for n in ("large", "shift", "delta"))
    row_bytes = 2 * WORD * block_q
    q_bytes, dout_bytes = (terms * HALF * block_q * width for width in (head_width, value_width))
    visits = make_visits(features, block_k, by_keys=True)
    place, entries, tile_of, is_whole, _ = visits
    next_entry = make_next_entry(visits)
    has_sums = sums is not None
    tile_bits = make_tile_bits(features, layout, FLOAT32, tiles.elements)  # type: ignore[arg-type]
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    to_gradients = make_gradients_by_keys(layout, features, tile_bits)
    copy_k = make_copy_tile(threads, block_k, head_width, copied, terms)
    copy_v = make_copy_tile(threads, block_k, value_width, copied, terms)
    copy_q = make_copy_tile(threads, block_q, head_width, copied, terms)
    copy_dout = make_copy_tile(threads, block_q, value_width, copied, terms)
    multiply_kq = make_multiply(transposed, head_width, dtype, block_q, is_transposed=True)
    multiply_v_dout = make_multiply(transposed, value_width, dtype, block_q)
    accumulate_dk = make_accumulate(transposed, head_width, dtype, k_own, block_q)
    accumulate_dv = make_accumulate(transposed, value_width, dtype, v_own, block_q)
    store_ds = make_keep_tile(transposed, block_k, block_q, dtype)
    add_dq = make_add_dq(layout, sums, head_width, k_own, dtype) if sums else add_nothing
    store = make_store_sums if numbers.is_scaled else make_store_tile
    store_dk = store(transposed, head_width, dtype, vectors, k_own)
    store_dv = store(transposed, value_width, dtype, vectors, v_own)
    bounds, is_inside = make_key_bounds(block_q, block_k)
    row_values, subtract_lse = make_row_values(layout), make_subtract_by_keys(transposed)
    is_plain, zero = features.of_elements == PLAIN, np.float32(0)
    operand_factor = np.float32(LOG2_E if is_plain else 1)

    def flash2_mma_dkdv(dout, q, k, v, lse, lse_rest, delta, dq_sums, dk, dv, scale, extras):
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
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        # 5: for 1 <= j <= T_c
        flat, col, first_q, seq_q, first_k, seq_k = place(
            cuda.blockIdx.x // parts,
            cuda.blockIdx.y,
            q.shape[2] // terms,
            k.shape[2] // terms,
            extras,
        )
        batch, head = numbers_of_mods(flat, extras)
        start = TilePlace(b, h, batch, head, 0, col, seq_q, seq_k)
        part = cuda.blockIdx.x % parts
        k_chunk, v_chunk = part * (k_own // COLS), part * (v_own // COLS)
        thread = cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        warp_key = warp * warp_keys
        # k, v, two each of q and dout, ds, two each of L and D of rows; then bits
        bits = cuda.shared.array(0, uint8)
        halves = cuda.shared.array(0, uint16)  # the same memory
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        k_tile, v_tile, ds_tile = memory + k_offset, memory + v_offset, memory + ds_offset
        q_tile, dout_tile = memory + q_offset, memory + dout_offset
        # In a 16 x 8 tile of sums a lane has keys lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        # Fragments are pairs of 16-bit numbers, for each term.
        dk_acc = cuda.local.array((dk_tiles, 4), float32)  # (warp_keys, k_own) / 32: dK
        dv_acc = cuda.local.array((dv_tiles, 4), float32)  # (warp_keys, v_own) / 32: dV
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, then (P ∘ Z)ᵀ
        dp = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: dPᵀ, then dSᵀ
        a_fragment = cuda.local.array((a_tiles, 4), uint32)  # (warp_keys, 16) / 32: K, V, P or dS
        b_fragment = cuda.local.array((b_tiles, 2), uint32)  # (16, 16) / 32: Q, or dO
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        first, stop = bounds(col, seq_q, seq_k, extras)
        k_row, k_stop, q_stop = first_k + col, first_k + seq_k, first_q + seq_q
        entry, entries_stop = entries(flat, col, seq_k, first, stop, extras)
        entry = next_entry(entry, entries_stop, first, stop, extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        copy_k(thread, k, b, h, k_row, k_stop, k_tile)
        copy_v(thread, v, b, h, k_row, k_stop, v_tile)
        top = top_of(scale, b, h)
        dp_unit, delta_unit = unit_of_dp(scale, b, h), unit_of_delta(scale, b, h)
        large_lse = shift = own_delta = zero
        if entry < entries_stop:
            q_row = first_q + tile_of(entry, extras) * block_q
            copy_q(thread, q, b, h, q_row, q_stop, q_tile)
            copy_dout(thread, dout, b, h, q_row, q_stop, dout_tile)
            large_lse, shift, own_delta = row_values(
                thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit
            )
            if thread < block_q:
                floats[large_index + thread], floats[shift_index + thread] = large_lse, shift
                floats[delta_index + thread] = own_delta
        cp_async_commit_group()
        set_all(dk_acc, zero)
        set_all(dv_acc, zero)
        factor = unit_of_scores(scale, b, h) * operand_factor
        stage = 0
        while entry < entries_stop:
            t = tile_of(entry, extras)
            row = t * block_q
            whole = is_inside(row, col, seq_q, seq_k, extras) and is_whole(entry, extras)
            cp_async_wait_all()
            draw(thread, bits, whole, moved(start, row, 0), extras)
            # The tiles are whole; every warp is done with the other stage and dS.
            has_large = False
            if is_plain:
                has_large = cuda.syncthreads_or(int32(large_lse != zero)) != 0
            else:
                cuda.syncthreads()
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            entry = next_entry(entry + 1, entries_stop, first, stop, extras)
            other = 1 - stage
            if entry < entries_stop:
                q_row = first_q + tile_of(entry, extras) * block_q
                copy_q(thread, q, b, h, q_row, q_stop, q_tile + other * q_bytes)
                copy_dout(thread, dout, b, h, q_row, q_stop, dout_tile + other * dout_bytes)
                large_lse, shift, own_delta = (
                    row_values(  # on their way until they are stored below
                        thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit
                    )
                )
            cp_async_commit_group()
            large_row = memory + rows_offset + WORD * (stage * block_q + lane_col(lane))
            shift_row, delta_row = large_row + row_bytes, large_row + 2 * row_bytes
            own = moved(start, row + lane_col(lane), warp_key + lane_row(lane))
            edge = edge_of(own, extras)
            for step in range(0, block_q, step_q):
                lane = recomputed(lane)  # addresses of fragments would fill the registers
                q_stage = q_tile + stage * q_bytes + HALF * head_width * step
                dout_stage = dout_tile + stage * dout_bytes + HALF * value_width * step
                # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
                multiply_kq(s, a_fragment, b_fragment, k_tile, q_stage, lane, warp_key)
                multiply_v_dout(dp, a_fragment, b_fragment, v_tile, dout_stage, lane, warp_key)
                # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                if is_plain and has_large:
                    subtract_lse(s, factor, large_row + WORD * step)
                to_gradients(
                    s, dp, large_row, shift_row, delta_row, edge, step, factor, dp_unit, whole, bits, lane,
                    warp_key, own, extras,
                )  # fmt: skip
                if has_sums:
                    store_ds(dp, ds_tile, lane, warp_key, step // COLS)
                # 12: dV_j += (P_ij ∘ Z)ᵀ dO_i
                accumulate_dv(dv_acc, s, a_fragment, b_fragment, dout_stage, lane, v_chunk)
                # 16: dK_j += dSᵀ Q_i
                accumulate_dk(dk_acc, dp, a_fragment, b_fragment, q_stage, lane, k_chunk)
            if thread < block_q:
                at = other * block_q + thread
                floats[large_index + at], floats[shift_index + at] = large_lse, shift
                floats[delta_index + at] = own_delta
            if has_sums or has_bits:
                cuda.syncthreads()  # dS is whole, and the bits have been read
            # 15: dQ_i += dS K_j
            lane = recomputed(lane)
            add_dq(dq_sums, ds_tile, k_tile, lane, warp, flat, first_q, t, part, k_chunk, extras)
            stage = other
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        dk_unit, dv_unit = unit_of_dk(scale, b, h), unit_of_dv(scale, b, h)
        scale_all(dk_acc, dk_unit)
        scale_all(dv_acc, dv_unit)
        store_dk(dk_acc, dk, b, h, k_row, k_stop, halves, memory, k_tile, lane, warp_key, k_chunk)
        store_dv(dv_acc, dv, b, h, k_row, k_stop, halves, memory, v_tile, lane, warp_key, v_chunk)

    read, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    rest = scale_type(numbers, True), extras_type(features, FLOAT32)
    written = array_type(FLOAT32, 4) if numbers.is_scaled else read
    signature = void(*[read] * 4, *[rows] * 4, written, written, *rest)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(flash2_mma_dkdv, signature, threads, shared_bytes, layout.resident)


@device_function
def add_nothing(dq_sums, ds_tile, k_tile, lane, warp, flat, first_q, t, part, chunk, extras):
    """Stand in for ``add_dq`` if dq has a separate kernel."""
