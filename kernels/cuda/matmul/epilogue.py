"""The epilogue of Hopper's product, on a tile in registers: bias, GELU, rounding, storing.

The accumulators of a warpgroup are 64 rows, 16 for each warp.  ``acc[t, e]`` of a lane is in row lane / 4,
or eight rows below if e > 1, and in column 8 t + 2 (lane % 4) + e % 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import int64, uint32

from kernels.common.pointwise import GELU_CONSTANTS
from kernels.cuda.device.warpgroups import LINE, PANEL, WARPGROUP
from kernels.cuda.matmul.layout import Form, ProductLayout
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    make_cp_async_bulk_wait_group,
    make_tensor_store,
)
from kernels.cuda.ptx.copies import global_address, st_global_v2
from kernels.cuda.ptx.fragments import DEVICE
from kernels.cuda.ptx.mma import stmatrix_x4
from kernels.cuda.ptx.numbers import PACK, UNPACK, ex2, rcp
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda

#: GELU in its tanh form is x / (1 + 2**-z), z = x (inner + cubic x²).
GELU_INNER = GELU_CONSTANTS[5], GELU_CONSTANTS[5] * GELU_CONSTANTS[3]
#: Columns of a tile of accumulators.
COLS = 8
square_place = DEVICE.square_place
#: Waits until the stores of this thread have read shared memory.
wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)
#: Number of the named barrier of the first consumer's threads; those of the others follow.
OWN = 1


@cache
def make_activation(count: int) -> Callable[..., None]:
    """Return ``activate(acc)``: GELU of (count, 4) accumulators, in its tanh form."""
    one = np.float32(1)
    inner, cubic = (np.float32(factor) for factor in GELU_INNER)

    @device_function
    def activate(acc):
        for t in range(count):
            for e in range(4):
                x = acc[t, e]
                acc[t, e] = x * rcp(one + ex2(-x * (inner + cubic * x * x)))

    return activate


@cache
def make_epilogue(layout: ProductLayout, form: Form) -> tuple[Any, Any]:
    """Return ``add_bias(acc, bias, first_col, cols)`` and ``activate(acc)``.

    For a 16-bit result the bias has the same dtype; otherwise it is float32.
    """
    count, is_half = layout.cols // COLS, form.out != "float32"
    unpack: Any = UNPACK.get(form.out)

    @device_function
    def add_pairs(acc, bias, first_col, cols):
        for t in range(count):
            col = first_col + t * COLS
            if col < cols:  # a multiple of eight
                x, y = unpack(uint32(bias[col]) | (uint32(bias[col + 1]) << uint32(16)))
                acc[t, 0] += x
                acc[t, 1] += y
                acc[t, 2] += x
                acc[t, 3] += y

    @device_function
    def add_numbers(acc, bias, first_col, cols):
        for t in range(count):
            for e in range(2):
                col = first_col + t * COLS + e
                if col < cols:
                    acc[t, e] += bias[col]
                    acc[t, e + 2] += bias[col]

    return (add_pairs if is_half else add_numbers), make_activation(count)


@cache
def make_write_tile(layout: ProductLayout, form: Form) -> Any:
    """Return ``write_tile(acc, tensor, tile, row, col, h, b, me, warp, lane)``, or None for float32.

    It rounds the warpgroup's 64 rows into the shared memory at ``tile``, and the copy engine writes them
    while the next tile is computed.
    """
    if form.out == "float32":
        return None
    pack, store, panels = PACK[form.out], make_tensor_store(4), layout.panels
    part_tiles = panels * PANEL // COLS
    parts, size = layout.cols // COLS // part_tiles, ROWS * LINE

    @device_function
    def write_tile(acc, tensor, tile, row, col, h, b, me, warp, lane):
        words = cuda.local.array(4, uint32)  # (4,)
        r, c = square_place(lane)
        line = warp * 16 + r
        for part in range(parts):
            if warp == 0 and lane == 0:
                wait_for_reads()
            bar_sync(OWN + me, WARPGROUP)  # what was stored from here before has been read
            for t in range(part_tiles // 2):
                n = part * part_tiles + 2 * t
                words[0] = pack(acc[n, 0], acc[n, 1])
                words[1] = pack(acc[n, 2], acc[n, 3])
                words[2] = pack(acc[n + 1, 0], acc[n + 1, 1])
                words[3] = pack(acc[n + 1, 2], acc[n + 1, 3])
                chunk = (2 * t + c) % 8
                stmatrix_x4(
                    tile + (t // 4) * size + line * LINE + ((chunk ^ (line % 8)) << 4), words
                )
            fence_proxy_async()  # the copy engine sees them
            bar_sync(OWN + me, WARPGROUP)  # all rows of the warpgroup are there
            if warp == 0 and lane == 0:
                for panel in range(panels):
                    first = col + (part * panels + panel) * PANEL
                    store(tensor, (first, row, h, b), tile + panel * size)
                cp_async_bulk_commit_group()

    return write_tile


@cache
def make_write_floats(layout: ProductLayout) -> Callable[..., None]:
    """Return ``write_floats(acc, out, steps, row, col, h, b, part, rows, cols, warp, lane)``.

    Each lane writes its own pairs of columns, so that four lanes write 32 bytes of a row.  ``steps`` are
    the strides of batches, heads, parts and rows, and whether all of them and ``cols`` are even.
    """
    count = layout.cols // COLS

    @device_function
    def write_floats(acc, out, steps, row, col, h, b, part, rows, cols, warp, lane):
        own_row, own_col = int64(row + warp * 16 + lane // 4), int64(col + 2 * (lane % 4))
        start = b * steps[0] + h * steps[1] + part * steps[2] + own_row * steps[3] + own_col
        for half in range(2):
            if own_row + 8 * half < rows:
                at = start + 8 * half * steps[3]
                for t in range(count):
                    x, y = acc[t, 2 * half], acc[t, 2 * half + 1]
                    if steps[4] != 0:
                        if own_col + t * COLS < cols:
                            st_global_v2(global_address(out) + 4 * (at + t * COLS), x, y)
                    else:
                        if own_col + t * COLS < cols:
                            out[at + t * COLS] = x
                        if own_col + t * COLS + 1 < cols:
                            out[at + t * COLS + 1] = y

    return write_floats


__all__ = [
    "make_activation",
    "make_epilogue",
    "make_write_floats",
    "make_write_tile",
    "wait_for_reads",
]
