"""The end of Hopper's backward pass with unordered sums of dQ: rounding them."""

from __future__ import annotations

from functools import cache

from numba import float32, float64, int32, int64, types, uint32, void

from kernels.cuda.attention.flash3_wgmma.backward.layout import KeyLayout, dq_bytes, dq_share
from kernels.cuda.attention.flash3_wgmma.layout import PADDING, Widths
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
from kernels.scores.program import Features

THREADS = 256


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
