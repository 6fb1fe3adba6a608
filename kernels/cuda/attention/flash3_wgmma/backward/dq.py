"""FlashAttention-3 backward by query tiles: dQ, summed in the registers of a block in a fixed order.

This takes two products more than adding dQ up in the kernel by key tiles, but no waiting: dS stays in the
registers of the warpgroup that computed it, as P does in the forward kernel, which has the same loop.
Measured on an H200 at N = 16,384 in bfloat16, together with the kernel by key tiles: 441 TFLOP/s at d = 64
and 526 at 128; unordered additions reach 490 and 564.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from numba import float32, float64, int32, types, uint32, void

from kernels.cuda.attention.flash3_wgmma.backward.elementwise import make_passes
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    MAPS,
    ROW_NUMBERS,
    QueryLayout,
    query_tiles,
    shift_place,
    square_place,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.backward.tile_walk import make_row_base, make_visits_of
from kernels.cuda.attention.flash3_wgmma.layout import (
    CLEAR_BARRIER,
    SHAPE,
    WARPGROUP_BARRIER,
    Schedule,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import words_type
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tiles import (
    broadcast_number,
    make_accumulate,
    make_clear_rows,
    make_fetch_tile,
    make_load_tile,
    make_multiply,
    make_pack,
    make_put_tile,
    make_write_tile,
    reset_items,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.one_source import first_full_tile, full_tiles_stop
from kernels.cuda.device.pipeline import (
    Barriers,
    Pipeline,
    acquire,
    commit,
    following,
    make_prologue,
    opaque,
    placed,
    publish,
    release,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, WARPGROUP, block_bytes, own_warpgroup
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    make_cp_async_bulk_wait_group,
)
from kernels.cuda.ptx.copies import global_address, st_shared
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


class Pipelines(NamedTuple):
    """The pipelines of a block: the q and dout tiles of an item, k tiles, and v tiles."""

    rows: Pipeline
    keys: Pipeline
    values: Pipeline


def _make_produce(
    layout: QueryLayout, widths: Widths, features: Features, pipelines: Pipelines
) -> Callable[..., None]:
    """Return ``produce(memory, q_map, k_map, v_map, dout_map, next_item, shape, schedule, extras)``.

    One thread calls it; it takes items and copies their tiles.
    """
    block_q, block_k = layout.block_q, layout.block_k
    q_panel, k_panel = block_q * LINE, block_k * LINE
    panels = widths.head_panels, widths.value_panels
    rows_size = sum(panels) * q_panel
    tiles, (of_rows, of_keys, of_values) = query_tiles(layout, widths), pipelines
    dout_offset, number_offset = tiles["dout"], tiles["number"]
    load_q, load_dout = (make_load_tile(n, q_panel) for n in panels)
    fetch_k, fetch_v = (make_fetch_tile(n, k_panel) for n in panels)
    visit_of, tile_of, _ = make_visits_of(features, block_q, block_k, False)

    @device_function
    def produce(memory, q_map, k_map, v_map, dout_map, next_item, shape, schedule, extras):
        q_tensor, dout_tensor = global_address(q_map), global_address(dout_map)
        k_tensor, v_tensor = global_address(k_map), global_address(v_map)
        rows, at = placed(of_rows, memory), start()
        keys, k_at = placed(of_keys, memory), start()
        values, v_at = placed(of_values, memory), start()
        item, items = int32(cuda.blockIdx.x), int32(schedule.tiles * schedule.heads)
        while item < items:
            after = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
            visit = visit_of(item, schedule, shape, extras)
            b, h, row = visit.b, visit.h, visit.place + visit.first_q
            # 9: load Q_i, dO_i, and say which they are
            acquire(rows, at)  # the last dQ is copied
            st_shared(memory + number_offset, item)
            full = commit(rows, at, rows_size)
            load_q(memory, q_tensor, full, row, h * shape.q_by_head, b * shape.q_by_batch)
            load_dout(
                memory + dout_offset, dout_tensor, full, row, h * shape.dout_by_head,
                b * shape.dout_by_batch,
            )  # fmt: skip
            at = following(rows, at)
            for n in range(int32(visit.stop - visit.first)):
                col = visit.first_k + tile_of(visit.stop - 1 - n, extras) * block_k
                # 6: load K_j, V_j
                k_at = fetch_k(keys, k_at, k_tensor, col, h * shape.k_by_head, b * shape.k_by_batch)
                v_at = fetch_v(
                    values, v_at, v_tensor, col, h * shape.v_by_head, b * shape.v_by_batch
                )
            item = int32(cuda.gridDim.x + after)
        acquire(rows, at)  # the last number was read
        st_shared(memory + number_offset, items)  # no more of them
        publish(rows, at)  # the consumers may end
        reset_items(next_item)

    return produce


def _make_consume(
    layout: QueryLayout, widths: Widths, dtype: str, features: Features, pipelines: Pipelines
) -> Callable[..., None]:
    """Return ``consume(me, memory, dq_map, shifts, delta, shape, scale, schedule, mask_words, extras)``.

    The threads of consumer ``me`` call it; it multiplies and writes dq.
    """
    block_q, block_k = layout.block_q, layout.block_k
    consumer_threads = WARPGROUP * layout.consumers
    head_tiles, key_tiles, depth_steps = widths.head // 8, block_k // 8, block_k // 16
    q_panel, k_panel = block_q * LINE, block_k * LINE
    tiles, (of_rows, of_keys, of_values) = query_tiles(layout, widths), pipelines
    dout_offset, number_offset = tiles["dout"], tiles["number"]
    put_dq = make_put_tile(widths.head_panels, q_panel, features.packed)
    multiply_qk, multiply_dout_v = (
        make_multiply(block_k, dtype, width, q_panel, k_panel) for width in widths
    )
    accumulate, pack_tile = make_accumulate(widths.head, dtype, block_k), make_pack(dtype, block_k)
    write_dq = make_write_tile(widths.head, dtype, q_panel)
    # Rows of all run along the depth of S and dP, and those of k across that of dS K.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_but_one = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)
    visit_of, tile_of, pattern_of = make_visits_of(features, block_q, block_k, False)
    elements = make_elements(features, block_q, block_k, False)
    row_base = make_row_base(features.packed)
    factor_of, slope_scale_of = elements.factor, elements.slope_scale
    words, own_of, has_patterns = elements.words, line_of(features), features.has_patterns
    has_large_row, lower, weigh, slope_of = make_passes(features, block_q, block_k, dtype, False)
    fetch_bits = elements.fetch_bits
    is_packed = features.packed
    clear_keys = make_clear_rows(consumer_threads, block_k, widths.head_panels)

    @device_function
    def fetch(seen, mask_words, entry, lane, own_row, own, extras):
        col = int32(tile_of(entry, extras) * block_k)
        place = LanePlace(lane, own_row, int32(col + 2 * (lane % 4)), own)
        fetch_bits(seen, mask_words, pattern_of(entry, extras), place, extras)

    @device_function
    def consume(me, memory, dq_map, shifts, delta, shape, scale, schedule, mask_words, extras):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        warp = int32(thread // 32)
        # Of the warpgroup's 64 rows a thread has two, eight apart; of eight columns two.
        dq_acc = cuda.local.array((head_tiles, 4), float32)  # (64, head_dim) / 128: dQ
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        dp = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: dP, then dS
        ds = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: dS
        # (words,) each, bits: what of P dropout keeps; what is seen, and then pairs of a mask
        kept, seen = cuda.local.array(words, uint32), cuda.local.array(words, uint32)
        factor = factor_of(scale, extras)
        rows, at = placed(of_rows, memory), start()
        keys, k_at = placed(of_keys, memory), start()
        values, v_at = placed(of_values, memory), start()
        own_tile = memory + me * (ROWS * LINE)  # of q, and then of dq
        q_desc, dout_desc = descriptor(along, own_tile), descriptor(along, own_tile + dout_offset)
        r, c = square_place(lane)
        line = me * ROWS + warp * 16 + r
        wait(rows, at)  # Q_i and dO_i are there, and the item's number
        item = broadcast_number(memory + number_offset, lane)
        while item < int32(schedule.tiles * schedule.heads):
            visit = visit_of(item, schedule, shape, extras)
            first, stop, row, b, h = visit.first, visit.stop, visit.place, visit.b, visit.h
            own = own_of(visit.flat, b, h, visit.rows, visit.cols, extras)
            own_row = int32(row + me * ROWS + warp * 16 + lane // 4)
            row_stop = min(row + block_q, visit.rows)
            full = int32(first_full_tile(row_stop, block_k, extras.lower))
            full_stop = int32(full_tiles_stop(row, block_k, visit.cols, extras.upper))
            line_of = row_base(visit.flat, visit.y, visit.first_q, extras) + own_row
            of_row = shift_place(line_of)
            own_shifts = shifts[visit.y, of_row], shifts[visit.y, of_row + 8]
            own_tops = shifts[visit.y, of_row + ROWS], shifts[visit.y, of_row + ROWS + 8]
            is_large = has_large_row((own_shifts, own_tops))
            delta_0, delta_1 = delta[visit.y, line_of], delta[visit.y, line_of + 8]
            # dQ = 0 is what the first dS K begins with
            if first < stop:
                # 10: S = Q_i K_jᵀ, the first
                wait(keys, k_at)  # K_j is there
                wgmma_fence()
                multiply_qk(s, q_desc, descriptor(along, tile_at(keys, k_at)))
                wgmma_commit_group()
                fetch(seen, mask_words, int32(stop - 1), lane, own_row, own, extras)
                wait_for_all()  # S is there
                left = int32(visit.cols - tile_of(stop - 1, extras) * block_k)
                if is_packed and left < block_k:  # the rest is the next sequence's
                    clear_keys(int32(cuda.threadIdx.x - WARPGROUP), left, tile_at(keys, k_at))
                    fence_proxy_async()  # the zeros are visible to products
                    bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros
            before = start()  # the stage of the keys before
            for n in range(int32(stop - first)):
                j = tile_of(stop - 1 - n, extras)
                if is_large:
                    lower(s, (own_shifts, own_tops), float32(scale))
                # 13: dP = dO_i V_jᵀ, computed while the exponentials are taken
                wait(values, v_at)  # V_j is there
                wgmma_fence()
                multiply_dout_v(dp, dout_desc, descriptor(along, tile_at(values, v_at)))
                wgmma_commit_group()
                # 11: P = exp(S - L_i)
                place = LanePlace(lane, own_row, int32(j * block_k + 2 * (lane % 4)), own)
                # The words of a block mask hide what is out of bounds, too.
                is_whole = has_patterns or full <= j < full_stop
                weigh(
                    s, ds, kept, seen, mask_words, (own_shifts, own_tops), factor, is_whole,
                    pattern_of(stop - 1 - n, extras), place, extras,
                )  # fmt: skip
                wait_for_all()  # dP is there, and V_j was read; so were the keys of the last dS K
                release(values, v_at, lane)
                if n > 0:
                    release(keys, before, lane)
                v_at = following(values, v_at)
                # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                slope_of(s, dp, kept, (delta_0, delta_1), is_whole, place, extras)
                # The accumulators of dP lie as the left operand of dS K does.
                pack_tile(ds, dp)
                before, k_at = k_at, following(keys, k_at)
                # 10: the next S.  After the last tile it reads old data and is not used: products behind
                # a branch would wait for each other.
                if n + 1 < stop - first:
                    wait(keys, k_at)  # K_j is there
                wgmma_fence()
                multiply_qk(s, q_desc, descriptor(along, tile_at(keys, k_at)))
                wgmma_commit_group()
                # 15: dQ_i = dQ_i + dS K_j
                accumulate(dq_acc, ds, descriptor(across, tile_at(keys, before)), n)
                wgmma_commit_group()
                # Read the next tile's bits while the products run; after the last tile they are not used.
                entry = int32(max(stop - 2 - n, first))
                fetch(seen, mask_words, entry, lane, own_row, own, extras)
                wait_but_one()  # the next S is there; dS K may go on
            wait_for_all()  # dQ is whole, and the last keys were read
            if first < stop:
                release(keys, before, lane)
            # Write dQ_i, by way of the tile of q, which this warpgroup has read to the end
            factor_of_dq = float32(scale) * slope_scale_of(extras)
            write_dq(memory, line, c, dq_acc, factor_of_dq, first < stop, ds)
            fence_proxy_async()  # the copy engine sees them
            bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # all rows of the warpgroup are there
            own_first, left = visit.first_q + row + me * ROWS, visit.rows - row - me * ROWS
            if is_packed or thread == 0:
                put_dq(dq_map, own_tile, thread, b, h, own_first, left)
                cp_async_bulk_commit_group()
                wait_for_reads()  # the copy has read the tile
            bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # and copied: another q may come
            release(rows, at, lane)  # lane 0 has read the number for its warp
            at = following(rows, at)
            wait(rows, at)  # the next rows are there, and the item's number
            item = broadcast_number(memory + number_offset, lane)

    return consume


@cache
def dq_kernel(
    layout: QueryLayout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the kernel by query tiles for one layout, two widths and one dtype.

    Args:
        layout: Layout of the block.
        widths: Widths that it is compiled for.
        dtype: "float16" or "bfloat16": of q, k, v, dout and dq.
        features: Options of the call.
    """
    tiles, warps = query_tiles(layout, widths), 4 * layout.consumers
    k_size, v_size = (n * layout.block_k * LINE for n in (widths.head_panels, widths.value_panels))
    barriers = Barriers(tiles["barriers"])
    pipelines = Pipelines(
        rows=barriers.pipeline(tiles["q"], 0, 1, warps),
        keys=barriers.pipeline(tiles["k"], k_size, layout.k_stages, warps),
        values=barriers.pipeline(tiles["v"], v_size, layout.v_stages, warps),
    )
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce = _make_produce(layout, widths, features, pipelines)
    consume = _make_consume(layout, widths, dtype, features, pipelines)

    def flash3_dq(
        q_map, k_map, v_map, dout_map, dq_map, shifts, delta, next_item, shape, scale, schedule,
        mask_words, extras,
    ):  # fmt: skip
        """Fill dq, tile after tile.

        Computes: dq for tiles of query rows of (batch, head), one after the other
        Source: FlashAttention-3, Algorithm 2, for the order of the products; FlashAttention-2,
            Algorithm 2, lines 10, 11, 13, 14 and 15, by rows
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, 2 rows and block_k / 4 columns of S and dP, and of dQ 2 rows
            and head_dim / 4 columns, scattered as wgmma scatters them
        Shared: q_tile (block_q, head_dim), later dq, and dout_tile (block_q, value_dim); stages of
            k_tile (block_k, head_dim) and v_tile (block_k, value_dim), in panels of 64 columns,
            128-byte swizzle; barriers
        Registers: dq_acc (head_dim / 8, 4), s and dp (block_k / 8, 4), ds (block_k / 16, 4) packed
            pairs
        Global traffic: reads q, dout, shifts and delta once, k and v once per query tile; writes dq once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        memory = enter()  # q, dout, k, v, barriers, number of the item
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                produce(memory, q_map, k_map, v_map, dout_map, next_item, shape, schedule, extras)
        else:
            take_registers()
            consume(
                int32(warpgroup - 1), opaque(memory), dq_map, shifts, delta, shape, scale, schedule,
                mask_words, extras,
            )  # fmt: skip

    schedule = types.NamedUniTuple(int32, 3, Schedule)
    counters = types.Array(int32, 1, "C")
    gradient = array_type(BITS, 4) if features.packed else MAPS
    signature = void(
        MAPS, MAPS, MAPS, MAPS, gradient, ROW_NUMBERS, ROW_NUMBERS, counters, SHAPE, float64,
        schedule, words_type(features), extras_type(features, FLOAT32, by_words=True),
    )  # fmt: skip
    return Kernel(flash3_dq, signature, layout.threads, block_bytes(tiles))
