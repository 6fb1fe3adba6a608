"""FlashAttention-2 forward on tensor cores: the loop of flash2 on fragments, float32 sums.

Tensors are of 16 bits, or float32 that was split into such beforehand (``float32_terms``).

What flash2 left on the table: CUDA cores multiply one pair of numbers a thread at a time, a tensor core
a whole tile a warp.  Here both products are ``mma.sync``; the probabilities never leave the lane that
computed them, for the accumulators of S = QKᵀ have the layout of the left operand of P·V; K and V of
the next tile are on their way (``cp.async``) while this one is multiplied; and shared memory is read
without bank conflicts, each fragment of K and V for all of the warp's rows.  Measured on an H200 at N =
16,384, d = 64: 325 TFLOP/s in bfloat16 and 127 in split float32, where flash2 does 29 in float32.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, void

from kernels.common.online_softmax import LN_2
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, make_units, scale_type
from kernels.cuda.attention.flash2_mma.nonfinite import (
    flag_type,
    is_flagged,
    make_clear_unseen,
    never_flagged,
)
from kernels.cuda.attention.flash2_mma.products import make_accumulate, make_multiply
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    HALF,
    ROW_OF,
    ROWS,
    WARP,
    MmaLayout,
    make_copy_tile,
    make_store_sums,
    make_store_tile,
)
from kernels.cuda.attention.options.score_functions import PLAIN, Features, extras_type
from kernels.cuda.attention.options.tile_scores import make_tile_scores
from kernels.cuda.attention.options.visits import make_next_entry, make_visits
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.one_source import (
    batch_and_head,
    ceil_div,
    first_full_tile,
    first_tile,
    full_tiles_stop,
    inverse_sum,
    is_tile_seen,
    log_sum_exp,
    near_inverse_sum,
    near_log_sum_exp,
    shift_of,
    tiles_stop,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    shared_address,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import ex2
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda

#: Tiles of K, and of V, in shared memory: the next ones come while this one is multiplied.
STAGES = 2
#: Lanes that share a row of scores are neighbours in two steps: 1 and 2 apart.
QUAD = (1, 2)


def forward_tiles(
    layout: MmaLayout, head_width: int, value_width: int, terms: int = 1
) -> SharedTiles:
    """Return where the tiles of the forward kernel lie, in bytes: those of K and V for each stage.

    An output of 16 bits takes the place of all of them at the end.
    """
    stage = STAGES * terms * HALF * layout.block_k
    k, v = stage * head_width, stage * value_width
    out = HALF * layout.block_q * value_width
    q = max(terms * HALF * layout.block_q * head_width, out - (k + v))
    return SharedTiles(q=q, k=k, v=v)


@device_function
def row_max_of(value):
    """Return the maximum over the four lanes that share a row."""
    for step in QUAD:
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, step))
    return value


@device_function
def row_sum_of(value):
    """Return the sum over the four lanes that share a row."""
    for step in QUAD:
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
    return value


@cache
def forward_kernel(
    layout: MmaLayout,
    head_width: int,
    value_width: int,
    dtype: str,
    vectors: bool,
    features: Features = PLAIN,
    is_folded: bool = True,
    is_split: bool = False,
) -> Kernel:
    """Return the forward kernel for one layout, two widths, one dtype and some options.

    Args:
        layout: Tiles and warps.
        head_width: head_dim rounded up to a multiple of 16, or more.
        value_width: value_dim likewise.
        dtype: See ``float32_terms.NUMBERS``.
        vectors: Rows of all tensors are aligned for pieces of 16 bytes and are whole pieces; of results
            alone, where operands are scaled.
        features: Options of the call.
        is_folded: The scale is positive: without options it is then multiplied within the exponent.
        is_split: The keys are divided among parts of the grid; out, of float32, and lse then have a batch
            for each part.
    """
    block_q, block_k, threads = layout.block_q, layout.block_k, layout.threads
    row_tiles, col_tiles, own_tiles = layout.row_tiles, block_k // COLS, value_width // COLS
    warp_rows, own_rows = ROWS * row_tiles, 2 * row_tiles
    s_tiles, acc_tiles = row_tiles * col_tiles, row_tiles * own_tiles
    numbers = NUMBERS[dtype]
    terms, units = numbers.terms, make_units(numbers)
    copied = vectors or numbers.is_scaled
    a_tiles, b_tiles = terms * row_tiles, 2 * terms
    unit_of_scores, unit_of_out, top_of = units.scores, units.out, units.top
    tiles = forward_tiles(layout, head_width, value_width, terms)
    q_offset, k_offset, v_offset = tiles["q"], tiles["k"], tiles["v"]
    k_bytes, v_bytes = (terms * HALF * block_k * width for width in (head_width, value_width))
    visits = make_visits(features, block_q)
    place, entries, tile_of, is_whole, _ = visits
    next_entry = make_next_entry(visits)
    scores = make_tile_scores(features, FLOAT32)
    operand_factor, edge_of, score_of = scores.operand_factor, scores.edge, scores.score
    is_folded = is_folded and features.of_elements == PLAIN
    tile_bits = make_tile_bits(features, layout, FLOAT32, tiles.elements)  # type: ignore[arg-type]
    draw, kept, listed, has_bits = tile_bits.draw, tile_bits.kept, tile_bits.listed, tile_bits.bytes
    copy_q = make_copy_tile(threads, block_q, head_width, copied, terms)
    copy_k = make_copy_tile(threads, block_k, head_width, copied, terms)
    copy_v = make_copy_tile(threads, block_k, value_width, copied, terms)
    multiply = make_multiply(layout, head_width, dtype)
    accumulate = make_accumulate(layout, value_width, dtype)
    is_found = is_flagged if features.hides else never_flagged
    is_wide = is_split or numbers.is_scaled
    store = make_store_sums if is_wide else make_store_tile
    store_out = store(layout, value_width, dtype, vectors)
    seen = tiles.elements + tile_bits.bytes
    clear_unseen = make_clear_unseen(layout, value_width, terms)
    patience = np.float32(layout.patience)
    is_patient = layout.patience > 0 and not numbers.is_scaled  # to as much as 16 bits hold
    # Where warps meet within a tile, for what some options need, none may leave it out.
    skips = layout.skips and features.of_elements == PLAIN and not features.hides
    inverse_of = inverse_sum if is_wide else near_inverse_sum
    lse_of = log_sum_exp if is_wide else near_log_sum_exp
    minus_inf, zero, ln_2 = np.float32(-math.inf), np.float32(0), np.float32(LN_2)
    rows_of, cols_of = ROW_OF, COL_OF

    def flash2_mma_forward(q, k, v, out, lse, scale, flag, extras):
        """Fill one query tile of out and lse.

        Computes: out and lse for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 1, lines 3-15; FlashAttention, Algorithm 2, lines 11
            (mask) and 14 (dropout)
        Grid: (num_q_tiles * parts, batch * heads), one block per query tile, the longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring
            columns of two rows: of S block_k / 8 tiles, of O value_dim / 8
        Shared: q_tile (block_q, head_dim); of each stage k_tile (block_k, head_dim),
            v_tile (block_k, value_dim), swizzled; at the end out (block_q, value_dim); for some
            options a byte for four columns
        Registers: acc (row_tiles * value_dim / 8, 4), s (row_tiles * block_k / 8, 4),
            a (row_tiles, 4), b (2, 2), the last two for each term, row_max, new_max, row_sum
            (2 * row_tiles,)
        Global traffic: reads q once, k and v once per query tile; writes out and lse once
        Needs: compute capability 8.0
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        # 3: for 1 <= i <= T_r
        tile, part, parts = cuda.blockIdx.x, 0, 1
        if is_split:
            q_tiles = ceil_div(q.shape[2] // terms, block_q)
            tile, part, parts = tile % q_tiles, tile // q_tiles, cuda.gridDim.x // q_tiles
        flat, row, first_q, seq_q, first_k, seq_k = place(
            tile, cuda.blockIdx.y, q.shape[2] // terms, k.shape[2] // terms, extras
        )
        thread = cuda.threadIdx.x
        lane, warp = thread % WARP, thread // WARP
        if skips:  # taken from one lane: so the compiler sees that a warp goes one way
            warp = int(cuda.shfl_sync(0xFFFFFFFF, int32(warp), 0))
        warp_row = warp * warp_rows
        bits = cuda.shared.array(0, uint8)  # q, two each of k and v; then bits, then seen
        halves = cuda.shared.array(0, uint16)  # the same memory
        memory = shared_address(bits)
        q_tile, k_tile, v_tile = memory + q_offset, memory + k_offset, memory + v_offset
        # Of 16 x 8 sums a lane has rows lane / 4 and eight below, columns 2 (lane % 4) and the next.
        # Fragments are pairs of 16 bits, of each term.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, value_dim) / 32: O
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P
        a_fragment = cuda.local.array((a_tiles, 4), uint32)  # (warp_rows, 16) / 32: Q, or P
        b_fragment = cuda.local.array((b_tiles, 2), uint32)  # (16, 16) / 32: K, or V
        row_max = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: m, the same in four lanes
        new_max = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: m_new, likewise
        row_sum = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: l of own columns
        row_stop = min(row + block_q, seq_q)
        first = first_tile(row, block_k, seq_k, extras.lower)
        stop = tiles_stop(row_stop, block_k, seq_k, extras.upper)
        full = first_full_tile(row_stop, block_k, extras.lower)
        full_stop = full_tiles_stop(row, block_k, seq_k, extras.upper)
        # Keys that no row of the tile sees are read as zeros: zero times infinity would be NaN.
        k_start = first_k + max(row + extras.lower, 0)
        k_stop = first_k + min(row_stop + extras.upper, seq_k)
        entry, entries_stop = entries(flat, row, seq_q, first, stop, extras)
        if is_split:
            count = max(entries_stop - entry, 0)
            entries_stop = entry + count * (part + 1) // parts
            entry += count * part // parts
        entry = next_entry(entry, entries_stop, first, stop, extras)
        # 4: load Q_i, and the first K_j and V_j
        q_row, q_stop = first_q + row, first_q + seq_q
        copy_q(thread, q, b, h, q_row, q_row, q_stop, q_tile)
        if entry < entries_stop:
            k_row = first_k + tile_of(entry, extras) * block_k
            copy_k(thread, k, b, h, k_row, k_start, k_stop, k_tile)
            copy_v(thread, v, b, h, k_row, k_start, k_stop, v_tile)
        cp_async_commit_group()
        # 5: O = 0, l = 0, m = -inf
        factor, top = unit_of_scores(scale, b, h) * operand_factor, top_of(scale, b, h)
        for i in range(own_rows):
            row_max[i] = minus_inf
            row_sum[i] = zero
        for n in range(acc_tiles):
            for i in range(4):
                acc[n, i] = zero
        found = is_found(flag)
        stage = 0
        # 6: for 1 <= j <= T_c
        while entry < entries_stop:
            j = tile_of(entry, extras)
            col = j * block_k
            whole = full <= j < full_stop and is_whole(entry, extras)
            cp_async_wait_all()
            draw(thread, bits, whole, flat, row, col, seq_q, seq_k, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the last ones
            # 7: load K_j, V_j: those of the next iteration, while this one computes
            entry = next_entry(entry + 1, entries_stop, first, stop, extras)
            if entry < entries_stop:
                k_row = first_k + tile_of(entry, extras) * block_k
                other = 1 - stage
                copy_k(thread, k, b, h, k_row, k_start, k_stop, k_tile + other * k_bytes)
                copy_v(thread, v, b, h, k_row, k_start, k_stop, v_tile + other * v_bytes)
            cp_async_commit_group()
            if skips:
                own, own_stop = row + warp_row, min(row + warp_row + warp_rows, seq_q)
                if not is_tile_seen(own, own_stop, col, block_k, extras.lower, extras.upper):
                    stage = 1 - stage
                    continue  # the tensor cores are the other warps' meanwhile
            # 8: S = Q_i K_jᵀ
            k_stage = k_tile + stage * k_bytes
            multiply(s, a_fragment, b_fragment, q_tile, k_stage, lane, warp_row)
            own_row, own_col = row + warp_row + lane_row(lane), col + lane_col(lane)
            if not (is_folded and whole):
                edge = edge_of(own_row, own_col, seq_q, seq_k, extras)
                for m in range(row_tiles):
                    for n in range(col_tiles):
                        for i in range(4):
                            r, c = m * ROWS + rows_of[i], n * COLS + cols_of[i]
                            at = m * col_tiles + n
                            value = s[at, i] if is_folded else s[at, i] * factor
                            in_row, in_col = warp_row + lane_row(lane) + r, lane_col(lane) + c
                            s[at, i] = score_of(
                                value, whole, listed(bits, in_row, in_col), edge, flat, b, h,
                                own_row, r, own_col, c, seq_q, seq_k, extras,
                            )  # fmt: skip
            unit = factor if is_folded else float32(1)
            grows = False
            for i in range(own_rows):
                # 9: m_new = max(m, rowmax S)
                largest = row_max[i]
                for n in range(col_tiles):
                    at = i // 2 * col_tiles + n
                    largest = max(largest, max(s[at, 2 * (i % 2)], s[at, 2 * (i % 2) + 1]))
                new_max[i] = row_max_of(largest)
                grows = grows or (new_max[i] - row_max[i]) * unit > patience
            if not is_patient or cuda.ballot_sync(0xFFFFFFFF, grows) != 0:
                for i in range(own_rows):
                    # 10, first half: O = diag(e^(m - m_new)) O, and l likewise.  The last shift is what
                    # it was then, bit for bit: what was summed weighs neither more nor less.
                    shift = float32(shift_of(new_max[i])) * unit - top
                    rescale = ex2((row_max[i] * unit - top) - shift)
                    row_max[i] = new_max[i]
                    row_sum[i] *= rescale
                    for n in range(own_tiles):
                        at = i // 2 * own_tiles + n
                        acc[at, 2 * (i % 2)] *= rescale
                        acc[at, 2 * (i % 2) + 1] *= rescale
            for m in range(row_tiles):
                for half in range(2):  # the row, and that eight below
                    # 9: P = exp(S - m_new), l = l + rowsum P
                    i = 2 * m + half
                    shift = float32(shift_of(row_max[i])) * unit - top
                    total = zero
                    for n in range(col_tiles):
                        at = m * col_tiles + n
                        for u in range(2):
                            p = ex2(s[at, 2 * half + u] * unit - shift)
                            total += p
                            if has_bits:  # what dropout leaves of P; l is the sum of all
                                in_row = warp_row + lane_row(lane) + m * ROWS + 8 * half
                                p *= kept(bits, in_row, lane_col(lane) + n * COLS + u, extras)
                            s[at, 2 * half + u] = p
                    # Each lane sums its own columns; the lanes of a row meet once, at the end.
                    row_sum[i] += total
            if found:
                clear_unseen(thread, lane, s, bits, seen, v_tile + stage * v_bytes)
            # 10, second half: O = O + P V_j
            v_stage = v_tile + stage * v_bytes
            accumulate(acc, s, a_fragment, b_fragment, v_stage, lane, 0)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with the tiles, which the output overwrites
        out_batch = b + part * q.shape[0]
        for i in range(own_rows):
            # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
            total = row_sum_of(row_sum[i])
            inverse = float32(inverse_of(total)) * unit_of_out(scale, b, h)
            for n in range(own_tiles):
                at = i // 2 * own_tiles + n
                acc[at, 2 * (i % 2)] *= inverse
                acc[at, 2 * (i % 2) + 1] *= inverse
            own_row = warp_row + lane_row(lane) + i // 2 * ROWS + 8 * (i % 2)
            if lane % 4 == 0 and row + own_row < seq_q:
                unit = factor if is_folded else float32(1)
                shift = (float32(shift_of(row_max[i])) * unit - top) * ln_2
                lse[out_batch, h, q_row + own_row] = lse_of(shift, total)
        # 14: write O_i
        store_out(acc, out, out_batch, h, q_row, q_stop, halves, memory, memory, lane, warp_row, 0)

    read, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    rest = scale_type(numbers), flag_type(features.hides), extras_type(features, FLOAT32)
    written = array_type(FLOAT32, 4) if is_wide else read
    signature = void(read, read, read, written, rows, *rest)
    shared_bytes = seen + (block_k if features.hides else 0)
    return Kernel(flash2_mma_forward, signature, threads, shared_bytes, layout.resident)
