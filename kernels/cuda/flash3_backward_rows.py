"""Around Hopper's backward kernels: lse and delta as they want them, and dQ's sums rounded."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, float64, int32, int64, types, uint32, void

from kernels.cuda.device import Kernel, array_type
from kernels.cuda.flash3_backward_layout import WORD, KeyLayout, dq_bytes, dq_share
from kernels.cuda.flash3_layout import WARPGROUP, Widths
from kernels.cuda.half import EIGHT
from kernels.cuda.ptx.copies import global_address, st_global_v4
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import ROWS
from kernels.dtypes import BITS, FLOAT32
from kernels.online_softmax import LOG2_E
from kernels.targets import cuda

THREADS = 256
_INF, _LOG2_E, _ZERO = np.float32(math.inf), np.float32(LOG2_E), np.float32(0)


@cache
def rows_kernel() -> Kernel:
    """Return the kernel that lays out lse and delta for the kernels by tiles."""

    def flash3_rows(lse, delta, padded_lse, padded_delta):
        """Fill padded_lse, in base 2, and padded_delta.

        Computes   L · log2(e) and D.  Rows that see nothing, and those beyond the end, have L infinite and
                   D zero: their probabilities and gradients are then 0.
        Source     none
        Grid       (ceil(padded rows / threads), batch * heads)
        Block      (threads,)
        One thread does: one row
        Shared     none
        Registers  two numbers
        Global     reads lse and delta once; writes as much, and the padding.
        Needs      nothing
        """
        heads, seq_q = lse.shape[1], lse.shape[2]
        row, flat = cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.blockIdx.y
        b, h = flat // heads, flat % heads
        if row < padded_lse.shape[1]:
            own, own_delta = _INF, _ZERO
            if row < seq_q and lse[b, h, row] != -_INF:
                own, own_delta = lse[b, h, row] * _LOG2_E, delta[b, h, row]
            padded_lse[flat, row] = own
            padded_delta[flat, row] = own_delta

    read, padded = array_type(FLOAT32, 3), types.Array(float32, 2, "C")
    return Kernel(flash3_rows, void(read, read, padded, padded), THREADS)


@cache
def zero_kernel() -> Kernel:
    """Return the kernel that fills float32 with zeros, 16 bytes at a time."""

    def flash3_zero(sums):
        """Fill sums.

        Computes   0
        Source     none
        Grid       ceil(elements / 4 / threads)
        Block      (threads,)
        One thread does: four neighbours
        Shared     none
        Registers  four words
        Global     writes sums once.
        Needs      a multiple of four elements
        """
        place = int64(cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * CHUNK
        words = cuda.local.array(4, uint32)
        for i in range(4):
            words[i] = 0
        if place < WORD * sums.shape[0]:
            st_global_v4(global_address(sums) + place, words)

    return Kernel(flash3_zero, void(types.Array(float32, 1, "C")), THREADS)


@cache
def round_dq_kernel(layout: KeyLayout, widths: Widths, dtype: str) -> Kernel:
    """Return the kernel that makes dq of the sums that the kernel by key tiles leaves.

    Args:
        layout: Of that kernel.
        widths: Likewise.
        dtype: "float16" or "bfloat16": of dq.
    """
    share, block_q, consumers = dq_share(layout, widths), layout.block_q, layout.consumers
    cols, by_rows, share_words = share.cols, share.by_rows, dq_bytes(layout, widths) // WORD
    pack = PACK[dtype]

    def flash3_round_dq(dq_sum, dq, padded_rows, scale):
        """Fill dq.

        Computes   scale · dq_sum, each number rounded once.
        Source     none
        Grid       (ceil(seq_q * head_dim / 8 / threads), batch * heads)
        Block      (threads,)
        One thread does: eight neighbours of a row, which four lanes of a warpgroup left, two of them each:
                   the sums lie as the accumulators of ``wgmma`` do, register by register
        Shared     none
        Registers  eight numbers
        Global     reads dq_sum once and writes dq once.
        Needs      cc 9.0, head_dim a multiple of eight
        """
        heads, seq_q, pieces = dq.shape[1], dq.shape[2], dq.shape[3] // EIGHT
        number, flat = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32(cuda.blockIdx.y)
        row, piece = int32(number // pieces), int32(number % pieces)
        if row < seq_q:
            tile, r = int32(row // block_q), int32(row % block_q)
            col = int32(piece * EIGHT)
            owner = int32(r // ROWS) if by_rows else int32(col // cols)
            r, col = int32(r % ROWS), int32(col % cols)
            # Of 16 rows of a warp a lane has two, eight apart.
            lane = int32(r // 16 * 32 + r % 8 * 4)
            first = (flat * (padded_rows // block_q) + tile) * consumers + owner
            place = first * share_words + (col // 8 * WARPGROUP + lane) * 4 + r % 16 // 8 * 2
            words, tau = cuda.local.array(4, uint32), float32(scale)
            for pair in range(4):
                x, y = dq_sum[place + 4 * pair], dq_sum[place + 4 * pair + 1]
                words[pair] = pack(x * tau, y * tau)
            b, h = int64(flat // heads), int64(flat % heads)
            start = b * dq.strides[0] + h * dq.strides[1] + int64(row) * dq.strides[2]
            st_global_v4(global_address(dq) + start + int64(piece * CHUNK), words)

    sums = types.Array(float32, 1, "C")
    return Kernel(flash3_round_dq, void(sums, array_type(BITS, 4), int64, float64), THREADS)
