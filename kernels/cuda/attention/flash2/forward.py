"""FlashAttention-2 forward on CUDA cores: query tiles outside and parallel, one division at the end.

What flash1 left on the table: one block per head leaves most of the GPU idle, and O, l and m travel to
global memory and back for every key tile.  Here each query tile has a block of its own, and O, l and m
stay in registers until the end.  A thread multiplies register tiles loaded by 128-bit loads, so that
arithmetic, not shared memory, is the limit.  Measured on an H200 (float32, N = 4096, d = 64, 64 heads):
9.7 ms, 28 TFLOP/s; flash1 takes 360 ms, and naive, with 4 GiB of scores, 17.1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import float64, int32, uint8, void

from kernels.common.online_softmax import LARGE, LOG2_E
from kernels.cuda.attention.flash2.register_scores import make_scores
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import extras_type, make_row_end
from kernels.cuda.attention.options.tile_scores import TilePlace, moved
from kernels.cuda.attention.options.visits import grid_of, make_row_bounds, make_visits
from kernels.cuda.attention.register_tiles import (
    RegisterLayout,
    assign,
    make_accumulate,
    make_load_tiles,
    make_multiply,
    make_store_tile,
    pick_layout,
    set_all,
    widths,
)
from kernels.cuda.attention.split_keys import empty_parts, merge_parts, own_part, parts_of
from kernels.cuda.attention.tile_bits import TileBits, make_tile_bits
from kernels.cuda.device.one_source import batch_and_head, shift_of
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import EXP2, MINUS, VECTOR, are_vectors
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import ALL_LANES, Kernel, array_type, device_function, scalar_type
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import IS_SIMULATOR, cuda
from kernels.scores.program import PLAIN, Features


def make_row_reductions(lanes: int) -> tuple[Any, Any]:
    """Return maximum and sum over the ``lanes`` neighbouring threads that share a row.

    They take ``(value, scratch, row, lane)`` and give every thread the result.  On a GPU the threads are
    lanes of one warp and exchange registers; in the simulator, which has no warps, they meet in
    ``scratch``, a shared array (block_q, lanes).
    """
    if IS_SIMULATOR:

        def gathered(value, scratch, row, lane):
            cuda.syncthreads()  # the values of the last reduction have been read
            scratch[row, lane] = value
            cuda.syncthreads()  # every value has been written
            return [scratch[row, i] for i in range(lanes)]

        return lambda *args: max(gathered(*args)), lambda *args: sum(gathered(*args))

    steps = lanes.bit_length() - 1

    @device_function
    def row_max(value, scratch, row, lane):
        for i in range(steps):
            other = cuda.shfl_xor_sync(ALL_LANES, value, 1 << i)
            value = max(value, other)
        return value

    @device_function
    def row_sum(value, scratch, row, lane):
        for i in range(steps):
            value = value + cuda.shfl_xor_sync(ALL_LANES, value, 1 << i)
        return value

    return row_max, row_sum


def forward_tiles(layout: RegisterLayout, head_width: int, value_width: int) -> SharedTiles:
    """Return the offsets of the tiles of the forward kernel."""
    return SharedTiles(
        q=layout.block_q * layout.row_stride(head_width),
        k=layout.block_k * layout.row_stride(head_width),
        v=layout.block_k * layout.row_stride(value_width),
        p=layout.block_q * (layout.block_k + VECTOR),
    )


@cache
def _make_softmax_step(
    layout: RegisterLayout, own_width: int, dtype: np.dtype[Any], tile_bits: TileBits, p_tile: int
) -> Callable[..., None]:
    """Return ``softmax_step(tx, ty, s, acc, row_max, row_sum, scratch, shared, bits, extras)``.

    It computes P from the scores in ``s``, stores it in shared memory at ``p_tile``, and rescales the
    earlier sums.
    """
    real, exp2, minus = scalar_type(dtype), EXP2[dtype], MINUS[dtype]
    zero, log2_e = dtype.type(0), dtype.type(LOG2_E)
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = layout.block_q // rows_of_threads, layout.block_k // lanes
    p_stride, kept = layout.block_k + VECTOR, tile_bits.kept
    row_max_of, _ = make_row_reductions(lanes)

    @device_function
    def softmax_step(tx, ty, s, acc, row_max, row_sum, scratch, shared, bits, extras):
        for i in range(own_rows):
            # TASK 5.7: Lines 9, 10: maximum over the row's threads; P to shared memory.
            # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
            largest = s[i, 0]
            for c in range(1, own_cols):
                largest = max(largest, s[i, c])
            r = ty + i * rows_of_threads
            largest = max(row_max[i], row_max_of(largest, scratch, r, tx))
            shift = real(shift_of(largest))
            rescale = exp2((row_max[i] - shift) * log2_e)
            row_max[i] = largest
            total = zero
            for c in range(own_cols):
                p = exp2(minus(s[i, c], shift) * log2_e)
                total += p
                # P after dropout; l sums P before it.
                p *= kept(bits, r, tx + c * lanes, extras)
                shared[p_tile + r * p_stride + tx + c * lanes] = p
            # Each thread sums its own columns; the threads of a row meet once, at the end.
            row_sum[i] = row_sum[i] * rescale + total
            # 10, first half: O = diag(e^(m - m_new)) O
            for c in range(own_width):
                acc[i, c] *= rescale
            # END TASK 5.7

    return softmax_step


@cache
def _make_finish_rows(
    layout: RegisterLayout, own_width: int, dtype: np.dtype[Any], features: Features
) -> Callable[..., None]:
    """Return the function that divides O by l, and writes L of the rows from ``first`` up to ``stop``.

    The function is ``finish_rows(tx, ty, acc, row_max, row_sum, scratch, lse, lse_rest, b, h, first, stop,
    extras)``.
    """
    rows_of_threads, own_rows = layout.rows_of_threads, layout.block_q // layout.rows_of_threads
    _, row_sum_of = make_row_reductions(layout.lanes)
    end_row = make_row_end(features, dtype)

    @device_function
    def finish_rows(
        tx, ty, acc, row_max, row_sum, scratch, lse, lse_rest, b, h, first, stop, extras
    ):
        for i in range(own_rows):
            # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
            r = ty + i * rows_of_threads
            # TASK 5.7: Line 12: the threads of a row add up their sums; one division for the whole row.
            total = row_sum_of(row_sum[i], scratch, r, tx)
            inverse, row_lse, row_rest = end_row(total, shift_of(row_max[i]), b, h, extras)
            for c in range(own_width):
                acc[i, c] *= inverse
            # END TASK 5.7
            if tx == 0 and first + r < stop:
                lse[b, h, first + r], lse_rest[b, h, first + r] = row_lse, row_rest

    return finish_rows


@cache
def forward_kernel(
    layout: RegisterLayout, head_width: int, value_width: int, dtype: np.dtype[Any], vectors: bool,
    features: Features = PLAIN, is_split: bool = False,
) -> Kernel:  # fmt: skip
    """Return the forward kernel for one layout, two widths, one dtype and some options.

    Args:
        layout: Tiles and threads.
        head_width: head_dim, or more.
        value_width: value_dim, or more.
        dtype: Dtype of all of them.
        vectors: Whether q, k and v are aligned for 128-bit loads.
        features: Options of the call.
        is_split: Whether the keys are divided along the third dimension of the grid; out, lse and lse_rest
            then have a batch for each part.
    """
    real, block_q, block_k = scalar_type(dtype), layout.block_q, layout.block_k
    lanes, own_rows = layout.lanes, block_q // layout.rows_of_threads
    own_cols, own_width = block_k // lanes, layout.columns(value_width)
    tiles = forward_tiles(layout, head_width, value_width)
    q_tile, k_tile, v_tile, p_tile = tiles["q"], tiles["k"], tiles["v"], tiles["p"]
    scratch_shape = (block_q, lanes) if IS_SIMULATOR else (1, 1)
    place, entries, tile_of, is_whole, is_within = make_visits(features, block_q)
    bounds = make_row_bounds(block_q, block_k)
    tile_bits = make_tile_bits(features, layout, dtype, dtype.itemsize * tiles.elements)
    draw, to_scores = tile_bits.draw, make_scores(layout, features, dtype, tile_bits)
    load_q, _, load_k, load_v = make_load_tiles(layout, head_width, value_width, real, vectors)
    multiply = make_multiply(layout, block_q, block_k, head_width, real)
    accumulate = make_accumulate(layout, block_q, block_k, value_width)
    store_out = make_store_tile(layout, block_q, value_width, assign)
    softmax_step = _make_softmax_step(layout, own_width, dtype, tile_bits, p_tile)
    # Parts of the keys are merged by their own L.
    finish_rows = _make_finish_rows(layout, own_width, dtype, PLAIN if is_split else features)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)

    def flash2_forward(q, k, v, out, lse, lse_rest, scale, extras):
        """Fill one query tile of out, lse and lse_rest.

        Computes: out, lse and lse_rest for one tile of query rows of one (batch, head)
        Source: FlashAttention-2, Algorithm 1, lines 3-15; FlashAttention, Algorithm 2, lines 11
            (mask) and 14 (dropout)
        Grid: (num_q_tiles, batch * heads, parts), one block per query tile, the longest first
        Block: (lanes * rows_of_threads,)
        One thread does: the scores of own_rows x own_cols pairs, and own_rows x own_width of O
        Shared: q_tile (block_q, head_dim), k_tile (block_k, head_dim), v_tile (block_k, value_dim),
            p (block_q, block_k); rows padded by one vector; for some options a byte for four
            columns
        Registers: acc (own_rows, own_width), s (own_rows, own_cols), row_max, row_sum (own_rows,)
        Global traffic: reads q once, k and v once per query tile; writes out, lse and lse_rest once
        Needs: warp shuffles and 128-bit loads, for which the simulator has plain forms
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        # 3: for 1 <= i <= T_r
        flat, row, first_q, seq_q, first_k, seq_k = place(
            cuda.blockIdx.x, cuda.blockIdx.y, q.shape[2], k.shape[2], extras
        )
        batch, head = numbers_of_mods(flat, extras)
        start = TilePlace(b, h, batch, head, row, 0, seq_q, seq_k)
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)  # q_tile, k_tile, v_tile, p
        bits = cuda.shared.array(0, uint8)  # the same memory; the bits begin after the tiles
        scratch = cuda.shared.array(
            scratch_shape, real
        )  # (block_q, lanes), used only in the simulator
        # A thread owns the rows ty, ty + rows_of_threads, …; of S the columns tx, tx + lanes, …; of O the
        # four columns from 4 · tx, the four from 4 · (tx + lanes), ….
        acc = cuda.local.array((own_rows, own_width), real)  # (block_q, value_dim) / threads: O
        s = cuda.local.array((own_rows, own_cols), real)  # (block_q, block_k) / threads: S
        fragment = cuda.local.array((own_rows, VECTOR), real)  # (own_rows, 4): of Q, or of P
        row_max = cuda.local.array(own_rows, real)  # (own_rows,): m
        row_sum = cuda.local.array(own_rows, real)  # (own_rows,): the part of l from own columns
        # 4: load Q_i, scaled
        q_row, q_stop = first_q + row, first_q + seq_q
        load_q(cuda.threadIdx.x, q, b, h, q_row, q_stop, real(scale), shared, q_tile)
        # 5: O = 0, l = 0, m = -inf
        for i in range(own_rows):
            row_max[i], row_sum[i] = minus_inf, zero
        set_all(acc, zero)
        first, stop, full, full_stop = bounds(row, seq_q, seq_k, extras)
        entry, entries_stop = entries(flat, row, seq_q, first, stop, extras)
        out_batch = b
        if is_split:
            part, parts = cuda.blockIdx.z, cuda.gridDim.z
            entry, entries_stop = own_part(entry, entries_stop, part, parts)
            out_batch += cuda.blockIdx.z * q.shape[0]
        # 6: for 1 <= j <= T_c
        for e in range(entry, entries_stop):
            j = tile_of(e, extras)
            if is_within(j, first, stop):  # the same for all threads of the block
                col = j * block_k
                whole = full <= j < full_stop and is_whole(e, extras)
                cuda.syncthreads()  # every thread is done with the last key tile
                # 7: load K_j, V_j
                k_row, k_stop = first_k + col, first_k + seq_k
                load_k(cuda.threadIdx.x, k, b, h, k_row, k_stop, one, shared, k_tile)
                load_v(cuda.threadIdx.x, v, b, h, k_row, k_stop, one, shared, v_tile)
                tile = moved(start, 0, col)
                draw(cuda.threadIdx.x, bits, whole, tile, extras)
                cuda.syncthreads()  # the tiles are whole
                # 8: S = Q_i K_jᵀ
                multiply(tx, ty, s, fragment, shared, q_tile, k_tile)
                to_scores(tx, ty, s, whole, bits, tile, extras)
                # 9: m, P and l from S     10, first half: O = diag(e^(m - m_new)) O
                softmax_step(tx, ty, s, acc, row_max, row_sum, scratch, shared, bits, extras)
                cuda.syncthreads()  # P is whole
                # 10, second half: O = O + P V_j
                accumulate(tx, ty, acc, fragment, shared, p_tile, v_tile)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        finish_rows(
            tx, ty, acc, row_max, row_sum, scratch, lse, lse_rest, out_batch, h, q_row, q_stop, extras
        )  # fmt: skip
        # 14: write O_i
        store_out(tx, ty, acc, out, out_batch, h, q_row, q_stop)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(*[read] * 4, rows, rows, float64, extras_type(features, dtype))
    shared_bytes = dtype.itemsize * tiles.elements + tile_bits.bytes
    return Kernel(flash2_forward, signature, layout.threads, shared_bytes, layout.resident)


@cache
def own_rows_kernel(
    layout: RegisterLayout,
    head_width: int,
    value_width: int,
    dtype: np.dtype[Any],
    vectors: bool,
    features: Features,
) -> Kernel:
    """Return the kernel that fills lse and lse_rest; its arguments are those of ``forward_kernel``."""
    forward = forward_kernel(layout, head_width, value_width, dtype, vectors, features)
    fill_tile: Callable[..., None] = device_function(forward.source)
    block_q, threads, large, inf = layout.block_q, layout.threads, dtype.type(LARGE), math.inf
    place = make_visits(features, block_q)[0]

    def flash2_own_rows(q, k, v, lse, lse_rest, own_out, own_lse, own_rest, scale, extras):
        """Fill one tile of own_lse and own_rest.

        Computes: a copy of lse and lse_rest, or what forward_kernel computes if a row is large
        Source: none
        Grid: (num_q_tiles, batch * heads), as of the forward kernel
        Block: (lanes * rows_of_threads,)
        One thread does: every threads-th row of a copy
        Shared: as in the forward kernel
        Registers: as in the forward kernel
        Global traffic: reads lse and lse_rest, and writes their copies; if a row is large, also what
            the forward kernel reads and writes
        Needs: what the forward kernel needs
        """
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        _, row, first_q, seq_q, _, _ = place(
            cuda.blockIdx.x, cuda.blockIdx.y, q.shape[2], k.shape[2], extras
        )
        has_large = False
        for r in range(row + cuda.threadIdx.x, min(row + block_q, seq_q), threads):
            top = lse[b, h, first_q + r]
            own_lse[b, h, first_q + r], own_rest[b, h, first_q + r] = (
                top,
                lse_rest[b, h, first_q + r],
            )
            has_large = has_large or large < abs(top) < inf
        if cuda.syncthreads_or(int32(has_large)) != 0:  # the copies are written
            fill_tile(q, k, v, own_out, own_lse, own_rest, scale, extras)

    read, lines = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(
        *[read] * 3, *[lines] * 2, read, *[lines] * 2, float64, extras_type(features, dtype)
    )
    return Kernel(flash2_own_rows, signature, threads, forward.shared_bytes, layout.resident)


def forward_layout(problem: Problem, tile: tuple[int, int] | None = None) -> RegisterLayout:
    """Return tiles and threads of the forward kernel, the caller's tile if there is one."""
    return pick_layout("forward", problem, tile)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = forward_layout(problem)
    return layout.block_q, layout.block_k


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest; allocates the parts if the keys are divided among blocks.

    Args:
        problem: The checked call.
        tile: (block_q, block_k), multiples of four.
        operands: The operands, on the device; out, lse and lse_rest are written.
    """
    layout, features = forward_layout(problem, tile), problem.features
    q, k, v = operands.q, operands.k, operands.v
    results = operands.out, operands.lse, operands.lse_rest
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    grid = grid_of(q, q.shape[2], layout.block_q, extras)
    parts = parts_of(problem, layout, grid)
    kind = *widths(problem), problem.dtype, are_vectors(q, k, v), features, parts > 1
    launch = forward_kernel(layout, *kind)[(*grid, parts), layout.threads]
    if parts == 1:
        launch(q, k, v, *results, problem.scale, extras)
        return
    of_parts = empty_parts(parts, operands.out, problem.dtype)
    launch(q, k, v, *of_parts, problem.scale, extras)
    merge_parts(of_parts, results, features, extras)


def with_own_rows(problem: Problem, operands: Operands) -> Operands:
    """Return the operands of a backward pass with lse and lse_rest that belong to this rung's scores.

    Another rung adds the terms of S = τ Q Kᵀ in another order.  In an ordinary row the difference is small
    beside 1.  In a large one it is not, and exp(S - L) is no probability if S and L are of two rungs.

    Args:
        problem: The checked call, in float32 or float64.
        operands: The operands, on the device, and the results of any rung.
    """
    problem = operands.forward_problem(problem)
    layout, features = forward_layout(problem), problem.features
    q, k, v, out = operands.q, operands.k, operands.v, operands.out
    results = [empty_device(tuple(x.shape), problem.dtype) for x in (out, *[operands.lse] * 2)]
    extras = make_extras(problem, operands, layout.block_q, layout.block_k)
    kind = *widths(problem), problem.dtype, are_vectors(q, k, v), features
    grid = grid_of(q, q.shape[2], layout.block_q, extras)
    launch = own_rows_kernel(layout, *kind)[grid, layout.threads]
    launch(q, k, v, operands.lse, operands.lse_rest, *results, problem.scale, extras)
    return operands.having(lse=results[1], lse_rest=results[2])
