"""The start of a backward pass on tensor cores: D = rowsum(dO ∘ O) in float32, and zeros for sums of dQ."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from kernels.common.geometry import PLAIN
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.row_folds import make_lane_folds
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.copies import global_address, ld_global_v4, st_global_v4
from kernels.cuda.ptx.numbers import UNPACK, float_of
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.arrays import device_view, empty_device, reshaped
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type, device_function
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import BITS, FLOAT32, NAMES
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int64, types, uint32, void

THREADS = 256
#: Elements that a lane loads at a time.
PIECE = CHUNK // BITS.itemsize


def lanes_of(value_dim: int) -> int:
    """Return the number of lanes that share a row, one piece each: a power of two, up to a warp."""
    return min(1 << (PLAIN.ceil_div(value_dim, PIECE) - 1).bit_length(), WARP)


@cache
def _make_add_products(dtype: str) -> tuple[Any, Any]:
    """Return ``add(total, x, y)`` for words of a dtype, and ``number(element)``, its float32."""
    if dtype == "float32":

        @device_function
        def add_product(total, x, y):
            return total + float_of(x) * float_of(y)

        @device_function
        def own_number(element):
            return element

        return add_product, own_number
    unpack = UNPACK[dtype]

    @device_function
    def add_products(total, x, y):
        low, high = unpack(x)
        other_low, other_high = unpack(y)
        total += low * other_low
        total += high * other_high
        return total

    @device_function
    def number(element):
        low, _ = unpack(uint32(element))
        return low

    return add_products, number


@cache
def make_row_sum(lanes: int, dtype: str, vectors: bool) -> Callable[..., Any]:
    """Return ``row_sum(dout, out, b, h, row, lane, inside)``: rowsum(dO ∘ O), in all lanes of a row.

    Every lane of a warp must call it.  Lanes of a row out of bounds pass ``inside`` as false and get 0.
    See :func:`delta_kernel`.
    """
    (add, number), (_, lane_sum) = _make_add_products(dtype), make_lane_folds(lanes)
    of_piece = CHUNK // _stored(dtype).itemsize

    @device_function
    def row_sum(dout, out, b, h, row, lane, inside):
        total, dim = float32(0), out.shape[3]
        if inside and vectors:
            left, right = cuda.local.array(4, uint32), cuda.local.array(4, uint32)  # (4,)
            left_row = global_address(dout) + b * dout.strides[0] + h * dout.strides[1]
            left_row += row * dout.strides[2]
            right_row = global_address(out) + b * out.strides[0] + h * out.strides[1]
            right_row += row * out.strides[2]
            for piece in range(lane, dim // of_piece, lanes):
                ld_global_v4(left, left_row + piece * CHUNK)
                ld_global_v4(right, right_row + piece * CHUNK)
                for w in range(4):
                    total = add(total, left[w], right[w])
        elif inside:
            for c in range(lane, dim, lanes):
                total += number(dout[b, h, row, c]) * number(out[b, h, row, c])
        return lane_sum(total)  # every lane of the warp takes part

    return row_sum


def _stored(dtype: str) -> Any:
    return FLOAT32 if dtype == "float32" else BITS


@device_function
def zero_sums(sums, thread, threads):
    """Fill a thread's share of flat float32 sums with zeros, 16 bytes at a time.

    There are a multiple of four elements, or a single one that stays unchanged for no sums.
    """
    zeros = cuda.local.array(4, uint32)  # (4,)
    for w in range(4):
        zeros[w] = 0
    first = global_address(sums)
    for piece in range(thread, sums.shape[0] // (CHUNK // WORD), threads):
        st_global_v4(first + int64(piece) * CHUNK, zeros)


def no_sums(array: Any) -> Any:
    """Return the placeholder for missing sums: one element of a float32 device array."""
    return device_view(array, (1,), (1,))


@cache
def delta_kernel(lanes: int, dtype: str, vectors: bool, has_dlse: bool) -> Kernel:
    """Return the kernel that fills delta, and sums of dq with zeros.

    Args:
        lanes: Number of lanes that share a row; a power of two, up to 32.
        dtype: "float16", "bfloat16" or "float32".
        vectors: Rows are aligned for pieces of 16 bytes and are whole pieces.
        has_dlse: Whether there is a gradient of lse.
    """
    row_sum, stored = make_row_sum(lanes, dtype, vectors), _stored(dtype)

    def half_delta(dout, out, dlse, delta, sums):
        """Fill delta, and sums with zeros.

        Computes: D = rowsum(dO ∘ O) - dL, which serves as D does: dS = P ∘ (dP - D) + P dL
        Source: FlashAttention-2, Algorithm 2, line 4
        Grid: ceil(batch * heads * seq_q * lanes / threads)
        Block: (threads,)
        One thread does: every lanes-th piece, or element, of one row, and its share of the sums
        Shared: none
        Registers: one sum, two pieces
        Global traffic: reads dout and out once, and dlse if there is one; writes delta and sums once
        Needs: warp shuffles; sums a multiple of four elements, or a single one for none
        """
        heads, seq_q = delta.shape[1], delta.shape[2]
        thread = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        zero_sums(sums, thread, cuda.gridDim.x * THREADS)
        i, lane = thread // lanes, thread % lanes
        b, h, row = i // seq_q // heads, i // seq_q % heads, i % seq_q
        inside = b < delta.shape[0]
        total = row_sum(dout, out, b, h, row, lane, inside)
        if inside and lane == 0:
            if has_dlse:
                total -= dlse[b, h, row]
            delta[b, h, row] = total

    read, rows = array_type(stored, 4), array_type(FLOAT32, 3)
    signature = void(read, read, rows, rows, types.Array(float32, 1, "C"))
    return Kernel(half_delta, signature, THREADS)


def delta_of(problem: Problem, operands: Operands, sums: Any = None) -> Any:
    """Return D = rowsum(dO ∘ O), minus the gradient of lse if there is one, in float32.

    The same launch fills ``sums`` with zeros: contiguous float32, a multiple of four elements.
    """
    dout, out = as_bits(operands.dout), as_bits(operands.out)
    has_dlse = operands.dlse is not None
    shape = tuple(out.shape[:3])
    delta = empty_device(shape, FLOAT32)
    vectors = are_vectors(dout) and are_vectors(out)
    lanes = lanes_of(out.shape[3] * problem.dtype.itemsize // BITS.itemsize)
    kernel = delta_kernel(lanes, NAMES[problem.dtype], vectors, has_dlse)
    launch = kernel[PLAIN.ceil_div(math.prod(shape) * lanes, THREADS), THREADS]
    flat = no_sums(delta) if sums is None else reshaped(sums, (sums.size,))
    launch(dout, out, operands.dlse if has_dlse else delta, delta, flat)
    return delta
