"""The matrix product on Hopper: copies and products at the same time, tile after tile.

What ``mma.sync`` leaves on the table: its fragments go through registers, and it reaches little more than
half of what Hopper's tensor cores can.  Here one warpgroup, the producer, does nothing but issue copies;
the others multiply tiles out of shared memory by ``wgmma``, 64 rows each, and wait for the products before,
never for the last ones.  Measured at 8192³ in bfloat16 on an H200: 359 TFLOP/s by ``mma.sync``, 702 to 797
here, 0.96 to 1.00 of cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import float32, int32, int64, types, uint8, uint16, void

from kernels.cuda.device.warpgroups import make_next, own_warpgroup
from kernels.cuda.matmul.epilogue import (
    make_epilogue,
    make_write_floats,
    make_write_tile,
    wait_for_reads,
)
from kernels.cuda.matmul.layout import (
    ALIGNMENT,
    LINE,
    PANEL,
    STEPS,
    TERMS,
    Form,
    Order,
    ProductLayout,
    place_of,
    shared_bytes,
    shared_tiles,
)
from kernels.cuda.ptx.barriers import (
    fence_mbarrier_init,
    make_setmaxnreg,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from kernels.cuda.ptx.bulk import make_tensor_load
from kernels.cuda.ptx.copies import align_up, global_address, shared_address
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import Kernel, device_function
from kernels.runtime.targets import cuda

#: rows, cols, steps of the depth, those of a part, parts; heads, and by what a head's and a batch's number
#: is multiplied to find it in a and in b: 0 where it repeats; elements from plane to plane.
SHAPE = types.UniTuple(int32, 11)
MAPS = types.Array(uint8, 1, "C")


@cache
def _make_load(lines: int, depth: int, is_turned: bool) -> Callable[..., None]:
    """Return ``load(target, tensor, full, line, k, h, b)``, which issues the copy of an operand's tile."""
    load, panels, panel_bytes = make_tensor_load(4), lines // PANEL, depth * LINE

    @device_function
    def load_lines(target, tensor, full, line, k, h, b):
        load(target, tensor, full, (k, line, h, b))

    @device_function
    def load_panels(target, tensor, full, line, k, h, b):
        for panel in range(panels):
            load(target + panel * panel_bytes, tensor, full, (line + panel * PANEL, k, h, b))

    return load_panels if is_turned else load_lines


@cache
def product_kernel(layout: ProductLayout, form: Form) -> Kernel:
    """Return the kernel for one layout and one form.

    Args:
        layout: Layout of the block.
        form: What is multiplied, and what is done with the result.
    """
    stages, planes = layout.stages, form.planes
    rows_a_block, cols_a_block = layout.rows, layout.cols
    a_size, b_size, depth = layout.a_bytes, layout.b_bytes, form.depth
    stage_bytes = planes * (a_size + b_size)
    b_offset, out_offset, barrier_offset = (
        shared_tiles(layout, form)[name] for name in ("b", "out", "barriers")
    )
    empty = 8 * stages  # barriers of eight bytes, those of full stages first
    own_out = layout.panels * ROWS * LINE
    consumer_warps = 4 * layout.consumers
    col_tiles, terms, promotes = cols_a_block // 8, TERMS[planes], planes > 1
    term_count = len(terms)
    a_planes, b_planes = (tuple(term[i] for term in terms) for i in (0, 1))
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    wait_for_all, wait_for_last = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    next_stage = make_next(stages)

    # An operand whose lines run across the depth lies in panels of 64 of them.
    turned_panel = depth * LINE
    multiply = make_wgmma(
        cols_a_block, form.dtype, a_transposed=form.a_turned, b_transposed=form.b_turned
    )
    a_layout = descriptor_layout(LINE, 16, 8 * LINE)
    b_layout = descriptor_layout(LINE, turned_panel if form.b_turned else 16, 8 * LINE)
    a_step, b_step = (
        (16 * LINE if is_turned else LINE // STEPS) >> 4
        for is_turned in (form.a_turned, form.b_turned)
    )
    load_a = _make_load(rows_a_block, depth, form.a_turned)
    load_b = _make_load(cols_a_block, depth, form.b_turned)

    @device_function
    def arrive(barrier, lane):
        if lane == 0:
            mbarrier_arrive(barrier)

    write_tile = make_write_tile(layout, form)
    write_floats = make_write_floats(layout)
    add_bias, activate = make_epilogue(layout, form)
    is_half, has_bias, has_gelu, keeps = (
        form.out != "float32",
        form.has_bias,
        form.has_gelu,
        form.keeps_input,
    )

    if is_half:

        @device_function
        def write(acc, target, steps, own_tile, row, col, h, b, part, rows, cols, me, warp, lane):
            write_tile(acc, global_address(target), own_tile, row, col, h, b, me, warp, lane)

    else:

        @device_function
        def write(acc, target, steps, own_tile, row, col, h, b, part, rows, cols, me, warp, lane):
            write_floats(acc, target, steps, row, col, h, b, part, rows, cols, warp, lane)

    def product_wgmma(a_map, b_map, out, before_gelu, bias, out_steps, shape, order):
        """Multiply matrix after matrix, tile after tile.

        Computes: out = gelu(a·b + bias) for each batch and head; bias and GELU if asked for; the
            depth may be divided into parts, whose sums lie one after the other
        Source: the Hopper kernels of CUTLASS, for who does what; Goto and van de Geijn (2008) for tiles
        Grid: (multiprocessors,), one block each, that takes every so many-th item; see ``Order``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, 2 rows and cols / 4 columns of out, scattered as wgmma
            scatters them
        Shared: stages of a (rows, depth) and b (depth, cols), lines of 128 bytes, swizzled; of a
            result of 16 bits panels of 64 columns, rounded; barriers
        Registers: acc (cols / 8, 4); with planes as many again: sums
        Global traffic: reads a once for each tile of columns, b once for each tile of rows; writes
            out once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        shared = cuda.shared.array(0, uint8)  # stages of a, those of b, the result, barriers
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers = tile + barrier_offset
        steps_of_depth, part_steps, parts, heads = shape[2], shape[3], shape[4], shape[5]
        warpgroup, lane = own_warpgroup(), int32(cuda.threadIdx.x % 32)
        first_item, stride = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        items = int32(order.row_tiles * order.col_tiles * order.matrices)
        if cuda.threadIdx.x == 0:
            for i in range(stages):
                mbarrier_init(barriers + 8 * i, 1)
                mbarrier_init(barriers + empty + 8 * i, consumer_warps)
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == 0:
                a_tensor, b_tensor = global_address(a_map), global_address(b_map)
                stage, phase, item = int32(0), int32(0), first_item
                while item < items:
                    row_tile, col_tile, matrix = place_of(item, order)
                    row = int32(row_tile * rows_a_block)
                    col = int32(col_tile * cols_a_block)
                    part, number = int32(matrix % parts), int32(matrix // parts)
                    h, b = int32(number % heads), int32(number // heads)
                    first = int32(part * part_steps)
                    stop = int32(min(first + part_steps, steps_of_depth))
                    for k in range(first, stop):
                        full = barriers + 8 * stage
                        mbarrier_wait(barriers + empty + 8 * stage, phase ^ 1)  # it was read
                        mbarrier_arrive_expect_tx(full, stage_bytes)
                        for plane in range(planes):
                            n, at = stage * planes + plane, int32(plane * shape[10] + k * depth)
                            load_a(
                                tile + n * a_size, a_tensor, full, row, at, h * shape[6], b * shape[7]
                            )  # fmt: skip
                            load_b(
                                tile + b_offset + n * b_size, b_tensor, full, col, at,
                                h * shape[8], b * shape[9],
                            )  # fmt: skip
                        stage, phase = next_stage(stage, phase)
                    item += stride
        else:
            claim()
            me, warp = int32(warpgroup - 1), int32(cuda.threadIdx.x // 32 % 4)
            acc = cuda.local.array((col_tiles, 4), float32)  # (64, cols) / 128: a·b
            sums = cuda.local.array((col_tiles, 4), float32)  # (64, cols) / 128: with planes, a·b
            a_desc = descriptor(a_layout, tile + me * (ROWS * LINE))
            b_desc = descriptor(b_layout, tile + b_offset)
            own_tile = tile + out_offset + me * own_out
            stage, phase, item = int32(0), int32(0), first_item
            while item < items:
                row_tile, col_tile, matrix = place_of(item, order)
                row = int32(row_tile * rows_a_block + me * ROWS)
                col = int32(col_tile * cols_a_block)
                part, number = int32(matrix % parts), int32(matrix // parts)
                h, b = int32(number % heads), int32(number // heads)
                first = int32(part * part_steps)
                stop = int32(min(first + part_steps, steps_of_depth))
                last = int32(0)  # the stage of the products before
                if promotes:
                    for t in range(col_tiles):
                        for e in range(4):
                            sums[t, e] = float32(0)
                for k in range(first, stop):
                    mbarrier_wait(barriers + 8 * stage, phase)  # its tiles are there
                    wgmma_fence()
                    for n in range(term_count):
                        a_at = a_desc + (stage * planes + a_planes[n]) * (a_size >> 4)
                        b_at = b_desc + (stage * planes + b_planes[n]) * (b_size >> 4)
                        for t in range(STEPS):
                            is_first = n + t == 0 and (promotes or k == first)
                            multiply(acc, a_at + t * a_step, b_at + t * b_step, not is_first)
                    wgmma_commit_group()
                    if promotes:
                        # Tensor cores cut off what does not fit into a sum; float32 additions round it.
                        wait_for_all()  # the sums are there, and the stage was read
                        arrive(barriers + empty + 8 * stage, lane)
                        for t in range(col_tiles):
                            for e in range(4):
                                sums[t, e] += acc[t, e]
                    else:
                        wait_for_last()  # the stage of the products before was read
                        if k > first:
                            arrive(barriers + empty + 8 * last, lane)
                    last = stage
                    stage, phase = next_stage(stage, phase)
                if promotes:
                    for t in range(col_tiles):
                        for e in range(4):
                            acc[t, e] = sums[t, e]
                else:
                    wait_for_all()  # the sums are whole, and the last stage was read
                    arrive(barriers + empty + 8 * last, lane)
                if has_bias:
                    add_bias(acc, bias, col + 2 * (lane % 4), shape[1])
                if keeps:
                    write(
                        acc, before_gelu, out_steps, own_tile, row, col, h, b, part,
                        shape[0], shape[1], me, warp, lane,
                    )  # fmt: skip
                if has_gelu:
                    activate(acc)
                write(
                    acc, out, out_steps, own_tile, row, col, h, b, part,
                    shape[0], shape[1], me, warp, lane,
                )  # fmt: skip
                item += stride
            if is_half and warp == 0 and lane == 0:
                wait_for_reads()  # of the last result

    from_map = MAPS if is_half else types.Array(float32, 1, "C")
    one_bias = types.Array(uint16 if is_half else float32, 1, "C") if has_bias else int64
    signature = void(
        MAPS, MAPS, from_map, from_map if keeps else int64, one_bias,
        types.UniTuple(int64, 5), SHAPE, types.NamedUniTuple(int32, 4, Order),
    )  # fmt: skip
    shared_size = shared_bytes(layout, form)
    return Kernel(product_wgmma, signature, layout.threads, shared_size)
