"""The producers of Hopper's backward kernels: one thread, which takes items and copies their tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernels.cuda.attention.flash3_wgmma.backward.layout import tiles_of
from kernels.cuda.attention.flash3_wgmma.layout import KernelForm
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_row_base, make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import (
    Source,
    make_fetch_tile,
    make_load_tile,
    reset_items,
)
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
from kernels.runtime.types import int32, int64


class BackwardPipelines(NamedTuple):
    """The pipelines of a block."""

    own: Pipeline  # The tiles of an item: by keys of k and v, else of q and dout
    first: Pipeline  # The tiles that it visits, of q or k
    second: Pipeline  # The tiles that it visits, of dout or v


def backward_pipelines(form: KernelForm) -> tuple[BackwardPipelines, Barriers]:
    """Return the pipelines of a block, and all its barriers."""
    layout, tiles, warps = form.layout, tiles_of(form), 4 * form.layout.consumers
    barriers, (_, block) = Barriers(tiles["barriers"]), form.sides
    # By keys, each consumer thread empties them for itself: it has read the number of the item.
    emptied_by = WARPGROUP * layout.consumers if form.by_keys else warps
    names = ("k", "q", "dout") if form.by_keys else ("q", "k", "v")
    stages = (
        (layout.q_stages, layout.dout_stages)
        if form.by_keys
        else (layout.k_stages, layout.v_stages)
    )
    own = barriers.pipeline(tiles[names[0]], 0, 1, emptied_by)
    others = (
        barriers.pipeline(tiles[name], panels * block * LINE, count, warps)
        for name, panels, count in zip(names[1:], form.panels, stages, strict=True)
    )
    return BackwardPipelines(own, *others), barriers


def make_produce(form: KernelForm, pipelines: BackwardPipelines) -> Callable[..., None]:
    """Return ``produce(memory, maps, shifts, delta, work)``, with which one thread copies all tiles.

    ``maps`` are the tensor maps of q, k, v and dout.
    """
    (layout, _, _, features, parts), tiles, panels = form, tiles_of(form), form.panels
    by_keys, (own_block, block) = form.by_keys, form.sides
    has_second, second_offset = not by_keys or parts.dk, tiles["v" if by_keys else "dout"]
    rows_size, shifts_offset, delta_offset = 0, 0, 0
    if by_keys:
        rows_size, shifts_offset, delta_offset = block * WORD, tiles["shifts"], tiles["delta"]
    number_offset, (of_own, of_first, of_second) = tiles["number"], pipelines
    load_first, load_second = (make_load_tile(n, own_block * LINE) for n in panels)
    own_size = (panels[0] + panels[1] * has_second) * own_block * LINE
    fetch_first = make_fetch_tile(panels[0], block * LINE, 2 * rows_size)
    fetch_second = make_fetch_tile(panels[1], block * LINE, rows_size)
    _, item_of, tile_of, _ = make_walk(features, layout.block_q, layout.block_k, by_keys)
    row_base = make_row_base(features.packed)

    @device_function
    def produce(memory, maps, shifts, delta, work):
        shape, extras, (q_map, k_map, v_map, dout_map) = work.shape, work.extras, maps
        q = Source(global_address(q_map), shape.q_by_head, shape.q_by_batch)
        dout = Source(global_address(dout_map), shape.dout_by_head, shape.dout_by_batch)
        k = Source(global_address(k_map), shape.k_by_head, shape.k_by_batch)
        v = Source(global_address(v_map), shape.v_by_head, shape.v_by_batch)
        own_first, own_second, first, second = (k, v, q, dout) if by_keys else (q, dout, k, v)
        shift_rows, delta_rows = global_address(shifts), global_address(delta)
        own_tiles, at = placed(of_own, memory), start()
        first_tiles, first_at = placed(of_first, memory), start()
        second_tiles, second_at = placed(of_second, memory), start()
        number, items = int32(cuda.blockIdx.x), int32(work.schedule.tiles * work.schedule.heads)
        while number < items:
            after = cuda.atomic.add(work.next_item, 0, 1)  # it is there when it is needed
            # 5: for 1 <= j <= T_c
            item = item_of(number, work)
            base = row_base(item.flat, item.line, item.first_q, extras)
            own_start, start_of_others = item.first_q, item.first_k
            if by_keys:
                own_start, start_of_others = item.first_k, item.first_q
            # 6: load K_j, V_j, and say which they are
            acquire(own_tiles, at)  # the last gradients are copied
            st_shared(memory + number_offset, number)
            row, full = own_start + item.place, commit(own_tiles, at, own_size)
            load_first(memory, own_first, full, row, item)
            if has_second:
                load_second(memory + second_offset, own_second, full, row, item)
            at = following(own_tiles, at)
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
            for n in range(int32(item.stop - item.first)):
                entry = item.first + n if by_keys else item.stop - 1 - n
                row = int32(tile_of(entry, extras) * block)
                place = (int64(item.line) * delta.shape[1] + base + row) * WORD
                row += start_of_others
                # 9: load Q_i, L_i, then dO_i, D_i
                numbers = memory + shifts_offset, shift_rows + 2 * place
                first_at = fetch_first(first_tiles, first_at, first, row, item, numbers)
                numbers = memory + delta_offset, delta_rows + place
                second_at = fetch_second(second_tiles, second_at, second, row, item, numbers)
            number = int32(cuda.gridDim.x + after)
        acquire(own_tiles, at)  # the last number was read
        st_shared(memory + number_offset, items)  # no more of them
        publish(own_tiles, at)  # the consumers may end
        reset_items(work.next_item)

    return produce
