"""The consumers of Hopper's forward kernel, which multiply, compute the softmax, and write O and L.

FlashAttention-3, Algorithm 2: the next S = Q Kᵀ is issued before the last P V, and computed while the
softmax of its own tile waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, uint32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    next_item,
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
    rescale_rows,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    CLEAR_BARRIER,
    OUT_BARRIER,
    PING_PONG,
    ForwardLayout,
    ForwardPipelines,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import has_words
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of, seen_words
from kernels.cuda.attention.flash3_wgmma.tiles import (
    make_accumulate,
    make_clear_rows,
    make_pack,
    make_put_tile,
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
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group
from kernels.cuda.ptx.copies import ld_shared
from kernels.cuda.ptx.numbers import mul_rn
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import Features

LOG2_OF_E = np.float32(LOG2_E)
#: Descriptor layout of tiles whose rows run along the depth of a product.
ALONG = descriptor_layout(LINE, 16, 8 * LINE)


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
    """Return ``skip_tiles(keys, values, at, count, me, lane)``: release tiles that are masked for all rows.

    It returns the place of the next tile.
    """

    @device_function
    def skip_tiles(keys, values, at, count, me, lane):
        for _ in range(count):
            take_turn(me)
            pass_turn(me)
            # Not before they are there: too early, it would count for what was there before.
            wait(keys, at)
            wait(values, at)
            cuda.syncwarp()  # a lane that still waits would miss the phase
            release(keys, at, lane)
            release(values, at, lane)
            at = following(keys, at)
        return at

    return skip_tiles


def make_issue_scores(issue_score_products: Any) -> tuple[Callable[..., None], Callable[..., bool]]:
    """Return the functions that issue the first S = Q_i K_jᵀ of an item, and the first of the next item.

    ``issue_scores(s, me, queries, q_at, keys, at)``, and ``issue_ahead(s, me, queries, items, q_at, keys,
    at)``, which always commits a group of products, and returns whether the group has any.

    Args:
        issue_score_products: ``(s, q_desc, k_desc)``.
    """

    @device_function
    def issue_scores(s, me, queries, q_at, keys, at):
        wait(keys, at)  # K_j is there
        q_desc = descriptor(ALONG, tile_at(queries, q_at) + me * (ROWS * LINE))
        k_desc = descriptor(ALONG, tile_at(keys, at))
        wgmma_fence()
        issue_score_products(s, q_desc, k_desc)

    @device_function
    def issue_ahead(s, me, queries, items, q_at, keys, at):
        wait(queries, q_at)  # the next Q is there
        numbers = tile_at(items, q_at)
        has_tiles = ld_shared(numbers) > 0 and read_skip_count(numbers, me) == 0
        if has_tiles:
            issue_scores(s, me, queries, q_at, keys, at)
        wgmma_commit_group()
        return has_tiles

    return issue_scores, issue_ahead


def _make_clear_tail(layout: ForwardLayout, widths: Widths) -> Callable[..., None]:
    """Return ``clear_tail(values, at, left)``: zero the rows of V_j that belong to the next sequence."""
    threads = WARPGROUP * layout.consumers
    clear_values = make_clear_rows(threads, layout.block_k, widths.value_panels)

    @device_function
    def clear_tail(values, at, left):
        wait(values, at)  # V_j is there
        clear_values(int32(cuda.threadIdx.x - WARPGROUP), left, tile_at(values, at))
        fence_proxy_async()  # the zeros are visible to products
        bar_sync(CLEAR_BARRIER, threads)  # the rest is zeros

    return clear_tail


def make_finish(
    layout: ForwardLayout, widths: Widths, dtype: str, features: Features
) -> Callable[..., None]:
    """Return the function that writes a consumer's rows of out, lse and its rest, out through its q tile.

    In ``finish(me, own_tile, out, lse, rest, acc, shifts, sums, factor, item, pairs, extras)``, ``shifts``
    and ``sums`` are, for a lane's two rows, the shifts of the exponentials as natural logarithms, and the
    sums of the exponentials; out is multiplied by ``factor``, and ``pairs`` is overwritten.
    """
    q_panel, is_packed = layout.block_q * LINE, features.packed
    end_row = make_row_end(features, FLOAT32, near=True)
    write_out = make_write_out(widths.value, dtype, q_panel)
    put_out = make_put_tile(widths.value_panels, q_panel, is_packed)

    @device_function
    def finish(me, own_tile, out, lse, rest, acc, shifts, sums, factor, item, pairs, extras):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        warp = int32(cuda.threadIdx.x // 32 % 4)
        own_row = int32(item.row + me * ROWS + warp * 16 + lane // 4)
        sum_0, sum_1 = sums
        for step in range(2):
            sum_0 += cuda.shfl_xor_sync(ALL_LANES, sum_0, 1 << step)
            sum_1 += cuda.shfl_xor_sync(ALL_LANES, sum_1, 1 << step)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        inverse_0, lse_0, rest_0 = end_row(sum_0, shifts[0], item.b, item.h, extras)
        inverse_1, lse_1, rest_1 = end_row(sum_1, shifts[1], item.b, item.h, extras)
        if lane % 4 == 0:
            if own_row < item.rows:
                lse[item.line, item.first_q + own_row] = lse_0
                rest[item.line, item.first_q + own_row] = rest_0
            if own_row + 8 < item.rows:
                lse[item.line, item.first_q + own_row + 8] = lse_1
                rest[item.line, item.first_q + own_row + 8] = rest_1
        # 14: write O_i, by way of the tile of q, which this warpgroup has read to the end
        write_out(
            own_tile, warp, lane, acc, inverse_0 * factor, inverse_1 * factor, sum_0, sum_1, pairs
        )
        fence_proxy_async()  # the copy engine sees them
        bar_sync(OUT_BARRIER + me, WARPGROUP)  # all rows of the warpgroup are there
        top = item.row + me * ROWS
        if is_packed or thread == 0:
            put_out(out, own_tile, thread, item.b, item.h, item.first_q + top, item.rows - top)
            cp_async_bulk_commit_group()
        if is_packed:
            bar_sync(OUT_BARRIER + me, WARPGROUP)  # all have copied: another q may come

    return finish


def make_consume(
    layout: ForwardLayout,
    widths: Widths,
    dtype: str,
    features: Features,
    pipelines: ForwardPipelines,
) -> Callable[..., None]:
    """Return the function ``consume(me, memory, out, lse, rest, scale, mask_words, extras)``.

    The threads of consumer ``me`` call it.

    Args:
        layout: Layout of the block.
        widths: Widths of the kernel.
        dtype: "float16" or "bfloat16".
        features: Options of the call.
        pipelines: Pipelines of the block.
    """
    block_k, q_panel, k_panel = layout.block_k, layout.block_q * LINE, layout.block_k * LINE
    key_tiles, value_tiles, depth_steps = block_k // 8, widths.value // 8, block_k // 16
    of_queries, of_items, of_keys, of_values, list_offset = pipelines
    # The next item's first scores are issued before this one's output is written.
    issues_ahead, is_packed = layout.items > 1, features.packed
    issue_score_products = make_issue_score_products(block_k, dtype, widths.head, q_panel, k_panel)
    issue_scores, issue_ahead = make_issue_scores(issue_score_products)
    softmax_step, pack = make_softmax_step(block_k, layout.patience), make_pack(dtype, block_k)
    accumulate = make_accumulate(widths.value, dtype, block_k)
    # Rows of q and k run along the depth; those of v across it, from panel to panel.
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    modifies_scores, of_all, score_whole, score_edge = make_elements(features, block_k)
    first_bits, fetch = make_fetch(features, layout.block_q, block_k)
    drop, has_patterns = make_drop(features, block_k), features.has_patterns
    words, seen_count, own_of = bit_words(block_k), seen_words(features, block_k), line_of(features)
    has_bits, is_listed = (
        features.dropout or has_words(features) or has_patterns,
        features.block_mask,
    )
    has_kept = features.dropout
    offer_turn, take_turn, pass_turn = make_turns(layout)
    skip_tiles = make_skip_tiles(take_turn, pass_turn)
    clear_tail = _make_clear_tail(layout, widths)
    finish = make_finish(layout, widths, dtype, features)
    minus_inf, zero, one = np.float32(-math.inf), np.float32(0), np.float32(1)

    @device_function
    def visited(item):
        if is_listed:  # the producer has read the list
            return int32(0), item.tiles
        return int32(item.stop - item.tiles), item.stop

    @device_function
    def apply_options(whole, s, seen, place, scale, extras):
        if not whole:
            score_edge(s, seen, place, scale, extras)
        elif of_all:
            score_whole(s, seen, place, scale, extras)

    @device_function
    def consume(me, memory, out, lse, rest, scale, mask_words, extras):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        warp = int32(cuda.threadIdx.x // 32 % 4)
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: P
        # Scores that options bend are natural logarithms first; else one factor makes them base 2.
        unit = one if modifies_scores else float32(scale)
        factor = unit * LOG2_OF_E
        kept = cuda.local.array(words, uint32)  # (words,), bits: what of P dropout keeps
        seen = cuda.local.array(seen_count, uint32)  # (seen_count,), bits, then pairs of a mask
        queries, items, q_at = placed(of_queries, memory), placed(of_items, memory), start()
        keys, values, at = placed(of_keys, memory), placed(of_values, memory), start()
        offer_turn(me)
        item, skipped = next_item(queries, items, q_at, me)
        is_issued, copied = False, int32(-1)  # the slot whose output is on its way
        listed, pattern = int32(0), int32(0)
        while item.tiles >= 0:
            own_tile = tile_at(queries, q_at) + me * (ROWS * LINE)  # of q, and then of out
            q_desc = descriptor(ALONG, own_tile)
            b, h, flat, cols = item.b, item.h, item.flat, item.cols
            own = own_of(flat, b, h, item.rows, cols, extras)
            warp_row = int32(item.row + me * ROWS + warp * 16)
            own_row = int32(warp_row + lane // 4)
            bits = first_bits(lane, b, h, warp_row, extras)
            first, stop = visited(item)
            if skipped > 0:  # before any turn: others wait for the next q in theirs
                release_slot(queries, thread, copied)
                copied = int32(-1)
            at = skip_tiles(keys, values, at, skipped, me, lane)  # fully masked for these rows
            stop = int32(stop - skipped)
            # 5: l = 0, m = -inf; O = 0 is what the first P V begins with
            maxima, shifts, sums, has_large = (
                (minus_inf, minus_inf),
                (zero, zero),
                (zero, zero),
                False,
            )
            if first < stop:
                if not is_issued:
                    # 8: S = Q_i K_jᵀ, the first
                    issue_scores(s, me, queries, q_at, keys, at)
                    wgmma_commit_group()
                if is_listed:
                    listed, pattern = read_listed(memory + list_offset, at.stage)
                col = (listed if is_listed else stop - 1) * block_k
                fetch(seen, kept, bits, pattern, lane, flat, warp_row, col, mask_words, extras)
                wait_for_all()  # S is there, and K_j was read
                release(keys, at, lane)
                if is_packed and cols - col < block_k:  # the rest is the next sequence's
                    clear_tail(values, at, cols - col)
            before = start()  # the stage of the values before
            for n in range(int32(stop - first)):
                j = int32(listed if is_listed else stop - 1 - n)
                place = LanePlace(lane, own_row, int32(j * block_k + 2 * (lane % 4)), own)
                # The words of a block mask hide what is out of bounds, too.
                whole = pattern == 0 if has_patterns else item.full <= j < item.full_stop
                apply_options(whole, s, seen, place, scale, extras)
                # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                maxima, shifts, sums, has_large, is_scaled, rescale_0, rescale_1 = softmax_step(
                    s, unit, factor, maxima, shifts, sums, has_large
                )
                wait_for_all()  # the last P V is done: its values may be overwritten, and O is ours
                if n > 0:
                    release(values, before, lane)
                # 10, first half: O = diag(e^(m - m_new)) O
                if is_scaled:
                    rescale_rows(acc, rescale_0, rescale_1)
                # The accumulators of S lie as the left operand of P V does.
                pack(p, s)
                drop(p, kept)  # l is the sum of all
                before, at = at, following(keys, at)
                has_next = n + 1 < stop - first
                if has_next:
                    wait(keys, at)  # the next K is there
                    if is_listed:
                        listed, pattern = read_listed(memory + list_offset, at.stage)
                take_turn(me)
                wgmma_fence()
                if has_next:
                    # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                    issue_score_products(s, q_desc, descriptor(ALONG, tile_at(keys, at)))
                    wgmma_commit_group()
                # 10, second half: O = O + P V_j
                wait(values, before)  # V_j is there
                accumulate(acc, p, descriptor(across, tile_at(values, before)), n)
                wgmma_commit_group()
                pass_turn(me)
                if issues_ahead and n == 0:  # not before the products: a branch there holds them up
                    release_slot(queries, thread, copied)
                    copied = int32(-1)
                if has_bits and has_next:  # while it is computed
                    col = (listed if is_listed else stop - 2 - n) * block_k
                    fetch(seen, kept, bits, pattern, lane, flat, warp_row, col, mask_words, extras)
                wait_for_scores()  # the next S is there, and its K was read; P V may go on
                if has_next:
                    release(keys, at, lane)
            is_issued = False
            if issues_ahead:
                # 8: S = Q_i K_jᵀ, the next item's first, computed while this one's O is written
                release_slot(queries, thread, copied)  # if this item has no tiles
                copied = int32(-1)
                is_issued = issue_ahead(s, me, queries, items, following(queries, q_at), keys, at)
                wait_for_scores()  # the last P V is done: V was read; the next S may go on
            else:
                wait_for_all()  # the last P V is done: V was read
            if first < stop:
                release(values, before, lane)
            item = read_item(tile_at(items, q_at))  # read again instead of kept in registers
            release_alone(items, q_at)  # each thread, for what it has read itself
            shift_0 = mul_rn(float32(shift_of(maxima[0])), unit)
            shift_1 = mul_rn(float32(shift_of(maxima[1])), unit)
            keep_scale = extras.keep_scale if has_kept else one
            finish(
                me, own_tile, out, lse, rest, acc, (shift_0, shift_1), sums, keep_scale, item,
                p, extras,
            )  # fmt: skip
            copied = q_at.stage
            if not issues_ahead:
                release_slot(queries, thread, copied)
                copied = int32(-1)
            q_at = following(queries, q_at)
            item, skipped = next_item(queries, items, q_at, me)
        wait_for_reads()  # of the last output, in the thread that issued its copies
        wait_for_all()  # the unused S after the last item

    return consume
