"""The matrix product on tensor cores by warps: asynchronous copies, fragments, ``mma.sync``; cc 8.0.

What the CUDA-core product leaves on the table: an instruction of a warp is 32 multiply-adds there, and
1,024 or 2,048 here; and a warp reads an operand from shared memory once for 64 rows or columns here, not
for eight. Measured at 8192³ in bfloat16 on an H200: 359 TFLOP/s; the CUDA-core product reaches 35 in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import float32, int32, int64, types, uint8, uint16, uint32, void

from kernels.cuda.matmul.epilogue import make_activation
from kernels.cuda.matmul.layout import LINE, STEPS, Form, Order, WarpLayout, place_of
from kernels.cuda.ptx.copies import (
    cp_async_16,
    cp_async_commit_group,
    global_address,
    ld_shared_v4,
    make_cp_async_wait_group,
    shared_address,
    st_global_v2,
    st_global_v4,
    st_shared,
)
from kernels.cuda.ptx.fragments import DEVICE, lane_col, lane_row
from kernels.cuda.ptx.mma import MMA, ldmatrix_x4, ldmatrix_x4_trans, mma_tf32
from kernels.cuda.ptx.numbers import PACK, UNPACK
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.kernel import Kernel, device_function
from kernels.runtime.targets import cuda

square_place, turned_place = DEVICE.square_place, DEVICE.turned_place
#: Rows of a tile of A, columns of a tile of accumulators, lanes of a warp.
ROWS, COLS, WARP = 16, 8, 32
#: rows, cols, depth, steps per part, parts, heads.
SHAPE = types.UniTuple(int32, 6)
STEP_TYPE = types.UniTuple(int64, 3)


@cache
def make_copy_lines(threads: int, lines: int, width: int) -> Callable[..., None]:
    """Return ``copy(thread, address, line_bytes, lines_left, bytes_left, target)``, which copies a tile.

    The copy to shared memory is asynchronous.  Lines beyond ``lines_left`` and bytes beyond ``bytes_left``
    of a line are zeros, and not read.

    Args:
        threads: Number of threads that copy, a multiple of width / 16.
        lines: Lines of the tile.
        width: Bytes of a line, a multiple of 16.
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

    Args:
        rows: Rows of the left operand, or columns of the right one.
        width: Bytes of a line of the tile.
        is_left: Whether it is the left operand.
        is_turned: Whether lines run across the depth.
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


@cache
def product_kernel(layout: WarpLayout, form: Form) -> Kernel:
    """Return the kernel for one layout and one form.

    Args:
        layout: Layout of the block.
        form: Dtypes and epilogue of the product; one plane.
    """
    threads, stages, depth = layout.threads, layout.stages, form.depth
    block_rows, block_cols = layout.rows, layout.cols
    size = LINE // depth  # bytes of an element
    col_warps = layout.col_warps
    own_rows, own_cols = block_rows // layout.row_warps, block_cols // col_warps
    row_tiles, col_tiles = own_rows // ROWS, own_cols // COLS
    tiles = row_tiles * col_tiles
    a_turned, b_turned, is_half = form.a_turned, form.b_turned, form.out != "float32"
    has_bias, has_gelu, keeps = form.has_bias, form.has_gelu, form.keeps_input
    a_width, b_width = (
        lines * size if is_turned else LINE
        for lines, is_turned in ((block_rows, a_turned), (block_cols, b_turned))
    )
    copy_a, copy_b = (
        make_copy_lines(threads, depth if is_turned else lines, width)
        for lines, width, is_turned in (
            (block_rows, a_width, a_turned), (block_cols, b_width, b_turned)
        )
    )  # fmt: skip
    load_a = make_load(own_rows, a_width, True, a_turned)
    load_b = make_load(own_cols, b_width, False, b_turned)
    a_bytes, stage_bytes = block_rows * LINE, (block_rows + block_cols) * LINE
    multiply = mma_tf32 if form.dtype == "tf32" else MMA[form.dtype]
    wait_for_stage = make_cp_async_wait_group(stages - 2)
    activate = make_activation(tiles)
    unpack: Any = UNPACK.get(form.out)
    write = _make_write(layout, form)

    @device_function
    def add_bias(acc, bias, first_col, cols):
        for n in range(col_tiles):
            col = first_col + n * COLS
            if is_half:
                if col < cols:  # a multiple of eight
                    x, y = unpack(uint32(bias[col]) | (uint32(bias[col + 1]) << uint32(16)))
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
                            acc[m * col_tiles + n, e] += bias[col + e]
                            acc[m * col_tiles + n, e + 2] += bias[col + e]

    @device_function
    def fetch(
        thread, a_at, b_at, a_steps, b_steps, a_left, b_left, depth_left, target
    ):  # fmt: skip
        if a_turned:
            copy_a(thread, a_at, a_steps[2] * size, depth_left, a_left * size, target)
        else:
            copy_a(thread, a_at, a_steps[2] * size, a_left, depth_left * size, target)
        if b_turned:
            copy_b(thread, b_at, b_steps[2] * size, depth_left, b_left * size, target + a_bytes)
        else:
            copy_b(thread, b_at, b_steps[2] * size, b_left, depth_left * size, target + a_bytes)
        cp_async_commit_group()

    def product_mma(a, b, out, before_gelu, bias, a_steps, b_steps, out_steps, shape, order):
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
        tile = shared_address(shared)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread // WARP), int32(thread % WARP)
        rows, cols, total_depth, part_steps, parts, heads = shape
        row_tile, col_tile, matrix = place_of(cuda.blockIdx.x, order)
        row, col = int32(row_tile * block_rows), int32(col_tile * block_cols)
        part, number = int32(matrix % parts), int32(matrix // parts)
        h, b_number = int64(number % heads), int64(number // heads)
        first = int32(part * part_steps * depth)
        steps = int32(min(part_steps, (total_depth - first + depth - 1) // depth))
        a_at = global_address(a) + (b_number * a_steps[0] + h * a_steps[1]) * size
        b_at = global_address(b) + (b_number * b_steps[0] + h * b_steps[1]) * size
        a_line, a_along = (int64(first), row) if a_turned else (int64(row), first)
        b_line, b_along = (int64(first), col) if b_turned else (int64(col), first)
        a_at += (a_line * a_steps[2] + a_along) * size
        b_at += (b_line * b_steps[2] + b_along) * size
        a_step = int64(depth * size) * (a_steps[2] if a_turned else 1)
        b_step = int64(depth * size) * (b_steps[2] if b_turned else 1)
        a_left, b_left, depth_left = (
            int32(rows - row),
            int32(cols - col),
            int32(total_depth - first),
        )

        acc = cuda.local.array((tiles, 4), float32)  # (own_rows, own_cols) / 32: a·b
        left = cuda.local.array((row_tiles, 4), uint32)  # (own_rows, depth / 4) / 32: a
        right = cuda.local.array((col_tiles, 2), uint32)  # (depth / 4, own_cols) / 32: b
        for t in range(tiles):
            for e in range(4):
                acc[t, e] = float32(0)
        for stage in range(stages - 1):
            if stage < steps:
                fetch(
                    thread, a_at, b_at, a_steps, b_steps, a_left, b_left,
                    depth_left - stage * depth, tile + stage * stage_bytes,
                )  # fmt: skip
                a_at += a_step
                b_at += b_step
            else:
                cp_async_commit_group()  # an empty one, so that they are counted alike
        own_row, own_col = int32(warp // col_warps * own_rows), int32(warp % col_warps * own_cols)
        stage, ahead = int32(0), int32(stages - 1)
        for k in range(steps):
            wait_for_stage()
            cuda.syncthreads()  # everyone's copies are there, and the last stage was read by all
            if k + stages - 1 < steps:
                fetch(
                    thread, a_at, b_at, a_steps, b_steps, a_left, b_left,
                    depth_left - (k + stages - 1) * depth, tile + ahead * stage_bytes,
                )  # fmt: skip
                a_at += a_step
                b_at += b_step
            else:
                cp_async_commit_group()
            a_tile = tile + stage * stage_bytes
            for step in range(STEPS):
                load_a(left, a_tile, lane, own_row, step)
                load_b(right, a_tile + a_bytes, lane, own_col, step)
                for n in range(col_tiles):
                    for m in range(row_tiles):
                        multiply(acc[m * col_tiles + n], left[m], right[n])
            ahead = stage
            stage = int32(0 if stage == stages - 1 else stage + 1)
        cuda.syncthreads()  # all stages were read: they may be written again
        if has_bias:
            add_bias(acc, bias, col + own_col + lane_col(lane), cols)
        if keeps:
            write(
                acc, before_gelu, out_steps, tile, row, own_row, col + own_col, h, b_number, part,
                rows, cols, warp, lane,
            )  # fmt: skip
        if has_gelu:
            activate(acc)
        write(
            acc, out, out_steps, tile, row, own_row, col + own_col, h, b_number, part,
            rows, cols, warp, lane,
        )  # fmt: skip

    operand = types.Array(float32 if size == 4 else uint16, 1, "C")
    result = types.Array(uint16 if is_half else float32, 1, "C")
    one_bias = types.Array(uint16 if is_half else float32, 1, "C") if has_bias else int64
    signature = void(
        operand, operand, result, result if keeps else int64, one_bias, STEP_TYPE, STEP_TYPE,
        types.UniTuple(int64, 5), SHAPE, types.NamedUniTuple(int32, 4, Order),
    )  # fmt: skip
    return Kernel(product_mma, signature, threads, layout.shared_bytes, layout.resident)


@cache
def _make_write(layout: WarpLayout, form: Form) -> Any:
    """Return ``write(acc, out, steps, tile, row, own_row, col, h, b, part, rows, cols, warp, lane)``.

    It writes a warp's rows and columns.  16-bit results pass through the warp's part of shared memory, so
    that lanes write whole pieces of rows.
    """
    own_rows, own_cols = layout.rows // layout.row_warps, layout.cols // layout.col_warps
    row_tiles, col_tiles = own_rows // ROWS, own_cols // COLS
    width = 2 * own_cols
    chunks, own_bytes = width // CHUNK, own_rows * width
    pack: Any = PACK.get(form.out)
    place = make_tile_place(device_function, width)

    @device_function
    def write_pieces(
        acc, out, steps, tile, row, own_row, col, h, b, part, rows, cols, warp, lane
    ):  # fmt: skip
        words = cuda.local.array(4, uint32)  # (4,)
        own = tile + warp * own_bytes
        at, byte = lane_row(lane), 2 * lane_col(lane)
        cuda.syncwarp()  # what lay here before has been read
        for m in range(row_tiles):
            for n in range(col_tiles):
                t, line = m * col_tiles + n, at + m * ROWS
                st_shared(own + place(line, n) + byte, pack(acc[t, 0], acc[t, 1]))
                st_shared(own + place(line + 8, n) + byte, pack(acc[t, 2], acc[t, 3]))
        cuda.syncwarp()  # the warp's rows are whole
        start = global_address(out) + 2 * (b * steps[0] + h * steps[1])
        for i in range(lane, own_rows * chunks, WARP):
            line, chunk = i // chunks, i % chunks
            target_row, target_col = int64(row + own_row + line), int64(col + chunk * COLS)
            if target_row < rows and target_col < cols:
                ld_shared_v4(words, own + place(line, chunk))
                st_global_v4(start + 2 * (target_row * steps[3] + target_col), words)

    @device_function
    def write_floats(
        acc, out, steps, tile, row, own_row, col, h, b, part, rows, cols, warp, lane
    ):  # fmt: skip
        start = b * steps[0] + h * steps[1] + part * steps[2]
        first_row, first_col = int64(row + own_row + lane_row(lane)), int64(col + lane_col(lane))
        for m in range(row_tiles):
            for half in range(2):
                target_row = first_row + m * ROWS + 8 * half
                if target_row < rows:
                    for n in range(col_tiles):
                        target_col = first_col + n * COLS
                        x = acc[m * col_tiles + n, 2 * half]
                        y = acc[m * col_tiles + n, 2 * half + 1]
                        at = start + target_row * steps[3] + target_col
                        if steps[4] != 0:
                            if target_col < cols:
                                st_global_v2(global_address(out) + 4 * at, x, y)
                        else:
                            if target_col < cols:
                                out[at] = x
                            if target_col + 1 < cols:
                                out[at + 1] = y

    return write_floats if form.out == "float32" else write_pieces
