"""FlashAttention-3 forward on Hopper: copies, products and softmax at the same time.

What flash2_mma left on the table: a warp that loads cannot multiply, and one that multiplies cannot
take exponentials; and ``mma.sync`` reaches little more than half of what Hopper's tensor cores can.
Here one warpgroup does nothing but issue copies of tiles, which arrive while the others compute,
and ``wgmma`` multiplies 64 rows at a time out of shared memory while its warpgroup goes on: the next
scores are computed during the last product with the values, and the softmax of one warpgroup falls into
the products of another.  Measured on an H200 at N = 16,384 in bfloat16: 571 TFLOP/s at d = 64 and 721
at 128, where flash2_mma does 325 and 378.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, float64, int32, types, uint8, uint32, void

from kernels.common.online_softmax import LN_2, LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    make_produce_items,
    read_item,
    read_listed,
    read_skip_count,
    release_slot,
    wait_for_reads,
)
from kernels.cuda.attention.flash3_wgmma.forward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.forward.tile_steps import (
    make_drop,
    make_fetch,
    make_issue_score_products,
    make_softmax_step,
    make_write_out,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    CLEAR_BARRIER,
    LISTED,
    OUT_BARRIER,
    PING_PONG,
    SHAPE,
    ForwardLayout,
    Schedule,
    Widths,
    item_bytes,
    k_bytes,
    shared_bytes,
    shared_tiles,
    v_bytes,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import has_words, words_type
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of, seen_words
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import (
    make_accumulate,
    make_clear_rows,
    make_load_tile,
    make_pack,
    make_put_tile,
)
from kernels.cuda.attention.options.score_functions import extras_type, make_row_end
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.warpgroups import ALIGNMENT, LINE, WARPGROUP, make_next, own_warpgroup
from kernels.cuda.ptx.barriers import (
    bar_arrive,
    bar_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    make_setmaxnreg,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group
from kernels.cuda.ptx.copies import (
    align_up,
    global_address,
    ld_shared,
    shared_address,
    st_shared,
)
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import WORD, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features

MAPS = types.Array(uint8, 1, "C")
#: The producer warpgroup's thread that schedules items; its first thread copies keys and values.
SCHEDULER_THREAD = 32


@cache
def forward_kernel(
    layout: ForwardLayout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the forward kernel for one layout, two widths, one dtype and some options.

    Args:
        layout: Layout of the block.
        widths: Columns that it is compiled for.
        dtype: "float16" or "bfloat16": of q, k, v and out.
        features: Options of the call.
    """
    # Out is a tensor map, or the array where sequences are packed; mask_words is 0 if not needed.
    consumers, block_k, stages = layout.consumers, layout.block_k, layout.stages
    block_q, ping_pong = layout.block_q, layout.ping_pong
    head_panels, value_panels = widths.head_panels, widths.value_panels
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 16
    q_panel, k_panel = block_q * LINE, block_k * LINE
    k_size, v_size = k_bytes(layout, widths), v_bytes(layout, widths)
    tiles = shared_tiles(layout, widths, features)
    k_offset, v_offset, barrier_offset = tiles["k"], tiles["v"], tiles["barriers"]
    number_offset, q_size = tiles["numbers"], tiles["k"] // layout.items
    slots, number_bytes = layout.items, item_bytes(layout)
    # The next item's first scores are issued before this one's output is written.
    issues_ahead, is_packed = slots > 1, features.packed
    # Barriers of eight bytes, one of each kind for an item or a stage; those of q_full come first.
    q_empty, item_ready, k_full = 8 * slots, 16 * slots, 24 * slots
    k_empty, v_full, v_empty = (k_full + 8 * stages * i for i in (1, 2, 3))
    consumer_warps, consumer_threads = 4 * consumers, WARPGROUP * consumers

    load_k, load_v = (make_load_tile(panels, k_panel) for panels in (head_panels, value_panels))
    put_out = make_put_tile(value_panels, q_panel, features.packed)
    issue_score_products = make_issue_score_products(block_k, dtype, widths.head, q_panel, k_panel)
    softmax_step, pack = make_softmax_step(block_k, layout.patience), make_pack(dtype, block_k)
    accumulate = make_accumulate(widths.value, dtype, block_k)
    end_row = make_row_end(features, FLOAT32, near=True)
    write_out = make_write_out(widths.value, dtype, q_panel)
    # Rows of q and k run along the depth; those of v across it, from panel to panel.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    _, _, tile_of, pattern_of = make_walk(features, block_q)
    produce_items = make_produce_items(layout, features, head_panels, q_panel, q_size)
    bends, of_all, score_whole, score_edge = make_elements(features, block_k)
    first_bits, fetch = make_fetch(features, block_q, block_k)
    drop, has_patterns = make_drop(features, block_k), features.has_patterns
    words, has_kept, own_of = bit_words(block_k), features.dropout, line_of(features)
    has_bits = has_kept or has_words(features) or has_patterns
    seen_count = seen_words(features, block_k)
    clear_values = make_clear_rows(consumer_threads, block_k, value_panels)
    # For each stage: its tile, and the number of the tile's words in the block mask.
    list_offset, is_listed = tiles["listed"], features.block_mask
    zero, minus_inf, log2_e, ln_2 = (np.float32(x) for x in (0, -math.inf, LOG2_E, LN_2))
    pair = 2 * WARPGROUP  # threads of two consumers
    next_stage, next_slot = make_next(stages), make_next(slots)

    def flash3_forward(
        q_map, k_map, v_map, out, lse, next_item, shape, scale, schedule, mask_words, extras
    ):  # fmt: skip
        """Fill out and lse, tile after tile.

        Computes: out and lse for tiles of query rows of (batch, head), one after the other
        Source: FlashAttention-3, Algorithms 1 (consumer and producer) and 2
            (overlap within a warpgroup); FlashAttention-2, Algorithm 1, for the numbered lines
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, the scores of 2 rows and block_k / 4 columns, and of out 2
            rows and value_dim / 4 columns, scattered as wgmma scatters them
        Shared: q_tile (block_q, head_dim), later out; stages of k_tile (block_k, head_dim) and
            v_tile (block_k, value_dim), in panels of 64 columns, 128-byte swizzle; barriers
        Registers: acc (value_dim / 8, 4), s (block_k / 8, 4), p (block_k / 16, 4) packed pairs
        Global traffic: reads q once, k and v once per query tile; writes out and lse once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        shared = cuda.shared.array(0, uint8)  # q, k, v, barriers, numbers of items, listed
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers = tile + barrier_offset
        warpgroup, lane = own_warpgroup(), int32(cuda.threadIdx.x % 32)
        numbers = tile + number_offset
        if cuda.threadIdx.x == 0:
            for i in range(slots):
                mbarrier_init(barriers + 8 * i, 1)
                mbarrier_init(barriers + q_empty + 8 * i, consumers + 1)  # and k and v's producer
                mbarrier_init(barriers + item_ready + 8 * i, 1)
            for i in range(stages):
                mbarrier_init(barriers + k_full + 8 * i, 1)
                mbarrier_init(barriers + v_full + 8 * i, 1)
                mbarrier_init(barriers + k_empty + 8 * i, consumer_warps)
                mbarrier_init(barriers + v_empty + 8 * i, consumer_warps)
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == SCHEDULER_THREAD:
                produce_items(tile, numbers, barriers, q_map, next_item, shape, schedule, extras)
            if cuda.threadIdx.x == 0:
                k_tensor, v_tensor = global_address(k_map), global_address(v_map)
                stage, phase, slot, q_phase = int32(0), int32(0), int32(0), int32(0)
                mbarrier_wait(barriers + item_ready, q_phase)  # the first item is published
                item = read_item(numbers)
                while item.tiles >= 0:
                    # Read: an item without tiles may otherwise be followed by another in its place before.
                    mbarrier_arrive(barriers + q_empty + 8 * slot)
                    b, h = item.b, item.h
                    # 6: for 1 <= j <= T_c, backwards: what bounds hide in part comes first
                    for n in range(item.tiles):
                        j = tile_of(int32(item.stop - 1 - n), extras)
                        col = item.first_k + j * block_k
                        # 7: load K_j, V_j
                        full = barriers + k_full + 8 * stage
                        mbarrier_wait(barriers + k_empty + 8 * stage, phase ^ 1)  # its K was read
                        if is_listed:
                            at = tile + list_offset + LISTED * stage
                            st_shared(at, j)
                            st_shared(at + WORD, pattern_of(int32(item.stop - 1 - n), extras))
                        mbarrier_arrive_expect_tx(full, k_size)
                        at = tile + k_offset + stage * k_size
                        load_k(at, k_tensor, full, col, h * shape.k_by_head, b * shape.k_by_batch)
                        full = barriers + v_full + 8 * stage
                        mbarrier_wait(barriers + v_empty + 8 * stage, phase ^ 1)  # its V was read
                        mbarrier_arrive_expect_tx(full, v_size)
                        at = tile + v_offset + stage * v_size
                        load_v(at, v_tensor, full, col, h * shape.v_by_head, b * shape.v_by_batch)
                        stage, phase = next_stage(stage, phase)
                    slot, q_phase = next_slot(slot, q_phase)
                    mbarrier_wait(barriers + item_ready + 8 * slot, q_phase)  # the next one is, too
                    item = read_item(numbers + number_bytes * slot)
        else:
            claim()
            me, warp = int32(warpgroup - 1), int32(cuda.threadIdx.x // 32 % 4)
            # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
            acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
            s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
            p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: P
            # Scores that options bend are natural logarithms first; else one factor makes them base 2.
            factor = log2_e if bends else float32(scale) * log2_e
            kept = cuda.local.array(words, uint32)  # (words,), bits: what of P dropout keeps
            seen = cuda.local.array(seen_count, uint32)  # (seen_count,), bits, then pairs of a mask
            stage, phase, slot, q_phase = int32(0), int32(0), int32(0), int32(0)
            # The first consumer multiplies first.
            if ping_pong and me == consumers - 1:
                bar_arrive(PING_PONG, pair)
            mbarrier_wait(barriers, q_phase)  # the first item is published, and its Q is there
            item, thread = read_item(numbers), int32(cuda.threadIdx.x % WARPGROUP)
            skipped = read_skip_count(numbers, me)
            is_issued, copied = False, int32(-1)  # the slot whose output is on its way
            listed, pattern = int32(0), int32(0)
            while item.tiles >= 0:
                own_tile = tile + slot * q_size + me * (ROWS * LINE)  # of q, and then of out
                q_desc = descriptor(along, own_tile)
                b, h, flat = item.b, item.h, item.flat
                row, rows, cols = item.row, item.rows, item.cols
                own = own_of(flat, b, h, rows, cols, extras)
                warp_row = int32(row + me * ROWS + warp * 16)
                own_row = int32(warp_row + lane // 4)
                bits = first_bits(lane, b, h, warp_row, extras)
                if is_listed:  # the producer has read the list
                    first, stop = int32(0), item.tiles
                else:
                    first, stop = int32(item.stop - item.tiles), item.stop
                if skipped > 0:  # before any turn: others wait for the next q in theirs
                    release_slot(barriers + q_empty, thread, copied)
                    copied = int32(-1)
                for _ in range(skipped):  # fully masked for these rows
                    if ping_pong:
                        bar_sync(PING_PONG + me, pair)  # the one before has had its turn
                        bar_arrive(
                            PING_PONG + (me + 1) % consumers, pair
                        )  # and the next one has it
                    # Not before they are there: too early, it would count for what was there before.
                    mbarrier_wait(barriers + k_full + 8 * stage, phase)
                    mbarrier_wait(barriers + v_full + 8 * stage, phase)
                    cuda.syncwarp()  # a lane that still waits would miss the phase
                    if lane == 0:
                        mbarrier_arrive(barriers + k_empty + 8 * stage)
                        mbarrier_arrive(barriers + v_empty + 8 * stage)
                    stage, phase = next_stage(stage, phase)
                stop = int32(stop - skipped)
                # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
                max_0, max_1, sum_0, sum_1 = minus_inf, minus_inf, zero, zero
                if first < stop:
                    if not is_issued:
                        # 8: S = Q_i K_jᵀ, the first
                        mbarrier_wait(barriers + k_full + 8 * stage, phase)  # K_j is there
                        k_desc = descriptor(along, tile + k_offset + stage * k_size)
                        wgmma_fence()
                        issue_score_products(s, q_desc, k_desc)
                        wgmma_commit_group()
                    if is_listed:
                        listed, pattern = read_listed(tile + list_offset, stage)
                    col = (listed if is_listed else stop - 1) * block_k
                    fetch(seen, kept, bits, pattern, lane, flat, warp_row, col, mask_words, extras)
                    wait_for_all()  # S is there, and K_j was read
                    if lane == 0:
                        mbarrier_arrive(barriers + k_empty + 8 * stage)
                    if is_packed and cols - col < block_k:  # the rest is the next sequence's
                        mbarrier_wait(barriers + v_full + 8 * stage, phase)  # V_j is there
                        clear_values(
                            int32(cuda.threadIdx.x - WARPGROUP), cols - col,
                            tile + v_offset + stage * v_size,
                        )  # fmt: skip
                        fence_proxy_async()  # the zeros are visible to products
                        bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros
                before = int32(0)  # the stage of the values before
                for n in range(int32(stop - first)):
                    j = int32(listed if is_listed else stop - 1 - n)
                    own_col = int32(j * block_k + 2 * (lane % 4))
                    place = LanePlace(lane, own_row, own_col, own)
                    # The words of a block mask hide what is out of bounds, too.
                    whole = pattern == 0 if has_patterns else item.full <= j < item.full_stop
                    if not whole:
                        score_edge(s, seen, place, scale, extras)
                    elif of_all:
                        score_whole(s, seen, place, scale, extras)
                    # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                    max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1 = softmax_step(
                        s, factor, max_0, max_1, sum_0, sum_1
                    )
                    # The last P V is done: its values may be overwritten, and O is ours.
                    wait_for_all()
                    if n > 0 and lane == 0:
                        mbarrier_arrive(barriers + v_empty + 8 * before)
                    # 10, first half: O = diag(e^(m - m_new)) O
                    if is_scaled:
                        for t in range(value_tiles):
                            acc[t, 0] *= rescale_0
                            acc[t, 1] *= rescale_0
                            acc[t, 2] *= rescale_1
                            acc[t, 3] *= rescale_1
                    # The accumulators of S lie as the left operand of P V does.
                    pack(p, s)
                    drop(p, kept)  # l is the sum of all
                    before, v_phase = stage, phase
                    stage, phase = next_stage(stage, phase)
                    has_next = n + 1 < stop - first
                    if has_next:
                        mbarrier_wait(barriers + k_full + 8 * stage, phase)  # the next K is there
                        if is_listed:
                            listed, pattern = read_listed(tile + list_offset, stage)
                    if ping_pong:
                        bar_sync(PING_PONG + me, pair)  # the other's products are issued
                    wgmma_fence()
                    if has_next:
                        # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                        k_desc = descriptor(along, tile + k_offset + stage * k_size)
                        issue_score_products(s, q_desc, k_desc)
                    wgmma_commit_group()
                    # 10, second half: O = O + P V_j
                    mbarrier_wait(barriers + v_full + 8 * before, v_phase)  # V_j is there
                    v_desc = descriptor(across, tile + v_offset + before * v_size)
                    accumulate(acc, p, v_desc, n)
                    wgmma_commit_group()
                    if ping_pong:
                        bar_arrive(PING_PONG + (me + 1) % consumers, pair)  # the next one's turn
                    if (
                        issues_ahead and n == 0
                    ):  # not before the products: a branch there holds them up
                        release_slot(barriers + q_empty, thread, copied)
                        copied = int32(-1)
                    if has_bits and has_next:  # while it is computed
                        col = (listed if is_listed else stop - 2 - n) * block_k
                        fetch(
                            seen, kept, bits, pattern, lane, flat, warp_row, col, mask_words, extras
                        )
                    wait_for_scores()  # the next S is there, and its K was read; P V may go on
                    if has_next and lane == 0:
                        mbarrier_arrive(barriers + k_empty + 8 * stage)
                is_issued = False
                if issues_ahead:
                    # 8: S = Q_i K_jᵀ, the next item's first, computed while this one's O is written
                    release_slot(barriers + q_empty, thread, copied)  # if this item has no tiles
                    copied = int32(-1)
                    following, q_phase_then = next_slot(slot, q_phase)
                    mbarrier_wait(barriers + 8 * following, q_phase_then)  # the next Q is there
                    ahead = numbers + number_bytes * following
                    is_issued = ld_shared(ahead) > 0 and read_skip_count(ahead, me) == 0
                    if is_issued:
                        mbarrier_wait(barriers + k_full + 8 * stage, phase)  # its first K is there
                        q_desc = descriptor(along, tile + following * q_size + me * (ROWS * LINE))
                        k_desc = descriptor(along, tile + k_offset + stage * k_size)
                        wgmma_fence()
                        issue_score_products(s, q_desc, k_desc)
                    wgmma_commit_group()
                    wait_for_scores()  # the last P V is done: V was read; the next S may go on
                else:
                    wait_for_all()  # the last P V is done: V was read
                if first < stop and lane == 0:
                    mbarrier_arrive(barriers + v_empty + 8 * before)
                # Read again: the numbers took no registers meanwhile.
                item = read_item(numbers + number_bytes * slot)
                b, h, row, rows = item.b, item.h, item.row, item.rows
                own_row = int32(row + me * ROWS + warp * 16 + lane // 4)
                for step in range(2):
                    sum_0 += cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 1 << step)
                    sum_1 += cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 1 << step)
                # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
                shift_0 = float32(shift_of(max_0)) * factor * ln_2
                shift_1 = float32(shift_of(max_1)) * factor * ln_2
                inverse_0, lse_0 = end_row(sum_0, shift_0, b, h, extras)
                inverse_1, lse_1 = end_row(sum_1, shift_1, b, h, extras)
                if lane % 4 == 0:
                    if own_row < rows:
                        lse[item.line, item.first_q + own_row] = lse_0
                    if own_row + 8 < rows:
                        lse[item.line, item.first_q + own_row + 8] = lse_1
                if has_kept:
                    inverse_0 *= extras.keep_scale
                    inverse_1 *= extras.keep_scale
                # 14: write O_i, by way of the tile of q, which this warpgroup has read to the end
                write_out(own_tile, warp, lane, acc, inverse_0, inverse_1, sum_0, sum_1, p)
                fence_proxy_async()  # the copy engine sees them
                copied = slot
                bar_sync(OUT_BARRIER + me, WARPGROUP)  # all rows of the warpgroup are there
                top = row + me * ROWS
                if is_packed or thread == 0:
                    put_out(out, own_tile, thread, b, h, item.first_q + top, rows - top)
                    cp_async_bulk_commit_group()
                if is_packed:
                    bar_sync(OUT_BARRIER + me, WARPGROUP)  # all have copied: another q may come
                if not issues_ahead:
                    release_slot(barriers + q_empty, thread, copied)
                    copied = int32(-1)
                slot, q_phase = next_slot(slot, q_phase)
                mbarrier_wait(barriers + 8 * slot, q_phase)  # the next item, and its Q, are there
                item = read_item(numbers + number_bytes * slot)
                skipped = read_skip_count(numbers + number_bytes * slot, me)
            wait_for_reads()  # of the last output, in the thread that issued its copies
            wait_for_all()  # S of an item that there is not

    rows = types.Array(float32, 2, "C")
    extras = extras_type(features, FLOAT32, by_words=True)
    schedule = types.NamedUniTuple(int32, 3, Schedule)
    counters = types.Array(int32, 1, "C")
    out = array_type(BITS, 4) if features.packed else MAPS
    signature = void(
        *[MAPS] * 3, out, rows, counters, SHAPE, float64, schedule, words_type(features), extras
    )
    return Kernel(flash3_forward, signature, layout.threads, shared_bytes(layout, widths, features))
