"""FlashAttention-2 forward on CUDA cores: query tiles outside and parallel, one division at the end.

What flash1 left on the table: one block a head leaves most of the GPU idle, and O, l and m travel to global
memory and back for every key tile.  Here each query tile has a block of its own, and O, l and m stay in
registers until the end.  A thread multiplies register tiles fed by 128-bit loads, so that arithmetic and
not shared memory is the limit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import float64, int64, void

from kernels.cuda.device import (
    Kernel,
    array_type,
    ceil_div,
    device_function,
    full_key_tiles,
    inverse_sum,
    is_visible,
    log_sum_exp,
    scalar_type,
    shift_of,
    visited_key_tiles,
)
from kernels.cuda.register_tiles import (
    Layout,
    SharedTiles,
    assign,
    make_accumulate,
    make_load_tile,
    make_multiply,
    make_store_tile,
    pick_layout,
    widths,
)
from kernels.cuda.vector import EXP2, VECTOR, are_vectors
from kernels.geometry import PLAIN
from kernels.online_softmax import LN_2, LOG2_E
from kernels.problem import Problem
from kernels.targets import IS_SIMULATOR, cuda


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
            other = cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << i)
            value = max(value, other)
        return value

    @device_function
    def row_sum(value, scratch, row, lane):
        for i in range(steps):
            value = value + cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << i)
        return value

    return row_max, row_sum


def forward_tiles(layout: Layout, head_width: int, value_width: int) -> SharedTiles:
    """Return where the tiles of the forward kernel lie."""
    return SharedTiles(
        q=layout.block_q * layout.row_stride(head_width),
        k=layout.block_k * layout.row_stride(head_width),
        v=layout.block_k * layout.row_stride(value_width),
        p=layout.block_q * (layout.block_k + VECTOR),
    )


@cache
def forward_kernel(
    layout: Layout, head_width: int, value_width: int, dtype: np.dtype[Any], vectors: bool
) -> Kernel:
    """Return the forward kernel for one layout, two widths and one dtype.

    Args:
        layout: Tiles and threads.
        head_width: head_dim, or more.
        value_width: value_dim, or more.
        dtype: Of all of them.
        vectors: q, k and v are aligned for 128-bit loads.
    """
    real, exp2 = scalar_type(dtype), EXP2[dtype]
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    own_width = layout.columns(value_width)
    p_stride = block_k + VECTOR
    tiles = forward_tiles(layout, head_width, value_width)
    q_tile, k_tile, v_tile, p_tile = tiles["q"], tiles["k"], tiles["v"], tiles["p"]
    scratch_shape = (block_q, lanes) if IS_SIMULATOR else (1, 1)
    load_q = make_load_tile(layout, block_q, head_width, real, vectors)
    load_k = make_load_tile(layout, block_k, head_width, real, vectors)
    load_v = make_load_tile(layout, block_k, value_width, real, vectors)
    multiply = make_multiply(layout, block_q, block_k, head_width, real)
    accumulate = make_accumulate(layout, block_q, block_k, value_width)
    store_out = make_store_tile(layout, block_q, value_width, assign)
    row_max_of, row_sum_of = make_row_reductions(lanes)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e, ln_2 = dtype.type(LOG2_E), dtype.type(LN_2)

    def flash2_forward(q, k, v, out, lse, scale, diagonal):
        """Fill one query tile of out and lse.

        Computes   out and lse for one tile of query rows of one (batch, head).
        Source     FlashAttention-2, Algorithm 1, lines 3-15.
        Grid       (num_q_tiles, batch * heads)        one block per query tile, the longest first
        Block      (lanes * rows_of_threads,)
        One thread does: the scores of own_rows x own_cols pairs, and own_rows x own_width of O.
        Shared     q_tile (block_q, head_dim), k_tile (block_k, head_dim), v_tile (block_k, value_dim),
                   p (block_q, block_k); rows padded by one vector
        Registers  acc (own_rows, own_width), s (own_rows, own_cols), row_max, row_sum (own_rows,)
        Global     reads q once, k and v once per query tile; writes out and lse once.
        Needs      warp shuffles and 128-bit loads, for which the simulator has plain forms.
        """
        heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
        b, h = cuda.blockIdx.y // heads, cuda.blockIdx.y % heads
        # 3: for 1 <= i <= T_r.  Under a causal mask the last tile is the longest: it starts first.
        row = (ceil_div(seq_q, block_q) - 1 - cuda.blockIdx.x) * block_q
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)  # q_tile, k_tile, v_tile, p
        scratch = cuda.shared.array(scratch_shape, real)
        acc = cuda.local.array((own_rows, own_width), real)
        s = cuda.local.array((own_rows, own_cols), real)
        fragment = cuda.local.array((own_rows, VECTOR), real)
        row_max = cuda.local.array(own_rows, real)
        row_sum = cuda.local.array(own_rows, real)
        # 4: load Q_i, scaled so that exp becomes exp2
        load_q(cuda.threadIdx.x, q, b, h, row, seq_q, real(scale) * log2_e, shared, q_tile)
        # 5: O = 0, l = 0, m = -inf
        for i in range(own_rows):
            row_max[i] = minus_inf
            row_sum[i] = zero
            for c in range(own_width):
                acc[i, c] = zero
        row_stop = min(row + block_q, seq_q)
        visited = visited_key_tiles(row_stop, seq_k, block_k, ceil_div(seq_k, block_k), diagonal)
        full = full_key_tiles(row, seq_k, block_k, diagonal)
        # 6: for 1 <= j <= T_c
        for j in range(visited):
            col = j * block_k
            cuda.syncthreads()  # every thread is done with the last key tile
            # 7: load K_j, V_j
            load_k(cuda.threadIdx.x, k, b, h, col, seq_k, one, shared, k_tile)
            load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_tile)
            cuda.syncthreads()  # the tiles are whole
            # 8: S = Q_i K_jᵀ
            multiply(tx, ty, s, fragment, shared, q_tile, k_tile)
            if j >= full:
                for i in range(own_rows):
                    for c in range(own_cols):
                        this_col = col + tx + c * lanes
                        this_row = row + ty + i * rows_of_threads
                        if this_col >= seq_k or not is_visible(this_row, this_col, diagonal):
                            s[i, c] = minus_inf
            for i in range(own_rows):
                # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                largest = s[i, 0]
                for c in range(1, own_cols):
                    largest = max(largest, s[i, c])
                r = ty + i * rows_of_threads
                largest = max(row_max[i], row_max_of(largest, scratch, r, tx))
                shift = real(shift_of(largest))
                rescale = exp2(row_max[i] - shift)
                row_max[i] = largest
                total = zero
                for c in range(own_cols):
                    p = exp2(s[i, c] - shift)
                    shared[p_tile + r * p_stride + tx + c * lanes] = p
                    total += p
                # Each thread sums its own columns; the threads of a row meet once, at the end.
                row_sum[i] = row_sum[i] * rescale + total
                # 10, first half: O = diag(e^(m - m_new)) O
                for c in range(own_width):
                    acc[i, c] *= rescale
            cuda.syncthreads()  # P is whole
            # 10, second half: O = O + P V_j
            accumulate(tx, ty, acc, fragment, shared, p_tile, v_tile)
        for i in range(own_rows):
            # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
            r = ty + i * rows_of_threads
            total = row_sum_of(row_sum[i], scratch, r, tx)
            inverse = real(inverse_sum(total))
            for c in range(own_width):
                acc[i, c] *= inverse
            if tx == 0 and row + r < seq_q:
                lse[b, h, row + r] = log_sum_exp(real(shift_of(row_max[i])) * ln_2, total)
        # 14: write O_i
        store_out(tx, ty, acc, out, b, h, row, seq_q)

    read = array_type(dtype, 4)
    signature = void(read, read, read, read, array_type(dtype, 3), float64, int64)
    shared_bytes = dtype.itemsize * tiles.elements
    return Kernel(flash2_forward, signature, layout.threads, shared_bytes, layout.resident)


def forward_layout(problem: Problem, tile: tuple[int, int] | None = None) -> Layout:
    """Return tiles and threads of the forward kernel, the caller's tile if there is one."""
    return pick_layout("forward", problem, tile)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the forward kernel."""
    layout = forward_layout(problem)
    return layout.block_q, layout.block_k


def forward(
    problem: Problem, tile: tuple[int, int], q: Any, k: Any, v: Any, out: Any, lse: Any
) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call.
        tile: (block_q, block_k), multiples of four.
        q: (batch, heads, seq_q, head_dim), any strides, on the device as all the others.
        k: (batch, heads, seq_k, head_dim), any strides.
        v: (batch, heads, seq_k, value_dim), any strides.
        out: (batch, heads, seq_q, value_dim), written.
        lse: (batch, heads, seq_q), written.
    """
    layout = forward_layout(problem, tile)
    batch, heads, seq_q, _ = q.shape
    kernel = forward_kernel(layout, *widths(problem), problem.dtype, are_vectors(q, k, v))
    grid = (PLAIN.ceil_div(seq_q, layout.block_q), batch * heads)
    kernel[grid, layout.threads](q, k, v, out, lse, problem.scale, problem.diagonal)
