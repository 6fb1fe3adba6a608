"""Steps on a tile that Hopper's forward and backward kernels share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash3_wgmma.dropout_bits import offset_of
from kernels.cuda.attention.flash3_wgmma.layout import CLEAR_BARRIER, WARPGROUP_BARRIER, KernelForm
from kernels.cuda.attention.options.tile_scores import is_inside
from kernels.cuda.device.half import EIGHT
from kernels.cuda.device.pipeline import acquire, commit, following, tile_at
from kernels.cuda.device.warpgroups import LINE, PANEL, WARPGROUP, store_pairs
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    cp_async_bulk_load,
    tensor_load,
    tensor_store,
    wait_for_reads,
)
from kernels.cuda.ptx.copies import (
    global_address,
    ld_shared,
    ld_shared_v4,
    st_global_v4,
    st_shared_v4,
)
from kernels.cuda.ptx.fragments import square_place
from kernels.cuda.ptx.numbers import PACK, mul_rn, sub_rn
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.ptx.wgmma import (
    KINDS,
    ROWS,
    descriptor_layout,
    make_wgmma,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64, uint32

ZERO = np.float32(0)
#: Descriptor layout of tiles whose rows run along the depth of a product.
ALONG = descriptor_layout(LINE, 16, 8 * LINE)


class Source(NamedTuple):
    """A tensor that the copy engine reads."""

    tensor: Any  # Address of its map
    by_head: Any  # Factor of the head index, 0 if heads repeat
    by_batch: Any  # Factor of the batch index


class ConsumerThread(NamedTuple):
    """The position of a thread in a consumer warpgroup."""

    me: Any  # Number of the consumer
    thread: Any  # Number of the thread in its warpgroup
    lane: Any  # Number of the thread in its warp
    warp: Any  # Number of the warp in its warpgroup


@device_function
def own_thread(me):
    """Return the running thread of consumer ``me``."""
    thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
    return ConsumerThread(me, thread, lane, int32(cuda.threadIdx.x // 32 % 4))


@cache
def make_load_tile(panels: int, panel_bytes: int) -> Any:
    """Return ``load_tile(target, source, barrier, row, item)``: copy a tile panel by panel.

    ``source`` is a :class:`Source`, and ``item`` a record with the indices ``b`` and ``h``.
    """

    @device_function
    def load_tile(target, source, barrier, row, item):
        h, b = item.h * source.by_head, item.b * source.by_batch
        for panel in range(panels):
            to, place = target + panel * panel_bytes, (panel * PANEL, row, h, b)
            tensor_load(to, source.tensor, barrier, place)

    return load_tile


@cache
def make_fetch(load: Any, size: int, numbers_bytes: int = 0) -> Any:
    """Return ``fetch(stages, at, source, row, item, numbers)``: copy a tile into a stage, return the next.

    ``load`` issues the copy of ``size`` bytes, see :func:`make_load_tile`.  With the tile come
    ``numbers_bytes`` of the same rows of a float32 vector: ``numbers`` are the address in shared memory at
    which the vectors of all stages begin, and that in global memory.
    """

    @device_function
    def fetch(stages, at, source, row, item, numbers):
        acquire(stages, at)  # what was there before was read
        full = commit(stages, at, size + numbers_bytes)
        load(tile_at(stages, at), source, full, row, item)
        if numbers_bytes > 0:
            to = numbers[0] + at.stage * numbers_bytes
            cp_async_bulk_load(to, numbers[1], numbers_bytes, full)
        return following(stages, at)

    return fetch


def make_fetch_tile(panels: int, panel_bytes: int, numbers_bytes: int = 0) -> Any:
    """Return the function of :func:`make_fetch` for a tile of panels."""
    load, size = make_load_tile(panels, panel_bytes), panels * panel_bytes
    return make_fetch(load, size, numbers_bytes)


@device_function
def reset_items(next_item):
    """Reset the counters for the next launch; the producer of the last block to end calls it."""
    if cuda.atomic.add(next_item, 1, 1) == cuda.gridDim.x - 1:
        next_item[0], next_item[1] = 0, 0


@cache
def make_multiply(cols: int, dtype: str, depth: int, left_panel: int, right_panel: int) -> Any:
    """Return ``multiply(acc, left, right)``: acc = A Bᵀ, rows along the depth, a group of products.

    B has ``cols`` rows, and both have ``depth`` columns, a multiple of 32 bytes.
    """
    begin, add = make_wgmma(cols, dtype, begins=True), make_wgmma(cols, dtype)
    steps = depth // KINDS[dtype][1]

    @device_function
    def multiply(acc, left, right):
        for t in range(steps):
            # A step is 32 bytes; four are a line of a panel.
            panel, step = t // 4, 2 * (t % 4)
            a, b = (
                left + panel * (left_panel >> 4) + step,
                right + panel * (right_panel >> 4) + step,
            )
            if t == 0:
                begin(acc, a, b)
            else:
                add(acc, a, b, 1)

    return multiply


def make_issue(multiply: Any) -> Any:
    """Return ``issue(acc, left, right)``, which starts ``multiply`` as a group of its own."""

    @device_function
    def issue(acc, left, right):
        wgmma_fence()
        multiply(acc, left, right)
        wgmma_commit_group()

    return issue


@cache
def make_multiply_dq(cols: int, dtype: str, depth: int) -> Any:
    """Return ``multiply(acc, left, right)``: acc = Aᵀ B, both stored by rows, a group of products.

    B has ``cols`` columns, and both have ``depth`` rows, a multiple of 16.
    """
    begin, add = (
        make_wgmma(cols, dtype, a_transposed=True, b_transposed=True, begins=begins)
        for begins in (True, False)
    )
    steps = depth // 16

    @device_function
    def multiply(acc, left, right):
        for t in range(steps):
            step = t * (16 * LINE >> 4)
            if t == 0:
                begin(acc, left + step, right + step)
            else:
                add(acc, left + step, right + step, 1)

    return multiply


@cache
def make_accumulate(cols: int, dtype: str, depth: int) -> Any:
    """Return ``accumulate(acc, pairs, right, has_sums)``: acc += A B, A in registers.

    B is stored by rows; bytes are stored by columns, which 8-bit instructions cannot transpose.  B has
    ``cols`` columns and ``depth`` rows, a multiple of 32 bytes.
    """
    step_depth, is_half = KINDS[dtype][1], dtype in PACK
    multiply = make_wgmma(cols, dtype, a_in_registers=True, b_transposed=is_half)
    steps, step = depth // step_depth, (step_depth * LINE if is_half else step_depth) >> 4

    @device_function
    def accumulate(acc, pairs, right, has_sums):
        for t in range(steps):
            multiply(acc, pairs[t], right + t * step, has_sums + t > 0)

    return accumulate


@device_function
def lowered(product, scale, top):
    """Return scale · product - top, where ``top`` is 0 or large.

    A large one is a rounded product itself, or near one, which a fused subtraction would not meet.
    """
    return sub_rn(mul_rn(product, scale), top)


@cache
def make_pack(dtype: str, depth: int) -> Any:
    """Return ``pack(pairs, numbers)``: round accumulators to the left operand of the next product.

    Both have the same layout.
    """
    pack, steps = PACK[dtype], depth // 16

    @device_function
    def pack_tile(pairs, numbers):
        for t in range(steps):
            pairs[t, 0] = pack(numbers[2 * t, 0], numbers[2 * t, 1])
            pairs[t, 1] = pack(numbers[2 * t, 2], numbers[2 * t, 3])
            pairs[t, 2] = pack(numbers[2 * t + 1, 0], numbers[2 * t + 1, 1])
            pairs[t, 3] = pack(numbers[2 * t + 1, 2], numbers[2 * t + 1, 3])

    return pack_tile


@cache
def make_clear_rows(consumers: int, rows: int, panels: int) -> Any:
    """Return ``clear_rows(first, tile)``: zero the rows of a tile from ``first`` on.

    If a packed sequence ends within a tile, these rows belong to the next sequence.  The copy engine copies
    them too, and if they are infinite, their product with a probability of zero is NaN.  All threads of all
    consumers call the function.
    """
    chunks, panel_bytes, threads = LINE // CHUNK, rows * LINE, WARPGROUP * consumers

    @device_function
    def clear_rows(first, tile):
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        begin = int32(first * chunks + int32(cuda.threadIdx.x - WARPGROUP))
        for panel in range(panels):  # the swizzle leaves each row in its line
            for n in range(begin, rows * chunks, threads):
                st_shared_v4(tile + panel * panel_bytes + n * CHUNK, zeros)
        fence_proxy_async()  # the zeros are visible to products
        bar_sync(CLEAR_BARRIER, threads)  # the rest is zeros

    return clear_rows


@cache
def make_hide(cols: int, by_keys: bool) -> Any:
    """Return ``hide(numbers, edge)``: zero the elements outside the bounds or the arrays."""
    tiles, offset = cols // 8, offset_of(by_keys)

    @device_function
    def hide(numbers, edge):
        for t in range(tiles):
            for i in range(4):
                r, c = offset(t, i)
                if not is_inside(edge, r, c):
                    numbers[t, i] = ZERO

    return hide


@cache
def make_hide_pairs(cols: int) -> Any:
    """Return ``hide_pairs(pairs, edge)``: :func:`make_hide` for packed pairs, with keys as rows."""
    tiles = cols // 8

    @device_function
    def hide_pairs(pairs, edge):
        for t in range(tiles):
            for half in range(2):
                low = is_inside(edge, 8 * t, 8 * half)
                high = is_inside(edge, 8 * t + 1, 8 * half)
                kept = (0xFFFF if low else 0) | (0xFFFF0000 if high else 0)
                pairs[t // 2, 2 * (t % 2) + half] &= uint32(kept)

    return hide_pairs


@cache
def make_put_tile(panels: int, panel_bytes: int, is_packed: bool) -> Any:
    """Return ``put_tile(target, source, thread, b, h, row, left)``: write a warpgroup's rows to memory.

    Rows beyond ``left`` of packed sequences belong to the next one: the target is an array (batch, heads,
    seq, dim), to which all threads copy.  Otherwise it is a tensor map, and a single thread issues a copy,
    which omits rows beyond the end.
    """

    @device_function
    def copy_rows(target, source, thread, b, h, row, left):
        words, chunks = cuda.local.array(4, uint32), int32(target.shape[3] // EIGHT)  # words (4,)
        start = global_address(target) + int64(b) * target.strides[0] + int64(h) * target.strides[1]
        start += int64(row) * target.strides[2]
        for n in range(thread, min(left, ROWS) * chunks, WARPGROUP):
            r, chunk = n // chunks, n % chunks
            panel = source + chunk // 8 * panel_bytes + r * LINE
            ld_shared_v4(words, panel + ((chunk % 8 ^ r % 8) << 4))
            st_global_v4(start + int64(r) * target.strides[2] + int64(chunk * CHUNK), words)

    @device_function
    def store_rows(target, source, thread, b, h, row, left):
        for panel in range(panels):
            place = panel * PANEL, row, h, b
            tensor_store(global_address(target), place, source + panel * panel_bytes)

    return copy_rows if is_packed else store_rows


@device_function
def broadcast_number(place, lane):
    """Broadcast a number in shared memory to a warp; lane 0 reads it and may arrive for all lanes."""
    number = int32(0)
    if lane == 0:
        number = ld_shared(place)
    return cuda.shfl_sync(ALL_LANES, number, 0)


@cache
def make_write_tile(cols: int, dtype: str, panel_bytes: int) -> Any:
    """Return ``write_tile(tile, line, column, acc, factors, are_there, pairs)``: factor · acc in 16 bits.

    A lane has two rows, each with its own factor.  Rows that are not there, whose accumulators may never
    have been written, become zeros.  For ``line`` and ``column`` see :func:`store_pairs`.
    """
    pack, steps = PACK[dtype], cols // 16

    @device_function
    def write_tile(tile, line, column, acc, factors, are_there, pairs):
        for t in range(steps):
            for u in range(2):
                w, x = acc[2 * t + u, 0] * factors[0], acc[2 * t + u, 1] * factors[0]
                y, z = acc[2 * t + u, 2] * factors[1], acc[2 * t + u, 3] * factors[1]
                pairs[0, 2 * u] = pack(w, x) if are_there[0] else uint32(0)
                pairs[0, 2 * u + 1] = pack(y, z) if are_there[1] else uint32(0)
            store_pairs(tile, line, column, t, panel_bytes, pairs[0])

    return write_tile


def make_write_results(form: KernelForm, second_offset: int) -> Callable[..., None]:
    """Return ``write_results(own, memory, first, second, item, pairs)``, which writes 64 rows of an item.

    ``first`` and ``second`` are a result, its accumulators and its factor: of dK and dV in a kernel by
    keys, where one that is not computed is not read, and else of dQ alone.  They pass through the tiles of
    K and V, or of Q, which no one reads any more; ``pairs`` is overwritten.  ``second_offset`` is the
    offset of the tile for the second result.
    """
    by_keys, is_packed = form.by_keys, form.features.packed
    has_first, has_second = (form.parts.dk, form.parts.dv) if by_keys else (True, False)
    panel = form.sides[0] * LINE
    put_first, put_second = (make_put_tile(n, panel, is_packed) for n in form.panels)
    write_first, write_second = (make_write_tile(n, form.dtype, panel) for n in form.widths)

    @device_function
    def write_results(own, memory, first, second, item, pairs):
        r, c = square_place(own.lane)
        line, is_seen = own.me * ROWS + own.warp * 16 + r, item.first < item.stop
        if has_first:
            factors = first[2], first[2]
            write_first(memory, line, c, first[1], factors, (is_seen, is_seen), pairs)
        if has_second:
            factors = second[2], second[2]
            to = memory + second_offset
            write_second(to, line, c, second[1], factors, (is_seen, is_seen), pairs)
        fence_proxy_async()  # the copy engine sees them
        bar_sync(WARPGROUP_BARRIER + own.me, WARPGROUP)  # all rows of the warpgroup are there
        own_rows = memory + own.me * (ROWS * LINE)
        begin, size = (item.first_k, item.cols) if by_keys else (item.first_q, item.rows)
        row, left = begin + item.place + own.me * ROWS, size - item.place - own.me * ROWS
        if is_packed or own.thread == 0:
            if has_first:
                put_first(first[0], own_rows, own.thread, item.b, item.h, row, left)
            if has_second:
                to = own_rows + second_offset
                put_second(second[0], to, own.thread, item.b, item.h, row, left)
            cp_async_bulk_commit_group()
            wait_for_reads()  # the copies have read the tiles
        bar_sync(WARPGROUP_BARRIER + own.me, WARPGROUP)  # and copied: another item may come

    return write_results
