"""The epilogue of a product on tensor cores, on a tile in registers: bias, GELU, rounding, storing.

The accumulators of a warpgroup are 64 rows, 16 for each warp.  ``acc[t, e]`` of a lane is in row lane / 4,
or eight rows below if e > 1, and in column 8 t + 2 (lane % 4) + e % 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.pointwise import GELU_CONSTANTS
from kernels.cuda.device.warpgroups import LINE, PANEL, WARPGROUP, store_pairs
from kernels.cuda.matmul.layout import ProductForm, ProductLayout
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group, tensor_store, wait_for_reads
from kernels.cuda.ptx.copies import global_address, st_global_v2
from kernels.cuda.ptx.fragments import lane_col, lane_row, square_place
from kernels.cuda.ptx.numbers import PACK, UNPACK, ex2, rcp
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64, uint32

#: GELU in its tanh form is x / (1 + 2**-z), z = x (inner + cubic x²).
GELU_INNER = GELU_CONSTANTS[5], GELU_CONSTANTS[5] * GELU_CONSTANTS[3]
#: Columns of a tile of accumulators.
COLS = 8
#: Number of the named barrier of the first consumer's threads; those of the others follow.
OWN = 1


@cache
def make_epilogue(row_tiles: int, col_tiles: int, out: str) -> tuple[Any, Any]:
    """Return ``add_bias(acc, bias, head, first_col, cols)`` and ``activate(acc)``, GELU in its tanh form.

    Each head has ``cols`` numbers of the bias.
    ``row_tiles`` tiles of accumulators are below each other, 16 rows each, and ``col_tiles`` side by side.
    """
    is_half, one = out != "float32", np.float32(1)
    unpack: Any = UNPACK.get(out)
    inner, cubic = (np.float32(factor) for factor in GELU_INNER)

    @device_function
    def add_bias(acc, bias, head, first_col, cols):
        start = head * cols
        for n in range(col_tiles):
            col = first_col + n * COLS
            if is_half:
                if col < cols:  # a multiple of eight
                    x, y = unpack(
                        uint32(bias[start + col]) | (uint32(bias[start + col + 1]) << uint32(16))
                    )
                    for m in range(row_tiles):
                        t = m * col_tiles + n
                        acc[t, 0] += x
                        acc[t, 1] += y
                        acc[t, 2] += x
                        acc[t, 3] += y
            else:
                for e in range(2):
                    if col + e < cols:
                        for m in range(row_tiles):
                            t = m * col_tiles + n
                            acc[t, e] += bias[start + col + e]
                            acc[t, e + 2] += bias[start + col + e]

    @device_function
    def activate(acc):
        for t in range(row_tiles * col_tiles):
            for e in range(4):
                x = acc[t, e]
                acc[t, e] = x * rcp(one + ex2(-x * (inner + cubic * x * x)))

    return add_bias, activate


@cache
def make_write_tile(layout: ProductLayout, form: ProductForm) -> Any:
    """Return ``write_tile(acc, target, steps, tile, item, me, shape)``, or None for float32.

    It rounds the warpgroup's 64 rows into the shared memory at ``tile``, and the copy engine writes them
    while the next tile is computed.
    """
    if form.out == "float32":
        return None
    pack, panels = PACK[form.out], layout.panels
    part_tiles = panels * PANEL // COLS
    parts, size = layout.cols // COLS // part_tiles, ROWS * LINE

    @device_function
    def write_tile(acc, target, steps, tile, item, me, shape):
        warp, lane = int32(cuda.threadIdx.x // 32 % 4), int32(cuda.threadIdx.x % 32)
        row, head = int32(item.row + me * ROWS), item.h
        tensor = global_address(target) + int64(head * shape[13])
        if shape[13] != 0:
            head = int32(0)  # of its own map
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
                store_pairs(tile, line, c, t, size, words)
            fence_proxy_async()  # the copy engine sees them
            bar_sync(OWN + me, WARPGROUP)  # all rows of the warpgroup are there
            if warp == 0 and lane == 0:
                for panel in range(panels):
                    first = item.col + (part * panels + panel) * PANEL
                    tensor_store(tensor, (first, row, head, item.b), tile + panel * size)
                cp_async_bulk_commit_group()

    return write_tile


@cache
def make_write_floats(row_tiles: int, col_tiles: int) -> Callable[..., None]:
    """Return ``write_floats(acc, out, steps, item, row, col, shape)``: write a warp's accumulators.

    Each lane writes its own pairs of columns, so that four lanes write 32 bytes of a row.  ``row`` and
    ``col`` are the first of the warp.  ``steps`` are the strides of batches, heads, parts and rows, and
    whether all of them and the number of columns are even; ``shape`` begins with rows and columns.
    """

    @device_function
    def write_floats(acc, out, steps, item, row, col, shape):
        lane, rows, cols = int32(cuda.threadIdx.x % 32), shape[0], shape[1]
        own_row, own_col = int64(row + lane_row(lane)), int64(col + lane_col(lane))
        start = int64(item.b) * steps[0] + int64(item.h) * steps[1] + int64(item.part) * steps[2]
        start += own_row * steps[3] + own_col
        for m in range(row_tiles):
            for half in range(2):
                down = 2 * m * COLS + half * COLS
                if own_row + down < rows:
                    for n in range(col_tiles):
                        x, y = (
                            acc[m * col_tiles + n, 2 * half],
                            acc[m * col_tiles + n, 2 * half + 1],
                        )
                        at, left = start + down * steps[3] + n * COLS, cols - own_col - n * COLS
                        if steps[4] != 0:
                            if left > 0:
                                st_global_v2(global_address(out) + 4 * at, x, y)
                        else:
                            if left > 0:
                                out[at] = x
                            if left > 1:
                                out[at + 1] = y

    return write_floats
