"""The producers of Hopper's backward kernels: one thread, which takes items and copies their tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from kernels.cuda.runtime.kernel import ALL_LANES, WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64


class BackwardPipelines(NamedTuple):
    """The pipelines of a thread block in the backward pass of flash3_wgmma."""

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


def make_entries(form: KernelForm) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``entry_of(item, n)`` and ``next_entry(item, n)``: the n-th entry that an item visits.

    The second returns the one after it, or the last.  By rows, the last tile comes first.  So it does where
    key tiles are added to dQ in their order: under a causal mask, they all visit the last query tile.
    """
    backwards = not form.by_keys or form.parts.ordered

    @device_function
    def entry_of(item, n):
        return int32(item.stop - 1 - n) if backwards else int32(item.first + n)

    @device_function
    def next_entry(item, n):
        if backwards:
            return int32(max(item.stop - 2 - n, item.first))
        return int32(min(item.first + n + 1, item.stop - 1))

    return entry_of, next_entry


def make_first_item(form: KernelForm) -> Callable[..., Any]:
    """Return ``first_item(work)``: the number of a block's first item, for a warp whose lanes all call it.

    Each block has one, except where blocks wait for each other: one that has not started must have none.
    """
    is_ordered = form.by_keys and form.parts.ordered

    @device_function
    def first_item(work):
        number = int32(cuda.blockIdx.x)
        if is_ordered:
            if cuda.threadIdx.x == 0:
                number = int32(cuda.atomic.add(work.next_item, 0, 1))
            number = cuda.shfl_sync(ALL_LANES, number, 0)
        return number

    return first_item


def make_produce(form: KernelForm, pipelines: BackwardPipelines) -> Callable[..., None]:
    """Return ``produce(memory, maps, shifts, delta, first, work)``, with which one thread copies all tiles.

    ``maps`` are the tensor maps of q, k, v and dout, and ``first`` is :func:`make_first_item`'s.
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
    row_base, (entry_of, _) = make_row_base(features.packed), make_entries(form)
    is_ordered = by_keys and parts.ordered

    @device_function
    def produce(memory, maps, shifts, delta, first, work):
        shape, extras, (q_map, k_map, v_map, dout_map) = work.shape, work.extras, maps
        q = Source(global_address(q_map), shape.q_by_head, shape.q_by_batch)
        dout = Source(global_address(dout_map), shape.dout_by_head, shape.dout_by_batch)
        k = Source(global_address(k_map), shape.k_by_head, shape.k_by_batch)
        v = Source(global_address(v_map), shape.v_by_head, shape.v_by_batch)
        own_left, own_right, left, right = (k, v, q, dout) if by_keys else (q, dout, k, v)
        shift_rows, delta_rows = global_address(shifts), global_address(delta)
        own_tiles, at = placed(of_own, memory), start()
        first_tiles, first_at = placed(of_first, memory), start()
        second_tiles, second_at = placed(of_second, memory), start()
        number, items = first, int32(work.schedule.tiles * work.schedule.heads)
        while number < items:
            after = int32(0)
            if not is_ordered:
                after = cuda.atomic.add(work.next_item, 0, 1)  # early: the number arrives in time
            # 5: for 1 <= j <= T_c
            item = item_of(number, work)
            base = row_base(item.flat, item.line, item.first_q, extras)
            own_start, start_of_others = item.first_q, item.first_k
            if by_keys:
                own_start, start_of_others = item.first_k, item.first_q
            # 6: load K_j, V_j, and say which they are
            acquire(own_tiles, at)  # the previous gradients have been copied
            st_shared(memory + number_offset, number)
            row, full = own_start + item.place, commit(own_tiles, at, own_size)
            load_first(memory, own_left, full, row, item)
            if has_second:
                load_second(memory + second_offset, own_right, full, row, item)
            at = following(own_tiles, at)
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
            for n in range(int32(item.stop - item.first)):
                row = int32(tile_of(entry_of(item, n), extras) * block)
                place = (int64(item.line) * delta.shape[1] + base + row) * WORD
                row += start_of_others
                # 9: load Q_i, L_i, then dO_i, D_i
                numbers = memory + shifts_offset, shift_rows + 2 * place
                first_at = fetch_first(first_tiles, first_at, left, row, item, numbers)
                numbers = memory + delta_offset, delta_rows + place
                second_at = fetch_second(second_tiles, second_at, right, row, item, numbers)
            if is_ordered:  # an item that waits for its block would hold up those after it
                number = int32(cuda.atomic.add(work.next_item, 0, 1))
            else:
                number = int32(cuda.gridDim.x + after)
        acquire(own_tiles, at)  # the previous number has been read
        st_shared(memory + number_offset, items)  # there are no more items
        publish(own_tiles, at)  # the consumers may end
        reset_items(work.next_item)

    return produce
