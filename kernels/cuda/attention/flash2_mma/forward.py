"""FlashAttention-2 forward on tensor cores: the loop of flash2 on fragments, float32 sums.

What flash2 left on the table: a CUDA core multiplies one pair of numbers per thread at a time, a tensor
core a whole tile per warp.  Here both products are ``mma.sync``.  The probabilities never leave the lane
that computed them, because the accumulators of S = QKᵀ have the layout of the left operand of P·V.  K and V
of the next tile are copied (``cp.async``) while the current tile is multiplied.  Shared memory is read
without bank conflicts, each fragment of K and V once for all rows of the warp.  Measured on an H200 at N =
16,384, d = 64 in bfloat16: 318 TFLOP/s; flash2 reaches 30 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.fragment_scores import make_fragment_scores
from kernels.cuda.attention.flash2_mma.pipeline import MmaVariant, make_load_keys
from kernels.cuda.attention.flash2_mma.softmax import (
    SoftmaxRows,
    make_finish_rows,
    make_scale_row,
    make_softmax_step,
)
from kernels.cuda.attention.flash2_mma.tiles import COLS, HALF, ROWS, MmaLayout, WarpLane
from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.attention.split_keys import make_own_part
from kernels.cuda.device.one_source import ceil_div, is_tile_seen
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_wait_all, recomputed, shared_address
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint8
from kernels.scores.program import PLAIN

#: Tiles of K, and of V, in shared memory: the next are copied while the current ones are multiplied.
STAGES = 2


def forward_tiles(
    layout: MmaLayout, head_width: int, value_width: int, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the forward kernel, in bytes; K and V have one tile per stage.

    At the end, a 16-bit output takes the place of all of them.
    """
    stage = STAGES * size * layout.block_k
    k, v = stage * head_width, stage * value_width
    out = HALF * layout.block_q * value_width
    q = max(size * layout.block_q * head_width, out - (k + v))
    return SharedTiles(q=q, k=k, v=v)


@cache
def make_exponent(numbers: Arithmetic, is_plain: bool, is_positive: bool) -> Callable[..., Any]:
    """Return ``exponent_of(scale, b, h)``: the factor of products, and (unit, top) of ``softmax``.

    Without options, the scale is a factor within the exponent, and a negative one is that of negated
    products.
    """
    units_of, log2_e, minus_one = numbers.forward_units, np.float32(LOG2_E), np.float32(-1)

    @device_function
    def exponent_of(scale, b, h):
        factor, top = units_of(scale, b, h)
        if not is_plain:
            return factor, (log2_e, top)
        if is_positive:
            return factor, (factor * log2_e, top)
        return minus_one, (-factor * log2_e, top)

    return exponent_of


@cache
def forward_kernel(variant: MmaVariant, is_positive: bool = True, is_split: bool = False) -> Kernel:
    """Return the forward kernel.

    Args:
        variant: What it is compiled for.
        is_positive: Whether the scale is positive.
        is_split: Whether keys are divided among parts of the grid; out, in float32, lse and lse_rest then
            have a batch for each part.
    """
    layout, head_width, value_width, numbers, vectors, features = variant
    block_q, block_k, row_tiles = layout.block_q, layout.block_k, layout.row_tiles
    column_parts, columns = layout.parts, value_width // layout.parts
    warp_rows, lane_rows, out_tiles = ROWS * row_tiles, 2 * row_tiles, columns // COLS
    s_tiles, acc_tiles = row_tiles * block_k // COLS, row_tiles * out_tiles
    is_plain, is_wide = features.of_elements == PLAIN, is_split or numbers.is_wide
    tiles = forward_tiles(layout, *variant.widths, numbers.size)
    q_offset, k_offset, v_offset = tiles["q"], tiles["k"], tiles["v"]
    k_bytes, v_bytes = (numbers.size * block_k * width for width in variant.widths)
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop()
    tile_bits = variant.bits(tiles)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_q = numbers.load_q(layout, head_width, vectors)
    load_keys, own_part = make_load_keys(variant, tiles), make_own_part(features)
    multiply = numbers.multiply(layout, head_width)
    accumulate = numbers.accumulate(layout, value_width, columns)
    store_out = numbers.store(layout, value_width, vectors, columns, is_wide=is_split)
    exponent_of = make_exponent(numbers, is_plain, is_positive)
    to_scores = make_fragment_scores(layout, features, tile_bits, is_plain and is_positive)
    scale_row = make_scale_row(out_tiles)
    softmax_step = make_softmax_step(layout, tile_bits, layout.patience, is_split, scale_row)
    # Parts of the keys are merged by their own L.
    finish_rows = make_finish_rows(layout, PLAIN if is_split else features, is_wide, scale_row)
    unit_of_out, zero, minus_inf = numbers.out_unit, np.float32(0), np.float32(-math.inf)
    # Where warps meet within a tile, for its bits, none may leave it out.
    skips, recomputes = layout.skips and not has_bits, numbers.size > HALF or column_parts > 1

    def flash2_mma_forward(q, k, v, out, lse, lse_rest, scale, extras):
        """Fill one query tile of out, lse and lse_rest.

        Computes: out, lse and lse_rest for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 1, lines 3-15; FlashAttention, Algorithm 2, lines 11
            (mask) and 14 (dropout)
        Grid: (num_q_tiles * column_parts * parts, batch * heads), one block per query tile and part of
            the columns of out, the longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring
            columns of two rows: of S block_k / 8 tiles, of O columns / 8
        Shared: q_tile (block_q, head_dim); of each stage k_tile (block_k, head_dim),
            v_tile (block_k, value_dim), swizzled; at the end out (block_q, value_dim); for some
            options a byte for four columns
        Registers: acc (row_tiles * columns / 8, 4), s (row_tiles * block_k / 8, 4),
            row_max, row_sum (2 * row_tiles,)
        Global traffic: reads q once, k and v once per query tile; writes out, lse and lse_rest
            once
        Needs: compute capability 8.0
        """
        # 3: for 1 <= i <= T_r
        x, chunk, part, parts = cuda.blockIdx.x, 0, 0, 1
        if is_split:
            q_tiles = ceil_div(q.shape[2], block_q) * column_parts
            x, part, parts = x % q_tiles, x // q_tiles, cuda.gridDim.x // q_tiles
        if column_parts > 1:
            x, chunk = x // column_parts, x % column_parts * out_tiles
        item = item_of(x, cuda.blockIdx.y, q, k, extras)
        b, h, _, _, row, _, seq_q, _ = item.start
        thread = cuda.threadIdx.x
        lane, warp = thread % WARP, thread // WARP
        if skips:  # from one lane, so that the compiler knows it is uniform in a warp
            warp = int(cuda.shfl_sync(ALL_LANES, int32(warp), 0))
        warp_row = warp * warp_rows
        bits = cuda.shared.array(0, uint8)  # a tile of q, two of k and two of v; then option bits
        memory = shared_address(bits)
        q_tile, k_tile, v_tile = memory + q_offset, memory + k_offset, memory + v_offset
        # In a 16 x 8 tile of sums a lane has rows lane / 4 and + 8, and columns 2 (lane % 4) and + 1.
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, columns) / 32: O
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P
        row_max = cuda.local.array(
            lane_rows, float32
        )  # (warp_rows,) / 8: m, the same in four lanes
        row_sum = cuda.local.array(lane_rows, float32)  # (warp_rows,) / 8: l of own columns
        visit = begin(item, bounds_of(item, extras), extras)
        if is_split:
            visit = advance(own_part(visit, part, parts), 0, extras)
        # 4: load Q_i, and the first K_j and V_j
        load_q(q, scale, item, q_tile, thread, WarpLane(lane, warp_row, 0), extras)
        load_keys(thread, k, v, item, visit, memory, 0, extras)
        # 5: O = 0, l = 0, m = -inf
        (factor, exponent), rows = exponent_of(scale, b, h), SoftmaxRows(row_max, row_sum)
        for i in range(lane_rows):
            row_max[i], row_sum[i] = minus_inf, zero
        set_all(acc, zero)
        has_large, stage = False, 0
        # 6: for 1 <= j <= T_c
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are complete, and every warp is done with the previous tiles
            # 7: load K_j, V_j: those of the next iteration, while this one computes
            visit = advance(visit, 1, extras)
            load_keys(thread, k, v, item, visit, memory, 1 - stage, extras)
            if skips:
                this, this_stop = row + warp_row, min(row + warp_row + warp_rows, seq_q)
                col, lower, upper = tile.place.col, extras.lower, extras.upper
                if not is_tile_seen(this, this_stop, col, block_k, lower, upper):
                    stage = 1 - stage
                    continue  # other warps may use the tensor cores
            if recomputes:
                lane = recomputed(lane)  # addresses of fragments would fill the registers
            share = WarpLane(lane, warp_row, chunk)
            # 8: S = Q_i K_jᵀ
            multiply(s, q_tile, k_tile + stage * k_bytes, share)
            to_scores(s, factor, tile, share, extras)
            # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = l + rowsum P
            # 10, first half: O = diag(e^(m - m_new)) O, l = e^(m - m_new) l
            has_large = softmax_step(s, acc, rows, has_large, exponent, bits, share, extras)
            # 10, second half: O = O + P V_j
            accumulate(acc, s, v_tile + stage * v_bytes, share)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with the tiles, which the output overwrites
        share = WarpLane(lane, warp_row, chunk)
        span = HeadRows(b + part * q.shape[0], h, item.q.first + row, item.q.stop)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        finish_rows(
            acc, rows, exponent, unit_of_out(scale, b, h), (lse, lse_rest), span, share, extras
        )
        # 14: write O_i
        store_out(acc, out, span, memory, share)

    read, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    wide = array_type(FLOAT32, 4)
    of_q, written = (wide if numbers.is_wide else read), (wide if is_wide else read)
    signature = variant.signature(of_q, read, read, written, rows, rows, is_backward=False)
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(
        numbers.named(flash2_mma_forward), signature, layout.threads, shared_bytes, layout.resident
    )
