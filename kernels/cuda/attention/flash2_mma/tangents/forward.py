"""The JVP on tensor cores: out, lse and their tangents, in the loop of the forward pass.

Three of four products have an operand in common with another one, so each fragment is loaded once.  A dot
above a letter is the derivative along the tangents of q, k and v; see
``docs/guides/attention-derivatives.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash2.forward import Results
from kernels.cuda.attention.flash2.tangents.forward import ResultTangents
from kernels.cuda.attention.flash2_mma.forward import STAGES, make_exponent
from kernels.cuda.attention.flash2_mma.fragment_scores import make_fragment_tangents
from kernels.cuda.attention.flash2_mma.pipeline import MmaVariant, make_load_keys
from kernels.cuda.attention.flash2_mma.products import (
    make_accumulate_tangents,
    make_multiply_tangents,
)
from kernels.cuda.attention.flash2_mma.softmax import (
    SoftmaxRows,
    make_finish_rows,
    make_scale_row,
    make_softmax_step,
    row_max_of,
    row_sum_of,
)
from kernels.cuda.attention.flash2_mma.tangents.dq import TANGENTS_TYPE
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    HALF,
    ROW_OF,
    ROWS,
    MmaLayout,
    WarpLane,
)
from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_wait_all, recomputed, shared_address
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, types, uint8
from kernels.scores.program import Features

_ZERO, _ONE, _MINUS_INF = np.float32(0), np.float32(1), np.float32(-math.inf)


class TangentSums(NamedTuple):
    """The sums that a lane keeps in the kernel of the JVP.

    Where Ṡ is large, only its differences matter.

    Attributes:
        acc: P ∘ Z V, where P is not yet divided by l.
        tangent: (P ∘ (Ṡ - c) ∘ Z) V + (P ∘ Z) V̇.
        apart: Its part of rowsum(P ∘ (Ṡ - c)), (2 * row_tiles,) float32.
        origin: c, which is Ṡ of a key with the largest score, of that shape.
        rows: The :class:`SoftmaxRows`.
    """

    acc: Any
    tangent: Any
    apart: Any
    origin: Any
    rows: Any


def jvp_tiles(
    layout: MmaLayout, head_width: int, value_width: int, size: int = HALF
) -> SharedTiles:
    """Return the offsets of the tiles of the JVP kernel, in bytes; those of keys have two stages.

    At the end, out and its tangent take the places of q and its tangent.
    """
    q = size * layout.block_q * max(head_width, value_width)
    k, v = (STAGES * size * layout.block_k * width for width in (head_width, value_width))
    return SharedTiles(q=q, q_tangent=q, k=k, v=v, k_tangent=k, v_tangent=v)


@cache
def _make_move_origins(layout: MmaLayout, own_tiles: int) -> Callable[..., None]:
    """Return ``move_origins(s, s_tangent, sums)``, which sets c of the rows whose maximum grows."""
    own_rows, col_tiles = 2 * layout.row_tiles, layout.block_k // COLS

    @device_function
    def move_origins(s, s_tangent, sums):
        acc, tangent, apart, origin, (row_max, row_sum) = sums
        new_max = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: of the tile
        grows = False
        for i in range(own_rows):
            largest = _MINUS_INF
            for n in range(col_tiles):
                at = i // 2 * col_tiles + n
                largest = max(largest, max(s[at, 2 * (i % 2)], s[at, 2 * (i % 2) + 1]))
            new_max[i] = row_max_of(largest)
            grows = grows or new_max[i] > row_max[i]
        if cuda.ballot_sync(ALL_LANES, grows) != 0:
            for i in range(own_rows):
                of_largest = _MINUS_INF
                for n in range(col_tiles):
                    at = i // 2 * col_tiles + n
                    for u in range(2 * (i % 2), 2 * (i % 2) + 2):
                        if s[at, u] == new_max[i]:
                            of_largest = max(of_largest, s_tangent[at, u])
                of_largest = row_max_of(of_largest)
                moved = _ZERO
                if new_max[i] > row_max[i]:
                    moved, origin[i] = origin[i] - of_largest, of_largest
                apart[i] += moved * row_sum[i]
                for n in range(own_tiles):
                    at = i // 2 * own_tiles + n
                    for u in range(2 * (i % 2), 2 * (i % 2) + 2):
                        tangent[at, u] += moved * acc[at, u]

    return move_origins


@cache
def _make_tangent_step(layout: MmaLayout, tile_bits: TileBits) -> Callable[..., None]:
    """Return ``tangent_step(s, s_tangent, sums, bits, share, extras)``.

    It replaces P by P ∘ Z and Ṡ by P ∘ (Ṡ - c) ∘ Z, and adds P ∘ (Ṡ - c) to ``apart``.
    """
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    kept, rows_of, cols_of = tile_bits.kept, ROW_OF, COL_OF

    @device_function
    def tangent_step(s, s_tangent, sums, bits, share, extras):
        first_row, first_col = share.row + lane_row(share.lane), lane_col(share.lane)
        for m in range(row_tiles):
            for n in range(col_tiles):
                at = m * col_tiles + n
                for i in range(4):
                    own = 2 * m + i // 2
                    in_row, in_col = first_row + m * ROWS + rows_of[i], first_col + n * COLS
                    keep = kept(bits, in_row, in_col + cols_of[i], extras)
                    moved = s[at, i] * (s_tangent[at, i] - sums.origin[own])
                    sums.apart[own] += moved
                    s[at, i] *= keep
                    s_tangent[at, i] = moved * keep

    return tangent_step


def _make_scale_rows(
    own_tiles: int, features: Features
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the functions that rescale the sums of a row, and that finish it; see ``make_scale_row``.

    The second turns the sums into O and Ȯ, and ``apart`` into L̇.
    """
    scale_row, has_sink = make_scale_row(own_tiles), features.sink

    @device_function
    def rescale(sums, i, factor):
        scale_row(sums.acc, i, factor)
        scale_row(sums.tangent, i, factor)
        sums.apart[i] *= factor

    @device_function
    def finish(sums, i, inverse):
        rescale(sums, i, inverse)
        # With a sink, the probabilities of a row add up to less than 1.
        seen = row_sum_of(sums.rows.sum[i]) * inverse if has_sink else _ONE
        origin, apart = sums.origin[i], row_sum_of(sums.apart[i])
        # O = (P ∘ Z) V     Ȯ = (P ∘ (Ṡ - L̇) ∘ Z) V + (P ∘ Z) V̇
        weight = origin * (_ONE - seen) - apart
        for n in range(own_tiles):
            at = i // 2 * own_tiles + n
            for u in range(2 * (i % 2), 2 * (i % 2) + 2):
                sums.tangent[at, u] += weight * sums.acc[at, u]
        # L = m + log l     L̇ = rowsum(P ∘ Ṡ), with c added back
        sums.apart[i] = origin * seen + apart

    return rescale, finish


@cache
def jvp_kernel(variant: MmaVariant) -> Kernel:
    """Return the kernel that fills out, lse, lse_rest and the tangents of out and lse."""
    layout, head_width, value_width, numbers, vectors, features = variant
    block_q, block_k, row_tiles = layout.block_q, layout.block_k, layout.row_tiles
    parts, columns = layout.parts, value_width // layout.parts
    warp_rows, lane_rows, out_tiles = ROWS * row_tiles, 2 * row_tiles, columns // COLS
    s_tiles, acc_tiles = row_tiles * block_k // COLS, row_tiles * out_tiles
    tiles = jvp_tiles(layout, *variant.widths, numbers.size)
    q_offset, moved_q_offset, k_offset, v_offset, moved_k_offset, moved_v_offset = tiles
    k_bytes, v_bytes = (numbers.size * block_k * width for width in variant.widths)
    item_of, bounds_of, begin, advance, tile_at, *_ = variant.loop()
    tile_bits, (copy_q, _) = variant.bits(tiles), variant.copies(block_q)
    draw, has_bits = tile_bits.draw, tile_bits.bytes
    load_keys, load_moved = (make_load_keys(variant, tiles, of) for of in ("", "_tangent"))
    multiply = make_multiply_tangents(numbers.dtype, layout, head_width)
    accumulate = make_accumulate_tangents(numbers.dtype, layout, value_width, columns)
    store_out = numbers.store(layout, value_width, vectors, columns)
    exponent_of = make_exponent(numbers, is_plain=False, is_positive=True)
    to_tangents = make_fragment_tangents(layout, features, tile_bits)
    rescale, finish = _make_scale_rows(out_tiles, features)
    move_origins = _make_move_origins(layout, out_tiles)
    # Dropout comes after the row sums of both.
    softmax_step = make_softmax_step(layout, tile_bits._replace(bytes=0), 0, False, rescale)
    tangent_step = _make_tangent_step(layout, tile_bits)
    finish_rows = make_finish_rows(layout, features, False, finish)
    unit_of_out = numbers.out_unit

    def flash2_mma_jvp(inputs, tangents, results, result_tangents, scale, extras):
        """Fill one query tile of out, lse, lse_rest and the tangents of out and lse.

        Computes: out, lse and their derivatives along the tangents of q, k and v, for one tile of query
            rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 1, lines 3-15, and the derivative of each
        Grid: (num_q_tiles * parts, batch * heads), one block per query tile and part of the columns of
            out, the longest first
        Block: (32 * warps,)
        One thread does: of 16 x 8 tiles, for row_tiles * 16 rows of its warp, two neighbouring columns of
            two rows: of S and Ṡ block_k / 8 tiles, of O and Ȯ columns / 8
        Shared: tiles of q and its tangent (block_q, head_dim), of each stage tiles of k, v and their
            tangents (block_k, head_dim or value_dim), swizzled; at the end out and its tangent; for some
            options a byte for four columns
        Registers: acc and its tangent (row_tiles * columns / 8, 4), s and s_tangent
            (row_tiles * block_k / 8, 4), and four numbers a row
        Global traffic: reads q and its tangent once, k, v and their tangents once per query tile; writes
            the results once
        Needs: compute capability 8.0
        """
        # 3: for 1 <= i <= T_r
        x, chunk = cuda.blockIdx.x, 0
        if parts > 1:
            x, chunk = x // parts, x % parts * out_tiles
        item = item_of(x, cuda.blockIdx.y, inputs.q, inputs.k, extras)
        b, h, row, thread = item.start.b, item.start.h, item.start.row, cuda.threadIdx.x
        lane, warp_row = thread % WARP, thread // WARP * warp_rows
        bits = cuda.shared.array(0, uint8)  # the tiles; then bits
        memory = shared_address(bits)
        acc = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, columns) / 32: O
        acc_tangent = cuda.local.array((acc_tiles, 4), float32)  # (warp_rows, columns) / 32: Ȯ
        s = cuda.local.array((s_tiles, 4), float32)  # (warp_rows, block_k) / 32: S, then P ∘ Z
        s_tangent = cuda.local.array(
            (s_tiles, 4), float32
        )  # (warp_rows, block_k) / 32: Ṡ, P ∘ (Ṡ - c) ∘ Z
        # (warp_rows,) / 8 each: m, the part of l from own columns, and those of TangentSums
        row_max, row_sum = (
            cuda.local.array(lane_rows, float32),
            cuda.local.array(lane_rows, float32),
        )
        apart, origin = cuda.local.array(lane_rows, float32), cuda.local.array(lane_rows, float32)
        rows = SoftmaxRows(row_max, row_sum)
        sums = TangentSums(acc, acc_tangent, apart, origin, rows)
        visit = begin(item, bounds_of(item, extras), extras)
        # 4: load Q_i, and the first K_j and V_j
        span = HeadRows(item.q.b, item.q.h, item.q.first + row, item.q.stop)
        copy_q(thread, inputs.q, span, memory + q_offset)
        copy_q(thread, tangents.q, span, memory + moved_q_offset)
        load_keys(thread, inputs.k, inputs.v, item, visit, memory, 0, extras)
        load_moved(thread, tangents.k, tangents.v, item, visit, memory, 0, extras)
        # 5: O = 0, l = 0, m = -inf
        factor, exponent = exponent_of(scale, b, h)
        for i in range(lane_rows):
            row_max[i], row_sum[i], apart[i], origin[i] = _MINUS_INF, _ZERO, _ZERO, _ZERO
        set_all(acc, _ZERO)
        set_all(acc_tangent, _ZERO)
        has_large, stage = False, 0
        # 6: for 1 <= j <= T_c
        while visit.entry < visit.stop:
            tile = tile_at(item, visit, bits, extras)
            cp_async_wait_all()
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole, and every warp is done with the last ones
            # 7: load K_j, V_j, K̇_j, V̇_j: those of the next iteration, while this one computes
            visit = advance(visit, 1, extras)
            load_keys(thread, inputs.k, inputs.v, item, visit, memory, 1 - stage, extras)
            load_moved(thread, tangents.k, tangents.v, item, visit, memory, 1 - stage, extras)
            lane = recomputed(lane)  # addresses of fragments would fill the registers
            share = WarpLane(lane, warp_row, chunk)
            at_k, at_v = memory + stage * k_bytes, memory + stage * v_bytes
            # 8: X = τ Q_i K_jᵀ, S = f(X)     Ẋ = τ (Q̇_i K_jᵀ + Q_i K̇_jᵀ), Ṡ = f'(X) ∘ Ẋ
            of_q, of_k = (
                (memory + q_offset, memory + moved_q_offset),
                (at_k + k_offset, at_k + moved_k_offset),
            )
            multiply((s, s_tangent), of_q, of_k, share)
            to_tangents((s, s_tangent), factor, tile, share, extras)
            # 9: m, P, l and P ∘ (Ṡ - c)     10, first half: O = diag(e^(m - m_new)) O, Ȯ likewise
            move_origins(s, s_tangent, sums)
            has_large = softmax_step(s, sums, rows, has_large, exponent, bits, share, extras)
            tangent_step(s, s_tangent, sums, bits, share, extras)
            # 10, second half: O = O + P V_j     Ȯ = Ȯ + (P ∘ (Ṡ - c)) V_j + P V̇_j
            of_v = at_v + v_offset, at_v + moved_v_offset
            accumulate((acc, acc_tangent), (s, s_tangent), of_v, share)
            if has_bits:
                cuda.syncthreads()  # every warp has read the bits before they are drawn anew
            stage = 1 - stage
        cp_async_wait_all()
        cuda.syncthreads()  # every warp is done with the tiles, which the results overwrite
        share = WarpLane(lane, warp_row, chunk)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l     and their tangents
        of_rows = results.lse, results.lse_rest
        finish_rows(sums, rows, exponent, unit_of_out(scale, b, h), of_rows, span, share, extras)
        for i in range(lane_rows):
            at = span.first + warp_row + lane_row(lane) + i // 2 * ROWS + 8 * (i % 2)
            if lane % 4 == 0 and at < span.stop and chunk == 0:
                result_tangents.lse[b, h, at] = apart[i]
        # 14: write O_i and Ȯ_i
        store_out(acc, results.out, span, memory + q_offset, share)
        store_out(acc_tangent, result_tangents.out, span, memory + moved_q_offset, share)

    four, rows_type = array_type(BITS, 4), array_type(FLOAT32, 3)
    result_types = types.NamedTuple([four, rows_type, rows_type], Results)
    tangent_types = types.NamedTuple([four, rows_type], ResultTangents)
    signature = variant.signature(
        TANGENTS_TYPE, TANGENTS_TYPE, result_types, tangent_types, is_backward=False
    )
    shared_bytes = tiles.elements + tile_bits.bytes
    return Kernel(flash2_mma_jvp, signature, layout.threads, shared_bytes, layout.resident)
