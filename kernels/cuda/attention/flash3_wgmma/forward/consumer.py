"""The consumers of Hopper's forward kernel, which multiply, compute the softmax, and write O and L.

FlashAttention-3, Algorithm 2: the next S = Q Kᵀ is issued before the last P V, and computed while the
softmax of its own tile waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words
from kernels.cuda.attention.flash3_wgmma.forward.producer import (
    next_item,
    read_item,
    read_listed,
    read_skip_count,
    release_slot,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    OUT_BARRIER,
    PING_PONG,
    ForwardLayout,
    ForwardPipelines,
    KernelForm,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of, seen_words
from kernels.cuda.attention.flash3_wgmma.tile_steps import (
    make_apply_options,
    make_drop,
    make_exponentials,
    make_fetch,
    make_rescale,
)
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ALONG,
    make_accumulate,
    make_clear_rows,
    make_multiply,
    make_pack,
    make_put_tile,
    make_write_tile,
    own_thread,
)
from kernels.cuda.attention.options.score_functions import make_row_end
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
from kernels.cuda.ptx.barriers import bar_arrive, bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group, wait_for_reads
from kernels.cuda.ptx.copies import ld_shared
from kernels.cuda.ptx.fragments import square_place
from kernels.cuda.ptx.numbers import mul_rn
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import ALL_LANES, WORD, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint32

LOG2_OF_E, ZERO = np.float32(LOG2_E), np.float32(0)


def make_turns(layout: ForwardLayout) -> tuple[Any, Any, Any]:
    """Return ``offer_turn(me)``, ``take_turn(me)`` and ``pass_turn(me)``: consumers take turns to multiply.

    One consumer then computes its softmax while another multiplies.
    """
    consumers, ping_pong, pair = layout.consumers, layout.ping_pong, 2 * WARPGROUP

    @device_function
    def offer_turn(me):  # at the beginning: the first consumer multiplies first
        if ping_pong and me == consumers - 1:
            bar_arrive(PING_PONG, pair)

    @device_function
    def take_turn(me):
        if ping_pong:
            bar_sync(PING_PONG + me, pair)  # the one before has issued its products

    @device_function
    def pass_turn(me):
        if ping_pong:
            bar_arrive(PING_PONG + (me + 1) % consumers, pair)  # the next one may

    return offer_turn, take_turn, pass_turn


def make_skip_tiles(take_turn: Any, pass_turn: Any) -> Callable[..., Any]:
    """Return ``skip_tiles(block, at, count, copied, own)``: release tiles that are masked for all rows.

    It returns the place of the next tile, and the slot whose output is still being copied, or -1.
    """

    @device_function
    def skip_tiles(block, at, count, copied, own):
        if count > 0:  # before any turn: others wait for the next q in theirs
            release_slot(block.queries, own.thread, copied)
            copied = int32(-1)
        for _ in range(count):
            take_turn(own.me)
            pass_turn(own.me)
            # Not before they are there: too early, it would count for what was there before.
            wait(block.keys, at)
            wait(block.values, at)
            cuda.syncwarp()  # a lane that still waits would miss the phase
            release(block.keys, at, own.lane)
            release(block.values, at, own.lane)
            at = following(block.keys, at)
        return at, copied

    return skip_tiles


@device_function
def placed_block(pipelines, memory):
    """Return the pipelines of a block in its memory."""
    queries, items, keys, values, listed = pipelines
    return ForwardPipelines(
        placed(queries, memory), placed(items, memory), placed(keys, memory), placed(values, memory),
        memory + listed,
    )  # fmt: skip


def make_issue_scores(issue_score_products: Any) -> tuple[Callable[..., None], Callable[..., bool]]:
    """Return the functions that issue the first S = Q_i K_jᵀ of an item, and the first of the next item.

    ``issue_first(s, me, block, q_at, at, is_issued)`` does nothing if they are issued already, and
    ``issue_ahead(s, me, block, q_at, at)`` always commits a group of products, and returns whether the
    group has any.
    """

    @device_function
    def issue_scores(s, me, block, q_at, at):
        wait(block.keys, at)  # K_j is there
        q_desc = descriptor(ALONG, tile_at(block.queries, q_at) + me * (ROWS * LINE))
        k_desc = descriptor(ALONG, tile_at(block.keys, at))
        wgmma_fence()
        issue_score_products(s, q_desc, k_desc)

    @device_function
    def issue_ahead(s, me, block, q_at, at):
        wait(block.queries, q_at)  # the next Q is there
        numbers = tile_at(block.items, q_at)
        has_tiles = ld_shared(numbers) < ld_shared(numbers + WORD) and (
            read_skip_count(numbers, me) == 0
        )
        if has_tiles:
            issue_scores(s, me, block, q_at, at)
        wgmma_commit_group()
        return has_tiles

    @device_function
    def issue_first(s, me, block, q_at, at, is_issued):
        if not is_issued:
            issue_scores(s, me, block, q_at, at)
            wgmma_commit_group()

    return issue_first, issue_ahead


def make_end_products(issues_ahead: bool, issue_ahead: Any) -> Callable[..., bool]:
    """Return ``end_products(s, block, q_at, at, before, copied, has_tiles, own)``.

    It waits for the last P V of an item, releases its values at ``before``, and returns whether it has
    issued the next item's first scores.  These are then computed while the output of this item is written.
    """
    wait_for_all, wait_for_last = make_wgmma_wait_group(0), make_wgmma_wait_group(1)

    @device_function
    def end_products(s, block, q_at, at, before, copied, has_tiles, own):
        is_issued = False
        if issues_ahead:
            # 8: S = Q_i K_jᵀ, the next item's first, computed while this one's O is written
            release_slot(block.queries, own.thread, copied)  # if this item has no tiles
            is_issued = issue_ahead(s, own.me, block, following(block.queries, q_at), at)
            wait_for_last()  # the last P V is done: V was read; the next S may go on
        else:
            wait_for_all()  # the last P V is done: V was read
        if has_tiles:
            release(block.values, before, own.lane)
        return is_issued

    return end_products


class RowResults(NamedTuple):
    """The results of a forward kernel."""

    out: Any  # Tensor map of out, or the array if sequences are packed
    lse: Any  # (batch * heads, rows) float32
    rest: Any  # What lse loses by rounding, of the same shape


def make_finish(form: KernelForm) -> Callable[..., None]:
    """Return the function that writes a consumer's rows of out, lse and its rest, out through its q tile.

    In ``finish(own, block, q_at, results, acc, state, pairs, extras)``, ``state`` are the maxima of a
    lane's two rows, the factor that makes them natural logarithms, the sums of the exponentials, and the
    factor of out; ``pairs`` is overwritten.  It returns the slot of q from which out is still being copied,
    or -1.
    """
    q_panel, is_packed = form.layout.block_q * LINE, form.features.packed
    is_alone = form.layout.items == 1
    end_row = make_row_end(form.features, FLOAT32, near=True)
    write_out = make_write_tile(form.widths.value, form.dtype, q_panel)
    put_out = make_put_tile(form.widths.value_panels, q_panel, is_packed)

    @device_function
    def finish(own, block, q_at, results, acc, state, pairs, extras):
        (out, lse, rest), (maxima, unit, (sum_0, sum_1), factor) = results, state
        item = read_item(tile_at(block.items, q_at))  # read again instead of kept in registers
        release_alone(block.items, q_at)  # each thread releases the slot for itself
        shift_0 = mul_rn(float32(shift_of(maxima[0])), unit)
        shift_1 = mul_rn(float32(shift_of(maxima[1])), unit)
        own_tile = tile_at(block.queries, q_at) + own.me * (ROWS * LINE)
        own_row = int32(item.place + own.me * ROWS + own.warp * 16 + own.lane // 4)
        for step in range(2):
            sum_0 += cuda.shfl_xor_sync(ALL_LANES, sum_0, 1 << step)
            sum_1 += cuda.shfl_xor_sync(ALL_LANES, sum_1, 1 << step)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        inverse_0, lse_0, rest_0 = end_row(sum_0, shift_0, item.b, item.h, extras)
        inverse_1, lse_1, rest_1 = end_row(sum_1, shift_1, item.b, item.h, extras)
        if own.lane % 4 == 0:
            if own_row < item.rows:
                lse[item.line, item.first_q + own_row] = lse_0
                rest[item.line, item.first_q + own_row] = rest_0
            if own_row + 8 < item.rows:
                lse[item.line, item.first_q + own_row + 8] = lse_1
                rest[item.line, item.first_q + own_row + 8] = rest_1
        # 14: write O_i, by way of the tile of q, which this warpgroup has read to the end
        r, c = square_place(own.lane)
        factors, are_seen = (inverse_0 * factor, inverse_1 * factor), (sum_0 != ZERO, sum_1 != ZERO)
        write_out(own_tile, own.warp * 16 + r, c, acc, factors, are_seen, pairs)
        fence_proxy_async()  # the copy engine sees them
        bar_sync(OUT_BARRIER + own.me, WARPGROUP)  # all rows of the warpgroup are stored
        top = item.place + own.me * ROWS
        if is_packed or own.thread == 0:
            put_out(out, own_tile, own.thread, item.b, item.h, item.first_q + top, item.rows - top)
            cp_async_bulk_commit_group()
        if is_packed:
            bar_sync(OUT_BARRIER + own.me, WARPGROUP)  # all rows are written: the next q may arrive
        if is_alone:
            release_slot(block.queries, own.thread, q_at.stage)
            return int32(-1)
        return q_at.stage

    return finish


def make_consume(form: KernelForm, pipelines: ForwardPipelines) -> Callable[..., None]:
    """Return ``consume(me, memory, results, work)``, which the threads of consumer ``me`` call."""
    layout, widths, dtype, features, _ = form
    block_k, q_panel, k_panel = layout.block_k, layout.block_q * LINE, layout.block_k * LINE
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 16
    # The next item's first scores are issued before this one's output is written.
    issues_ahead, is_packed = layout.items > 1, features.packed
    issue_score_products = make_multiply(block_k, dtype, widths.head, q_panel, k_panel)
    issue_first, issue_ahead = make_issue_scores(issue_score_products)
    rescale = make_rescale(block_k, layout.patience, form.waits_first)
    accumulate, pack = make_accumulate(widths.value, dtype, block_k), make_pack(dtype, block_k)
    # Rows of q and k run along the depth; those of v across it, from panel to panel.
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    modifies_scores, apply_options = features.modifies_scores, make_apply_options(features, block_k)
    first_bits, fetch = make_fetch(features, layout.block_q, block_k)
    exponentials, drop = make_exponentials(block_k), make_drop(features, block_k)
    words, seen_count, own_of = bit_words(block_k), seen_words(features, block_k), line_of(features)
    has_kept, is_listed, has_patterns = features.dropout, features.block_mask, features.has_patterns
    offer_turn, take_turn, pass_turn = make_turns(layout)
    skip_tiles = make_skip_tiles(take_turn, pass_turn)
    clear_values = make_clear_rows(layout.consumers, block_k, widths.value_panels)
    end_products, finish = make_end_products(issues_ahead, issue_ahead), make_finish(form)
    minus_inf, zero, one = np.float32(-math.inf), np.float32(0), np.float32(1)

    @device_function
    def consume(me, memory, results, work):
        own, extras = own_thread(me), work.extras
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: P
        # Options modify natural scores.  Without such options, one factor converts scores to base 2.
        unit = one if modifies_scores else float32(work.scale)
        factor = unit * LOG2_OF_E
        kept = cuda.local.array(words, uint32)  # (words,): bits of the elements that dropout keeps
        seen = cuda.local.array(seen_count, uint32)  # (seen_count,): bits, then pairs of a mask
        block, q_at, at = placed_block(pipelines, memory), start(), start()
        queries, keys, values = block.queries, block.keys, block.values
        offer_turn(me)
        item, skipped = next_item(queries, block.items, q_at, me)
        is_issued, copied = False, int32(-1)  # the slot whose output is being copied
        listed, pattern = int32(0), int32(0)
        while item.first >= 0:
            q_desc = descriptor(ALONG, tile_at(queries, q_at) + me * (ROWS * LINE))
            line, cols = own_of(item, extras), item.cols
            warp_row = int32(item.place + me * ROWS + own.warp * 16)
            own_row = int32(warp_row + own.lane // 4)
            bits = first_bits(LanePlace(own.lane, warp_row, int32(0), line), extras)
            at, copied = skip_tiles(block, at, skipped, copied, own)  # masked for these rows
            first, stop = item.first, int32(item.stop - skipped)
            # 5: l = 0, m = -inf; the first P V begins with O = 0
            maxima, shifts, sums = (minus_inf, minus_inf), (zero, zero), (zero, zero)
            has_large = False
            if first < stop:
                # 8: S = Q_i K_jᵀ, the first
                issue_first(s, me, block, q_at, at, is_issued)
                if is_listed:
                    listed, pattern = read_listed(block.listed, at.stage)
                col = (listed if is_listed else stop - 1) * block_k
                fetch(seen, kept, bits, pattern, LanePlace(own.lane, warp_row, col, line), work)
                wait_for_all()  # S has been computed, and K_j has been read
                release(keys, at, own.lane)
                if is_packed and cols - col < block_k:  # the other keys belong to the next sequence
                    wait(values, at)  # V_j has arrived
                    clear_values(cols - col, tile_at(values, at))
            before = start()  # the stage of the values before
            for n in range(int32(stop - first)):
                j = int32(listed if is_listed else stop - 1 - n)
                place = LanePlace(own.lane, own_row, int32(j * block_k + 2 * (own.lane % 4)), line)
                # The words of a block mask also hide positions out of bounds.
                whole = pattern == 0 if has_patterns else item.full <= j < item.full_stop
                apply_options(whole, s, seen, place, work.scale, extras)
                # 9: m_new = max(m, rowmax S)
                # 10, first half: O = diag(e^(m - m_new)) O, l = e^(m - m_new) l
                maxima, shifts, sums, has_large = rescale(
                    s, acc, unit, factor, maxima, shifts, sums, has_large
                )
                wait_for_all()  # the last P V is done, so its values may be overwritten
                if n > 0:
                    release(values, before, own.lane)
                # 9: P = exp(S - m_new), l = l + rowsum P
                sums = exponentials(s, 0, factor, shifts[0], shifts[1], sums[0], sums[1])
                # The accumulators of S lie as the left operand of P V does.
                pack(p, s)
                drop(p, kept)  # after l, the sum of P before dropout
                before, at = at, following(keys, at)
                has_next = n + 1 < stop - first
                if has_next:
                    wait(keys, at)  # the next K has arrived
                    if is_listed:
                        listed, pattern = read_listed(block.listed, at.stage)
                take_turn(me)
                wgmma_fence()
                if has_next:
                    # 8: the next S = Q_i K_jᵀ, computed during the wait for P V
                    issue_score_products(s, q_desc, descriptor(ALONG, tile_at(keys, at)))
                    wgmma_commit_group()
                # 10, second half: O = O + P V_j
                wait(values, before)  # V_j has arrived
                accumulate(acc, p, descriptor(across, tile_at(values, before)), n)
                wgmma_commit_group()
                pass_turn(me)
                if issues_ahead and n == 0:  # a branch before the products would delay them
                    release_slot(queries, own.thread, copied)
                    copied = int32(-1)
                if has_next:  # read the options of the next tile during the products
                    col = (listed if is_listed else stop - 2 - n) * block_k
                    fetch(seen, kept, bits, pattern, LanePlace(own.lane, warp_row, col, line), work)
                wait_for_scores()  # the next S is complete, and its K was read; P V may go on
                if has_next:
                    release(keys, at, own.lane)
            is_issued = end_products(s, block, q_at, at, before, copied, first < stop, own)
            state = maxima, unit, sums, extras.keep_scale if has_kept else one
            copied = finish(own, block, q_at, results, acc, state, p, extras)
            q_at = following(queries, q_at)
            item, skipped = next_item(queries, block.items, q_at, me)
        wait_for_reads()  # of the last output, in the thread that issued its copies
        wait_for_all()  # the unused S after the last item

    return consume
