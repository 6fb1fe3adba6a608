"""FlashAttention-2 forward on tensor cores: the loop of flash2 on fragments, float32 sums.

Operands are fp16 or bf16, or float32 split into float16 terms (``float32_terms``): k and v beforehand, q
in this kernel.

What flash2 left on the table: a CUDA core multiplies one pair of numbers per thread at a time, a tensor
core a whole tile per warp.  Here both products are ``mma.sync``.  The probabilities never leave the lane
that computed them, because the accumulators of S = QKᵀ have the layout of the left operand of P·V.  K and V
of the next tile are copied (``cp.async``) while the current tile is multiplied.  Shared memory is read
without bank conflicts, each fragment of K and V once for all rows of the warp.  Measured on an H200 at N =
16,384, d = 64: 318 TFLOP/s in bfloat16 and 124 in split float32; flash2 reaches 30 in float32.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, make_units, scale_type
from kernels.cuda.attention.flash2_mma.fragment_scores import make_fragment_scores
from kernels.cuda.attention.flash2_mma.products import make_accumulate, make_multiply
from kernels.cuda.attention.flash2_mma.softmax import make_finish_rows, make_softmax_step
from kernels.cuda.attention.flash2_mma.split_operands import make_split_rows
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    HALF,
    ROWS,
    WARP,
    MmaLayout,
    make_copy_tile,
    make_store_sums,
    make_store_tile,
)
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import TilePlace, moved
from kernels.cuda.attention.options.visits import make_next_entry, make_row_bounds, make_visits
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.attention.split_keys import own_part
from kernels.cuda.attention.tile_bits import make_tile_bits
from kernels.cuda.device.one_source import (
    batch_and_head,
    ceil_div,
    is_tile_seen,
)
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import (
    cp_async_commit_group,
    cp_async_wait_all,
    recomputed,
    shared_address,
)
from kernels.cuda.runtime.kernel import ALL_LANES, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features

#: Tiles of K, and of V, in shared memory: the next are copied while the current ones are multiplied.
STAGES = 2


def forward_tiles(
    layout: MmaLayout, head_width: int, value_width: int, terms: int = 1
) -> SharedTiles:
    """Return the offsets of the tiles of the forward kernel, in bytes; K and V have one tile per stage.

    At the end, a 16-bit output takes the place of all of them.
    """
    stage = STAGES * terms * HALF * layout.block_k
    k, v = stage * head_width, stage * value_width
    out = HALF * layout.block_q * value_width
    q = max(terms * HALF * layout.block_q * head_width, out - (k + v))
    return SharedTiles(q=q, k=k, v=v)


@device_function
def _copy_nothing(thread, source, b, h, first, stop, target):
    """Leave the query tile to ``split_rows``."""


@device_function
def _no_split(q, scale, b, h, first_q, row, seq_q, seq_k, extras, tile, lane, warp_row):
    """Leave the query tile to ``copy_tile``."""


@cache
def forward_kernel(
    layout: MmaLayout,
    head_width: int,
    value_width: int,
    dtype: str,
    vectors: bool,
    features: Features = PLAIN,
    is_positive: bool = True,
    is_split: bool = False,
) -> Kernel:
    """Return the forward kernel for one layout, two widths, one dtype and some options.

    Args:
        layout: Tiles and warps.
        head_width: head_dim rounded up to a multiple of 16, or more.
        value_width: value_dim rounded up in the same way.
        dtype: See ``float32_terms.NUMBERS``.
        vectors: Whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces; if
            operands are scaled, only q and the results count.
        features: Options of the call.
        is_positive: Whether the scale is positive.  Without options, the scale is a factor within the
            exponent, and a negative one is that of negated products.
        is_split: Whether the keys are divided among parts of the grid; out, in float32, lse and lse_rest
            then have a batch for each part.
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
    scale_of_q = units.split_q
    tiles = forward_tiles(layout, head_width, value_width, terms)
    q_offset, k_offset, v_offset = tiles["q"], tiles["k"], tiles["v"]
    k_bytes, v_bytes = (terms * HALF * block_k * width for width in (head_width, value_width))
    visits = make_visits(features, block_q)
    place, entries, tile_of, is_whole, _ = visits
    next_entry, bounds = make_next_entry(visits), make_row_bounds(block_q, block_k)
    is_plain = features.of_elements == PLAIN
    tile_bits = make_tile_bits(features, layout, FLOAT32, tiles.elements)  # type: ignore[arg-type]
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    copy_q, split_q = make_copy_tile(threads, block_q, head_width, copied), _no_split
    if numbers.is_scaled:
        copy_q, split_q = _copy_nothing, make_split_rows(layout, head_width, dtype, vectors)
    copy_k = make_copy_tile(threads, block_k, head_width, copied, terms)
    copy_v = make_copy_tile(threads, block_k, value_width, copied, terms)
    multiply = make_multiply(layout, head_width, dtype)
    accumulate = make_accumulate(layout, value_width, dtype)
    is_wide = is_split or numbers.is_scaled
    store = make_store_sums if is_wide else make_store_tile
    store_out = store(layout, value_width, dtype, vectors)
    to_scores = make_fragment_scores(layout, features, tile_bits, is_plain and is_positive)
    patience = 0 if numbers.is_scaled else layout.patience  # to as much as 16 bits hold
    softmax_step = make_softmax_step(layout, own_tiles, tile_bits, patience)
    finish_rows = make_finish_rows(layout, own_tiles, PLAIN if is_split else features, is_wide)
    # Where warps meet within a tile, for its bits, none may leave it out.
    skips = layout.skips and not has_bits
    minus_inf, zero, log2_e = np.float32(-math.inf), np.float32(0), np.float32(LOG2_E)
    minus_one = np.float32(-1)

    def flash2_mma_forward(q, k, v, out, lse, lse_rest, scale, extras):
        """Fill one query tile of out, lse and lse_rest.

        Computes: out, lse and lse_rest for one tile of query rows of one (batch, head)
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
            a (row_tiles, 4), b (2, 2), the last two for each term, row_max, row_sum
            (2 * row_tiles,)
        Global traffic: reads q once, k and v once per query tile; writes out, lse and lse_rest
            once
        Needs: compute capability 8.0
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        # 3: for 1 <= i <= T_r
        tile, part, parts = cuda.blockIdx.x, 0, 1
        if is_split:
            q_tiles = ceil_div(q.shape[2], block_q)
            tile, part, parts = tile % q_tiles, tile // q_tiles, cuda.gridDim.x // q_tiles
        flat, row, first_q, seq_q, first_k, seq_k = place(
            tile, cuda.blockIdx.y, q.shape[2], k.shape[2] // terms, extras
        )
        batch, head = numbers_of_mods(flat, extras)
        start = TilePlace(b, h, batch, head, row, 0, seq_q, seq_k)
        thread = cuda.threadIdx.x
        lane, warp = thread % WARP, thread // WARP
        if skips:  # from one lane, so that the compiler knows it is uniform in a warp
            warp = int(cuda.shfl_sync(ALL_LANES, int32(warp), 0))
        warp_row = warp * warp_rows
        bits = cuda.shared.array(0, uint8)  # q, two each of k and v; then bits
        halves = cuda.shared.array(0, uint16)  # the same memory
        memory = shared_address(bits)
        q_tile, k_tile, v_tile = memory + q_offset, memory + k_offset, memory + v_offset
        # In a 16 x 8 tile of sums a lane has rows lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        # Fragments are pairs of 16-bit numbers, for each term.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, value_dim) / 32: O
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P
        a_fragment = cuda.local.array((a_tiles, 4), uint32)  # (warp_rows, 16) / 32: Q, or P
        b_fragment = cuda.local.array((b_tiles, 2), uint32)  # (16, 16) / 32: K, or V
        row_max = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: m, the same in four lanes
        row_sum = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: l of own columns
        first, stop, full, full_stop = bounds(row, seq_q, seq_k, extras)
        entry, entries_stop = entries(flat, row, seq_q, first, stop, extras)
        if is_split:
            entry, entries_stop = own_part(entry, entries_stop, part, parts)
        entry = next_entry(entry, entries_stop, first, stop, extras)
        # 4: load Q_i, and the first K_j and V_j
        q_row, q_stop, k_stop = first_q + row, first_q + seq_q, first_k + seq_k
        copy_q(thread, q, b, h, q_row, q_stop, q_tile)
        if entry < entries_stop:
            k_row = first_k + tile_of(entry, extras) * block_k
            copy_k(thread, k, b, h, k_row, k_stop, k_tile)
            copy_v(thread, v, b, h, k_row, k_stop, v_tile)
        q_scale = scale_of_q(scale, b, h)
        split_q(q, q_scale, b, h, first_q, row, seq_q, seq_k, extras, q_tile, lane, warp_row)
        cp_async_commit_group()
        # 5: O = 0, l = 0, m = -inf
        factor = unit_of_scores(scale, b, h)
        top = top_of(scale, b, h)
        unit = log2_e
        if is_plain and is_positive:
            unit = factor * log2_e
        elif is_plain:
            unit, factor = -factor * log2_e, minus_one
        for i in range(own_rows):
            row_max[i] = minus_inf
            row_sum[i] = zero
        set_all(acc, zero)
        has_large, stage = False, 0
        # 6: for 1 <= j <= T_c
        while entry < entries_stop:
            j = tile_of(entry, extras)
            col = j * block_k
            whole = full <= j < full_stop and is_whole(entry, extras)
            cp_async_wait_all()
            tile_place = moved(start, 0, col)
            draw(thread, bits, whole, tile_place, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the last ones
            # 7: load K_j, V_j: those of the next iteration, while this one computes
            entry = next_entry(entry + 1, entries_stop, first, stop, extras)
            if entry < entries_stop:
                k_row = first_k + tile_of(entry, extras) * block_k
                other = 1 - stage
                copy_k(thread, k, b, h, k_row, k_stop, k_tile + other * k_bytes)
                copy_v(thread, v, b, h, k_row, k_stop, v_tile + other * v_bytes)
            cp_async_commit_group()
            if skips:
                own, own_stop = row + warp_row, min(row + warp_row + warp_rows, seq_q)
                if not is_tile_seen(own, own_stop, col, block_k, extras.lower, extras.upper):
                    stage = 1 - stage
                    continue  # leaves the tensor cores to the other warps
            if terms > 1:
                lane = recomputed(lane)  # addresses of fragments would fill the registers
            # 8: S = Q_i K_jᵀ
            k_stage = k_tile + stage * k_bytes
            multiply(s, a_fragment, b_fragment, q_tile, k_stage, lane, warp_row)
            to_scores(s, factor, whole, bits, lane, warp_row, tile_place, extras)
            # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = l + rowsum P
            # 10, first half: O = diag(e^(m - m_new)) O, and l likewise
            has_large = softmax_step(
                s, acc, row_max, row_sum, has_large, unit, top, bits, lane, warp_row, extras
            )
            # 10, second half: O = O + P V_j
            v_stage = v_tile + stage * v_bytes
            accumulate(acc, s, a_fragment, b_fragment, v_stage, lane, 0)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with the tiles, which the output overwrites
        out_batch = b + part * q.shape[0]
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        out_unit = unit_of_out(scale, b, h)
        finish_rows(
            acc, row_max, row_sum, unit, top, out_unit, lse, lse_rest, out_batch, h, q_row,
            q_stop, lane, warp_row, extras,
        )  # fmt: skip
        # 14: write O_i
        store_out(acc, out, out_batch, h, q_row, q_stop, halves, memory, memory, lane, warp_row, 0)

    read, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    rest = scale_type(numbers), extras_type(features, FLOAT32)
    wide = array_type(FLOAT32, 4)
    of_q, written = (wide if numbers.is_scaled else read), (wide if is_wide else read)
    signature = void(of_q, read, read, written, rows, rows, *rest)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(flash2_mma_forward, signature, threads, shared_bytes, layout.resident)
