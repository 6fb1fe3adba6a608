"""The start and the end of Hopper's backward pass, row by row.

The kernels by tiles take L and delta as they are laid out here, and zeros for sums of dQ, which are rounded
at the end if they were added in any order.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from kernels.common.online_softmax import LARGE, LOG2_E
from kernels.cuda.attention.delta import THREADS, lanes_of, make_row_sum, zero_sums
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    KeyLayout,
    dq_bytes,
    dq_share,
    shift_place,
)
from kernels.cuda.attention.flash3_wgmma.layout import PADDING, ROW_NUMBERS, Widths
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_row_base, make_walk
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
from kernels.runtime.types import float32, float64, int32, int64, types, uint32, void
from kernels.scores.program import Features

_INF, _ZERO = np.float32(math.inf), np.float32(0)
_LARGE, _LOG2_E = np.float32(LARGE), np.float32(LOG2_E)


def lanes_a_row(value_dim: int) -> int:
    """Return the number of lanes that share a row, such that no block has more rows than a tile."""
    return max(lanes_of(value_dim), THREADS // PADDING)


def blocks_a_tile(lanes: int) -> int:
    """Return the number of blocks that share a tile of rows, with ``lanes`` lanes per row."""
    return PADDING * lanes // THREADS


@cache
def preprocess_kernel(
    lanes: int, dtype: str, vectors: bool, has_dlse: bool, is_packed: bool = False
) -> Kernel:
    """Return the kernel that computes delta and lays out L and delta for the kernels by tiles.

    ``vectors`` tells whether rows of dout and out are whole, aligned pieces of 16 bytes.
    """
    features = Features(packed=is_packed)
    place, row_base = make_walk(features, PADDING).place, make_row_base(is_packed)
    row_sum = make_row_sum(lanes, dtype, vectors)
    blocks, rows_a_block = blocks_a_tile(lanes), THREADS // lanes

    def flash3_preprocess(dout, out, lses, shifts, padded_delta, sums, factor, extras):
        """Fill shifts, see ``shift_place``, and padded_delta; fill sums with zeros.

        Computes: for P = exp2((S - top) · log2(e) - shift), shift = L · log2(e) and top = 0, or where that
            is large top = lse and shift = rest · log2(e); factor · D, D = rowsum(dO ∘ O) - dL, see
            ``delta_factor``; a row that sees no key, or is out of bounds, has an infinite shift and D zero,
            so that its probabilities and gradients are 0
        Source: FlashAttention-2, Algorithm 2, line 4
        Grid: (tiles of 128 rows * 128 * lanes / threads, batch * heads)
        Block: (threads,)
        One thread does: every lanes-th piece, or element, of one row, and its share of the sums
        Registers: one sum, two pieces
        Global traffic: reads dout, out and lse once, dlse if there is one, and the rest of large rows;
            writes as much as lse three times, with the padding, and the sums once
        Needs: warp shuffles; sums a multiple of four elements, or a single one for none
        """
        lse, rest, dlse = lses
        heads, y, thread = lse.shape[1], int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        block = int64(y) * cuda.gridDim.x + cuda.blockIdx.x
        zero_sums(sums, block * THREADS + thread, int64(cuda.gridDim.x) * cuda.gridDim.y * THREADS)
        flat, start, first, rows, _, _ = place(
            int32(cuda.blockIdx.x // blocks), y, int32(lse.shape[2]), int32(0), extras
        )
        base = row_base(flat, y, first, extras)
        own_row = int32(start + cuda.blockIdx.x % blocks * rows_a_block + thread // lanes)
        b, h, row = int64(y // heads), int64(y % heads), int64(first + own_row)
        lane, inside = thread % lanes, own_row < rows
        shift, top, own_delta = _INF, _ZERO, _ZERO
        if inside and lse[b, h, row] != -_INF:
            shift = lse[b, h, row] * _LOG2_E
            if abs(shift) > _LARGE:
                shift, top = rest[b, h, row] * _LOG2_E, lse[b, h, row]
        delta = row_sum(dout, out, b, h, row, lane, inside)
        if lane == 0:
            if shift != _INF:
                if has_dlse:
                    delta -= dlse[b, h, row]
                own_delta = delta * float32(factor)
            at = shift_place(base + own_row)
            shifts[y, at], shifts[y, at + ROWS] = shift, top
            padded_delta[y, base + own_row] = own_delta

    read, rows, sums = array_type(BITS, 4), array_type(FLOAT32, 3), types.Array(float32, 1, "C")
    signature = void(
        read, read, types.UniTuple(rows, 3), ROW_NUMBERS, ROW_NUMBERS, sums, float64,
        extras_type(features, FLOAT32),
    )  # fmt: skip
    return Kernel(flash3_preprocess, signature, THREADS)


@cache
def round_dq_kernel(
    layout: KeyLayout, widths: Widths, dtype: str, is_packed: bool = False
) -> Kernel:
    """Return the kernel that computes dq from the sums of the kernel by key tiles.

    Layout and widths are those of that kernel.
    """
    features = Features(packed=is_packed)
    place_of, row_base = make_walk(features, PADDING).place, make_row_base(is_packed)
    share, block_q, consumers = dq_share(layout, widths), layout.block_q, layout.consumers
    cols, by_rows, share_words = share.cols, share.by_rows, dq_bytes(layout, widths) // WORD
    pack = PACK[dtype]

    def flash3_round_dq(dq_sum, dq, padded_rows, scale, extras):
        """Fill dq.

        Computes: scale · dq_sum, each number rounded once
        Grid: (tiles of 128 rows * ceil(128 * head_dim / 8 / threads), batch * heads)
        Block: (threads,)
        One thread does: eight neighbours of a row, which four lanes of a warpgroup left, two of
            them each: the sums lie as the accumulators of ``wgmma`` do, register by register
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
