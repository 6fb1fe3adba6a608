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

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, make_add_dq
from kernels.cuda.attention.flash2_mma.large_rows import make_subtract_by_keys
from kernels.cuda.attention.flash2_mma.pipeline import INPUTS_TYPE, MmaVariant, make_load_queries
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    HALF,
    ROW_OF,
    ROWS,
    MmaRoleLayout,
    WarpLane,
)
from kernels.cuda.attention.options.tile_scores import edge_of, is_inside, moved
from kernels.cuda.attention.options.visits import VisitedTile, rows_from
from kernels.cuda.attention.register_tiles import scale_all, set_all
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.barriers import bar_arrive, bar_sync
from kernels.cuda.ptx.copies import (
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
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint8, uint32

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


def _make_to_p(layout: MmaRoleLayout, is_whole: bool) -> Callable[..., None]:
    """Return ``to_p(s, large_row, unit, edge)``: replace products by Pᵀ; see ``_make_share_p``."""
    key_tiles, col_tiles = layout.transposed.row_tiles, layout.step_q // COLS
    rows_of, cols_of, row_bytes = ROW_OF, COL_OF, 2 * WORD * layout.block_q
    minus_inf = np.float32(-math.inf)

    @device_function
    def to_p(s, large_row, unit, edge):
        for n in range(col_tiles):
            low, high = ld_shared_v2(large_row + row_bytes + WORD * n * COLS)
            for m in range(key_tiles):
                at = m * col_tiles + n
                for i in range(4):
                    r, c = n * COLS + cols_of[i], m * ROWS + rows_of[i]
                    score = s[at, i] * unit if is_whole or is_inside(edge, r, c) else minus_inf
                    s[at, i] = ex2(score - (high if i % 2 else low))

    return to_p


def _make_share_p(variant: MmaVariant) -> Callable[..., None]:
    """Return the function that replaces the products of a warp of the first half by Pᵀ, and stores it.

    The function is ``share_p(s, large_row, unit, has_large, tile, share, targets, extras)``.  The
    ``VisitedTile`` begins at the rows and keys of the ``WarpLane``, ``large_row`` is the address of the
    ``large_lse`` of the lane's first row, and ``targets`` are the tile of Pᵀ and the lane's part of it in
    float32.
    """
    layout, threads, transposed = variant.layout, variant.layout.threads, variant.layout.transposed
    s_tiles = transposed.row_tiles * layout.step_q // COLS
    to_p, to_p_of_whole = (_make_to_p(layout, is_whole) for is_whole in (False, True))
    subtract_lse = make_subtract_by_keys(transposed)
    keep_scores = variant.numbers.keep(transposed, layout.block_k, layout.block_q)

    @device_function
    def share_p(s, large_row, unit, has_large, tile, share, targets, extras):
        if has_large:
            subtract_lse(s, unit, large_row)
        if tile.whole:
            to_p_of_whole(s, large_row, unit, 0)
        else:
            edge = edge_of(moved(tile.place, lane_col(share.lane), lane_row(share.lane)), extras)
            to_p(s, large_row, unit, edge)
        p_tile, exchange = targets
        for n in range(s_tiles):
            st_shared_v4_f32(exchange + CHUNK * WARP * n, s[n])
        keep_scores(s, p_tile, share)
        bar_arrive(P_READY, threads)  # its P is there for the other half
        bar_sync(P_WHOLE, threads // 2)  # all of the half have stored their P

    return share_p


def _make_share_ds(variant: MmaVariant, has_sums: bool) -> Callable[..., None]:
    """Return the function that replaces the products of a warp of the second half by dSᵀ, and stores it.

    In ``share_ds(s, large_row, dp_unit, share, targets)``, ``targets`` are the tile of dSᵀ and the part
    of Pᵀ of the lane; the others are as for :func:`_make_share_p`.
    """
    layout, threads, transposed = variant.layout, variant.layout.threads, variant.layout.transposed
    key_tiles, col_tiles = transposed.row_tiles, layout.step_q // COLS
    keep_scores = variant.numbers.keep(transposed, layout.block_k, layout.block_q)
    delta_bytes = 4 * WORD * layout.block_q

    @device_function
    def share_ds(s, large_row, dp_unit, share, targets):
        p = cuda.local.array(4, uint32)  # (16, 8) / 32: Pᵀ, as bits of float32
        ds_tile, exchange = targets
        bar_sync(P_READY, threads)  # P is there, in float32
        for n in range(col_tiles):
            low, high = ld_shared_v2(large_row + delta_bytes + WORD * n * COLS)
            for m in range(key_tiles):
                at = m * col_tiles + n
                ld_shared_v4(p, exchange + CHUNK * WARP * at)
                for i in range(4):
                    ds = s[at, i] * dp_unit - (high if i % 2 else low)
                    s[at, i] = float_of(p[i]) * ds
        keep_scores(s, ds_tile, share)
        if has_sums:
            bar_arrive(DS_READY, threads)  # its dS is there for the other half
        bar_sync(DS_WHOLE, threads // 2)  # all of the half have stored their dS

    return share_ds


@cache
def roles_kernel(variant: MmaVariant, sums: DqSums | None = None) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``sums`` also adds to the sums of dq."""
    layout, width, _, numbers, vectors, _ = variant
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    step_q, q_warps, transposed = layout.step_q, layout.q_warps, layout.transposed
    key_tiles, columns = transposed.row_tiles, width // q_warps
    s_tiles, acc_tiles = key_tiles * step_q // COLS, key_tiles * columns // COLS
    role_warps, warp_keys = layout.warps // 2, ROWS * key_tiles
    tiles, has_sums = role_tiles(layout, width, numbers.size), sums is not None
    large_offset = tiles["large"]
    k_offset, v_offset, q_offset, dout_offset = (tiles[name] for name in ("k", "v", "q", "dout"))
    p_offset, ds_offset, exchange_offset = tiles["p"], tiles["ds"], tiles["exchange"]
    stage_bytes = numbers.size * block_q * width
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop(by_keys=True)
    load_queries, keep_values = make_load_queries(variant, tiles)
    share_p, share_ds = _make_share_p(variant), _make_share_ds(variant, has_sums)
    copy_keys, _ = variant.copies(block_k)
    zero, log2_e = np.float32(0), np.float32(LOG2_E)
    multiply = numbers.multiply(transposed, width, b_rows=block_q, is_transposed=True)
    accumulate = numbers.stored(transposed, block_q, width, columns)
    add_dq = make_add_dq(variant, sums, width)
    store_keys = numbers.store(transposed, width, vectors, columns)
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
        start, thread = item.start, cuda.threadIdx.x
        lane, warp = int32(thread % WARP), thread // WARP
        of_scores, number = warp < role_warps, warp % role_warps
        first_key, first_row = number // q_warps * warp_keys, number % q_warps * step_q
        chunk = number % q_warps * (columns // COLS)
        # k, v, two each of q and dout, P, dS, P in float32, two each of L and D of rows
        bits = cuda.shared.array(0, uint8)
        floats = cuda.shared.array(0, float32)  # the same memory
        memory = shared_address(bits)
        k_tile, v_tile, ds_tile = memory + k_offset, memory + v_offset, memory + ds_offset
        q_tile, dout_tile = memory + q_offset, memory + dout_offset
        # What the half multiplies: Sᵀ = K Qᵀ and dV = Pᵀ dO, or dPᵀ = V dOᵀ and dK = dSᵀ Q.
        left = k_tile if of_scores else v_tile
        right = (q_tile if of_scores else dout_tile) + HALF * width * first_row
        half_scores = memory + p_offset if of_scores else ds_tile
        half_rows = dout_tile if of_scores else q_tile
        exchange = memory + exchange_offset + CHUNK * (number * s_tiles * WARP + lane)
        # In a 16 x 8 tile of sums a lane has keys lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_keys, columns) / 32: dV, or dK
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_keys, step_q) / 32: Sᵀ, Pᵀ, or dPᵀ, dSᵀ
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        visit = begin(item, bounds_of(item, extras), extras)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        keys = rows_from(item.k, start.col)
        copy_keys(thread, read.k, keys, k_tile)
        copy_keys(thread, read.v, keys, v_tile)
        units = units_of(scale, start.b, start.h)
        unit, dp_unit = units[0] * log2_e, units[2]
        values = load_queries(thread, read, item, visit, memory, 0, units, extras)
        keep_values(thread, floats, 0, values)
        set_all(acc, zero)
        stage = 0
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            # The tiles are whole; every warp is done with the other stage, P and dS.
            has_large = cuda.syncthreads_or(int32(values.large != zero)) != 0
            # 9: load Q_i, dO_i, L_i, D_i: those of the next iteration, while this one computes
            visit = advance(visit, 1, extras)
            # On their way until they are kept below.
            values = load_queries(thread, read, item, visit, memory, 1 - stage, units, extras)
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply(s, left, right + stage * stage_bytes, WarpLane(lane, first_key, 0))
            share = WarpLane(lane, first_key, first_row // COLS)
            large_row = (
                memory + large_offset + WORD * (stage * block_q + first_row + lane_col(lane))
            )
            targets = half_scores, exchange
            if of_scores:
                # 11: P = exp(S - L_i)
                part = VisitedTile(moved(tile.place, first_row, first_key), tile.whole, bits)
                share_p(s, large_row, unit, has_large, part, share, targets, extras)
            else:
                # 14: dS = P ∘ (dP - D_i)
                share_ds(s, large_row, dp_unit, share, targets)
            # 12: dV_j += P_ijᵀ dO_i     16: dK_j += dSᵀ Q_i
            lane = recomputed(lane)
            rows = half_rows + stage * stage_bytes
            accumulate(acc, half_scores, rows, WarpLane(lane, first_key, chunk))
            keep_values(thread, floats, 1 - stage, values)
            if has_sums and of_scores:
                bar_sync(DS_READY, threads)  # all of dS is there
            # 15: dQ_i += dS K_j
            lane, i = recomputed(lane), tile.place.row // block_q
            add_dq(dq_sums, ds_tile, k_tile, WarpLane(lane, warp, 0), item, i, extras)
            stage = 1 - stage
        # 18: write dK_j, dV_j
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with K, V: what is stored takes their place
        _, dk_unit, dv_unit = units_of_gradients(scale, start.b, start.h)
        scale_all(acc, dv_unit if of_scores else dk_unit)
        share = WarpLane(lane, first_key, chunk)
        if of_scores:
            store_keys(acc, dv, keys, v_tile, share)
        else:
            store_keys(acc, dk, keys, k_tile, share)

    result, sums_type = variant.result_type, array_type(FLOAT32, 3)
    signature = variant.signature(INPUTS_TYPE, sums_type, result, result)
    return Kernel(
        numbers.named(flash2_mma_roles), signature, threads, tiles.elements, layout.resident
    )
