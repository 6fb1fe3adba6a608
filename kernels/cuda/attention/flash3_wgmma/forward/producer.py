"""The producer of Hopper's forward kernels: one thread copies the tiles of K and V, item after item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import int32

from kernels.cuda.attention.flash3_wgmma.forward.scheduler import read_item
from kernels.cuda.attention.flash3_wgmma.layout import (
    LISTED,
    ForwardLayout,
    ForwardPipelines,
)
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.device.pipeline import (
    acquire,
    following,
    placed,
    release_alone,
    start,
    tile_at,
    wait,
)
from kernels.cuda.ptx.copies import global_address, st_shared
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.scores.program import Features


def make_produce_tiles(
    layout: ForwardLayout,
    features: Features,
    pipelines: ForwardPipelines,
    fetch_k: Any,
    fetch_v: Any,
) -> Callable[..., None]:
    """Return ``produce_tiles(memory, k_map, v_map, shape, extras)``, which one thread calls.

    Args:
        layout: Layout of the block.
        features: Options of the call.
        pipelines: Pipelines of the block.
        fetch_k: Copies a tile of k, see ``tiles.make_fetch``.
        fetch_v: Copies a tile of v.
    """
    _, of_items, of_keys, of_values, list_offset = pipelines
    block_k, is_listed = layout.block_k, features.block_mask
    _, _, tile_of, pattern_of = make_walk(features, layout.block_q)

    @device_function
    def produce_tiles(memory, k_map, v_map, shape, extras):
        k_tensor, v_tensor = global_address(k_map), global_address(v_map)
        items, item_at = placed(of_items, memory), start()
        keys, values, at = placed(of_keys, memory), placed(of_values, memory), start()
        wait(items, item_at)  # the first item is published
        item = read_item(tile_at(items, item_at))
        while item.tiles >= 0:
            # Released only once read: the scheduler could otherwise overwrite an item without tiles first.
            release_alone(items, item_at)
            b, h = item.b, item.h
            # 6: for 1 <= j <= T_c, backwards: partially masked tiles come first
            for n in range(item.tiles):
                j = tile_of(int32(item.stop - 1 - n), extras)
                col = item.first_k + j * block_k
                # 7: load K_j, V_j
                if is_listed:
                    acquire(keys, at)  # its K was read
                    # The tile, and the index of its words in the block mask.
                    listed = memory + list_offset + LISTED * at.stage
                    st_shared(listed, j)
                    st_shared(listed + WORD, pattern_of(int32(item.stop - 1 - n), extras))
                fetch_k(keys, at, k_tensor, col, h * shape.k_by_head, b * shape.k_by_batch)
                at = fetch_v(values, at, v_tensor, col, h * shape.v_by_head, b * shape.v_by_batch)
            item_at = following(items, item_at)
            wait(items, item_at)  # the next one is, too
            item = read_item(tile_at(items, item_at))

    return produce_tiles
