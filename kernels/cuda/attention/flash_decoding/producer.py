"""The warps that copy queries and keys, and values; each lane copies the keys of one page."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cuda.attention.flash3_wgmma.tiles import Source
from kernels.cuda.attention.flash_decoding.layout import (
    DecodingForm,
    DecodingPipelines,
    make_item_of,
)
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.pipeline import BARRIER, acquire, commit, following, placed, start, tile_at
from kernels.cuda.device.warpgroups import LINE, PANEL
from kernels.cuda.ptx.bulk import tensor_load
from kernels.cuda.ptx.copies import global_address
from kernels.cuda.runtime.kernel import WARP, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, uint32


def make_produce(
    form: DecodingForm, pipelines: DecodingPipelines, of_values: bool = False
) -> Callable[..., None]:
    """Return ``produce(memory, q_map, kv_map, work)``, which the lanes of one warp call.

    It copies queries and keys, or with ``of_values`` the values.  Each lane copies the keys of one page.  A
    copy is issued by one lane at a time, so that many small pages keep a warp busy, and a stage of keys is
    free before one of values is: each has a warp of its own.
    """
    block_k, is_paged = form.layout.block_k, form.features.is_paged
    q_panel, panel_bytes = form.layout.rows * LINE, block_k * LINE
    head_panels = form.widths.head_panels
    panels = form.widths.value_panels if of_values else head_panels
    pipeline = pipelines.values if of_values else pipelines.keys
    item_of = make_item_of(block_k)

    @device_function
    def place_of(col, item, work):
        """Return the page of a lane's keys, whose first one is ``col``, and their row there.

        Without pages they are the batch and the column.
        """
        if not is_paged:
            return item.b, col
        size, is_there = uint32(work.shape.page), 0 <= col < item.length
        place, row = uint32(uint32(col) // size), int32(uint32(col) % size)
        return (work.extras.tiles.table[item.b, place] if is_there else int32(0)), row

    @device_function
    def fetch(stages, at, source, live, place, shape):
        lane, row, h, page = place
        if lane == 0:
            acquire(stages, at)  # what was there before was read
            commit(stages, at, live * shape.copied * LINE * panels)
        cuda.syncwarp()
        if lane < live:
            full = stages.full + BARRIER * at.stage
            target = tile_at(stages, at) + lane * shape.copied * LINE
            h, page = h * source.by_head, page * source.by_batch
            for panel in range(panels):
                to = target + panel * panel_bytes
                tensor_load(to, source.tensor, full, (panel * PANEL, row, h, page))

    @device_function
    def fetch_q(queries, at, source, item, shape):
        acquire(queries, at)  # the item before is done with it
        full = commit(queries, at, head_panels * shape.group * shape.tokens * LINE)
        h, b = item.key_head * shape.group * source.by_head, item.b * source.by_batch
        for panel in range(head_panels):
            to = tile_at(queries, at) + panel * q_panel
            tensor_load(to, source.tensor, full, (panel * PANEL, item.token, h, b))

    @device_function
    def produce(memory, q_map, kv_map, work):
        shape, lane = work.shape, int32(cuda.threadIdx.x % WARP)
        q = Source(global_address(q_map), shape.q_by_head, shape.q_by_batch)
        source = Source(global_address(kv_map), shape.k_by_head, shape.k_by_batch)
        if of_values:
            source = Source(global_address(kv_map), shape.v_by_head, shape.v_by_batch)
        queries, q_at = placed(pipelines.queries, memory), start()
        stages, at = placed(pipeline, memory), start()
        for number in range(cuda.blockIdx.x, shape.items, cuda.gridDim.x):
            item = item_of(int32(number), work)
            if item.begin < item.stop:
                if not of_values:
                    if lane == 0:
                        fetch_q(queries, q_at, q, item, shape)
                    q_at = following(queries, q_at)
                col = int32((item.stop - 1) * block_k + lane * shape.copied)
                page, row = place_of(col, item, work)
                # 6: for 1 <= j <= T_c, backwards     7: load K_j, V_j
                for n in range(int32(item.stop - item.begin)):
                    left = item.length - (item.stop - 1 - n) * block_k
                    live = int32(ceil_div(min(left, block_k), shape.copied))
                    place = lane, row, item.key_head, page
                    col = int32(col - block_k)
                    # Of the next tile, while this one is waited for.
                    page, row = place_of(col, item, work)
                    fetch(stages, at, source, live, place, shape)
                    at = following(stages, at)

    return produce
