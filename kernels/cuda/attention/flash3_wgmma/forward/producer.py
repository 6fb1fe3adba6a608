"""The producer of Hopper's forward kernel: one thread copies the tiles of K and V, item after item."""

from __future__ import annotations

from collections.abc import Callable

from numba import int32

from kernels.cuda.attention.flash3_wgmma.forward.scheduler import read_item
from kernels.cuda.attention.flash3_wgmma.layout import (
    LISTED,
    ForwardLayout,
    ForwardPipelines,
    Widths,
    shared_tiles,
)
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import make_fetch_tile
from kernels.cuda.device.pipeline import (
    acquire,
    following,
    placed,
    release_alone,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.copies import global_address, st_shared
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.scores.program import Features


def make_produce_tiles(
    layout: ForwardLayout, widths: Widths, features: Features, pipelines: ForwardPipelines
) -> Callable[..., None]:
    """Return ``produce_tiles(memory, k_map, v_map, shape, extras)``, which one thread calls.

    Args:
        layout: Layout of the block.
        widths: Widths of the kernel.
        features: Options of the call.
        pipelines: Pipelines of the block.
    """
    _, of_items, of_keys, of_values = pipelines
    block_k = layout.block_k
    fetch_k, fetch_v = (
        make_fetch_tile(n, block_k * LINE) for n in (widths.head_panels, widths.value_panels)
    )
    _, _, tile_of, pattern_of = make_walk(features, layout.block_q)
    # For each stage: its tile, and the number of the tile's words in the block mask.
    list_offset, is_listed = shared_tiles(layout, widths, features)["listed"], features.block_mask

    @device_function
    def produce_tiles(memory, k_map, v_map, shape, extras):
        k_tensor, v_tensor = global_address(k_map), global_address(v_map)
        items, item_at = placed(of_items, memory), start()
        keys, values, at = placed(of_keys, memory), placed(of_values, memory), start()
        wait(items, item_at)  # the first item is published
        item = read_item(tile_at(items, item_at))
        while item.tiles >= 0:
            # Read: an item without tiles may otherwise be followed by another in its place before.
            release_alone(items, item_at)
            b, h = item.b, item.h
            # 6: for 1 <= j <= T_c, backwards: what bounds hide in part comes first
            for n in range(item.tiles):
                j = tile_of(int32(item.stop - 1 - n), extras)
                col = item.first_k + j * block_k
                # 7: load K_j, V_j
                if is_listed:
                    acquire(keys, at)  # its K was read
                    listed = memory + list_offset + LISTED * at.stage
                    st_shared(listed, j)
                    st_shared(listed + WORD, pattern_of(int32(item.stop - 1 - n), extras))
                fetch_k(keys, at, k_tensor, col, h * shape.k_by_head, b * shape.k_by_batch)
                at = fetch_v(values, at, v_tensor, col, h * shape.v_by_head, b * shape.v_by_batch)
            item_at = following(items, item_at)
            wait(items, item_at)  # the next one is, too
            item = read_item(tile_at(items, item_at))

    return produce_tiles
