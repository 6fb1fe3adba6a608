"""FlashAttention-3 forward on Hopper: copies, products and softmax at the same time.

What flash2_mma left on the table: a warp that loads cannot multiply, and one that multiplies cannot take
exponentials; and ``mma.sync`` reaches little more than half of what Hopper's tensor cores can.  Here one
warpgroup does nothing but ask the copy engine for tiles, which come while the others compute, and
``wgmma`` multiplies 64 rows at a time out of shared memory while its warpgroup goes on: the next scores are
computed during the last product with the values, and the softmax of one warpgroup falls into the products
of another.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import float32, float64, int32, types, uint8, uint32, void

from kernels.cuda.device import (
    Kernel,
    device_function,
    first_full_tile,
    first_tile,
    full_tiles_stop,
    inverse_sum,
    log_sum_exp,
    shift_of,
    tiles_stop,
)
from kernels.cuda.flash3_layout import (
    ALIGNMENT,
    LINE,
    PANEL,
    WARPGROUP,
    Layout,
    Schedule,
    Widths,
    item_of,
    k_bytes,
    make_next,
    shared_bytes,
    shared_tiles,
    v_bytes,
)
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
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    make_cp_async_bulk_wait_group,
    make_tensor_load,
    make_tensor_store,
)
from kernels.cuda.ptx.copies import align_up, global_address, ld_shared, shared_address, st_shared
from kernels.cuda.ptx.fragments import DEVICE
from kernels.cuda.ptx.mma import stmatrix_x4
from kernels.cuda.ptx.numbers import PACK, ex2
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.scores import PLAIN, Features, extras_type
from kernels.cuda.tile_scores import make_tile_scores
from kernels.online_softmax import LN_2
from kernels.targets import cuda

#: The shape of a call: rows, columns, heads of the kernel, and by what a head's and a batch's number is
#: multiplied to find it in q, k and v: 0 where it repeats.
SHAPE = types.UniTuple(int32, 10)
MAPS = types.Array(uint8, 1, "C")
square_place = DEVICE.square_place


@cache
def forward_kernel(
    layout: Layout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the forward kernel for one layout, two widths, one dtype and some options.

    Args:
        layout: Who works.
        widths: Columns that it is compiled for.
        dtype: "float16" or "bfloat16": of q, k, v and out.
        features: Options of the call.
    """
    consumers, block_k, stages = layout.consumers, layout.block_k, layout.stages
    block_q, takes_turns = layout.block_q, layout.takes_turns
    head_panels, value_panels = widths.head_panels, widths.value_panels
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 16
    head_steps = widths.head // 16
    q_panel, k_panel = block_q * LINE, block_k * LINE
    q_bytes, k_size, v_size = (
        head_panels * q_panel,
        k_bytes(layout, widths),
        v_bytes(layout, widths),
    )
    tiles = shared_tiles(layout, widths)
    k_offset, v_offset, barrier_offset = tiles["k"], tiles["v"], tiles["barriers"]
    number_offset, q_size = tiles["numbers"], tiles["k"] // layout.items
    slots = layout.items
    # Barriers of eight bytes, one of each kind for an item or a stage; those of q_full come first.
    q_empty, k_full = 8 * slots, 16 * slots
    k_empty, v_full, v_empty = (k_full + 8 * stages * i for i in (1, 2, 3))
    consumer_warps = 4 * consumers

    load, store = make_tensor_load(4), make_tensor_store(4)
    multiply_qk = make_wgmma(block_k, dtype)
    multiply_pv = make_wgmma(widths.value, dtype, a_in_registers=True, b_transposed=True)
    # Rows of q and k run along the depth; those of v across it, from panel to panel.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    pack = PACK[dtype]
    scores = make_tile_scores(features, np.dtype(np.float32))
    edge_of, score_of, operand_factor = scores.edge, scores.score, scores.operand_factor
    zero, minus_inf, ln_2 = np.float32(0), np.float32(-math.inf), np.float32(LN_2)
    turns = 2 * WARPGROUP
    next_stage, next_slot = make_next(stages), make_next(slots)

    @device_function
    def ask_for_scores(s, q_desc, k_desc):
        """8: S = Q_i K_jᵀ, a group of products; a step of 16 is 32 bytes, or a panel."""
        for t in range(head_steps):
            panel, step = t // 4, 2 * (t % 4)
            q_step, k_step = panel * (q_panel >> 4) + step, panel * (k_panel >> 4) + step
            multiply_qk(s, q_desc + q_step, k_desc + k_step, t > 0)

    def flash3_forward(
        q_map, k_map, v_map, out_map, lse, next_item, shape, scale, schedule, extras
    ):
        """Fill out and lse, tile after tile.

        Computes   out and lse for tiles of query rows of (batch, head), one after the other.
        Source     FlashAttention-3, Algorithms 1 (consumer and producer) and 2 (overlap within a
                   warpgroup); FlashAttention-2, Algorithm 1, for the numbered lines.
        Grid       (multiprocessors,)  one block each, that takes items in turn; see ``Schedule``
        Block      (128 * (consumers + 1),)  warpgroup 0 copies, the others multiply
        One thread does: of a consumer, the scores of 2 rows and block_k / 4 columns, and of out 2 rows
                   and value_dim / 4 columns, scattered as wgmma scatters them
        Shared     q_tile (block_q, head_dim), later out; stages of k_tile (block_k, head_dim) and
                   v_tile (block_k, value_dim), in panels of 64 columns, 128-byte swizzle; barriers
        Registers  acc (value_dim / 8, 4), s (block_k / 8, 4), p (block_k / 16, 4) packed pairs
        Global     reads q once, k and v once per query tile; writes out and lse once.
        Needs      cc 9.0: wgmma, tensor copies, mbarriers, register reallocation.
        """
        shared = cuda.shared.array(0, uint8)
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers = tile + barrier_offset
        seq_q, seq_k, heads = shape[0], shape[1], shape[2]
        warpgroup, lane = int32(cuda.threadIdx.x // WARPGROUP), int32(cuda.threadIdx.x % 32)
        items = int32(schedule.tiles * schedule.heads)
        if cuda.threadIdx.x == 0:
            for i in range(slots):
                mbarrier_init(barriers + 8 * i, 1)
                mbarrier_init(barriers + q_empty + 8 * i, consumer_warps)
            for i in range(stages):
                mbarrier_init(barriers + k_full + 8 * i, 1)
                mbarrier_init(barriers + v_full + 8 * i, 1)
                mbarrier_init(barriers + k_empty + 8 * i, consumer_warps)
                mbarrier_init(barriers + v_empty + 8 * i, consumer_warps)
            fence_mbarrier_init()
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == 0:
                q_tensor, k_tensor = global_address(q_map), global_address(k_map)
                v_tensor = global_address(v_map)
                stage, phase, slot, q_phase = int32(0), int32(0), int32(0), int32(0)
                item = int32(cuda.blockIdx.x)
                while item < items:
                    following = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
                    # 3: for 1 <= i <= T_r
                    i, flat = item_of(item, schedule)
                    row, b, h = int32(i * block_q), int32(flat // heads), int32(flat % heads)
                    row_stop = min(row + block_q, seq_q)
                    first = int32(first_tile(row, block_k, seq_k, extras.lower))
                    stop = int32(tiles_stop(row_stop, block_k, seq_k, extras.upper))
                    # 4: load Q_i, and say which it is
                    mbarrier_wait(barriers + q_empty + 8 * slot, q_phase ^ 1)
                    st_shared(tile + number_offset + 4 * slot, item)
                    full = barriers + 8 * slot
                    mbarrier_arrive_expect_tx(full, q_bytes)
                    for panel in range(head_panels):
                        load(
                            tile + slot * q_size + panel * q_panel, q_tensor, full,
                            (panel * PANEL, row, h * shape[4], b * shape[5]),
                        )  # fmt: skip
                    slot, q_phase = next_slot(slot, q_phase)
                    # 6: for 1 <= j <= T_c, backwards: what bounds hide in part comes first
                    for n in range(stop - first):
                        col = (stop - 1 - n) * block_k
                        # 7: load K_j, V_j
                        full = barriers + k_full + 8 * stage
                        mbarrier_wait(barriers + k_empty + 8 * stage, phase ^ 1)
                        mbarrier_arrive_expect_tx(full, k_size)
                        for panel in range(head_panels):
                            load(
                                tile + k_offset + stage * k_size + panel * k_panel, k_tensor, full,
                                (panel * PANEL, col, h * shape[6], b * shape[7]),
                            )  # fmt: skip
                        full = barriers + v_full + 8 * stage
                        mbarrier_wait(barriers + v_empty + 8 * stage, phase ^ 1)
                        mbarrier_arrive_expect_tx(full, v_size)
                        for panel in range(value_panels):
                            load(
                                tile + v_offset + stage * v_size + panel * k_panel, v_tensor, full,
                                (panel * PANEL, col, h * shape[8], b * shape[9]),
                            )  # fmt: skip
                        stage, phase = next_stage(stage, phase)
                    item = int32(cuda.gridDim.x + following)
                mbarrier_wait(barriers + q_empty + 8 * slot, q_phase ^ 1)
                st_shared(tile + number_offset + 4 * slot, items)  # no more of them
                mbarrier_arrive(barriers + 8 * slot)
                # The last block to end sets the counters back for the next launch.
                if cuda.atomic.add(next_item, 1, 1) == cuda.gridDim.x - 1:
                    next_item[0], next_item[1] = 0, 0
        else:
            claim()
            me, warp = int32(warpgroup - 1), int32(cuda.threadIdx.x // 32 % 4)
            acc = cuda.local.array((value_tiles, 4), float32)
            s = cuda.local.array((key_tiles, 4), float32)
            p = cuda.local.array((depth_steps, 4), uint32)
            # Scores that options bend are natural logarithms first; else one factor makes them base 2.
            factor = float32(scale) * operand_factor
            stage, phase, slot, q_phase = int32(0), int32(0), int32(0), int32(0)
            # Whose turn it is to multiply: the first one's.
            if takes_turns and me == consumers - 1:
                bar_arrive(1, turns)
            mbarrier_wait(barriers, q_phase)
            item = ld_shared(tile + number_offset)
            while item < items:
                own_tile = tile + slot * q_size + me * (ROWS * LINE)  # of q, and then of out
                q_desc = descriptor(along, own_tile)
                i, flat = item_of(item, schedule)
                row, b, h = int32(i * block_q), int32(flat // heads), int32(flat % heads)
                own_row = int32(row + me * ROWS + warp * 16 + lane // 4)
                row_stop = min(row + block_q, seq_q)
                first = int32(first_tile(row, block_k, seq_k, extras.lower))
                stop = int32(tiles_stop(row_stop, block_k, seq_k, extras.upper))
                full = int32(first_full_tile(row_stop, block_k, extras.lower))
                full_stop = int32(full_tiles_stop(row, block_k, seq_k, extras.upper))
                # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
                max_0, max_1, sum_0, sum_1 = minus_inf, minus_inf, zero, zero
                if first < stop:
                    # 8: S = Q_i K_jᵀ, the first
                    mbarrier_wait(barriers + k_full + 8 * stage, phase)
                    k_desc = descriptor(along, tile + k_offset + stage * k_size)
                    wgmma_fence()
                    ask_for_scores(s, q_desc, k_desc)
                    wgmma_commit_group()
                    wait_for_all()
                    if lane == 0:
                        mbarrier_arrive(barriers + k_empty + 8 * stage)
                before = int32(0)  # the stage of the values before
                for n in range(int32(stop - first)):
                    j = int32(stop - 1 - n)
                    if not full <= j < full_stop:
                        edge = edge_of(own_row, j * block_k + 2 * (lane % 4), seq_q, seq_k, extras)
                        for t in range(key_tiles):
                            for e in range(4):
                                s[t, e] = score_of(
                                    s[t, e], False, True, edge, flat, b, h, own_row, 8 * (e // 2),
                                    0, 8 * t + e % 2, seq_q, seq_k, extras,
                                )  # fmt: skip
                    # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                    top_0, top_1 = max_0, max_1
                    for t in range(key_tiles):
                        top_0 = max(top_0, max(s[t, 0], s[t, 1]))
                        top_1 = max(top_1, max(s[t, 2], s[t, 3]))
                    for step in range(2):  # the four lanes of a row
                        top_0 = max(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 1 << step))
                        top_1 = max(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 1 << step))
                    shift_0 = float32(shift_of(top_0)) * factor
                    shift_1 = float32(shift_of(top_1)) * factor
                    rescale_0 = ex2(max_0 * factor - shift_0)
                    rescale_1 = ex2(max_1 * factor - shift_1)
                    max_0, max_1 = top_0, top_1
                    sum_0, sum_1 = sum_0 * rescale_0, sum_1 * rescale_1
                    for t in range(key_tiles):
                        s[t, 0] = ex2(s[t, 0] * factor - shift_0)
                        s[t, 1] = ex2(s[t, 1] * factor - shift_0)
                        s[t, 2] = ex2(s[t, 2] * factor - shift_1)
                        s[t, 3] = ex2(s[t, 3] * factor - shift_1)
                        sum_0 += s[t, 0] + s[t, 1]
                        sum_1 += s[t, 2] + s[t, 3]
                    # The last P V is done: its values may be overwritten, and O is ours.
                    wait_for_all()
                    if n > 0 and lane == 0:
                        mbarrier_arrive(barriers + v_empty + 8 * before)
                    # 10, first half: O = diag(e^(m - m_new)) O
                    for t in range(value_tiles):
                        acc[t, 0] *= rescale_0
                        acc[t, 1] *= rescale_0
                        acc[t, 2] *= rescale_1
                        acc[t, 3] *= rescale_1
                    # The accumulators of S lie as the left operand of P V does.
                    for t in range(depth_steps):
                        p[t, 0] = pack(s[2 * t, 0], s[2 * t, 1])
                        p[t, 1] = pack(s[2 * t, 2], s[2 * t, 3])
                        p[t, 2] = pack(s[2 * t + 1, 0], s[2 * t + 1, 1])
                        p[t, 3] = pack(s[2 * t + 1, 2], s[2 * t + 1, 3])
                    before, v_phase = stage, phase
                    stage, phase = next_stage(stage, phase)
                    has_next = n + 1 < stop - first
                    if has_next:
                        mbarrier_wait(barriers + k_full + 8 * stage, phase)
                    if takes_turns:
                        bar_sync(1 + me, turns)  # the other's products are all asked for
                    wgmma_fence()
                    if has_next:
                        # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                        k_desc = descriptor(along, tile + k_offset + stage * k_size)
                        ask_for_scores(s, q_desc, k_desc)
                    wgmma_commit_group()
                    # 10, second half: O = O + P V_j
                    mbarrier_wait(barriers + v_full + 8 * before, v_phase)
                    v_desc = descriptor(across, tile + v_offset + before * v_size)
                    for t in range(depth_steps):
                        multiply_pv(acc, p[t], v_desc + t * (16 * LINE >> 4), n + t > 0)
                    wgmma_commit_group()
                    if takes_turns:
                        bar_arrive(1 + (me + 1) % consumers, turns)
                    wait_for_scores()
                    if has_next and lane == 0:
                        mbarrier_arrive(barriers + k_empty + 8 * stage)
                wait_for_all()
                if first < stop and lane == 0:
                    mbarrier_arrive(barriers + v_empty + 8 * before)
                for step in range(2):
                    sum_0 += cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 1 << step)
                    sum_1 += cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 1 << step)
                # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
                inverse_0, inverse_1 = float32(inverse_sum(sum_0)), float32(inverse_sum(sum_1))
                if lane % 4 == 0:
                    if own_row < seq_q:
                        lse[flat, own_row] = log_sum_exp(
                            float32(shift_of(max_0)) * factor * ln_2, sum_0
                        )
                    if own_row + 8 < seq_q:
                        lse[flat, own_row + 8] = log_sum_exp(
                            float32(shift_of(max_1)) * factor * ln_2, sum_1
                        )
                # 14: write O_i, by way of the tile of q, which this warpgroup has read to the end
                r, c = square_place(lane)
                line = warp * 16 + r
                for t in range(value_tiles // 2):
                    for u in range(2):
                        # Of a row that saw nothing the accumulators may never have been written.
                        w, x = acc[2 * t + u, 0] * inverse_0, acc[2 * t + u, 1] * inverse_0
                        y, z = acc[2 * t + u, 2] * inverse_1, acc[2 * t + u, 3] * inverse_1
                        p[0, 2 * u] = pack(w, x) if sum_0 != zero else uint32(0)
                        p[0, 2 * u + 1] = pack(y, z) if sum_1 != zero else uint32(0)
                    chunk = (2 * t + c) % 8
                    stmatrix_x4(
                        own_tile + (t // 4) * q_panel + line * LINE + ((chunk ^ (line % 8)) << 4),
                        p[0],
                    )
                fence_proxy_async()
                bar_sync(4 + me, WARPGROUP)  # all rows of the warpgroup are there
                if warp == 0 and lane == 0:
                    out_tensor = global_address(out_map)
                    for panel in range(value_panels):
                        store(
                            out_tensor, (panel * PANEL, row + me * ROWS, h, b),
                            own_tile + panel * q_panel,
                        )  # fmt: skip
                    cp_async_bulk_commit_group()
                    wait_for_reads()
                bar_sync(4 + me, WARPGROUP)  # and copied: another q may come
                if lane == 0:
                    mbarrier_arrive(barriers + q_empty + 8 * slot)
                slot, q_phase = next_slot(slot, q_phase)
                mbarrier_wait(barriers + 8 * slot, q_phase)
                item = ld_shared(tile + number_offset + 4 * slot)

    rows = types.Array(float32, 2, "C")
    extras = extras_type(features, np.dtype(np.float32))
    schedule = types.NamedUniTuple(int32, 3, Schedule)
    counters = types.Array(int32, 1, "C")
    signature = void(MAPS, MAPS, MAPS, MAPS, rows, counters, SHAPE, float64, schedule, extras)
    return Kernel(flash3_forward, signature, layout.threads, shared_bytes(layout, widths))
