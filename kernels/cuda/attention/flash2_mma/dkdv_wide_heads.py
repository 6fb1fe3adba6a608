"""FlashAttention-2 backward on tensor cores for wide heads: half of the warps compute dV, the others dK.

What the general kernel left on the table: shared memory delivers fragments more slowly than tensor cores
multiply them.  A warp that keeps both dK and dV has registers for only 16 keys of a wide head, and reads
each fragment of Q and dO for these keys alone.  With 256 columns, two blocks share the columns, and both
compute all scores.  Here a warp keeps either dK or dV, for two to four times as many keys.  The price is
that P goes from one half of the warps to the other in float32, and that P and dS reach the warps of a half
through shared memory.  Measured on an H200 at d = 256, N = 16,384 in bfloat16: 263 TFLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32, int32, uint8, uint32, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.block_item import (
    INPUTS_TYPE,
    LseAndDelta,
    make_item,
    make_row_values,
)
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    HALF,
    ROW_OF,
    ROWS,
    MmaRoleLayout,
    WarpLane,
    rows_from,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import edge_of, is_inside, moved
from kernels.cuda.attention.options.visits import make_key_bounds, make_visits
from kernels.cuda.attention.register_tiles import scale_all, set_all
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
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features

#: Named barriers: P is ready for the half that computes dS; all warps of a half have stored their P or dS;
#: dS is ready for the other half.
P_READY, P_WHOLE, DS_WHOLE, DS_READY = 1, 2, 3, 4


def role_tiles(layout: MmaRoleLayout, width: int, size: int = HALF) -> SharedTiles:
    """Return the offsets of the tiles of the kernel, in bytes: two each of Q, dO, L and D."""
    keys, queries = (size * rows * width for rows in (layout.block_k, layout.block_q))
    scores, rows = layout.block_q * layout.block_k, 2 * FLOAT32.itemsize * layout.block_q
    return SharedTiles(
        k=keys,
        v=keys,
        q=2 * queries,
        dout=2 * queries,
        p=size * scores,
        ds=size * scores,
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
    numbers: Arithmetic,
    vectors: bool,
    sums: DqSums | None = None,
    features: Features = PLAIN,
) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq."""
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    step_q, q_warps, transposed = layout.step_q, layout.q_warps, layout.transposed
    key_tiles, col_tiles, own_cols = transposed.row_tiles, step_q // COLS, width // q_warps
    s_tiles, acc_tiles = key_tiles * col_tiles, key_tiles * own_cols // COLS
    role_warps, role_threads, warp_keys = layout.warps // 2, threads // 2, ROWS * key_tiles
    tiles, has_sums = role_tiles(layout, width, numbers.size), sums is not None
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    p_offset, ds_offset, exchange_offset = tiles["p"], tiles["ds"], tiles["exchange"]
    rows_offset, row_bytes = tiles["large"], 2 * WORD * block_q
    stage_bytes = numbers.size * block_q * width
    visits = make_visits(features, block_k, by_keys=True)
    item_of, entries = make_item(visits, by_keys=True), visits.entries
    to_probabilities, to_ds = _make_to_probabilities(layout), _make_to_ds(layout)
    bounds, is_whole = make_key_bounds(block_q, block_k)
    load_values, keep_values = make_row_values(layout, tiles)
    subtract_lse = make_subtract_by_keys(transposed)
    zero, log2_e = np.float32(0), np.float32(LOG2_E)
    copy_keys = numbers.copy(threads, block_k, width, vectors)
    copy_rows = numbers.copy(threads, block_q, width, vectors)
    multiply = numbers.multiply(transposed, width, b_rows=block_q, is_transposed=True)
    keep_scores = numbers.keep(transposed, block_k, block_q)
    accumulate = numbers.stored(transposed, block_q, width, own_cols)
    add_dq = make_add_dq(layout, sums, width, width, numbers)
    store_keys = numbers.store(transposed, width, vectors, own_cols)
    units_of, units_of_gradients = numbers.backward_units, numbers.gradient_units

    def flash2_mma_roles(read, dq_sums, dk, dv, scale, extras):
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
        # 5: for 1 <= j <= T_c
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, read.q, read.k, extras)
        b, h, _, _, _, col, seq_q, seq_k = item.start
        thread = cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        of_scores, number = warp < role_warps, warp % role_warps
        first_key, first_row = number // q_warps * warp_keys, number % q_warps * step_q
        start = moved(item.start, first_row, first_key)
        chunk = number % q_warps * (own_cols // COLS)
        # k, v, two each of q and dout, P, dS, P in float32, two each of L and D of rows
        bits = cuda.shared.array(0, uint8)
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
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_keys, own_cols) / 32: dV, or dK
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, Pᵀ, or dPᵀ, dSᵀ
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        first, stop = bounds(col, seq_q, seq_k, extras)
        tile, stop = entries(item.flat, col, seq_k, first, stop, extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        keys = rows_from(item.k, col)
        copy_keys(thread, read.k, keys, k_tile)
        copy_keys(thread, read.v, keys, v_tile)
        factor, top, dp_unit, delta_unit = units_of(scale, b, h)
        unit = factor * log2_e
        values = LseAndDelta(zero, zero, zero)
        if tile < stop:
            span = rows_from(item.q, tile * block_q)
            copy_rows(thread, read.q, span, q_tile)
            copy_rows(thread, read.dout, span, dout_tile)
            values = load_values(thread, read, span, top, delta_unit)
            keep_values(thread, floats, 0, values)
        cp_async_commit_group()
        set_all(acc, zero)
        stage = 0
        while tile < stop:
            row = tile * block_q
            cp_async_wait_all()
            # The tiles are whole; every warp is done with the other stage, P and dS.
            has_large = cuda.syncthreads_or(int32(values.large != zero)) != 0
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            tile += 1
            other = 1 - stage
            if tile < stop:
                span, at = rows_from(item.q, tile * block_q), other * stage_bytes
                copy_rows(thread, read.q, span, q_tile + at)
                copy_rows(thread, read.dout, span, dout_tile + at)
                # On their way until they are kept below.
                values = load_values(thread, read, span, top, delta_unit)
            cp_async_commit_group()
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            own = WarpLane(lane, first_key, 0)
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply(s, left, right + stage * stage_bytes, own)
            own = WarpLane(lane, first_key, first_row // COLS)
            large_row = memory + rows_offset + WORD * (stage * block_q + first_row + lane_col(lane))
            if of_scores:
                # 11: P = exp(S - L_i)
                if has_large:
                    subtract_lse(s, unit, large_row)
                whole = is_whole(row, col, seq_q, seq_k, extras)
                place = moved(start, row, 0)
                to_probabilities(s, large_row + row_bytes, unit, whole, lane, place, extras)
                for n in range(s_tiles):
                    st_shared_v4_f32(exchange + CHUNK * WARP * n, s[n])
                keep_scores(s, own_scores, own)
                bar_arrive(P_READY, threads)  # its P is there for the other half
                bar_sync(P_WHOLE, role_threads)  # all of the half have stored their P
            else:
                bar_sync(P_READY, threads)  # P is there, in float32
                # 14: dS = P ∘ (dP - D_i)
                to_ds(s, large_row + 2 * row_bytes, exchange, dp_unit)
                keep_scores(s, own_scores, own)
                if has_sums:
                    bar_arrive(DS_READY, threads)  # its dS is there for the other half
                bar_sync(DS_WHOLE, role_threads)  # all of the half have stored their dS
            # 12: dV_j += P_ijᵀ dO_i     16: dK_j += dSᵀ Q_i
            lane = recomputed(lane)
            rows = own_rows + stage * stage_bytes
            accumulate(acc, own_scores, rows, WarpLane(lane, first_key, chunk))
            keep_values(thread, floats, other, values)
            if has_sums and of_scores:
                bar_sync(DS_READY, threads)  # all of dS is there
            # 15: dQ_i += dS K_j
            lane = recomputed(lane)
            add_dq(dq_sums, ds_tile, k_tile, WarpLane(lane, warp, 0), item, row // block_q, extras)
            stage = other
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        _, dk_unit, dv_unit = units_of_gradients(scale, b, h)
        scale_all(acc, dv_unit if of_scores else dk_unit)
        own = WarpLane(lane, first_key, chunk)
        if of_scores:
            store_keys(acc, dv, keys, v_tile, own)
        else:
            store_keys(acc, dk, keys, k_tile, own)

    written = array_type(FLOAT32 if numbers.is_wide else BITS, 4)
    rest = numbers.scale_type(True), extras_type(features, FLOAT32)
    signature = void(INPUTS_TYPE, array_type(FLOAT32, 3), written, written, *rest)
    return Kernel(flash2_mma_roles, signature, threads, tiles.elements, layout.resident)
