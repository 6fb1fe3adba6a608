"""The producer of the float8 forward kernel: one thread that loads tiles of keys and values."""

from __future__ import annotations

from collections.abc import Callable

from numba import int32

from kernels.cuda.attention.flash3_wgmma.float8.layout import places
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    read_item,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    ForwardLayout,
    Widths,
    item_bytes,
)
from kernels.cuda.attention.flash3_wgmma.tiles import (
    BARRIER,
    LOAD,
    make_load_tile,
)
from kernels.cuda.device.warpgroups import make_next
from kernels.cuda.ptx.barriers import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from kernels.cuda.ptx.copies import global_address
from kernels.cuda.runtime.kernel import device_function


def make_produce_tiles(layout: ForwardLayout, widths: Widths) -> Callable[..., None]:
    """Return ``produce_tiles(tile, barriers, k_map, v_map, shape)``: one thread loads keys and values."""
    at, block_k = places(layout, widths), layout.block_k
    k_offset, v_offset, k_size, v_size = at.tiles["k"], at.tiles["v"], at.k_size, at.v_size
    q_empty, ready, keys, values, empty = at[:5]
    number_offset, number_bytes = at.tiles["numbers"], item_bytes(layout)
    load_k = make_load_tile(1, k_size)
    next_stage, next_slot = make_next(layout.stages), make_next(layout.items)

    @device_function
    def produce_tiles(tile, barriers, k_map, v_map, shape):
        k_tensor, v_tensor, numbers = (
            global_address(k_map),
            global_address(v_map),
            tile + number_offset,
        )
        stage, phase, slot, item_phase = int32(0), int32(0), int32(0), int32(0)
        mbarrier_wait(barriers + ready, item_phase)  # the first item is published
        item = read_item(numbers)
        while item.tiles >= 0:
            # Read: an item without tiles may otherwise be followed by another in its place before.
            mbarrier_arrive(barriers + q_empty + BARRIER * slot)
            b, h = item.b, item.h
            # 6: for 1 <= j <= T_c, backwards: what bounds hide in part comes first
            for n in range(item.tiles):
                col = int32((item.stop - 1 - n) * block_k)
                # 7: load K_j, V_j
                full = barriers + keys + BARRIER * stage
                mbarrier_wait(full + empty, phase ^ 1)  # its K was read
                mbarrier_arrive_expect_tx(full, k_size)
                place = tile + k_offset + stage * k_size
                load_k(place, k_tensor, full, col, h * shape.k_by_head, b * shape.k_by_batch)
                full = barriers + values + BARRIER * stage
                mbarrier_wait(full + empty, phase ^ 1)  # its V was read
                mbarrier_arrive_expect_tx(full, v_size)
                place, own_head = tile + v_offset + stage * v_size, h * shape.v_by_head
                LOAD(place, v_tensor, full, (col, int32(0), own_head, b * shape.v_by_batch))
                stage, phase = next_stage(stage, phase)
            slot, item_phase = next_slot(slot, item_phase)
            mbarrier_wait(barriers + ready + BARRIER * slot, item_phase)  # the next one is, too
            item = read_item(numbers + number_bytes * slot)

    return produce_tiles
