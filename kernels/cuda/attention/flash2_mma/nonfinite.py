"""Numbers that are not finite in keys, or rows, that options hide: they must change nothing.

A tensor core multiplies the zeros of hidden elements too, and zero times infinity is NaN.  No load passes
through registers, so nobody sees such a number on its way.  So a kernel that reads each operand once says
beforehand whether there are any; only if so, the rows of a tile that no element of the other side sees are
made zeros in shared memory before they are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numba import int64, types, uint32, void

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.delta import PIECE, THREADS, lanes_of
from kernels.cuda.attention.flash2_mma.tiles import COL_OF, COLS, MmaLayout
from kernels.cuda.device.memory import fill
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.copies import global_address, ld_global_v4, st_shared_v4
from kernels.cuda.ptx.fragments import lane_col
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.arrays import device_view, empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function
from kernels.cuda.runtime.recorder import active
from kernels.runtime.dtypes import BITS
from kernels.runtime.targets import cuda, current_device

#: Sign bits of a pair.
SIGNS = 0x80008000
#: Flags that are made zeros by one launch.
FLAGS = 1024


#: Of a pair of 16-bit numbers: both exponents, and the lowest bit of each.
_EXPONENTS = {"float16": (0x7C007C00, 0x04000400), "bfloat16": (0x7F807F80, 0x00800080)}


def flag_type(is_guarded: bool) -> Any:
    """Return numba's type of the argument ``flag`` of a kernel: an array, or 0 where none is needed."""
    return types.Array(types.int32, 1, "A") if is_guarded else int64


@device_function
def is_flagged(flag):
    """Return whether a kernel found numbers that are not finite."""
    return flag[0] != 0


@device_function
def never_flagged(flag):
    """Return False, for a kernel without a flag."""
    return False


@cache
def make_clear_rows(
    threads: int, rows: int, width: int, terms: int = 1, term_rows: int = 0
) -> Callable[..., None]:
    """Return ``clear_rows(thread, bits, seen, tile)``: make zeros of the rows of a tile that nobody sees.

    ``bits`` is shared memory as bytes, of which those from ``seen`` on are 0 for such rows.

    Args:
        threads: Who clear.
        rows: Of the tile.
        width: Columns of the tile.
        terms: Tiles of a number.
        term_rows: From one of them to the next, where there are more than are cleared.
    """
    term_bytes = BITS.itemsize * (term_rows or rows) * width
    chunks = width // PIECE
    place = make_tile_place(device_function, BITS.itemsize * width)

    @device_function
    def clear_rows(thread, bits, seen, tile):
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        for n in range(thread, rows * chunks, threads):
            if bits[seen + n // chunks] == 0:
                st_shared_v4(tile + place(n // chunks, n % chunks), zeros)

    @device_function
    def clear_terms(thread, bits, seen, tile):
        for t in range(terms):
            clear_rows(thread, bits, seen, tile + t * term_bytes)

    return clear_rows if terms == 1 else clear_terms


@cache
def make_clear_unseen(layout: MmaLayout, width: int, terms: int = 1) -> Callable[..., None]:
    """Return ``clear_unseen(thread, lane, s, bits, seen, tile)``, for all threads of a block.

    It makes zeros of the rows of a tile, keys, for which no lane has a probability in ``s``; bytes of
    shared memory from ``seen`` on, block_k of them, are its own.

    Args:
        layout: Of the block.
        width: Columns of the tile.
        terms: Tiles of a number.
    """
    threads, block_k = layout.threads, layout.block_k
    row_tiles, col_tiles = layout.row_tiles, block_k // COLS
    clear_rows, cols_of = make_clear_rows(threads, block_k, width, terms), COL_OF

    @device_function
    def clear_unseen(thread, lane, s, bits, seen, tile):
        for n in range(thread, block_k, threads):
            bits[seen + n] = 0
        cuda.syncthreads()  # every warp is done with the tile; nothing has been seen yet
        for m in range(row_tiles):
            for n in range(col_tiles):
                for i in range(4):
                    if s[m * col_tiles + n, i] != 0:
                        bits[seen + lane_col(lane) + n * COLS + cols_of[i]] = 1
        cuda.syncthreads()  # everybody has said what it sees
        clear_rows(thread, bits, seen, tile)
        cuda.syncthreads()  # what nobody sees is zeros

    return clear_unseen


@cache
def flag_kernel(lanes: int, dtype: str, vectors: bool) -> Kernel:
    """Return the kernel that looks for numbers that are not finite; arguments as of ``delta_kernel``."""
    exponents, lowest = _EXPONENTS[dtype]

    def flag_not_finite(first, second, third, flag):
        """Set flag if an array has an infinity or NaN.

        Computes: flag[0] = 1 if any number of the arrays is not finite
        Source: none
        Grid: (ceil(batch * heads * seq * lanes / threads), arrays): the first ones of the three
        Block: (threads,)
        One thread does: every lanes-th piece, or element, of one row
        Shared: none
        Registers: one piece
        Global traffic: reads the arrays once; writes flag at most once a thread
        Needs: nothing
        """
        array = first
        if cuda.blockIdx.y == 1:
            array = second
        elif cuda.blockIdx.y == 2:
            array = third
        heads, seq, dim = array.shape[1], array.shape[2], array.shape[3]
        thread = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        i, lane = thread // lanes, thread % lanes
        b, h, row = i // seq // heads, i // seq % heads, i % seq
        found = int64(0)
        if b < array.shape[0] and vectors:
            words = cuda.local.array(4, uint32)  # (4,)
            begin = global_address(array) + b * array.strides[0] + h * array.strides[1]
            begin += row * array.strides[2]
            for piece in range(lane, dim // PIECE, lanes):
                ld_global_v4(words, begin + piece * CHUNK)
                for w in range(4):
                    found |= (int64(words[w]) & exponents) + lowest
        elif b < array.shape[0]:
            for c in range(lane, dim, lanes):
                found |= (int64(array[b, h, row, c]) & exponents) + lowest
        if found & SIGNS:
            flag[0] = 1

    read = array_type(BITS, 4)
    flag = types.Array(types.int32, 1, "A")
    return Kernel(flag_not_finite, void(read, read, read, flag), THREADS)


def flag_of(dtype: str, *arrays: Any) -> Any:
    """Return (1,) int32 on the device: 1 if a number of the arrays is not finite, else 0.

    Args:
        dtype: "float16" or "bfloat16".
        arrays: One to three, (batch, heads, seq, dim) on the device, as uint16.
    """
    flag = _fresh_flag(current_device())
    lanes = lanes_of(max(array.shape[3] for array in arrays))
    rows = max(math.prod(array.shape[:3]) for array in arrays)
    kernel = flag_kernel(lanes, dtype, are_vectors(*arrays))
    grid = PLAIN.ceil_div(rows * lanes, THREADS), len(arrays)
    kernel[grid, THREADS](*arrays, *arrays[:1] * (3 - len(arrays)), flag)
    return flag


def _fresh_flag(device: int) -> Any:
    """Return (1,) int32, 0, which nobody else has: of many that are made zeros together.

    Each is given away once, and the memory of all lives until the last one is dropped.
    """
    if active() is not None:  # of each call its own, at the same place
        flag = empty_device((1,), np.dtype(np.int32))
        fill(flag, 0)
        return flag
    with _lock:
        flags, used = _flags.get(device, (None, FLAGS))
        if used == FLAGS:
            flags, used = empty_device((FLAGS,), np.dtype(np.int32)), 0
            fill(flags, 0)
        _flags[device] = flags, used + 1
    return device_view(flags, (1,), (1,), used)


_flags: dict[int, tuple[Any, int]] = {}
_lock = Lock()
