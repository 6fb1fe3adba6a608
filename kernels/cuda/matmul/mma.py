"""The matrix product on tensor cores by warps: asynchronous copies, fragments, ``mma.sync``; cc 8.0.

What the CUDA-core product leaves on the table: an instruction of a warp is 32 multiply-adds there, and
1,024 or 2,048 here; and a warp reads an operand from shared memory once for 64 rows or columns here, not
for eight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.matmul.epilogue import COLS, make_epilogue, make_write_floats
from kernels.cuda.matmul.layout import STEPS, Order, ProductForm, WarpLayout, make_find
from kernels.cuda.ptx.copies import (
    cp_async_16,
    cp_async_commit_group,
    global_address,
    ld_shared_v4,
    make_cp_async_wait_group,
    shared_address,
    st_global_v4,
    st_shared,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row, square_place, turned_place
from kernels.cuda.ptx.mma import MMA, ldmatrix_x4, ldmatrix_x4_trans, mma_tf32
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.kernel import Kernel, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, int64, types, uint8, uint16, uint32, void

#: Rows of a tile of A, lanes of a warp.
ROWS, WARP = 16, 32
#: rows, cols, steps of the depth, steps per part, parts, heads; depth.
SHAPE = types.UniTuple(int32, 7)
STEP_TYPE = types.UniTuple(int64, 3)


@cache
def make_copy_lines(threads: int, lines: int, width: int) -> Callable[..., None]:
    """Return ``copy(thread, address, line_bytes, lines_left, bytes_left, target)``, which copies a tile.

    The copy to shared memory is asynchronous.  Lines beyond ``lines_left`` and bytes beyond ``bytes_left``
    of a line are zeros, and not read.  ``width`` is in bytes, a multiple of 16, and the number of threads a
    multiple of ``width`` / 16.
    """
    chunks = width // CHUNK
    step = threads // chunks
    place = make_tile_place(device_function, width)

    @device_function
    def copy(thread, address, line_bytes, lines_left, bytes_left, target):
        line, chunk = int32(thread // chunks), int32(thread % chunks)
        source = address + int64(line) * line_bytes + chunk * CHUNK
        count = max(min(bytes_left - chunk * CHUNK, CHUNK), 0)
        for i in range(-(-lines // step)):
            at = line + i * step
            if lines % step == 0 or at < lines:
                cp_async_16(target + place(at, chunk), source, count if at < lines_left else 0)
                source += step * line_bytes

    return copy


@cache
def make_load(rows: int, width: int, is_left: bool, is_turned: bool) -> Callable[..., None]:
    """Return ``load(fragments, tile, lane, first, step)``: load a warp's share of an operand to registers.

    ``fragments`` is (rows / 16, 4), tiles of the left operand, or (columns / 8, 2), tiles of the right one.
    The right operand has ``rows`` columns.  Lines have ``width`` bytes, and run across the depth if turned.
    """
    place = make_tile_place(device_function, width)
    count, apart = rows // ROWS, 1 if is_left else 2
    # Which of the four matrices is which: see ``fragments.square_place``.
    lane_place = square_place if is_left != is_turned else turned_place

    @device_function
    def load_lines(fragments, tile, lane, first, step):
        row, chunk = lane_place(lane)
        address = tile + place(first + row, 2 * step + chunk)
        for m in range(count):  # the swizzle begins anew after eight rows
            ldmatrix_x4(fragments[m * apart], address + m * (ROWS * width))

    @device_function
    def load_turned(fragments, tile, lane, first, step):
        row, chunk = lane_place(lane)
        for m in range(count):
            at = place(step * ROWS + row, first // COLS + 2 * m + chunk)
            ldmatrix_x4_trans(fragments[m * apart], tile + at)

    return load_turned if is_turned else load_lines


class Stream(NamedTuple):
    """The tiles of an operand that a block reads one after the other, along the depth."""

    address: Any  # Address of the next tile
    line_bytes: Any  # Distance of its lines
    jump: Any  # Distance to the tile after it
    left: Any  # Rows or columns of the operand from the block's first one on


@cache
def _make_fetch(
    layout: WarpLayout, form: ProductForm, is_left: bool
) -> tuple[Callable[..., Stream], Callable[..., Stream], Callable[..., None]]:
    """Return the functions that copy an operand and load its fragments.

    ``begin(array, steps, item, first, left)`` returns the :class:`Stream` of an item whose rows or columns
    begin at ``first``; ``fetch(thread, stream, depth_left, target)`` issues the copy of a tile and returns
    the stream of those after it; for ``load`` see :func:`make_load`.
    """
    depth, size = form.depth, LINE // form.depth  # bytes of an element
    lines, warps = (layout.rows, layout.row_warps) if is_left else (layout.cols, layout.col_warps)
    is_turned = form.a_turned if is_left else form.b_turned
    width = lines * size if is_turned else LINE
    copy = make_copy_lines(layout.threads, depth if is_turned else lines, width)

    @device_function
    def begin(array, steps, item, first, left):
        address = (
            global_address(array) + (int64(item.b) * steps[0] + int64(item.h) * steps[1]) * size
        )
        deep = int32(item.first * depth)
        line, along = (int64(deep), first) if is_turned else (int64(first), deep)
        jump = int64(depth * size) * (steps[2] if is_turned else 1)
        return Stream(address + (line * steps[2] + along) * size, steps[2] * size, jump, left)

    @device_function
    def fetch(thread, stream, depth_left, target):
        lines_left, numbers = stream.left, depth_left
        if is_turned:
            lines_left, numbers = depth_left, stream.left
        copy(thread, stream.address, stream.line_bytes, lines_left, numbers * size, target)
        return Stream(stream.address + stream.jump, stream.line_bytes, stream.jump, stream.left)

    return begin, fetch, make_load(lines // warps, width, is_left, is_turned)


def _make_multiply(layout: WarpLayout, form: ProductForm) -> Callable[..., None]:
    """Return ``multiply(acc, tile, a, b, steps, depth_left)``: the product of two operands' tiles.

    ``acc`` are the accumulators of the warp's rows and columns, ``tile`` the address of the stages in
    shared memory, ``a`` and ``b`` are streams, and ``depth_left`` is the depth from the first tile on.
    """
    stages, depth, col_warps = layout.stages, form.depth, layout.col_warps
    own_rows, own_cols = layout.rows // layout.row_warps, layout.cols // col_warps
    row_tiles, col_tiles = own_rows // ROWS, own_cols // COLS
    a_bytes, stage_bytes = layout.rows * LINE, (layout.rows + layout.cols) * LINE
    _, fetch_a, load_a = _make_fetch(layout, form, True)
    _, fetch_b, load_b = _make_fetch(layout, form, False)
    multiply_tile = mma_tf32 if form.dtype == "tf32" else MMA[form.dtype]
    wait_for_stage = make_cp_async_wait_group(stages - 2)

    @device_function
    def fetch(thread, a, b, depth_left, target):
        if depth_left > 0:
            a = fetch_a(thread, a, depth_left, target)
            b = fetch_b(thread, b, depth_left, target + a_bytes)
        cp_async_commit_group()  # of no copies behind the last tile, so that they are counted alike
        return a, b

    @device_function
    def multiply(acc, tile, a, b, steps, depth_left):
        left = cuda.local.array((row_tiles, 4), uint32)  # (own_rows, depth / 4) / 32: a
        right = cuda.local.array((col_tiles, 2), uint32)  # (depth / 4, own_cols) / 32: b
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread // WARP), int32(thread % WARP)
        for stage in range(stages - 1):
            a, b = fetch(thread, a, b, depth_left - stage * depth, tile + stage * stage_bytes)
        own_row, own_col = int32(warp // col_warps * own_rows), int32(warp % col_warps * own_cols)
        stage, ahead = int32(0), int32(stages - 1)
        for k in range(steps):
            wait_for_stage()
            cuda.syncthreads()  # everyone's copies are there, and the last stage was read by all
            a, b = fetch(
                thread, a, b, depth_left - (k + stages - 1) * depth, tile + ahead * stage_bytes
            )
            a_tile = tile + stage * stage_bytes
            for step in range(STEPS):
                load_a(left, a_tile, lane, own_row, step)
                load_b(right, a_tile + a_bytes, lane, own_col, step)
                for n in range(col_tiles):
                    for m in range(row_tiles):
                        multiply_tile(acc[m * col_tiles + n], left[m], right[n])
            ahead = stage
            stage = int32(0 if stage == stages - 1 else stage + 1)
        cuda.syncthreads()  # all stages were read: they may be written again

    return multiply


@cache
def product_kernel(layout: WarpLayout, form: ProductForm) -> Kernel:
    """Return the kernel for one layout and one form."""
    own_rows, own_cols = layout.rows // layout.row_warps, layout.cols // layout.col_warps
    row_tiles, col_tiles, col_warps = own_rows // ROWS, own_cols // COLS, layout.col_warps
    tiles, depth = row_tiles * col_tiles, form.depth
    has_bias, has_gelu, keeps = form.has_bias, form.has_gelu, form.keeps_input
    add_bias, activate = make_epilogue(row_tiles, col_tiles, form.out)
    find, write, multiply = (
        make_find(layout),
        _make_write(layout, form),
        _make_multiply(layout, form),
    )
    begin_a, begin_b = (_make_fetch(layout, form, is_left)[0] for is_left in (True, False))

    def product_mma(a, b, target, a_steps, b_steps, out_steps, shape, order):
        """Multiply one tile of one matrix.

        Computes: out = gelu(a·b + bias) for each batch and head; bias and GELU if asked for; the
            depth may be divided into parts, whose sums lie one after the other
        Source: Goto and van de Geijn (2008) for tiles; Algorithm 0 of FlashAttention, lines 1 and 3
        Grid: (tiles of all matrices,), in the order of ``Order``
        Block: (32 * row_warps * col_warps,)
        One thread does: of its warp's rows and columns those that mma gives its lane,
            rows · cols / threads
        Shared: stages of a (rows, depth) and b (depth, cols), lines of 128 bytes or more, swizzled;
            then a result of 16 bits
        Registers: acc (row_tiles · col_tiles, 4), fragments of a (row_tiles, 4) and b (col_tiles, 2)
        Global traffic: reads a once for each tile of columns, b once for each tile of rows; writes
            out once
        Needs: cc 8.0: cp.async, mma.sync; lines of the operands at multiples of 16 bytes
        """
        shared = cuda.shared.array(0, uint8)  # stages, of a and then b each; then the result
        tile, warp = shared_address(shared), int32(cuda.threadIdx.x // WARP)
        (out, before_gelu, bias), rows, cols = target, shape[0], shape[1]
        item = find(cuda.blockIdx.x, shape, order)
        own_a = begin_a(a, a_steps, item, item.row, int32(rows - item.row))
        own_b = begin_b(b, b_steps, item, item.col, int32(cols - item.col))
        acc = cuda.local.array((tiles, 4), float32)  # (own_rows, own_cols) / 32: a·b
        for t in range(tiles):
            for e in range(4):
                acc[t, e] = float32(0)
        steps = int32(item.stop - item.first)
        depth_left = int32(shape[6] - item.first * depth)
        multiply(acc, tile, own_a, own_b, steps, min(depth_left, steps * depth))
        row = int32(item.row + warp // col_warps * own_rows)
        col = int32(item.col + warp % col_warps * own_cols)
        if has_bias:
            add_bias(acc, bias, item.h, col + lane_col(int32(cuda.threadIdx.x % WARP)), cols)
        if keeps:
            write(acc, before_gelu, out_steps, tile, item, row, col, shape)
        if has_gelu:
            activate(acc)
        write(acc, out, out_steps, tile, item, row, col, shape)

    is_half = form.out != "float32"
    operand = types.Array(uint16 if LINE // depth == 2 else float32, 1, "C")
    result = types.Array(uint16 if is_half else float32, 1, "C")
    target = types.Tuple((result, result if keeps else int64, result if has_bias else int64))
    signature = void(
        operand, operand, target, STEP_TYPE, STEP_TYPE, types.UniTuple(int64, 5), SHAPE,
        types.NamedUniTuple(int32, 4, Order),
    )  # fmt: skip
    return Kernel(product_mma, signature, layout.threads, layout.shared_bytes, layout.resident)


@cache
def _make_write(layout: WarpLayout, form: ProductForm) -> Any:
    """Return ``write(acc, out, steps, tile, item, row, col, shape)`` for the rows and columns of a warp.

    ``row`` and ``col`` are the first of them.  16-bit results pass through the warp's part of shared
    memory, so that lanes write whole pieces of rows.
    """
    own_rows, own_cols = layout.rows // layout.row_warps, layout.cols // layout.col_warps
    row_tiles, col_tiles = own_rows // ROWS, own_cols // COLS
    width = 2 * own_cols
    chunks, own_bytes = width // CHUNK, own_rows * width
    pack: Any = PACK.get(form.out)
    place = make_tile_place(device_function, width)
    write_floats = make_write_floats(row_tiles, col_tiles)

    @device_function
    def write_pieces(acc, out, steps, tile, item, row, col, shape):
        words = cuda.local.array(4, uint32)  # (4,)
        lane = int32(cuda.threadIdx.x % WARP)
        own = tile + int32(cuda.threadIdx.x // WARP) * own_bytes
        at, byte = lane_row(lane), 2 * lane_col(lane)
        cuda.syncwarp()  # what lay here before has been read
        for m in range(row_tiles):
            for n in range(col_tiles):
                t, line = m * col_tiles + n, at + m * ROWS
                st_shared(own + place(line, n) + byte, pack(acc[t, 0], acc[t, 1]))
                st_shared(own + place(line + 8, n) + byte, pack(acc[t, 2], acc[t, 3]))
        cuda.syncwarp()  # the warp's rows are whole
        start = global_address(out) + 2 * (int64(item.b) * steps[0] + int64(item.h) * steps[1])
        for i in range(lane, own_rows * chunks, WARP):
            line, chunk = i // chunks, i % chunks
            target_row, target_col = int64(row + line), int64(col + chunk * COLS)
            if target_row < shape[0] and target_col < shape[1]:
                ld_shared_v4(words, own + place(line, chunk))
                st_global_v4(start + 2 * (target_row * steps[3] + target_col), words)

    @device_function
    def write_numbers(acc, out, steps, tile, item, row, col, shape):
        write_floats(acc, out, steps, item, row, col, shape)

    return write_numbers if form.out == "float32" else write_pieces
