"""The matrix product on Hopper: copies and products at the same time, tile after tile.

What ``mma.sync`` leaves on the table: its fragments go through registers, and it cannot use the full
speed of Hopper's tensor cores.  Here one warpgroup, the producer, only issues copies.  The others
multiply tiles from shared memory by ``wgmma``, 64 rows each, and wait only for the products of the previous
step, not for the latest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cuda.device.pipeline import (
    Barriers,
    Pipeline,
    acquire,
    commit,
    following,
    make_prologue,
    opaque,
    placed,
    release,
    start,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, PANEL, WARPGROUP, block_bytes, own_warpgroup
from kernels.cuda.matmul.epilogue import (
    COLS,
    OWN,
    make_epilogue,
    make_write_floats,
    make_write_tile,
)
from kernels.cuda.matmul.layout import (
    STEPS,
    TERMS,
    Order,
    ProductForm,
    ProductLayout,
    Stream,
    first_step,
    make_shares,
    shared_tiles,
)
from kernels.cuda.ptx.barriers import bar_sync
from kernels.cuda.ptx.bulk import tensor_load, wait_for_reads
from kernels.cuda.ptx.copies import global_address
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
from kernels.runtime.types import float32, int32, int64, types, uint8, uint16, uint32, void

#: rows, cols, steps of the depth, steps per part, parts; heads; the factors (0 if it repeats, else 1) of
#: the head and batch indices in a and in b; distance of consecutive planes; distance in bytes of the maps
#: of consecutive heads in a, b and out, 0 if they share one; steps of one head's depth, after which a sum
#: goes on with the next head.
SHAPE = types.UniTuple(int32, 15)
MAPS = types.Array(uint8, 1, "C")
STREAM = types.NamedTuple(
    (int32, int64, types.Array(float32, 1, "C"), types.Array(int64, 1, "C")), Stream
)


@cache
def _make_load(lines: int, depth: int, is_turned: bool) -> Callable[..., None]:
    """Return ``load(target, tensor, full, line, k, h, b)``, which issues the copy of an operand's tile."""
    panels, panel_bytes = lines // PANEL, depth * LINE

    @device_function
    def load_lines(target, tensor, full, line, k, h, b):
        tensor_load(target, tensor, full, (k, line, h, b))

    @device_function
    def load_panels(target, tensor, full, line, k, h, b):
        for panel in range(panels):
            place = line + panel * PANEL, k, h, b
            tensor_load(target + panel * panel_bytes, tensor, full, place)

    return load_panels if is_turned else load_lines


def _make_produce(
    layout: ProductLayout, form: ProductForm, operands: Pipeline, b_offset: int
) -> Callable[..., None]:
    """Return ``produce(memory, a_map, b_map, *work)``, with which one thread copies operands.

    The work is a stream, a shape and an order.
    """
    planes, depth, a_size, b_size = form.planes, form.depth, layout.a_bytes, layout.b_bytes
    stage_bytes = planes * (a_size + b_size)
    own_share, is_left, take = make_shares(layout, form.streams)
    load_a = _make_load(layout.rows, depth, form.a_turned)
    load_b = _make_load(layout.cols, depth, form.b_turned)

    @device_function
    def produce(memory, a_map, b_map, stream, shape, order):
        tiles, at = placed(operands, memory), start()
        a_tensor, b_tensor = global_address(a_map), global_address(b_map)
        share = own_share(stream, shape, order)
        while is_left(share, stream, shape, order):
            item, share = take(share, stream, shape, order)
            b = item.b
            for k in range(item.first, item.stop):
                acquire(tiles, at)
                full = commit(tiles, at, stage_bytes)
                later = int32(uint32(k) // uint32(shape[14]))
                h, step = int32(item.h + later), int32(k - later * shape[14])
                a_own, b_own = a_tensor + int64(h * shape[11]), b_tensor + int64(h * shape[12])
                for plane in range(planes):
                    n, line = at.stage * planes + plane, int32(plane * shape[10] + step * depth)
                    a_tile, b_tile = memory + n * a_size, memory + b_offset + n * b_size
                    load_a(a_tile, a_own, full, item.row, line, h * shape[6], b * shape[7])
                    load_b(b_tile, b_own, full, item.col, line, h * shape[8], b * shape[9])
                at = following(tiles, at)

    return produce


@cache
def _make_complete(layout: ProductLayout, streams: bool) -> Callable[..., bool]:
    """Return ``complete(acc, item, me, stream, shape, order)``: whether a consumer's sum is whole now.

    If another block has the end of it, the sum is left in the slot of the own one; what other blocks have
    left is added.
    """
    numbers, threads = layout.cols // 8, layout.consumers * WARPGROUP
    consumers = layout.consumers

    @device_function
    def is_whole(acc, item, me, stream, shape, order):
        return True

    @device_function
    def slot_of(block, me):
        return (
            int64(block) * (4 * numbers * threads) + me * WARPGROUP + cuda.threadIdx.x % WARPGROUP
        )

    @device_function
    def complete(acc, item, me, stream, shape, order):
        is_first, block = cuda.threadIdx.x % WARPGROUP == 0, int32(cuda.blockIdx.x)
        if item.stop < shape[2]:
            slot = slot_of(block, me)
            for t in range(numbers):
                for e in range(4):
                    stream.slots[slot + (4 * t + e) * threads] = acc[t, e]
            cuda.threadfence()
            bar_sync(OWN + me, WARPGROUP)  # all of the warpgroup have stored
            if is_first:
                cuda.atomic.max(stream.flags, block * consumers + me, stream.ticket)
            return False
        begin = int32(first_step(block, stream, shape, order) - item.first)
        while item.first > 0 and first_step(block, stream, shape, order) > begin:
            block = int32(block - 1)
            if is_first:
                while cuda.atomic.max(stream.flags, block * consumers + me, 0) < stream.ticket:
                    pass
            bar_sync(OWN + me, WARPGROUP)  # the slot is filled
            cuda.threadfence()
            slot = slot_of(block, me)
            for t in range(numbers):
                for e in range(4):
                    acc[t, e] += stream.slots[slot + (4 * t + e) * threads]
        return True

    return complete if streams else is_whole


@cache
def _make_write(layout: ProductLayout, form: ProductForm) -> Callable[..., None]:
    """Return ``write(acc, target, steps, tile, item, me, shape)``: write a warpgroup's tile to a result."""
    write_floats = make_write_floats(1, layout.cols // COLS)

    @device_function
    def write_numbers(acc, target, steps, tile, item, me, shape):
        row = int32(item.row + me * ROWS + cuda.threadIdx.x // 32 % 4 * 16)
        write_floats(acc, target, steps, item, row, item.col, shape)

    return make_write_tile(layout, form) or write_numbers


def _make_consume(
    layout: ProductLayout, form: ProductForm, operands: Pipeline, b_offset: int, out_offset: int
) -> Callable[..., None]:
    """Return ``consume(me, memory, out, before_gelu, bias, out_steps, *work)`` for the consumers.

    It multiplies the tiles and writes the results.
    """
    planes, own_out = form.planes, layout.panels * ROWS * LINE
    own_share, is_left, take = make_shares(layout, form.streams)
    complete = _make_complete(layout, form.streams)
    a_size, b_size = layout.a_bytes >> 4, layout.b_bytes >> 4
    col_tiles, terms, promotes = layout.cols // 8, TERMS[planes], planes > 1
    term_count = len(terms)
    a_planes, b_planes = (tuple(term[i] for term in terms) for i in (0, 1))
    wait_for_all, wait_for_last = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    # An operand whose lines run across the depth lies in panels of 64 of them.
    turned_panel = form.depth * LINE
    multiply = make_wgmma(
        layout.cols, form.dtype, a_transposed=form.a_turned, b_transposed=form.b_turned
    )
    a_layout = descriptor_layout(LINE, 16, 8 * LINE)
    b_layout = descriptor_layout(LINE, turned_panel if form.b_turned else 16, 8 * LINE)
    a_step, b_step = (
        (16 * LINE if is_turned else LINE // STEPS) >> 4
        for is_turned in (form.a_turned, form.b_turned)
    )
    write, (add_bias, activate) = _make_write(layout, form), make_epilogue(1, col_tiles, form.out)
    is_half, has_bias = form.out != "float32", form.has_bias
    has_gelu, keeps = form.has_gelu, form.keeps_input

    @device_function
    def consume(me, memory, out, before_gelu, bias, out_steps, stream, shape, order):
        warp, lane = int32(cuda.threadIdx.x // 32 % 4), int32(cuda.threadIdx.x % 32)
        acc = cuda.local.array((col_tiles, 4), float32)  # (64, cols) / 128: a·b
        sums = cuda.local.array((col_tiles, 4), float32)  # (64, cols) / 128: with planes, a·b
        a_desc = descriptor(a_layout, memory + me * (ROWS * LINE))
        b_desc = descriptor(b_layout, memory + b_offset)
        own_tile = memory + out_offset + me * own_out
        tiles, at = placed(operands, memory), start()
        share = own_share(stream, shape, order)
        while is_left(share, stream, shape, order):
            item, share = take(share, stream, shape, order)
            before = start()  # the stage of the products before
            if promotes:
                for t in range(col_tiles):
                    for e in range(4):
                        sums[t, e] = float32(0)
            for k in range(item.first, item.stop):
                wait(tiles, at)
                wgmma_fence()
                for n in range(term_count):
                    a_at = a_desc + (at.stage * planes + a_planes[n]) * a_size
                    b_at = b_desc + (at.stage * planes + b_planes[n]) * b_size
                    for t in range(STEPS):
                        is_first = n + t == 0 and (promotes or k == item.first)
                        multiply(acc, a_at + t * a_step, b_at + t * b_step, not is_first)
                wgmma_commit_group()
                if promotes:
                    # Tensor cores cut off what does not fit into a sum; float32 additions round it.
                    wait_for_all()  # the sums are there, and the stage was read
                    release(tiles, at, lane)
                    for t in range(col_tiles):
                        for e in range(4):
                            sums[t, e] += acc[t, e]
                else:
                    wait_for_last()  # the stage of the products before was read
                    if k > item.first:
                        release(tiles, before, lane)
                before, at = at, following(tiles, at)
            if not promotes:
                wait_for_all()  # the sums are whole, and the last stage was read
                release(tiles, before, lane)
            result = sums if promotes else acc
            if complete(result, item, me, stream, shape, order):
                if has_bias:
                    add_bias(result, bias, item.h, item.col + 2 * (lane % 4), shape[1])
                if keeps:
                    write(result, before_gelu, out_steps, own_tile, item, me, shape)
                if has_gelu:
                    activate(result)
                write(result, out, out_steps, own_tile, item, me, shape)
        if is_half and warp == 0 and lane == 0:
            wait_for_reads()  # of the last result

    return consume


@cache
def product_kernel(layout: ProductLayout, form: ProductForm) -> Kernel:
    """Return the kernel for one layout and one form."""
    tiles = shared_tiles(layout, form)
    barriers = Barriers(tiles["barriers"])
    operands = barriers.pipeline(
        tiles["a"], form.planes * layout.a_bytes, layout.stages, emptied_by=4 * layout.consumers
    )
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce = _make_produce(layout, form, operands, tiles["b"])
    consume = _make_consume(layout, form, operands, tiles["b"], tiles["out"])

    def product_wgmma(a_map, b_map, out, before_gelu, bias, out_steps, stream, shape, order):
        """Multiply matrix after matrix, tile after tile.

        Computes: out = gelu(a·b + bias) for each batch and head; bias and GELU if asked for; the
            depth may be divided into parts, whose sums lie one after the other, or
            among all blocks, see ``Stream``; or the products of all heads are summed
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
        memory = enter()  # stages of a, those of b, the result, barriers
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                produce(memory, a_map, b_map, stream, shape, order)
        else:
            take_registers()
            me = int32(warpgroup - 1)
            consume(me, opaque(memory), out, before_gelu, bias, out_steps, stream, shape, order)

    is_half = form.out != "float32"
    from_map = MAPS if is_half else types.Array(float32, 1, "C")
    one_bias = types.Array(uint16 if is_half else float32, 1, "C") if form.has_bias else int64
    signature = void(
        MAPS, MAPS, from_map, from_map if form.keeps_input else int64, one_bias,
        types.UniTuple(int64, 5), STREAM if form.streams else int64, SHAPE,
        types.NamedUniTuple(int32, 4, Order),
    )  # fmt: skip
    return Kernel(product_wgmma, signature, layout.threads, block_bytes(tiles))
