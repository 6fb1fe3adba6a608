"""Around Hopper's backward kernels: lse and delta as they want them, and dQ's sums rounded."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, float64, int32, int64, types, uint32, void

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    PADDING,
    KeyLayout,
    dq_bytes,
    dq_share,
)
from kernels.cuda.attention.flash3_wgmma.backward.tile_walk import make_row_base
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.half import EIGHT
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.cuda.ptx.copies import global_address, st_global_v4
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import WORD, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import Features

THREADS = 256
_INF, _LOG2_E, _ZERO = np.float32(math.inf), np.float32(LOG2_E), np.float32(0)


@cache
def rows_kernel(is_packed: bool = False) -> Kernel:
    """Return the kernel that lays out lse and delta for the kernels by tiles.

    Args:
        is_packed: Sequences are packed: each begins where :func:`row_base` says.
    """
    features = Features(packed=is_packed)
    place, row_base = make_walk(features, PADDING).place, make_row_base(is_packed)

    def flash3_rows(lse, delta, padded_lse, padded_delta, factor, extras):
        """Fill padded_lse, in base 2, and padded_delta.

        Computes: L · log2(e), and factor · D, see ``delta_factor``; rows that see nothing, and
            those beyond the end, have L infinite and D zero: their probabilities and gradients are
            then 0
        Source: none
        Grid: (tiles of 128 rows, batch * heads)
        Block: (128,)
        One thread does: one row
        Shared: none
        Registers: two numbers
        Global traffic: reads lse and delta once; writes as much, and the padding
        Needs: nothing
        """
        heads, y, thread = lse.shape[1], int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        flat, start, first, rows, _, _ = place(
            int32(cuda.blockIdx.x), y, int32(lse.shape[2]), int32(0), extras
        )
        base = row_base(flat, y, first, extras)
        b, h, own_row, row = y // heads, y % heads, start + thread, first + start + thread
        own, own_delta = _INF, _ZERO
        if own_row < rows and lse[b, h, row] != -_INF:
            own, own_delta = lse[b, h, row] * _LOG2_E, delta[b, h, row] * float32(factor)
        padded_lse[y, base + own_row] = own
        padded_delta[y, base + own_row] = own_delta

    read, padded = array_type(FLOAT32, 3), types.Array(float32, 2, "C")
    signature = void(read, read, padded, padded, float64, extras_type(features, FLOAT32))
    return Kernel(flash3_rows, signature, PADDING)


@cache
def zero_kernel() -> Kernel:
    """Return the kernel that fills float32 with zeros, 16 bytes at a time."""

    def flash3_zero(sums):
        """Fill sums.

        Computes: 0
        Source: none
        Grid: ceil(elements / 4 / threads)
        Block: (threads,)
        One thread does: four neighbours
        Shared: none
        Registers: four words
        Global traffic: writes sums once
        Needs: a multiple of four elements
        """
        place = int64(cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * CHUNK
        words = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            words[i] = 0
        if place < WORD * sums.shape[0]:
            st_global_v4(global_address(sums) + place, words)

    return Kernel(flash3_zero, void(types.Array(float32, 1, "C")), THREADS)


@cache
def round_dq_kernel(
    layout: KeyLayout, widths: Widths, dtype: str, is_packed: bool = False
) -> Kernel:
    """Return the kernel that makes dq of the sums that the kernel by key tiles leaves.

    Args:
        layout: Of that kernel.
        widths: Likewise.
        dtype: "float16" or "bfloat16": of dq.
        is_packed: As for ``rows_kernel``.
    """
    features = Features(packed=is_packed)
    place_of, row_base = make_walk(features, PADDING).place, make_row_base(is_packed)
    share, block_q, consumers = dq_share(layout, widths), layout.block_q, layout.consumers
    cols, by_rows, share_words = share.cols, share.by_rows, dq_bytes(layout, widths) // WORD
    pack = PACK[dtype]

    def flash3_round_dq(dq_sum, dq, padded_rows, scale, extras):
        """Fill dq.

        Computes: scale · dq_sum, each number rounded once
        Source: none
        Grid: (tiles of 128 rows * ceil(128 * head_dim / 8 / threads), batch * heads)
        Block: (threads,)
        One thread does: eight neighbours of a row, which four lanes of a warpgroup left, two of
            them each: the sums lie as the accumulators of ``wgmma`` do, register by register
        Shared: none
        Registers: eight numbers
        Global traffic: reads dq_sum once and writes dq once
        Needs: cc 9.0, head_dim a multiple of eight
        """
        heads, seq_q, pieces = dq.shape[1], dq.shape[2], dq.shape[3] // EIGHT
        blocks, y = (PADDING * pieces + THREADS - 1) // THREADS, int32(cuda.blockIdx.y)
        number = int32(cuda.blockIdx.x % blocks * THREADS + cuda.threadIdx.x)
        flat, start, first_q, rows, _, _ = place_of(
            int32(cuda.blockIdx.x // blocks), y, int32(seq_q), int32(0), extras
        )
        base = row_base(flat, y, first_q, extras)
        own_row, piece = int32(start + number // pieces), int32(number % pieces)
        if number < PADDING * pieces and own_row < rows:
            tile, r = int32((base + own_row) // block_q), int32(own_row % block_q)
            col = int32(piece * EIGHT)
            owner = int32(r // ROWS) if by_rows else int32(col // cols)
            r, col = int32(r % ROWS), int32(col % cols)
            # Of 16 rows of a warp a lane has two, eight apart.
            lane = int32(r // 16 * 32 + r % 8 * 4)
            first = (y * (padded_rows // block_q) + tile) * consumers + owner
            place = first * share_words + (col // 8 * WARPGROUP + lane) * 4 + r % 16 // 8 * 2
            words, tau = cuda.local.array(4, uint32), float32(scale)  # words (4,)
            for pair in range(4):
                low, high = dq_sum[place + 4 * pair], dq_sum[place + 4 * pair + 1]
                words[pair] = pack(low * tau, high * tau)
            b, h, row = int64(y // heads), int64(y % heads), int64(first_q + own_row)
            to = b * dq.strides[0] + h * dq.strides[1] + row * dq.strides[2]
            st_global_v4(global_address(dq) + to + int64(piece * CHUNK), words)

    sums, extras = types.Array(float32, 1, "C"), extras_type(features, FLOAT32)
    signature = void(sums, array_type(BITS, 4), int64, float64, extras)
    return Kernel(flash3_round_dq, signature, THREADS)
