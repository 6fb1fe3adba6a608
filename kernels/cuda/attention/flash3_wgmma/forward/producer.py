"""The producer warpgroup of Hopper's forward kernels: one thread schedules, another copies K and V.

The scheduler finds work items, publishes them and loads Q.  It runs ahead of the producer of keys and
values and of the consumers.  An item's bounds are computed once, before the previous item ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.cuda.attention.flash3_wgmma.layout import (
    ITEM_NUMBERS,
    LISTED,
    ForwardPipelines,
    KernelForm,
)
from kernels.cuda.attention.flash3_wgmma.tile_walk import WorkItem, make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import Source, make_load_tile, reset_items
from kernels.cuda.device.one_source import tiles_stop
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
from kernels.cuda.ptx.bulk import wait_for_reads
from kernels.cuda.ptx.copies import global_address, ld_shared, st_shared
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32


@device_function
def publish_item(at, item):
    """Write an item to shared memory."""
    st_shared(at, item.first)
    st_shared(at + 4, item.stop)
    st_shared(at + 8, item.full)
    st_shared(at + 12, item.full_stop)
    st_shared(at + 16, item.line)
    st_shared(at + 20, item.b)
    st_shared(at + 24, item.h)
    st_shared(at + 28, item.flat)
    st_shared(at + 32, item.place)
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


def make_produce_items(
    form: KernelForm, pipelines: ForwardPipelines, panels: int
) -> Callable[..., None]:
    """Return ``produce_items(memory, q_map, work)``, which one thread calls."""
    consumers, block_q, block_k = form.layout.consumers, form.layout.block_q, form.layout.block_k
    load_q, q_bytes = make_load_tile(panels, block_q * LINE), panels * block_q * LINE
    item_at, of_queries, of_items = make_walk(form.features, block_q, block_k).item, *pipelines[:2]
    is_listed, is_packed = form.features.block_mask, form.features.packed

    @device_function
    def count_skipped(consumer, item, extras):
        own = item.place + consumer * ROWS
        row_stop = min(item.place + block_q, item.rows)
        if own >= row_stop:  # it has no rows
            return int32(item.stop - item.first)
        visible = tiles_stop(min(own + ROWS, row_stop), block_k, item.cols, extras.upper)
        return int32(min(item.stop - visible, item.stop - item.first))

    @device_function
    def produce_items(memory, q_map, work):
        q = Source(global_address(q_map), work.shape.q_by_head, work.shape.q_by_batch)
        queries, published, at = placed(of_queries, memory), placed(of_items, memory), start()
        number, items = int32(cuda.blockIdx.x), int32(work.schedule.tiles * work.schedule.heads)
        while number < items:
            after = cuda.atomic.add(work.next_item, 0, 1)  # early: the number arrives in time
            # 3: for 1 <= i <= T_r
            item, numbers = item_at(number, work), tile_at(published, at)
            acquire(published, at)  # all readers are done with the old item
            publish_item(numbers, item)
            # All consumers clear the tail of a sequence together.
            has_tail = is_packed and item.stop * block_k > item.cols
            for c in range(consumers):
                skipped = count_skipped(c, item, work.extras)
                skipped = int32(0) if is_listed or has_tail else skipped
                st_shared(skip_count_address(numbers, c), skipped)
            publish(published, at)
            # 4: load Q_i
            acquire(queries, at)  # the output in this slot has been copied
            full = commit(queries, at, q_bytes)
            load_q(tile_at(queries, at), q, full, item.first_q + item.place, item)
            at = following(queries, at)
            number = int32(cuda.gridDim.x + after)
        acquire(published, at)  # all readers are done with the old item
        st_shared(tile_at(published, at), int32(-1))  # there are no more items
        st_shared(tile_at(published, at) + WORD, int32(-1))
        publish(published, at)  # the producer of keys may end
        publish(queries, at)  # the consumers, which wait for q, may end
        reset_items(work.next_item)

    return produce_items


def make_produce_tiles(
    form: KernelForm, pipelines: ForwardPipelines, fetch_k: Any, fetch_v: Any
) -> Callable[..., None]:
    """Return ``produce_tiles(memory, k_map, v_map, work)``, with which one thread copies keys and values.

    ``fetch_k`` and ``fetch_v`` copy a tile, see ``tiles.make_fetch``.
    """
    _, of_items, of_keys, of_values, list_offset = pipelines
    block_k, is_listed = form.layout.block_k, form.features.block_mask
    _, _, tile_of, pattern_of = make_walk(form.features, form.layout.block_q, block_k)

    @device_function
    def produce_tiles(memory, k_map, v_map, work):
        shape, extras = work.shape, work.extras
        k = Source(global_address(k_map), shape.k_by_head, shape.k_by_batch)
        v = Source(global_address(v_map), shape.v_by_head, shape.v_by_batch)
        items, item_at = placed(of_items, memory), start()
        keys, values, at = placed(of_keys, memory), placed(of_values, memory), start()
        wait(items, item_at)  # the first item is published
        item = read_item(tile_at(items, item_at))
        while item.first >= 0:
            # Released after the read: the scheduler could otherwise overwrite an item that has no tiles.
            release_alone(items, item_at)
            # 6: for 1 <= j <= T_c, backwards: partially masked tiles come first
            for n in range(int32(item.stop - item.first)):
                j = tile_of(int32(item.stop - 1 - n), extras)
                col = item.first_k + j * block_k
                # 7: load K_j, V_j
                if is_listed:
                    acquire(keys, at)  # the previous K of this stage was read
                    # The tile, and the index of its words in the block mask.
                    listed = memory + list_offset + LISTED * at.stage
                    st_shared(listed, j)
                    st_shared(listed + WORD, pattern_of(int32(item.stop - 1 - n), extras))
                fetch_k(keys, at, k, col, item, (0, 0))
                at = fetch_v(values, at, v, col, item, (0, 0))
            item_at = following(items, item_at)
            wait(items, item_at)  # the next item is published
            item = read_item(tile_at(items, item_at))

    return produce_tiles
