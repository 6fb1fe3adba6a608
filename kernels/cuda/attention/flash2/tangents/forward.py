"""The JVP of flash2's forward pass: out, lse and their tangents, in one pass over the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2.forward import (
    Results,
    RowState,
    clear_rows,
    make_finish_rows,
    make_softmax_step,
)
from kernels.cuda.attention.flash2.register_scores import (
    bits_of,
    kernel_of,
    make_loop,
)
from kernels.cuda.attention.flash2.tangents.products import make_loads, make_products
from kernels.cuda.attention.flash2.tangents.scores import (
    inputs_type,
    make_score_tangents,
)
from kernels.cuda.attention.options.score_functions import make_row_end
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import (
    Lane,
    RegisterLayout,
    Variant,
    assign,
    make_accumulate,
    make_keep_tile,
    make_store_tile,
    set_all,
)
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.one_source import shift_of, softmax_step_for
from kernels.cuda.device.row_folds import make_lane_folds
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import types, uint8


class ResultTangents(NamedTuple):
    """The tangents of out and lse."""

    out: Any
    lse: Any


class TangentState(NamedTuple):
    """The sums that a thread keeps for the tangents of its rows.

    Where Ṡ is large, only its differences matter.

    Attributes:
        acc: (P ∘ (Ṡ - c) ∘ Z) V + (P ∘ Z) V̇, where P is not yet divided by l.
        row_sum: Its part of rowsum(P ∘ (Ṡ - c)).
        origin: c, which is Ṡ of a key with the largest score.
        last_max: m before the present tile.
        last_sum: Its part of l before the present tile.
    """

    acc: Any
    row_sum: Any
    origin: Any
    last_max: Any
    last_sum: Any


@device_function
def clear_tangents(tangents):
    """Set all sums and c to 0, and m to minus infinity."""
    acc, row_sum, origin, last_max, last_sum = tangents
    set_all(acc, 0)
    for i in range(row_sum.shape[0]):
        row_sum[i], origin[i], last_max[i], last_sum[i] = 0, 0, -math.inf, 0


def jvp_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the JVP kernel."""
    block_q, block_k = layout.block_q, layout.block_k
    head, value = layout.row_stride(head_width), layout.row_stride(value_width)
    return SharedTiles(
        q=block_q * head,
        q_tangent=block_q * head,
        k=block_k * head,
        k_tangent=block_k * head,
        v=block_k * value,
        v_tangent=block_k * value,
        p=block_q * (block_k + VECTOR),
        p_tangent=block_q * (block_k + VECTOR),
    )


@cache
def _make_tangent_step(variant: Variant, tile_bits: TileBits, tile: int) -> Callable[..., None]:
    """Return ``tangent_step(lane, (s, s_tangent), state, tangents, shared, bits, extras)``.

    It adds P ∘ (Ṡ - c) to the row sums, stores P ∘ (Ṡ - c) ∘ Z in shared memory at ``tile``, and rescales
    the earlier sums.  ``state`` is the :class:`RowState` after the tile's softmax step.
    """
    layout, dtype = variant.layout, variant.dtype
    power, grown = softmax_step_for(dtype)
    row_max_of, _ = make_lane_folds(layout.lanes)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    lanes, rows_of_threads, kept = layout.lanes, layout.rows_of_threads, tile_bits.kept
    keep_tile, log2_e = make_keep_tile(layout, layout.block_q, layout.block_k), dtype.type(LOG2_E)

    @device_function
    def tangent_step(lane, registers, state, tangents, shared, bits, extras):
        (s, s_tangent), (acc, row_sum, origin, last_max, last_sum) = registers, tangents
        for i in range(s.shape[0]):
            largest, r = state.row_max[i], lane.ty + i * rows_of_threads
            shift, rescale = grown(last_max[i], largest, log2_e)
            # The new c is Ṡ of a key with the score m, if the tile has one.
            of_largest, moved = minus_inf, zero
            for c in range(s.shape[1]):
                if s[i, c] == largest:
                    of_largest = max(of_largest, s_tangent[i, c])
            of_largest = row_max_of(of_largest)
            if of_largest != minus_inf:
                moved, origin[i] = origin[i] - of_largest, of_largest
            total = (row_sum[i] + moved * last_sum[i]) * rescale
            for c in range(s.shape[1]):
                p = power(s[i, c], shift, log2_e) * (s_tangent[i, c] - origin[i])
                total += p
                s_tangent[i, c] = p * kept(bits, r, lane.tx + c * lanes, extras)
            row_sum[i], last_max[i], last_sum[i] = total, largest, state.row_sum[i]
            for c in range(acc.shape[1]):
                acc[i, c] = acc[i, c] * rescale + moved * state.acc[i, c]
        keep_tile(lane, s_tangent, one, shared, tile)

    return tangent_step


@cache
def _make_finish_tangents(variant: Variant) -> Callable[..., None]:
    """Return ``finish_tangents(lane, state, tangents, lse_tangent, rows, extras)``.

    It turns ``acc`` of ``tangents`` into Ȯ, and writes L̇; O is not yet divided by l.
    """
    rows_of_threads, one = variant.layout.rows_of_threads, variant.dtype.type(1)
    _, row_sum_of = make_lane_folds(variant.layout.lanes)
    end_row, has_sink = make_row_end(variant.features, variant.dtype), variant.features.sink

    @device_function
    def finish_tangents(lane, state, tangents, lse_tangent, rows, extras):
        (tx, ty), (b, h, first, stop) = lane, rows
        for i in range(state.row_sum.shape[0]):
            total, r = row_sum_of(state.row_sum[i]), ty + i * rows_of_threads
            inverse, _, _ = end_row(total, shift_of(state.row_max[i]), b, h, extras)
            # With a sink, the probabilities of a row add up to less than 1.
            seen, origin = total * inverse if has_sink else one, tangents.origin[i]
            # L = m + log l     L̇ = rowsum(P ∘ Ṡ), with c added back
            apart = row_sum_of(tangents.row_sum[i]) * inverse
            # O = (P ∘ Z) V     Ȯ = (P ∘ (Ṡ - L̇) ∘ Z) V + (P ∘ Z) V̇
            weight = origin * (one - seen) - apart
            for c in range(tangents.acc.shape[1]):
                out = state.acc[i, c] * inverse
                tangents.acc[i, c] = tangents.acc[i, c] * inverse + weight * out
            if tx == 0 and first + r < stop:
                lse_tangent[b, h, first + r] = origin * seen + apart

    return finish_tangents


@cache
def jvp_kernel(variant: Variant) -> Kernel:
    """Return the kernel that fills out, lse, lse_rest and the tangents of out and lse."""
    layout, head_width, value_width, dtype, _, features = variant
    real, lanes = scalar_type(dtype), layout.lanes
    block_q, block_k = layout.block_q, layout.block_k
    own_rows, own_cols = block_q // layout.rows_of_threads, block_k // lanes
    own_width = layout.columns(value_width)
    tiles = jvp_tiles(layout, head_width, value_width)
    *_, v_tile, v_tangent_tile, p_tile, p_tangent_tile = tiles
    item_of, bounds_of, begin, advance, tile_at, *_ = make_loop(variant)
    tile_bits = bits_of(variant, tiles)
    draw, to_tangents = tile_bits.draw, make_score_tangents(variant, tile_bits)
    load_queries, load_keys = make_loads(variant, tiles)
    multiply_qk = make_products(variant, tiles)
    accumulate = make_accumulate(layout, block_q, block_k, value_width)
    store = make_store_tile(layout, block_q, value_width, assign)
    softmax_step = make_softmax_step(variant, tile_bits, p_tile)
    tangent_step = _make_tangent_step(variant, tile_bits, p_tangent_tile)
    finish_rows = make_finish_rows(variant, features)
    finish_tangents = _make_finish_tangents(variant)

    def flash2_jvp(inputs, tangents, results, result_tangents, scale, extras):
        """Fill one query tile of out, lse, lse_rest and the tangents of out and lse.

        Computes: out, lse and their derivatives along the tangents of q, k and v, for one tile of query
            rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 1, lines 3-15, and the derivative of each
        Grid: (num_q_tiles, batch * heads), one block per query tile, the longest first
        Block: (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S and Ṡ, and own_rows x own_width of O and Ȯ
        Shared: tiles of q and its tangent (block_q, head_dim), of k, v and their tangents (block_k,
            head_dim or value_dim), P and P ∘ (Ṡ - c) (block_q, block_k); rows padded by one vector; for
            some options a byte for four columns
        Registers: acc and its tangent (own_rows, own_width), x and x_tangent (own_rows, own_cols), and
            six numbers a row
        Global traffic: reads q and its tangent once, k, v and their tangents once per query tile; writes
            the results once
        Needs: warp shuffles and 128-bit loads
        """
        # 3: for 1 <= i <= T_r
        item = item_of(cuda.blockIdx.x, cuda.blockIdx.y, inputs.q, inputs.k, extras)
        thread, rows = cuda.threadIdx.x, rows_from(item.q, item.start.row)
        lane = Lane(thread % lanes, thread // lanes)
        shared = cuda.shared.array(0, real)  # the tiles
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        acc = cuda.local.array((own_rows, own_width), real)  # (block_q, value_dim) / threads: O
        acc_tangent = cuda.local.array(
            (own_rows, own_width), real
        )  # (block_q, value_dim) / threads
        x = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: X, S
        x_tangent = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, Q̇ or P
        # (own_rows,) each: m and the part of l from own columns, and those of a TangentState
        row_max, row_sum = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        sum_tangent, origin = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        last_max, last_sum = cuda.local.array(own_rows, real), cuda.local.array(own_rows, real)
        state = RowState(acc, row_max, row_sum)
        state_tangents = TangentState(acc_tangent, sum_tangent, origin, last_max, last_sum)
        # 4: load Q_i and Q̇_i, scaled
        load_queries(thread, inputs, tangents, rows, real(scale), shared)
        # 5: O = 0, l = 0, m = -inf
        clear_rows(state)
        clear_tangents(state_tangents)
        visit = begin(item, bounds_of(item, extras), extras)
        # 6: for 1 <= j <= T_c
        while visit.entry < visit.stop:  # the same for all threads of the block
            tile = tile_at(item, visit, bits, extras)
            cuda.syncthreads()  # every thread is done with the last key tile
            # 7: load K_j, V_j, K̇_j, V̇_j
            load_keys(thread, inputs, tangents, rows_from(item.k, tile.place.col), shared)
            draw(thread, tile, extras)
            cuda.syncthreads()  # the tiles are whole
            # 8: X = τ Q_i K_jᵀ, S = f(X)     Ẋ = τ (Q̇_i K_jᵀ + Q_i K̇_jᵀ), Ṡ = f'(X) ∘ Ẋ
            multiply_qk(lane, (x, x_tangent), shared)
            to_tangents(lane, (x, x_tangent), tile, extras)
            # 9: m, P, l and P ∘ (Ṡ - c)     10, first half: O = diag(e^(m - m_new)) O, Ȯ likewise
            softmax_step(lane, x, state, shared, bits, extras)
            tangent_step(lane, (x, x_tangent), state, state_tangents, shared, bits, extras)
            cuda.syncthreads()  # P and P ∘ (Ṡ - c) are whole
            # 10, second half: O = O + P V_j     Ȯ = Ȯ + (P ∘ (Ṡ - c)) V_j + P V̇_j
            accumulate(lane, acc, fragment, shared, p_tile, v_tile)
            accumulate(lane, acc_tangent, fragment, shared, p_tangent_tile, v_tile)
            accumulate(lane, acc_tangent, fragment, shared, p_tile, v_tangent_tile)
            visit = advance(visit, 1, extras)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l     and their tangents
        finish_tangents(lane, state, state_tangents, result_tangents.lse, rows, extras)
        finish_rows(lane, state, results.lse, results.lse_rest, rows, extras)
        # 14: write O_i and Ȯ_i
        store(lane, acc, results.out, rows)
        store(lane, acc_tangent, result_tangents.out, rows)

    four, three, inputs = array_type(dtype, 4), array_type(dtype, 3), inputs_type(variant)
    result_types = types.NamedTuple([four, three, three], Results)
    tangent_types = types.NamedTuple([four, three], ResultTangents)
    return kernel_of(variant, flash2_jvp, [inputs, inputs, result_types, tangent_types], tiles)
