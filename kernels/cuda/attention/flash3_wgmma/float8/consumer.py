"""A consumer of the float8 forward kernel: scores, softmax and output of 64 query rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from kernels.common.online_softmax import LN_2, LOG2_E
from kernels.cuda.attention.flash3_wgmma.float8.layout import places
from kernels.cuda.attention.flash3_wgmma.float8.tile_steps import (
    ALL_LANES,
    OFFSET,
    make_accumulate,
    make_issue_score_products,
    make_pack,
    make_softmax_step,
)
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    read_item,
    read_skip_count,
    release_slot,
    wait_for_reads,
)
from kernels.cuda.attention.flash3_wgmma.forward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.forward.tile_steps import make_write_out
from kernels.cuda.attention.flash3_wgmma.layout import (
    OUT_BARRIER,
    PING_PONG,
    ForwardLayout,
    Widths,
    item_bytes,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tiles import (
    BARRIER,
    make_put_tile,
)
from kernels.cuda.attention.options.score_functions import make_row_end
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.warpgroups import LINE, WARPGROUP, make_next
from kernels.cuda.ptx.barriers import (
    bar_arrive,
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_wait,
)
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group
from kernels.cuda.ptx.copies import ld_shared
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import device_function
from kernels.problem.float8 import BLOCK
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN


class Results(NamedTuple):
    """What consumers write to.

    Attributes:
        out: Tensor map of (batch, heads, seq_q, value_dim).
        lse: (batch · heads, seq_q).
    """

    out: Any
    lse: Any


class Units(NamedTuple):
    """What numbers of e4m3 are to be multiplied by, (1, own batches · own heads, blocks of rows or 1).

    Attributes:
        q: Those of q.
        k: Those of k.
        v: Those of v, one for a head.
    """

    q: Any
    k: Any
    v: Any


def _make_skip_tiles(layout: ForwardLayout, widths: Widths) -> Callable[..., Any]:
    """Return ``skip_tiles(barriers, me, lane, count, stage, phase)``: tiles that no row of a consumer sees.

    It waits for them, releases them, and returns the next stage and its phase.
    """
    at, consumers, ping_pong = places(layout, widths), layout.consumers, layout.ping_pong
    keys, values, empty, pair = at.keys, at.values, at.empty, 2 * WARPGROUP
    next_stage = make_next(layout.stages)

    @device_function
    def skip_tiles(barriers, me, lane, count, stage, phase):
        for _ in range(count):
            if ping_pong:
                bar_sync(PING_PONG + me, pair)  # the one before has had its turn
                bar_arrive(PING_PONG + (me + 1) % consumers, pair)  # and the next one has it
            # Not before they are there: too early, it would count for what was there before.
            k_full = barriers + keys + BARRIER * stage
            v_full = barriers + values + BARRIER * stage
            mbarrier_wait(k_full, phase)
            mbarrier_wait(v_full, phase)
            cuda.syncwarp()  # a lane that still waits would miss the phase
            if lane == 0:
                mbarrier_arrive(k_full + empty)
                mbarrier_arrive(v_full + empty)
            stage, phase = next_stage(stage, phase)
        return stage, phase

    return skip_tiles


def _make_end_rows() -> Callable[..., Any]:
    """Return ``end_rows(item, row, lane, max_0, max_1, sum_0, sum_1, lse, extras)``.

    It writes lse of a lane's two rows, and returns what their sums of O are to be multiplied by.
    """
    end_row = make_row_end(PLAIN, FLOAT32, near=True)
    ln_2, offset = np.float32(LN_2), np.float32(OFFSET)

    @device_function
    def end_rows(item, row, lane, max_0, max_1, sum_0, sum_1, lse, extras):
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        shift_0 = (float32(shift_of(max_0)) - offset) * ln_2
        shift_1 = (float32(shift_of(max_1)) - offset) * ln_2
        inverse_0, lse_0 = end_row(sum_0, shift_0, item.b, item.h, extras)
        inverse_1, lse_1 = end_row(sum_1, shift_1, item.b, item.h, extras)
        if lane % 4 == 0:
            if row < item.rows:
                lse[item.line, row] = lse_0
            if row + 8 < item.rows:
                lse[item.line, row + 8] = lse_1
        return inverse_0, inverse_1

    return end_rows


def make_consume(
    layout: ForwardLayout, widths: Widths, dtype: str, has_blocks: bool
) -> Callable[..., None]:
    """Return ``consume(tile, barriers, me, results, units, shape, scale, extras)``: S, P, O of 64 rows."""
    at, consumers, block_k = places(layout, widths), layout.consumers, layout.block_k
    k_offset, v_offset, k_size, v_size = at.tiles["k"], at.tiles["v"], at.k_size, at.v_size
    q_empty, _, keys, values, empty = at[:5]
    number_offset, number_bytes = at.tiles["numbers"], item_bytes(layout)
    q_panel, q_size = layout.block_q * LINE, at.tiles["k"] // layout.items
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 32
    ping_pong, pair = layout.ping_pong, 2 * WARPGROUP
    issue_score_products = make_issue_score_products(block_k, widths.head)
    accumulate, pack = make_accumulate(widths.value, block_k), make_pack(block_k)
    softmax_step = make_softmax_step(block_k, layout.patience)
    skip_tiles, end_rows = _make_skip_tiles(layout, widths), _make_end_rows()
    score_edge = make_elements(PLAIN, block_k).edge
    write_out = make_write_out(widths.value, dtype, q_panel)
    put_out = make_put_tile(widths.value_panels, q_panel, False)
    along, own_of = descriptor_layout(LINE, 16, 8 * LINE), line_of(PLAIN)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    zero, minus_inf, log2_e = (np.float32(x) for x in (0, -math.inf, LOG2_E))
    next_stage, next_slot = make_next(layout.stages), make_next(layout.items)

    @device_function
    def own_line(b, h, by_batch, by_head, heads):
        """Return the line of units of (batch, head) for an operand that may repeat."""
        return int32(b * by_batch * (1 + by_head * (heads - 1)) + h * by_head)

    @device_function
    def unit_of(units, line, row):
        return units[0, line, row // BLOCK if has_blocks else 0]

    @device_function
    def consume(tile, barriers, me, results, units, shape, scale, extras):
        lane, warp = int32(cuda.threadIdx.x % 32), int32(cuda.threadIdx.x // 32 % 4)
        thread, numbers = int32(cuda.threadIdx.x % WARPGROUP), tile + number_offset
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in fours: P
        unseen = cuda.local.array(1, uint32)  # (1,), no bits of masks
        stage, phase, slot, q_phase = int32(0), int32(0), int32(0), int32(0)
        # The first consumer multiplies first.
        if ping_pong and me == consumers - 1:
            bar_arrive(PING_PONG, pair)
        mbarrier_wait(barriers, q_phase)  # the first item is published, and its Q is there
        item, skipped = read_item(numbers), read_skip_count(numbers, me)
        is_issued, copied = False, int32(-1)  # the slot whose output is on its way
        while item.tiles >= 0:
            own_tile = tile + slot * q_size + me * (ROWS * LINE)  # of q, and then of out
            q_desc = descriptor(along, own_tile)
            b, h, rows, cols = item.b, item.h, item.rows, item.cols
            own = own_of(item.flat, b, h, rows, cols, extras)
            own_row = int32(item.row + me * ROWS + warp * 16 + lane // 4)
            q_line = own_line(b, h, shape.q_by_batch, shape.q_by_head, shape.heads)
            k_line = own_line(b, h, shape.k_by_batch, shape.k_by_head, shape.heads)
            v_line = own_line(b, h, shape.v_by_batch, shape.v_by_head, shape.heads)
            row_factor = unit_of(units.q, q_line, item.row + me * ROWS) * float32(scale) * log2_e
            first, stop = int32(item.stop - item.tiles), item.stop
            if skipped > 0:  # before any turn: others wait for the next q in theirs
                release_slot(barriers + q_empty, thread, copied)
                copied = int32(-1)
            stage, phase = skip_tiles(barriers, me, lane, skipped, stage, phase)
            stop = int32(stop - skipped)
            # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
            max_0, max_1, sum_0, sum_1 = minus_inf, minus_inf, zero, zero
            key_unit = unit_of(units.k, k_line, max(stop - 1, 0) * block_k)
            if first < stop:
                k_full = barriers + keys + BARRIER * stage
                if not is_issued:
                    # 8: S = Q_i K_jᵀ, the first
                    mbarrier_wait(k_full, phase)  # K_j is there
                    wgmma_fence()
                    issue_score_products(
                        s, q_desc, descriptor(along, tile + k_offset + stage * k_size)
                    )
                    wgmma_commit_group()
                wait_for_all()  # S is there, and K_j was read
                if lane == 0:
                    mbarrier_arrive(k_full + empty)
            before = int32(0)  # the stage of the values before
            for n in range(int32(stop - first)):
                j = int32(stop - 1 - n)
                factor = row_factor * key_unit
                # The next one's, long before it is needed.
                key_unit = unit_of(units.k, k_line, max(j - 1, 0) * block_k)
                if not item.full <= j < item.full_stop:
                    place = LanePlace(lane, own_row, int32(j * block_k + 2 * (lane % 4)), own)
                    score_edge(s, unseen, place, scale, extras)
                # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1 = softmax_step(
                    s, factor, max_0, max_1, sum_0, sum_1
                )
                # The last P V is done: its values may be overwritten, and O is ours.
                wait_for_all()
                if n > 0 and lane == 0:
                    mbarrier_arrive(barriers + values + BARRIER * before + empty)
                # 10, first half: O = diag(e^(m - m_new)) O
                if is_scaled:
                    for t in range(value_tiles):
                        acc[t, 0] *= rescale_0
                        acc[t, 1] *= rescale_0
                        acc[t, 2] *= rescale_1
                        acc[t, 3] *= rescale_1
                pack(p, s)
                before, v_phase = stage, phase
                stage, phase = next_stage(stage, phase)
                has_next = n + 1 < stop - first
                if has_next:
                    mbarrier_wait(barriers + keys + BARRIER * stage, phase)  # the next K is there
                if ping_pong:
                    bar_sync(PING_PONG + me, pair)  # the other's products are issued
                wgmma_fence()
                if has_next:
                    # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                    issue_score_products(
                        s, q_desc, descriptor(along, tile + k_offset + stage * k_size)
                    )
                wgmma_commit_group()
                # 10, second half: O = O + P V_j
                mbarrier_wait(barriers + values + BARRIER * before, v_phase)  # V_j is there
                accumulate(acc, p, descriptor(along, tile + v_offset + before * v_size), n)
                wgmma_commit_group()
                if ping_pong:
                    bar_arrive(PING_PONG + (me + 1) % consumers, pair)  # the next one's turn
                if n == 0:  # not before the products: a branch there holds them up
                    release_slot(barriers + q_empty, thread, copied)
                    copied = int32(-1)
                wait_for_scores()  # the next S is there, and its K was read; P V may go on
                if has_next and lane == 0:
                    mbarrier_arrive(barriers + keys + BARRIER * stage + empty)
            # 8: S = Q_i K_jᵀ, the next item's first, computed while this one's O is written
            release_slot(barriers + q_empty, thread, copied)  # if this item has no tiles
            copied = int32(-1)
            following, q_phase_then = next_slot(slot, q_phase)
            mbarrier_wait(barriers + BARRIER * following, q_phase_then)  # the next Q is there
            ahead = numbers + number_bytes * following
            is_issued = ld_shared(ahead) > 0 and read_skip_count(ahead, me) == 0
            if is_issued:
                mbarrier_wait(barriers + keys + BARRIER * stage, phase)  # its first K is there
                q_desc = descriptor(along, tile + following * q_size + me * (ROWS * LINE))
                wgmma_fence()
                issue_score_products(s, q_desc, descriptor(along, tile + k_offset + stage * k_size))
            wgmma_commit_group()
            wait_for_scores()  # the last P V is done: V was read; the next S may go on
            if first < stop and lane == 0:
                mbarrier_arrive(barriers + values + BARRIER * before + empty)
            # Read again: the numbers took no registers meanwhile.
            item = read_item(numbers + number_bytes * slot)
            top = item.row + me * ROWS
            own_row = int32(top + warp * 16 + lane // 4)
            for step in range(2):  # the four lanes of a row
                sum_0 += cuda.shfl_xor_sync(ALL_LANES, sum_0, 1 << step)
                sum_1 += cuda.shfl_xor_sync(ALL_LANES, sum_1, 1 << step)
            inverse_0, inverse_1 = end_rows(
                item, own_row, lane, max_0, max_1, sum_0, sum_1, results.lse, extras
            )
            value_unit = units.v[0, v_line, 0]
            # 14: write O_i, by way of the tile of q, which this warpgroup has read to the end
            write_out(
                own_tile, warp, lane, acc, inverse_0 * value_unit, inverse_1 * value_unit, sum_0, sum_1,
                p,
            )  # fmt: skip
            fence_proxy_async()  # the copy engine sees them
            copied = slot
            bar_sync(OUT_BARRIER + me, WARPGROUP)  # all rows of the warpgroup are there
            if thread == 0:
                put_out(results.out, own_tile, thread, item.b, item.h, top, item.rows - top)
                cp_async_bulk_commit_group()
            slot, q_phase = following, q_phase_then  # the next item, and its Q, are there
            item = read_item(numbers + number_bytes * slot)
            skipped = read_skip_count(numbers + number_bytes * slot, me)
        wait_for_reads()  # of the last output, in the thread that issued its copies
        wait_for_all()  # S of an item that there is not

    return consume
