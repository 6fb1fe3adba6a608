"""FlashAttention-2 backward on tensor cores for wide heads: half of the warps compute dV, the others dK.

What the general kernel left on the table: shared memory delivers fragments more slowly than tensor cores
multiply them.  A warp that keeps both dK and dV has registers for only 16 keys of a wide head, and reads
each fragment of Q and dO for these keys alone.  With 256 columns, two blocks share the columns, and both
compute all scores.  Here a warp keeps either dK or dV, for two to four times as many keys.  The price is
that P goes from one half of the warps to the other in float32, and that P and dS reach the warps of a half
through shared memory.  Measured on an H200 at d = 256, N = 16,384 in bfloat16: 263 TFLOP/s.  float32 in two
terms uses this kernel too, with tiles of 16 queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.dkdv import add_nothing
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, make_units, scale_type
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.products import make_accumulate_stored, make_multiply
from kernels.cuda.attention.flash2_mma.row_values import make_row_values
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    HALF,
    ROW_OF,
    ROWS,
    WARP,
    MmaRoleLayout,
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
    is_inside,
    moved,
)
from kernels.cuda.attention.options.visits import make_key_bounds, make_visits
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.device.one_source import batch_and_head
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.barriers import bar_arrive, bar_sync
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    ld_shared_v2,
    ld_shared_v4,
    recomputed,
    shared_address,
    st_shared_v4_f32,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import ex2, float_of
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.kernel import WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features

#: Named barriers: P is ready for the half that computes dS; all warps of a half have stored their P or dS;
#: dS is ready for the other half.
P_READY, P_WHOLE, DS_WHOLE, DS_READY = 1, 2, 3, 4


def role_tiles(layout: MmaRoleLayout, width: int, terms: int = 1) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes: two each of Q, dO, L and D."""
    keys, queries = (terms * HALF * rows * width for rows in (layout.block_k, layout.block_q))
    scores, rows = layout.block_q * layout.block_k, 2 * FLOAT32.itemsize * layout.block_q
    return SharedTiles(
        k=keys,
        v=keys,
        q=2 * queries,
        dout=2 * queries,
        p=terms * HALF * scores,
        ds=terms * HALF * scores,
        exchange=FLOAT32.itemsize * scores,
        large=rows,
        shift=rows,
        delta=rows,
    )


@cache
def _make_to_probabilities(layout: MmaRoleLayout) -> Callable[..., None]:
    """Return the function that replaces the products of a warp of the first half by Pᵀ.

    The function is ``to_probabilities(s, shift_row, unit, whole, lane, place, extras)``.  The warp's rows
    and keys begin at ``place``, and ``shift_row`` is the address of the shift of the lane's first row.
    """
    key_tiles, col_tiles = layout.transposed.row_tiles, layout.step_q // COLS
    minus_inf = np.float32(-math.inf)
    rows_of, cols_of = ROW_OF, COL_OF

    @device_function
    def to_probabilities(s, shift_row, unit, whole, lane, place, extras):
        if whole:
            for n in range(col_tiles):
                low, high = ld_shared_v2(shift_row + WORD * n * COLS)
                for m in range(key_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        s[at, i] = ex2(s[at, i] * unit - (high if i % 2 else low))
        else:
            own = moved(place, lane_col(lane), lane_row(lane))
            edge = edge_of(own, extras)
            for n in range(col_tiles):
                low, high = ld_shared_v2(shift_row + WORD * n * COLS)
                for m in range(key_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        r, c = n * COLS + cols_of[i], m * ROWS + rows_of[i]
                        score = s[at, i] * unit if is_inside(edge, r, c) else minus_inf
                        s[at, i] = ex2(score - (high if i % 2 else low))

    return to_probabilities


@cache
def _make_to_ds(layout: MmaRoleLayout) -> Callable[..., None]:
    """Return the function that replaces the products of a warp of the second half by dSᵀ.

    In ``to_ds(s, delta_row, exchange, dp_unit)``, ``delta_row`` is the address of D of the lane's first row
    and ``exchange`` the address of the lane's part of Pᵀ.
    """
    key_tiles, col_tiles = layout.transposed.row_tiles, layout.step_q // COLS

    @device_function
    def to_ds(s, delta_row, exchange, dp_unit):
        p = cuda.local.array(4, uint32)  # (16, 8) / 32: Pᵀ, as bits of float32
        for n in range(col_tiles):
            low, high = ld_shared_v2(delta_row + WORD * n * COLS)
            for m in range(key_tiles):
                at = m * col_tiles + n
                ld_shared_v4(p, exchange + CHUNK * WARP * at)
                for i in range(4):
                    ds = s[at, i] * dp_unit - (high if i % 2 else low)
                    s[at, i] = float_of(p[i]) * ds

    return to_ds


@cache
def roles_kernel(
    layout: MmaRoleLayout,
    width: int,
    dtype: str,
    vectors: bool,
    sums: DqSums | None = None,
    features: Features = PLAIN,
) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq.

    Args:
        layout: Tiles and warps.
        width: head_dim and value_dim rounded up, a multiple of 16 for each of the warps that share them.
        dtype: See ``float32_terms.NUMBERS``.
        vectors: Whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces; if
            operands are scaled, only the results count.
        sums: Layout of the sums of dq in memory, or None.
        features: Options of the call; only packed sequences are supported.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    step_q, q_warps, transposed = layout.step_q, layout.q_warps, layout.transposed
    key_tiles, col_tiles, own = transposed.row_tiles, step_q // COLS, width // q_warps
    s_tiles, acc_tiles, warp_keys = key_tiles * col_tiles, key_tiles * own // COLS, ROWS * key_tiles
    role_warps, role_threads = layout.role_warps, layout.threads // 2
    numbers = NUMBERS[dtype]
    terms, units, copied = numbers.terms, make_units(numbers), vectors or numbers.is_scaled
    unit_of_scores, unit_of_dp, unit_of_delta = units.scores, units.dp, units.delta
    unit_of_dk, unit_of_dv, top_of = units.dk, units.dv, units.top
    b_tiles, tiles = 2 * terms, role_tiles(layout, width, terms)
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    p_offset, ds_offset, exchange_offset = tiles["p"], tiles["ds"], tiles["exchange"]
    rows_offset, row_bytes = tiles["large"], 2 * WORD * block_q
    large_index, shift_index, delta_index = (tiles[n] // WORD for n in ("large", "shift", "delta"))
    stage_bytes, has_sums = terms * HALF * block_q * width, sums is not None
    place, entries = make_visits(features, block_k, by_keys=True)[:2]
    to_probabilities, to_ds = _make_to_probabilities(layout), _make_to_ds(layout)
    bounds, is_whole = make_key_bounds(block_q, block_k)
    row_values, subtract_lse = make_row_values(layout), make_subtract_by_keys(transposed)
    zero, log2_e = np.float32(0), np.float32(LOG2_E)
    copy_keys = make_copy_tile(threads, block_k, width, copied, terms)
    copy_rows = make_copy_tile(threads, block_q, width, copied, terms)
    multiply = make_multiply(transposed, width, dtype, block_q, is_transposed=True)
    keep_scores = make_keep_tile(transposed, block_k, block_q, dtype)
    accumulate = make_accumulate_stored(transposed, block_q, width, dtype, own)
    add_dq = make_add_dq(layout, sums, width, width, dtype) if sums else add_nothing
    store = make_store_sums if numbers.is_scaled else make_store_tile
    store_keys = store(transposed, width, dtype, vectors, own)

    def flash2_mma_roles(dout, q, k, v, lse, lse_rest, delta, dq_sums, dk, dv, scale, extras):
        """Fill one key tile of dk and dv; with sums, add its part of dq to the sums, which are zero before.

        Computes: dk and dv for one tile of keys of one (batch, head), and its part of dq / τ
        Source: FlashAttention-2, Algorithm 2, lines 5-18; without sums all but line 15
        Grid: (num_k_tiles, batch * heads), one block per key tile
        Block: (32 * warps,), one half for Sᵀ and dV, the other for dPᵀ and dK
        One thread does: of 16 x 8 tiles, for the keys and step_q query rows of its warp, two
            neighbouring rows of two keys: of Sᵀ or dPᵀ step_q / 8 tiles, of dV or dK its warp's
            columns / 8
        Shared: k_tile, v_tile (block_k, dim), two each of q_tile, dout_tile (block_q, dim),
            large_lse, shift and delta (block_q,); Pᵀ, dSᵀ (block_k, block_q), swizzled, and Pᵀ as float32
        Registers: acc (key_tiles * columns / 8, 4), s (key_tiles * step_q / 8, 4), with sums those
            of dq, a share of (block_q, dim)
        Global traffic: reads k and v once, q, dout, lse, lse_rest and delta once per key tile; writes
            dk and dv once; with sums adds to those of dq once per key tile
        Needs: compute capability 8.0
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        # 5: for 1 <= j <= T_c
        flat, col, first_q, seq_q, first_k, seq_k = place(
            cuda.blockIdx.x, cuda.blockIdx.y, q.shape[2] // terms, k.shape[2] // terms, extras
        )
        thread = cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        of_scores, number = warp < role_warps, warp % role_warps
        first_key, first_row = number // q_warps * warp_keys, number % q_warps * step_q
        batch, head = numbers_of_mods(flat, extras)
        start = TilePlace(b, h, batch, head, first_row, col + first_key, seq_q, seq_k)
        chunk = number % q_warps * (own // COLS)
        # k, v, two each of q and dout, P, dS, P in float32, two each of L and D of rows
        bits = cuda.shared.array(0, uint8)
        halves = cuda.shared.array(0, uint16)  # the same memory
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        k_tile, v_tile = memory + k_offset, memory + v_offset
        q_tile, dout_tile, ds_tile = memory + q_offset, memory + dout_offset, memory + ds_offset
        # What the half multiplies: Sᵀ = K Qᵀ and dV = Pᵀ dO, or dPᵀ = V dOᵀ and dK = dSᵀ Q.
        left = k_tile if of_scores else v_tile
        right = (q_tile if of_scores else dout_tile) + HALF * width * first_row
        own_scores = memory + p_offset if of_scores else ds_tile
        own_rows = dout_tile if of_scores else q_tile
        exchange = memory + exchange_offset + CHUNK * (number * s_tiles * WARP + lane)
        # In a 16 x 8 tile of sums a lane has keys lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        # Fragments are pairs of 16-bit numbers.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_keys, own) / 32: dV, or dK
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, Pᵀ, or dPᵀ, dSᵀ
        a_fragment = cuda.local.array((key_tiles, 4), uint32)  # (warp_keys, 16) / 32: K, V, P or dS
        b_fragment = cuda.local.array((b_tiles, 2), uint32)  # of terms (16, 16) / 32: Q, or dO
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        first, stop = bounds(col, seq_q, seq_k, extras)
        k_row, k_stop, q_stop = first_k + col, first_k + seq_k, first_q + seq_q
        tile, stop = entries(flat, col, seq_k, first, stop, extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        copy_keys(thread, k, b, h, k_row, k_stop, k_tile)
        copy_keys(thread, v, b, h, k_row, k_stop, v_tile)
        top = top_of(scale, b, h)
        dp_unit, delta_unit = unit_of_dp(scale, b, h), unit_of_delta(scale, b, h)
        unit = unit_of_scores(scale, b, h) * log2_e
        large_lse = shift = own_delta = zero
        if tile < stop:
            q_row = first_q + tile * block_q
            copy_rows(thread, q, b, h, q_row, q_stop, q_tile)
            copy_rows(thread, dout, b, h, q_row, q_stop, dout_tile)
            large_lse, shift, own_delta = row_values(
                thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit
            )
            if thread < block_q:
                floats[large_index + thread], floats[shift_index + thread] = large_lse, shift
                floats[delta_index + thread] = own_delta
        cp_async_commit_group()
        set_all(acc, zero)
        stage = 0
        while tile < stop:
            row = tile * block_q
            cp_async_wait_all()
            # The tiles are whole; every warp is done with the other stage, P and dS.
            has_large = cuda.syncthreads_or(int32(large_lse != zero)) != 0
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            tile += 1
            other = 1 - stage
            if tile < stop:
                q_row, at = first_q + tile * block_q, other * stage_bytes
                copy_rows(thread, q, b, h, q_row, q_stop, q_tile + at)
                copy_rows(thread, dout, b, h, q_row, q_stop, dout_tile + at)
                large_lse, shift, own_delta = (
                    row_values(  # on their way until they are stored below
                        thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit
                    )
                )
            cp_async_commit_group()
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply(s, a_fragment, b_fragment, left, right + stage * stage_bytes, lane, first_key)
            large_row = memory + rows_offset + WORD * (stage * block_q + first_row + lane_col(lane))
            if of_scores:
                # 11: P = exp(S - L_i)
                if has_large:
                    subtract_lse(s, unit, large_row)
                to_probabilities(
                    s, large_row + row_bytes, unit,
                    is_whole(row, col, seq_q, seq_k, extras), lane, moved(start, row, 0), extras,
                )  # fmt: skip
                for n in range(s_tiles):
                    st_shared_v4_f32(exchange + CHUNK * WARP * n, s[n])
                keep_scores(s, own_scores, lane, first_key, first_row // COLS)
                bar_arrive(P_READY, threads)  # its P is there for the other half
                bar_sync(P_WHOLE, role_threads)  # all of the half have stored their P
            else:
                bar_sync(P_READY, threads)  # P is there, in float32
                # 14: dS = P ∘ (dP - D_i)
                to_ds(s, large_row + 2 * row_bytes, exchange, dp_unit)
                keep_scores(s, own_scores, lane, first_key, first_row // COLS)
                if has_sums:
                    bar_arrive(DS_READY, threads)  # its dS is there for the other half
                bar_sync(DS_WHOLE, role_threads)  # all of the half have stored their dS
            # 12: dV_j += P_ijᵀ dO_i     16: dK_j += dSᵀ Q_i
            lane = recomputed(lane)
            rows = own_rows + stage * stage_bytes
            accumulate(acc, a_fragment, b_fragment, own_scores, rows, lane, first_key, chunk)
            if thread < block_q:
                at = other * block_q + thread
                floats[large_index + at], floats[shift_index + at] = large_lse, shift
                floats[delta_index + at] = own_delta
            if has_sums and of_scores:
                bar_sync(DS_READY, threads)  # all of dS is there
            # 15: dQ_i += dS K_j
            lane = recomputed(lane)
            add_dq(
                dq_sums, ds_tile, k_tile, lane, warp, flat, first_q, row // block_q, 0, 0, extras
            )
            stage = other
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        scale_all(acc, unit_of_dv(scale, b, h) if of_scores else unit_of_dk(scale, b, h))
        if of_scores:
            store_keys(acc, dv, b, h, k_row, k_stop, halves, memory, v_tile, lane, first_key, chunk)
        else:
            store_keys(acc, dk, b, h, k_row, k_stop, halves, memory, k_tile, lane, first_key, chunk)

    read, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    rest = scale_type(numbers, True), extras_type(features, FLOAT32)
    written = array_type(FLOAT32, 4) if numbers.is_scaled else read
    signature = void(*[read] * 4, *[rows] * 4, written, written, *rest)
    return Kernel(flash2_mma_roles, signature, threads, tiles.elements, layout.resident)
