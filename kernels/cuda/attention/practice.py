"""Two small kernels to write before the rungs: Algorithm 0, and Algorithm 1 with one thread per row."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from kernels.runtime.targets import cuda
from kernels.runtime.types import types


def _algorithm0(q, k, v, s, out, scale):
    """Compute attention of each head with all scores in global memory.

    Computes: S = τ Q Kᵀ, P = softmax(S), O = P V
    Source: FlashAttention, Algorithm 0
    Grid: (ceil(seq_q / threads), heads)
    Block: any number of threads
    One thread does: one row of S, P and O
    Shared: none
    Registers: the maximum and the sum of the row
    Global traffic: S is written once, read by the exponentials, written as P, and read for each
        column of O; K and V are read once for each row
    Needs: any device

    Args:
        q: (heads, seq_q, head_dim).
        k: (heads, seq_k, head_dim).
        v: (heads, seq_k, value_dim).
        s: (heads, seq_q, seq_k), scratch.
        out: (heads, seq_q, value_dim), written.
        scale: τ.
    """
    # TASK 5.4: One thread, one row: its scores to s and their maximum; e^(s - m) and their sum; P V / sum.
    head, row = cuda.blockIdx.y, cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < q.shape[1]:
        largest = -math.inf
        for col in range(k.shape[1]):
            total = 0.0
            for x in range(q.shape[2]):
                total += q[head, row, x] * k[head, col, x]
            s[head, row, col] = scale * total
            largest = max(largest, s[head, row, col])
        row_sum = 0.0
        for col in range(k.shape[1]):
            s[head, row, col] = math.exp(s[head, row, col] - largest)
            row_sum += s[head, row, col]
        for x in range(v.shape[2]):
            total = 0.0
            for col in range(k.shape[1]):
                total += s[head, row, col] * v[head, col, x]
            out[head, row, x] = total / row_sum
    # END TASK 5.4


algorithm0 = cuda.jit(_algorithm0)


@cache
def make_flash1_rows(block_q: int, block_k: int, dim: int, real: Any = types.float32) -> Any:
    """Return ``flash1_rows(q, k, v, out, row_max, row_sum, scale)`` for one tile size.

    Args:
        block_q: Rows of a query tile, and threads of a block.
        block_k: Keys per tile.
        dim: head_dim and value_dim.
        real: The type of numbers.
    """

    @cuda.jit
    def flash1_rows(q, k, v, out, row_max, row_sum, scale):
        """Compute attention of one head: key tiles outside, query tiles inside, one thread per row.

        Source: FlashAttention, Algorithm 1; its line numbers stand at the lines
        Grid: heads
        Block: block_q threads
        """
        k_tile = cuda.shared.array((block_k, dim), real)  # (block_k, head_dim)
        v_tile = cuda.shared.array((block_k, dim), real)  # (block_k, head_dim)
        s = cuda.local.array(block_k, real)  # (block_k,)
        head, thread, n = cuda.blockIdx.x, cuda.threadIdx.x, q.shape[1]
        for row in range(thread, n, block_q):  # 2: O = 0, l = 0, m = -inf in global memory
            row_sum[head, row], row_max[head, row] = 0.0, -math.inf
            for x in range(dim):
                out[head, row, x] = 0.0
        for col in range(0, k.shape[1], block_k):  # 5: for 1 <= j <= T_c
            cols = min(block_k, k.shape[1] - col)  # the last tile may be short
            for c in range(thread, cols, block_q):  # 6: load K_j, V_j
                for x in range(dim):
                    k_tile[c, x] = k[head, col + c, x]
                    v_tile[c, x] = v[head, col + c, x]
            cuda.syncthreads()  # the tiles are complete before any thread reads them
            for row in range(
                thread, n, block_q
            ):  # 7: for 1 <= i <= T_r     8: load Q_i, O_i, l_i, m_i
                old_max, old_sum = row_max[head, row], row_sum[head, row]
                tile_max = -math.inf
                for c in range(cols):  # 9: S = Q_i K_jᵀ     10: m~ = rowmax(S)
                    total = 0.0
                    for x in range(dim):
                        total += q[head, row, x] * k_tile[c, x]
                    s[c] = scale * total
                    tile_max = max(tile_max, s[c])
                # TASK 5.4: Lines 10 to 13: P~ in s and l~; m_new and l_new; O of this row; then l and m.
                tile_sum = 0.0
                for c in range(cols):  # 10: P~ = exp(S - m~), l~ = rowsum(P~)
                    s[c] = math.exp(s[c] - tile_max)
                    tile_sum += s[c]
                new_max = max(old_max, tile_max)  # 11: m_new and l_new
                rescale, weight = math.exp(old_max - new_max), math.exp(tile_max - new_max)
                new_sum = rescale * old_sum + weight * tile_sum
                for x in range(dim):  # 12: write O_i
                    total = 0.0
                    for c in range(cols):
                        total += s[c] * v_tile[c, x]
                    old = rescale * old_sum * out[head, row, x]
                    out[head, row, x] = (old + weight * total) / new_sum
                row_sum[head, row], row_max[head, row] = new_sum, new_max  # 13: write l_i, m_i
                # END TASK 5.4
            cuda.syncthreads()  # all have used the tiles before the next ones replace them

    return flash1_rows
