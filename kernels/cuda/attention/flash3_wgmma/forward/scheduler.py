"""The scheduler of Hopper's forward kernels: one thread finds work items, publishes them and loads Q.

It runs ahead of the producer of keys and values and of the consumers.  An item's bounds are computed once
for all of them, before the previous item ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import int32

from kernels.cuda.attention.flash3_wgmma.layout import (
    ITEM_NUMBERS,
    LISTED,
    ForwardLayout,
    ForwardPipelines,
    item_of,
)
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import make_load_tile, reset_items
from kernels.cuda.device.one_source import first_full_tile, first_tile, full_tiles_stop, tiles_stop
from kernels.cuda.device.pipeline import (
    StagePhase,
    acquire,
    commit,
    following,
    placed,
    publish,
    release_alone,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.bulk import make_cp_async_bulk_wait_group
from kernels.cuda.ptx.copies import global_address, ld_shared, st_shared
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.scores.program import Features

wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)


class WorkItem(NamedTuple):
    """A work item; all numbers are int32.

    Attributes:
        tiles: Number of visited tiles; -1 if there are no more items.
        stop: One past the last visited entry: a tile, or an index in the block mask's list.
        full: The first tile that is fully within the bounds.
        full_stop: One past the last of these tiles.
        line: Index of (batch, head).
        b: Batch index.
        h: Head index.
        flat: Flat index of (batch, head).
        row: First row, counted from the start of its sequence.
        first_q: First row of the sequence in q.
        rows: Rows of the sequence.
        first_k: First row of the sequence in k.
        cols: Columns of the sequence.
    """

    tiles: Any
    stop: Any
    full: Any
    full_stop: Any
    line: Any
    b: Any
    h: Any
    flat: Any
    row: Any
    first_q: Any
    rows: Any
    first_k: Any
    cols: Any


@device_function
def publish_item(at, item):
    """Write an item to shared memory."""
    st_shared(at, item.tiles)
    st_shared(at + 4, item.stop)
    st_shared(at + 8, item.full)
    st_shared(at + 12, item.full_stop)
    st_shared(at + 16, item.line)
    st_shared(at + 20, item.b)
    st_shared(at + 24, item.h)
    st_shared(at + 28, item.flat)
    st_shared(at + 32, item.row)
    st_shared(at + 36, item.first_q)
    st_shared(at + 40, item.rows)
    st_shared(at + 44, item.first_k)
    st_shared(at + 48, item.cols)


@device_function
def read_item(at):
    """Return the item that was written to an address in shared memory."""
    return WorkItem(
        ld_shared(at), ld_shared(at + 4), ld_shared(at + 8), ld_shared(at + 12),
        ld_shared(at + 16), ld_shared(at + 20), ld_shared(at + 24), ld_shared(at + 28),
        ld_shared(at + 32), ld_shared(at + 36), ld_shared(at + 40), ld_shared(at + 44),
        ld_shared(at + 48),
    )  # fmt: skip


@device_function
def read_listed(at, stage):
    """Return the tile in a stage, and the number of its words, from the address of the list."""
    return int32(ld_shared(at + LISTED * stage)), int32(ld_shared(at + LISTED * stage + WORD))


@device_function
def skip_count_address(at, consumer):
    """Return the address of a consumer's skip count, the number of leading tiles masked for its rows."""
    return at + WORD * (ITEM_NUMBERS + consumer)


@device_function
def read_skip_count(at, consumer):
    """Return the number of leading tiles of an item that a consumer skips."""
    return int32(ld_shared(skip_count_address(at, consumer)))


@device_function
def next_item(queries, items, at, consumer):
    """Wait for an item and its Q; return it, and the number of leading tiles that a consumer skips."""
    wait(queries, at)  # the item was published before the bytes of its Q were announced
    numbers = tile_at(items, at)
    return read_item(numbers), read_skip_count(numbers, consumer)


@device_function
def release_slot(queries, thread, slot):
    """Free the slot from which out was copied, if any, for the next q; thread 0 issued the copy.

    All threads wait, even those that issued nothing, because a branch for one thread would serialize the
    products.
    """
    wait_for_reads()  # out was read: the slot is free
    if thread == 0 and slot >= 0:
        release_alone(queries, StagePhase(slot, slot))


@cache
def make_produce_items(
    layout: ForwardLayout, features: Features, pipelines: ForwardPipelines, panels: int
) -> Callable[..., None]:
    """Return ``produce_items(memory, q_map, next_item, shape, schedule, extras)``, which one thread calls.

    Args:
        layout: Layout of the block.
        features: Options of the call.
        pipelines: Pipelines of the block.
        panels: Panels of a tile of q.
    """
    consumers, block_q, block_k = layout.consumers, layout.block_q, layout.block_k
    load_q, q_bytes = make_load_tile(panels, block_q * LINE), panels * block_q * LINE
    place, entries, _, _ = make_walk(features, block_q)
    of_queries, of_items = pipelines[:2]
    is_listed, is_packed = features.block_mask, features.packed

    @device_function
    def count_skipped(consumer, row, row_stop, first, stop, cols, extras):
        own = row + consumer * ROWS
        if own >= row_stop:  # it has no rows
            return int32(stop - first)
        visible = tiles_stop(min(own + ROWS, row_stop), block_k, cols, extras.upper)
        return int32(min(stop - visible, stop - first))

    @device_function
    def produce_items(memory, q_map, next_item, shape, schedule, extras):
        q_tensor, items = global_address(q_map), int32(schedule.tiles * schedule.heads)
        queries, published, at = placed(of_queries, memory), placed(of_items, memory), start()
        item = int32(cuda.blockIdx.x)
        while item < items:
            after = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
            # 3: for 1 <= i <= T_r
            i, line = item_of(item, schedule)
            b, h = int32(line // shape.heads), int32(line % shape.heads)
            flat, row, first_q, rows, first_k, cols = place(i, line, shape.rows, shape.cols, extras)
            row_stop = min(row + block_q, rows)
            first = int32(first_tile(row, block_k, cols, extras.lower))
            stop = int32(tiles_stop(row_stop, block_k, cols, extras.upper))
            full = int32(first_full_tile(row_stop, block_k, extras.lower))
            full_stop = int32(full_tiles_stop(row, block_k, cols, extras.upper))
            begin, end = entries(flat, row, rows, first, stop, extras)
            numbers = tile_at(published, at)
            acquire(published, at)  # all have read what was there
            publish_item(
                numbers,
                WorkItem(
                    int32(end - begin), end, full, full_stop, line, b, h, flat, row, first_q, rows,
                    first_k, cols,
                ),
            )  # fmt: skip
            # All consumers clear the tail of a sequence together.
            has_tail = is_packed and stop * block_k > cols
            for c in range(consumers):
                skipped = count_skipped(c, row, row_stop, first, stop, cols, extras)
                skipped = int32(0) if is_listed or has_tail else skipped
                st_shared(skip_count_address(numbers, c), skipped)
            publish(published, at)
            # 4: load Q_i
            acquire(queries, at)  # out was copied from there
            full = commit(queries, at, q_bytes)
            load_q(
                tile_at(queries, at), q_tensor, full, first_q + row, h * shape.q_by_head,
                b * shape.q_by_batch,
            )  # fmt: skip
            at = following(queries, at)
            item = int32(cuda.gridDim.x + after)
        acquire(published, at)  # all have read what was there
        st_shared(tile_at(published, at), int32(-1))  # no more of them
        publish(published, at)  # the producer of keys may end
        publish(queries, at)  # and the consumers, which wait for q
        reset_items(next_item)

    return produce_items
