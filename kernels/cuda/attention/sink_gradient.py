"""The gradient of attention sinks on CUDA, for every rung."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.device.half import as_bits, form
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda
from kernels.runtime.types import void

#: Shape of a block: one warp per row, and several rows at a time.
BLOCK = RowBlock(SIZES.row_threads_least, SIZES.sink_rows)


@cache
def sink_kernel(stored: np.dtype[Any], dtype: np.dtype[Any], has_dlse: bool) -> Kernel:
    """Return the kernel that fills the gradient of the sinks, for dout and out stored as ``stored``."""
    storage, real, zero = form(stored), scalar_type(dtype), dtype.type(0)
    widen, lanes, lines, slots = storage.widen, BLOCK.threads, BLOCK.rows, BLOCK.slots
    _, row_sum_of = make_row_folds(BLOCK)

    def sink_gradient(dout, out, lse, lse_rest, dlse, sink, dsink):
        """Fill the gradient of a head's sink in each entry of the batch.

        Computes: dsink = -Σ exp(sink - L) D over the rows, D = rowsum(dO ∘ O) less the gradient of L
        Source: FlashAttention-2, section 2.3, for one more key whose value is 0, so that dP is 0 too
        Grid: batch * heads
        Block: (32, rows at a time)
        One thread does: every 32nd element of the rows of its warp
        Shared: one element a warp for D, one for the sums
        Registers: two sums
        Global traffic: reads dout, out, lse, lse_rest once, and dlse if there is one; writes dsink once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        sums = cuda.shared.array(lines, real)  # (lines,)
        heads, seq_q = lse.shape[1], lse.shape[2]
        b, h = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        lane, line = cuda.threadIdx.x, cuda.threadIdx.y
        own_sink, total = sink[b, h, 0, 0], zero
        for first in range(0, seq_q, lines):
            row, delta = first + line, zero
            if row < seq_q:
                for i in range(lane, out.shape[3], lanes):
                    delta += real(widen(dout[b, h, row, i])) * real(widen(out[b, h, row, i]))
            delta = row_sum_of(partial, delta)
            if row < seq_q:
                if has_dlse:
                    delta -= dlse[b, h, row]
                apart = own_sink - real(shift_of(lse[b, h, row]))
                total -= real(math.exp(apart - lse_rest[b, h, row])) * delta
        if lane == 0:
            sums[line] = total
        cuda.syncthreads()  # the sums of all warps are there
        if lane == 0 and line == 0:
            total = zero
            for i in range(lines):
                total += sums[i]
            dsink[cuda.blockIdx.x] = total

    read, rows = array_type(storage.stored, 4), array_type(dtype, 3)
    written = array_type(dtype, 1)
    signature = void(read, read, *[rows] * 3, array_type(dtype, 4), written)
    return Kernel(sink_gradient, signature, lanes * lines)


def sink_gradient(problem: Problem, operands: Operands, dsink: Any) -> None:
    """Fill dsink, (batch * heads,), the gradient of the sinks."""
    o, has_dlse = operands, operands.dlse is not None
    launch = sink_kernel(problem.dtype, problem.acc_dtype, has_dlse)[dsink.shape[0], BLOCK]
    rows = o.lse, o.lse_rest, o.dlse if has_dlse else o.lse
    launch(as_bits(o.dout), as_bits(o.out), *rows, o.sink, dsink)
