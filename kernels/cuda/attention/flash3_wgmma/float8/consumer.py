"""A consumer of the float8 forward kernel: scores, softmax and output of 64 query rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LN_2, LOG2_E
from kernels.cuda.attention.flash3_wgmma.forward.consumer import (
    make_end_products,
    make_finish,
    make_issue_scores,
    make_skip_tiles,
    make_turns,
    placed_block,
)
from kernels.cuda.attention.flash3_wgmma.forward.producer import (
    next_item,
    release_slot,
)
from kernels.cuda.attention.flash3_wgmma.layout import ForwardPipelines, KernelForm
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tile_steps import (
    ZERO,
    has_large_row,
    make_apply_options,
    make_exponentials,
    make_lane_maxima,
    rescale_rows,
    row_maxima,
)
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ALONG,
    make_accumulate,
    make_multiply,
    own_thread,
)
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.pipeline import following, release, start, tile_at, wait
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.bulk import wait_for_reads
from kernels.cuda.ptx.numbers import ex2, mul_rn, pack_e4m3, sub_rn
from kernels.cuda.ptx.wgmma import (
    KINDS,
    ROWS,
    descriptor,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.problem.float8 import BLOCK
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint32
from kernels.scores.program import PLAIN

E4M3 = "float8_e4m3"
#: Probabilities are multiplied by 2**OFFSET, so that those near the maximum use the upper end of e4m3's
#: range, and those down to 2⁻¹² of it are not subnormal.  A maximum may grow by two powers of two before
#: rows are rescaled, so that no probability exceeds 2⁸.
OFFSET = 6


@cache
def make_new_maxima(cols: int, patience: int) -> Callable[..., Any]:
    """Return ``new_maxima(s, factor, max_0, max_1, sum_0, sum_1)``.

    It returns the new maxima and the earlier sums of a lane's two rows, whether the accumulators must be
    rescaled, and by which factors.  The factor converts scores to base 2.  Unlike in the 16-bit kernel, it
    differs between tiles, and so maxima are those of scores times the factor.
    """
    lane_maxima, one, least = make_lane_maxima(cols), np.float32(1), np.float32(patience)
    minus_inf = np.float32(-math.inf)

    @device_function
    def new_maxima(s, factor, max_0, max_1, sum_0, sum_1):
        top_0, top_1 = lane_maxima(s, minus_inf, minus_inf)
        top_0, top_1 = max(max_0, top_0 * factor), max(max_1, top_1 * factor)
        # Whether a row grows is whether a lane of it does.
        grows = top_0 - max_0 > least or top_1 - max_1 > least
        is_scaled = cuda.ballot_sync(ALL_LANES, grows) != 0
        rescale_0 = rescale_1 = one
        if is_scaled:
            top_0, top_1 = row_maxima(top_0, top_1)
            rescale_0 = ex2(max_0 - float32(shift_of(top_0)))
            rescale_1 = ex2(max_1 - float32(shift_of(top_1)))
            max_0, max_1 = top_0, top_1
            sum_0, sum_1 = sum_0 * rescale_0, sum_1 * rescale_1
        return max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1

    return new_maxima


@cache
def make_probabilities(cols: int) -> Callable[..., Any]:
    """Return ``probabilities(p, s, factor, max_0, max_1, sum_0, sum_1)``: P, rounded, and the new sums.

    P is the left operand of the next product; its keys are permuted like those of V, see ``quantise``.
    Probabilities and sums are 2^OFFSET times as large.  The probabilities of one product are rounded while
    the exponentials of the next are computed.
    """
    pairs, exponentials, one = cols // 16, make_exponentials(16), np.float32(1)
    offset = np.float32(OFFSET)

    @device_function
    def lower(s, factor, top_0, top_1):
        for t in range(2 * pairs):
            for i in range(4):
                s[t, i] = sub_rn(mul_rn(s[t, i], factor), top_1 if i // 2 else top_0)

    @device_function
    def probabilities(p, s, factor, max_0, max_1, sum_0, sum_1):
        shift_0, shift_1 = float32(shift_of(max_0)), float32(shift_of(max_1))
        if has_large_row(shift_0, shift_1):  # a product less a rounded product would be wrong
            lower(s, factor, shift_0, shift_1)
            factor, shift_0, shift_1 = one, ZERO, ZERO
        shift_0, shift_1 = shift_0 - offset, shift_1 - offset
        for n in range(pairs):  # of squares: half the depth of a product
            u, t, half = 2 * n, n // 2, n % 2
            sum_0, sum_1 = exponentials(s, u, factor, shift_0, shift_1, sum_0, sum_1)
            p[t, 2 * half] = pack_e4m3(s[u, 0], s[u, 1], s[u + 1, 0], s[u + 1, 1])
            p[t, 2 * half + 1] = pack_e4m3(s[u, 2], s[u, 3], s[u + 1, 2], s[u + 1, 3])
        return sum_0, sum_1

    return probabilities


def _make_units(has_blocks: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``own_line(item, by_batch, by_head, heads)`` and ``unit_of(units, line, row)``.

    The first returns the line of units of an item's head, for an operand that may repeat.
    """

    @device_function
    def own_line(item, by_batch, by_head, heads):
        return int32(item.b * by_batch * (1 + by_head * (heads - 1)) + item.h * by_head)

    @device_function
    def unit_of(units, line, row):
        return units[0, line, row // BLOCK if has_blocks else 0]

    return own_line, unit_of


def make_consume(
    form: KernelForm, has_blocks: bool, pipelines: ForwardPipelines
) -> Callable[..., None]:
    """Return ``consume(me, memory, results, units, work)``, which the threads of consumer ``me`` call.

    ``has_blocks`` tells whether q and k have a unit for each block of rows.
    """
    layout, widths, *_ = form
    block_k, key_tiles, value_tiles = layout.block_k, layout.block_k // 8, widths.value // 8
    depth_steps = block_k // KINDS[E4M3][1]
    issue_score_products = make_multiply(block_k, E4M3, widths.head, 0, 0)
    issue_first, issue_ahead = make_issue_scores(issue_score_products)
    accumulate = make_accumulate(widths.value, E4M3, block_k)
    new_maxima = make_new_maxima(block_k, layout.patience)
    probabilities, (own_line, unit_of) = make_probabilities(block_k), _make_units(has_blocks)
    offer_turn, take_turn, pass_turn = make_turns(layout)
    skip_tiles = make_skip_tiles(take_turn, pass_turn)
    end_products, finish = make_end_products(True, issue_ahead), make_finish(form)
    apply_options, own_of = make_apply_options(PLAIN, block_k), line_of(PLAIN)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    zero, minus_inf, log2_e, ln_2, near = (
        np.float32(x) for x in (0, -math.inf, LOG2_E, LN_2, 2.0**-OFFSET)
    )

    @device_function
    def add_values(acc, p, values, at, has_sums):
        # 10, second half: O = O + P V_j
        wait(values, at)  # V_j is there
        accumulate(acc, p, descriptor(ALONG, tile_at(values, at)), has_sums)
        wgmma_commit_group()

    @device_function
    def consume(me, memory, results, units, work):
        own, shape, extras, scale = own_thread(me), work.shape, work.extras, work.scale
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in fours: P
        unseen = cuda.local.array(1, uint32)  # (1,), no bits of masks
        block, q_at, at = placed_block(pipelines, memory), start(), start()
        queries, keys, values = block.queries, block.keys, block.values
        offer_turn(me)
        item, skipped = next_item(queries, block.items, q_at, me)
        is_issued, copied = False, int32(-1)  # the slot whose output is on its way
        while item.first >= 0:
            q_desc = descriptor(ALONG, tile_at(queries, q_at) + me * (ROWS * LINE))
            line = own_of(item, extras)
            own_row = int32(item.place + me * ROWS + own.warp * 16 + own.lane // 4)
            q_line = own_line(item, shape.q_by_batch, shape.q_by_head, shape.heads)
            k_line = own_line(item, shape.k_by_batch, shape.k_by_head, shape.heads)
            v_line = own_line(item, shape.v_by_batch, shape.v_by_head, shape.heads)
            # A consumer may have no rows, and they no unit.
            unit_row = min(item.place + me * ROWS, item.rows - 1)
            row_factor = unit_of(units.q, q_line, unit_row) * float32(scale) * log2_e
            at, copied = skip_tiles(block, at, skipped, copied, own)  # masked for these rows
            stop, count = int32(item.stop - skipped), int32(item.stop - item.first - skipped)
            # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
            max_0, max_1, sum_0, sum_1 = minus_inf, minus_inf, zero, zero
            key_unit = unit_of(units.k, k_line, max(stop - 1, 0) * block_k)
            if count > 0:
                # 8: S = Q_i K_jᵀ, the first
                issue_first(s, me, block, q_at, at, is_issued)
                wait_for_all()  # S is there, and K_j was read
                release(keys, at, own.lane)
            before = start()  # the stage of the values before
            for n in range(count):
                j = int32(stop - 1 - n)
                factor = row_factor * key_unit
                # The next one's, long before it is needed.
                key_unit = unit_of(units.k, k_line, max(j - 1, 0) * block_k)
                if not item.full <= j < item.full_stop:
                    col = int32(j * block_k + 2 * (own.lane % 4))
                    place = LanePlace(own.lane, own_row, col, line)
                    apply_options(False, s, unseen, place, scale, extras)
                # 9: m_new = max(m, rowmax S), l = e^(m - m_new) l
                max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1 = new_maxima(
                    s, factor, max_0, max_1, sum_0, sum_1
                )
                wait_for_all()  # the last P V is done: its P and V may be overwritten, and O is ours
                if n > 0:
                    release(values, before, own.lane)
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
                    release_slot(queries, own.thread, copied)
                    copied = int32(-1)
                wait_for_scores()  # the next S is there, and its K was read; P V may go on
                release(keys, at, own.lane)
            if count > 0:
                take_turn(me)
                wgmma_fence()
                add_values(acc, p, values, before, count - 1)
                pass_turn(me)
            is_issued = end_products(s, block, q_at, at, before, copied, count > 0, own)
            sums, out_factor = (sum_0 * near, sum_1 * near), units.v[0, v_line, 0] * near
            state = (max_0, max_1), ln_2, sums, out_factor
            copied = finish(own, block, q_at, results, acc, state, p, extras)
            q_at = following(queries, q_at)
            item, skipped = next_item(queries, block.items, q_at, me)
        wait_for_reads()  # of the last output, in the thread that issued its copies
        wait_for_all()  # the unused S after the last item

    return consume
