"""The producer of Hopper's dK and dV kernel: one thread, which takes items and copies their tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import int32, int64

from kernels.cuda.attention.flash3_wgmma.backward.layout import KeyGradients, KeyLayout, key_tiles
from kernels.cuda.attention.flash3_wgmma.backward.tile_walk import make_row_base, make_visits_of
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.attention.flash3_wgmma.tiles import make_fetch_rows, make_load_tile, reset_items
from kernels.cuda.device.pipeline import (
    Barriers,
    Pipeline,
    acquire,
    commit,
    following,
    placed,
    publish,
    start,
)
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.copies import global_address, st_shared
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.scores.program import Features


class KeyPipelines(NamedTuple):
    """The pipelines of a block: the k and v tiles of an item, query tiles, and dout tiles."""

    keys: Pipeline
    queries: Pipeline
    douts: Pipeline


def key_pipelines(
    layout: KeyLayout, widths: Widths, parts: KeyGradients
) -> tuple[KeyPipelines, Barriers]:
    """Return the pipelines of a block, and all its barriers."""
    tiles, warps = key_tiles(layout, widths, parts), 4 * layout.consumers
    q_size, dout_size = (
        n * layout.block_q * LINE for n in (widths.head_panels, widths.value_panels)
    )
    barriers = Barriers(tiles["barriers"])
    # Each consumer thread empties the keys for itself: it has read the number of the item.
    keys = barriers.pipeline(tiles["k"], 0, 1, WARPGROUP * layout.consumers)
    queries = barriers.pipeline(tiles["q"], q_size, layout.q_stages, warps)
    douts = barriers.pipeline(tiles["dout"], dout_size, layout.dout_stages, warps)
    return KeyPipelines(keys, queries, douts), barriers


def make_produce(
    layout: KeyLayout,
    widths: Widths,
    parts: KeyGradients,
    features: Features,
    pipelines: KeyPipelines,
) -> Callable[..., None]:
    """Return the function of one thread, which takes items and copies their tiles.

    ``produce(memory, q_map, k_map, v_map, dout_map, shifts, delta, next_item, shape, schedule, extras)``
    """
    block_q, block_k, has_dk = layout.block_q, layout.block_k, parts.dk
    panels = widths.head_panels, widths.value_panels
    q_panel, k_panel, rows_size = block_q * LINE, block_k * LINE, block_q * WORD
    keys_size = (panels[0] + panels[1] * has_dk) * k_panel
    tiles, (of_keys, of_queries, of_douts) = key_tiles(layout, widths, parts), pipelines
    v_offset, number_offset = tiles["v"], tiles["number"]
    shifts_offset, delta_offset = tiles["shifts"], tiles["delta"]
    fetch_q = make_fetch_rows(panels[0], q_panel, 2 * rows_size)
    fetch_dout = make_fetch_rows(panels[1], q_panel, rows_size)
    load_k, load_v = (make_load_tile(n, k_panel) for n in panels)
    visit_of, tile_of, _ = make_visits_of(features, block_q, block_k, True)
    row_base = make_row_base(features.packed)

    @device_function
    def produce(
        memory, q_map, k_map, v_map, dout_map, shifts, delta, next_item, shape, schedule, extras
    ):
        q_tensor, dout_tensor = global_address(q_map), global_address(dout_map)
        k_tensor, v_tensor = global_address(k_map), global_address(v_map)
        shift_rows, delta_rows = global_address(shifts), global_address(delta)
        keys, at = placed(of_keys, memory), start()
        queries, q_at = placed(of_queries, memory), start()
        douts, dout_at = placed(of_douts, memory), start()
        item, items = int32(cuda.blockIdx.x), int32(schedule.tiles * schedule.heads)
        while item < items:
            after = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
            # 5: for 1 <= j <= T_c
            visit = visit_of(item, schedule, shape, extras)
            b, h, y = visit.b, visit.h, visit.y
            base = row_base(visit.flat, y, visit.first_q, extras)
            # 6: load K_j, V_j, and say which they are
            acquire(keys, at)  # the last dK and dV are copied
            st_shared(memory + number_offset, item)
            key, full = visit.first_k + visit.place, commit(keys, at, keys_size)
            load_k(memory, k_tensor, full, key, h * shape.k_by_head, b * shape.k_by_batch)
            if has_dk:
                load_v(
                    memory + v_offset, v_tensor, full, key, h * shape.v_by_head, b * shape.v_by_batch
                )  # fmt: skip
            at = following(keys, at)
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
            for n in range(int32(visit.stop - visit.first)):
                row = int32(tile_of(visit.first + n, extras) * block_q)
                place = (int64(y) * delta.shape[1] + base + row) * WORD
                row += visit.first_q
                # 9: load Q_i, L_i, then dO_i, D_i
                q_at = fetch_q(
                    queries, q_at, q_tensor, memory + shifts_offset, shift_rows + 2 * place, row,
                    h * shape.q_by_head, b * shape.q_by_batch,
                )  # fmt: skip
                dout_at = fetch_dout(
                    douts, dout_at, dout_tensor, memory + delta_offset, delta_rows + place, row,
                    h * shape.dout_by_head, b * shape.dout_by_batch,
                )  # fmt: skip
            item = int32(cuda.gridDim.x + after)
        acquire(keys, at)  # the last number was read
        st_shared(memory + number_offset, items)  # no more of them
        publish(keys, at)  # the consumers may end
        reset_items(next_item)

    return produce
