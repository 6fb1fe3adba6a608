"""A consumer of the float8 forward kernel: scores, softmax and output of 64 query rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from kernels.common.online_softmax import LN_2, LOG2_E
from kernels.cuda.attention.flash3_wgmma.float8.tile_steps import (
    OFFSET,
    make_accumulate,
    make_issue_score_products,
    make_new_maxima,
    make_probabilities,
)
from kernels.cuda.attention.flash3_wgmma.forward.consumer import (
    ALONG,
    make_finish,
    make_issue_scores,
    make_skip_tiles,
    make_turns,
)
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    next_item,
    read_item,
    release_slot,
    wait_for_reads,
)
from kernels.cuda.attention.flash3_wgmma.forward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.forward.tile_steps import rescale_rows
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, ForwardPipelines, Widths
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.pipeline import (
    following,
    placed,
    release,
    release_alone,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.numbers import mul_rn
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import device_function
from kernels.problem.float8 import BLOCK
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN


class Float8Units(NamedTuple):
    """The units of e4m3 numbers, by which they are multiplied, (1, own batches · own heads, blocks or 1).

    Attributes:
        q: Units of q.
        k: Units of k.
        v: Units of v, one per head.
    """

    q: Any
    k: Any
    v: Any


def make_consume(
    layout: ForwardLayout,
    widths: Widths,
    dtype: str,
    has_blocks: bool,
    pipelines: ForwardPipelines,
) -> Callable[..., None]:
    """Return the function ``consume(me, memory, out, lse, rest, units, shape, scale, extras)``.

    The threads of consumer ``me`` call it.

    Args:
        layout: Layout of the block.
        widths: Widths of the kernel.
        dtype: "float16" or "bfloat16", of out.
        has_blocks: Whether q and k have a unit for each block of rows.
        pipelines: Pipelines of the block.
    """
    block_k, (of_queries, of_items, of_keys, of_values, _) = layout.block_k, pipelines
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 32
    issue_score_products = make_issue_score_products(block_k, widths.head)
    issue_scores, issue_ahead = make_issue_scores(issue_score_products)
    accumulate = make_accumulate(widths.value, block_k)
    new_maxima = make_new_maxima(block_k, layout.patience)
    probabilities = make_probabilities(block_k)
    offer_turn, take_turn, pass_turn = make_turns(layout)
    skip_tiles = make_skip_tiles(take_turn, pass_turn)
    finish = make_finish(layout, widths, dtype, PLAIN)
    score_edge, own_of = make_elements(PLAIN, block_k).edge, line_of(PLAIN)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    zero, minus_inf, log2_e, ln_2, near = (
        np.float32(x) for x in (0, -math.inf, LOG2_E, LN_2, 2.0**-OFFSET)
    )

    @device_function
    def own_line(b, h, by_batch, by_head, heads):
        """Return the line of units of (batch, head) for an operand that may repeat."""
        return int32(b * by_batch * (1 + by_head * (heads - 1)) + h * by_head)

    @device_function
    def unit_of(units, line, row):
        return units[0, line, row // BLOCK if has_blocks else 0]

    @device_function
    def add_values(acc, p, values, at, has_sums):
        # 10, second half: O = O + P V_j
        wait(values, at)  # V_j is there
        accumulate(acc, p, descriptor(ALONG, tile_at(values, at)), has_sums)
        wgmma_commit_group()

    @device_function
    def consume(me, memory, out, lse, rest, units, shape, scale, extras):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        warp = int32(cuda.threadIdx.x // 32 % 4)
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in fours: P
        unseen = cuda.local.array(1, uint32)  # (1,), no bits of masks
        queries, items, q_at = placed(of_queries, memory), placed(of_items, memory), start()
        keys, values, at = placed(of_keys, memory), placed(of_values, memory), start()
        offer_turn(me)
        item, skipped = next_item(queries, items, q_at, me)
        is_issued, copied = False, int32(-1)  # the slot whose output is on its way
        while item.tiles >= 0:
            own_tile = tile_at(queries, q_at) + me * (ROWS * LINE)  # of q, and then of out
            q_desc = descriptor(ALONG, own_tile)
            b, h = item.b, item.h
            own = own_of(item.flat, b, h, item.rows, item.cols, extras)
            own_row = int32(item.row + me * ROWS + warp * 16 + lane // 4)
            q_line = own_line(b, h, shape.q_by_batch, shape.q_by_head, shape.heads)
            k_line = own_line(b, h, shape.k_by_batch, shape.k_by_head, shape.heads)
            v_line = own_line(b, h, shape.v_by_batch, shape.v_by_head, shape.heads)
            # A consumer may have no rows, and they no unit.
            unit_row = min(item.row + me * ROWS, item.rows - 1)
            row_factor = unit_of(units.q, q_line, unit_row) * float32(scale) * log2_e
            if skipped > 0:  # before any turn: others wait for the next q in theirs
                release_slot(queries, thread, copied)
                copied = int32(-1)
            at = skip_tiles(keys, values, at, skipped, me, lane)  # fully masked for these rows
            stop, count = int32(item.stop - skipped), int32(item.tiles - skipped)
            # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
            max_0, max_1, sum_0, sum_1 = minus_inf, minus_inf, zero, zero
            key_unit = unit_of(units.k, k_line, max(stop - 1, 0) * block_k)
            if count > 0:
                if not is_issued:
                    # 8: S = Q_i K_jᵀ, the first
                    issue_scores(s, me, queries, q_at, keys, at)
                    wgmma_commit_group()
                wait_for_all()  # S is there, and K_j was read
                release(keys, at, lane)
            before = start()  # the stage of the values before
            for n in range(count):
                j = int32(stop - 1 - n)
                factor = row_factor * key_unit
                # The next one's, long before it is needed.
                key_unit = unit_of(units.k, k_line, max(j - 1, 0) * block_k)
                if not item.full <= j < item.full_stop:
                    place = LanePlace(lane, own_row, int32(j * block_k + 2 * (lane % 4)), own)
                    score_edge(s, unseen, place, scale, extras)
                # 9: m_new = max(m, rowmax S), l = e^(m - m_new) l
                max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1 = new_maxima(
                    s, factor, max_0, max_1, sum_0, sum_1
                )
                wait_for_all()  # the last P V is done: its P and V may be overwritten, and O is ours
                if n > 0:
                    release(values, before, lane)
                # 10, first half: O = diag(e^(m - m_new)) O
                if is_scaled:
                    rescale_rows(acc, rescale_0, rescale_1)
                # 9: P = exp(S - m_new), l = l + rowsum P
                sum_0, sum_1 = probabilities(p, s, factor, max_0, max_1, sum_0, sum_1)
                before, at = at, following(keys, at)
                if n + 1 == count:
                    break  # behind a branch, the next S could not reuse the registers of this one
                wait(keys, at)  # the next K is there
                take_turn(me)
                wgmma_fence()
                # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                issue_score_products(s, q_desc, descriptor(ALONG, tile_at(keys, at)))
                wgmma_commit_group()
                add_values(acc, p, values, before, n)
                pass_turn(me)
                if n == 0:  # not before the products: a branch there holds them up
                    release_slot(queries, thread, copied)
                    copied = int32(-1)
                wait_for_scores()  # the next S is there, and its K was read; P V may go on
                release(keys, at, lane)
            if count > 0:
                take_turn(me)
                wgmma_fence()
                add_values(acc, p, values, before, count - 1)
                pass_turn(me)
            # 8: S = Q_i K_jᵀ, the next item's first, computed while this one's O is written
            release_slot(queries, thread, copied)  # if this item has no tiles
            q_next = following(queries, q_at)
            is_issued = issue_ahead(s, me, queries, items, q_next, keys, at)
            wait_for_scores()  # the last P V is done: V was read; the next S may go on
            if count > 0:
                release(values, before, lane)
            item = read_item(tile_at(items, q_at))  # read again instead of kept in registers
            release_alone(items, q_at)  # each thread, for what it has read itself
            shifts = (
                mul_rn(float32(shift_of(max_0)), ln_2),
                mul_rn(float32(shift_of(max_1)), ln_2),
            )
            finish(
                me, own_tile, out, lse, rest, acc, shifts, (sum_0 * near, sum_1 * near),
                units.v[0, v_line, 0] * near, item, p, extras,
            )  # fmt: skip
            copied, q_at = q_at.stage, q_next
            item, skipped = next_item(queries, items, q_at, me)
        wait_for_reads()  # of the last output, in the thread that issued its copies
        wait_for_all()  # the unused S after the last item

    return consume
