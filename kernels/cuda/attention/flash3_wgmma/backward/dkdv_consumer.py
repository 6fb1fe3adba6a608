"""The consumers of Hopper's dK and dV kernel, which multiply and write the gradients.

FlashAttention-3, Algorithm 3, with the numbered lines of FlashAttention-2, Algorithm 2.  All five products
are issued as soon as their operands are ready, and waited for where their results are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cuda.attention.flash3_wgmma.backward.dq_shares import (
    DqPipelines,
    make_hand_over,
    make_issue_dq,
)
from kernels.cuda.attention.flash3_wgmma.backward.elementwise import (
    LOG2_OF_E,
    has_large_row,
    make_fetch_bits,
    make_passes,
    make_weigh,
)
from kernels.cuda.attention.flash3_wgmma.backward.layout import dq_share, tiles_of
from kernels.cuda.attention.flash3_wgmma.backward.producer import BackwardPipelines, make_entries
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.layout import (
    CONSUMERS_BARRIER,
    KernelForm,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_row_base, make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ALONG,
    ConsumerThread,
    make_accumulate,
    make_clear_rows,
    make_multiply,
    make_pack,
    make_write_results,
    own_thread,
)
from kernels.cuda.device.one_source import first_tile, is_full_tile
from kernels.cuda.device.pipeline import (
    StagePhase,
    following,
    placed,
    preceding,
    release,
    release_alone,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.barriers import bar_sync
from kernels.cuda.ptx.copies import ld_shared, recomputed
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_fence,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, int64, uint32


class KeyRegisters(NamedTuple):
    """The local arrays of a consumer thread, which holds two of the 64 keys of its warpgroup."""

    dk: Any  # (64, head_dim) / 128: dK
    dv: Any  # (64, value_dim) / 128: dV
    dq: Any  # (64, share.cols) / 128: dQ, of which it has two rows
    s: Any  # (64, block_q) / 128: Sᵀ, then Pᵀ
    dp: Any  # (64, block_q) / 128: dPᵀ, then dSᵀ
    p: Any  # (64, block_q) / 128, in pairs: Pᵀ
    ds: Any  # (64, block_q) / 128, in pairs: dSᵀ
    kept: Any  # Bits: what of P dropout keeps
    seen: Any  # Bits: what is seen, and behind them pairs of a mask


class KeyBlock(NamedTuple):
    """The shared memory, the pipelines and the descriptors of a block whose work items are key tiles."""

    memory: Any  # Address of the block's memory
    pipelines: BackwardPipelines  # The pipelines in this memory
    k_desc: Any  # Descriptor of the consumer's keys
    v_desc: Any  # Descriptor of its values


class QueryTile(NamedTuple):
    """A query tile that a work item visits."""

    n: Any  # Its number among those of the item
    row: Any  # Its first row, from the start of the sequence
    is_whole: Any  # Whether the bounds mask nothing in it; the words of a block mask say so, too
    q_at: Any  # Its place in the pipeline of q
    dout_at: Any  # Its place in that of dout


def _make_shifts_at(form: KernelForm) -> Callable[..., Any]:
    """Return ``shifts_at(memory, at, row)``: the address of a row's shift."""
    block_q, shifts_offset = form.layout.block_q, tiles_of(form)["shifts"]

    @device_function
    def shifts_at(memory, at, row):
        return memory + shifts_offset + at.stage * (2 * block_q * WORD) + WORD * row

    return shifts_at


def _make_rows_of(form: KernelForm) -> Callable[..., Any]:
    """Return ``rows_of(entry, item, extras)``: a tile's first row, and whether the bounds mask nothing."""
    block_q, block_k, features = form.layout.block_q, form.layout.block_k, form.features
    tile_of = make_walk(features, block_q, block_k, True).tile_of
    has_patterns = features.has_patterns

    @device_function
    def rows_of(entry, item, extras):
        row = int32(tile_of(entry, extras) * block_q)
        # The words of a block mask hide what is out of bounds, too.
        is_whole = has_patterns or is_full_tile(
            row, block_q, item.rows, item.place, block_k, item.cols, extras.lower, extras.upper
        )
        return row, is_whole

    return rows_of


def _make_visit(form: KernelForm) -> Callable[..., None]:
    """Return ``visit(registers, block, tile, item, largest_top, place, work)``, from Sᵀ to P and dS.

    It issues the products for dP and dV; ``tile`` is a :class:`QueryTile`, and ``place`` a
    ``score_terms.LanePlace``.
    """
    layout, widths, dtype, features, (has_dk, has_dv, *_) = form
    block_q, block_k, is_packed = layout.block_q, layout.block_k, features.packed
    q_panel, k_panel = block_q * LINE, block_k * LINE
    delta_offset, rows_size = tiles_of(form)["delta"], block_q * WORD
    multiply_v_dout = make_multiply(block_q, dtype, widths.value, k_panel, q_panel)
    add_dv, pack_tile = make_accumulate(widths.value, dtype, block_q), make_pack(dtype, block_q)
    wait_for_dp = make_wgmma_wait_group(1 if has_dv else 0)
    fence_pairs = make_wgmma_fence(block_q // 4)
    shifts_at, walk = _make_shifts_at(form), make_walk(features, block_q, block_k, True)
    pattern_of, (entry_of, _) = walk.pattern_of, make_entries(form)
    factor_of, has_tops = make_elements(form).factor, features.modifies_scores
    _, lower, *_, slope_of = make_passes(form)
    weigh = make_weigh(form, multiply_v_dout if has_dk else None)
    clear_q, clear_dout = (make_clear_rows(layout.consumers, block_q, n) for n in form.panels)
    across_rows = descriptor_layout(LINE, q_panel, 8 * LINE)

    @device_function
    def visit(registers, block, tile, item, largest_top, place, work):
        (n, row, is_whole, q_at, dout_at), extras = tile, work.extras
        douts = block.pipelines.second
        own_row, s, dp = int32(2 * (place.lane % 4)), registers.s, registers.dp
        shifts = shifts_at(block.memory, q_at, own_row)
        delta = block.memory + delta_offset + dout_at.stage * rows_size + WORD * own_row
        dout_tile = tile_at(douts, dout_at)
        factor, is_large = factor_of(work.scale, extras), has_large_row(largest_top)
        if not has_tops and is_large:
            lower(s, shifts, float32(work.scale))
            factor = LOG2_OF_E
        if is_packed and item.rows - row < block_q:  # the rest is the next sequence's
            if has_dk:
                clear_q(item.rows - row, tile_at(block.pipelines.first, q_at))
            if has_dv:
                clear_dout(item.rows - row, dout_tile)
        # 11: P = exp(S - L_i); once packed, it is laid out as the left operand of Pᵀ dO
        # 13: dPᵀ = V_j dO_iᵀ, computed while the exponentials are taken
        pattern, bits = pattern_of(entry_of(item, n), extras), (registers.kept, registers.seen)
        rows, marks = (is_large, shifts), (is_whole, pattern)
        product = dp, block.v_desc, descriptor(ALONG, dout_tile)
        weigh((s, registers.p), bits, rows, factor, marks, place, work, product)
        if has_dv:
            # 12: dV_j = dV_j + Pᵀ dO_i, computed while dS is
            fence_pairs(registers.p)
            add_dv(registers.dv, registers.p, descriptor(across_rows, dout_tile), n)
            wgmma_commit_group()
        if has_dk:
            wait_for_dp()  # dP is complete; Pᵀ dO may go on
            # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            slope_of(s, dp, registers.kept, delta, is_whole, place, extras)
            pack_tile(registers.ds, dp)
            if not has_dv:
                cuda.syncwarp()  # all lanes have read their deltas
                release(douts, dout_at, place.lane)

    return visit


def make_consume(
    form: KernelForm, pipelines: BackwardPipelines, dq_path: DqPipelines
) -> Callable[..., None]:
    """Return the function of the threads of consumer ``me``, which multiplies and writes the gradients.

    ``consume(me, memory, dk_map, dv_map, delta, work)``
    """
    layout, widths, dtype, features, (has_dk, has_dv, adds_dq, _) = form
    consumers, block_q, block_k = layout.consumers, layout.block_q, layout.block_k
    q_panel, k_panel, is_packed = block_q * LINE, block_k * LINE, features.packed
    sizes = widths.head // 8, widths.value // 8, dq_share(layout, widths).cols // 8
    (head_tiles, value_tiles, dq_tiles), row_tiles, pairs = sizes, block_q // 8, block_q // 16
    tiles, (of_keys, of_queries, of_douts) = tiles_of(form), pipelines
    v_offset, number_offset, visit = tiles["v"], tiles["number"], _make_visit(form)
    multiply_qk = make_multiply(block_q, dtype, widths.head, k_panel, q_panel)
    add_dk, consumer_threads = make_accumulate(widths.head, dtype, block_q), WARPGROUP * consumers
    across_rows = descriptor_layout(LINE, q_panel, 8 * LINE)
    wait_for_all, wait_but_two = make_wgmma_wait_group(0), make_wgmma_wait_group(2)
    item_of, rows_of = make_walk(features, block_q, block_k, True).item, _make_rows_of(form)
    elements, own_of = make_elements(form), line_of(features)
    scale_of, slope_scale_of, words = elements.scale, elements.slope_scale, elements.words
    shifts_at, fetch = _make_shifts_at(form), make_fetch_bits(form)
    row_base, (entry_of, next_entry) = make_row_base(is_packed), make_entries(form)
    largest_top_of = make_passes(form).largest_top
    lags = layout.lags
    (store_ds, issue_dq), of_slopes = make_issue_dq(form), dq_path.slopes
    hand_over, end_sums = make_hand_over(form, dq_path.shares)
    clear_keys = make_clear_rows(consumers, block_k, widths.head_panels)
    # dV takes the place of V, or of K where V is not needed.
    write_gradients = make_write_results(form, v_offset if has_dk else tiles["k"])

    @device_function
    def share_of(item, row, base, rows, extras):
        slot = int64(item.line) * (rows // block_q) + (base + row) // block_q
        first = first_tile(row, block_k, item.cols, int32(extras.lower))
        return int32(slot * consumers), int32(item.place // block_k - first)

    @device_function
    def next_item(memory, keys, at):
        wait(keys, at)  # K_j and V_j are there, and the item's number
        return ld_shared(memory + number_offset)

    @device_function
    def issue_scores(s, k_desc, queries, at):
        multiply_qk(s, k_desc, descriptor(ALONG, tile_at(queries, at)))
        wgmma_commit_group()

    @device_function
    def consume(me, memory, dk_map, dv_map, delta, work):
        own, extras = own_thread(me), work.extras
        registers = KeyRegisters(
            cuda.local.array((head_tiles, 4), float32), cuda.local.array((value_tiles, 4), float32),
            cuda.local.array((dq_tiles, 4), float32), cuda.local.array((row_tiles, 4), float32),
            cuda.local.array((row_tiles, 4), float32), cuda.local.array((pairs, 4), uint32),
            cuda.local.array((pairs, 4), uint32), cuda.local.array(words, uint32),
            cuda.local.array(words, uint32),
        )  # fmt: skip
        s, seen, largest_top = registers.s, registers.seen, float32(0)
        row, is_whole = int32(0), True
        keys, at = placed(of_keys, memory), start()
        queries, q_at = placed(of_queries, memory), start()
        douts, dout_at = placed(of_douts, memory), start()
        dq_at, slopes, ds_at = StagePhase(me, int32(0)), placed(of_slopes, memory), start()
        share, turn = int32(0), int32(0)
        own_keys = memory + me * (ROWS * LINE)
        k_desc, v_desc = descriptor(ALONG, own_keys), descriptor(ALONG, own_keys + v_offset)
        block = KeyBlock(memory, BackwardPipelines(keys, queries, douts), k_desc, v_desc)
        own_row = int32(2 * (own.lane % 4))
        number = next_item(memory, keys, at)
        while number < int32(work.schedule.tiles * work.schedule.heads):
            item = item_of(number, work)
            first, stop = item.first, item.stop
            base, line = row_base(item.flat, item.line, item.first_q, extras), own_of(item, extras)
            own_col = int32(item.place + me * ROWS + own.warp * 16 + own.lane // 4)
            # 7: the first products begin with dK_j = 0, dV_j = 0
            # Rows beyond the end are the next sequence's.
            if is_packed and adds_dq and item.cols - item.place < block_k:
                clear_keys(item.cols - item.place, memory)
            if first < stop:
                # 10: Sᵀ = K_j Q_iᵀ, the first
                wait(queries, q_at)  # Q_i, L_i have arrived
                wgmma_fence()
                issue_scores(s, k_desc, queries, q_at)
                fetch(seen, entry_of(item, 0), own_col, own, line, work)
                largest_top = largest_top_of(shifts_at(memory, q_at, 2 * own.lane))
                row, is_whole = rows_of(entry_of(item, 0), item, extras)
                wait(douts, dout_at)  # dO_i, D_i have arrived
                wait_for_all()  # S is complete
            for n in range(int32(stop - first)):
                tile = QueryTile(n, row, is_whole, q_at, dout_at)
                place = LanePlace(own.lane, int32(row + own_row), own_col, line)
                visit(registers, block, tile, item, largest_top, place, work)
                before = preceding(slopes, ds_at) if lags else ds_at
                if adds_dq:
                    store_ds(registers.ds, slopes, ds_at, own)
                    # 15: dQ_i += dS K_j, this consumer's share, or that of the tile before, which at the
                    # first is not used: products behind a branch would wait for each other.
                    if n > 0 or not lags:
                        wait(slopes, before)  # dS is complete
                    issue_dq(registers.dq, memory, tile_at(slopes, before), own)
                else:
                    wgmma_fence()
                if has_dk:
                    # 16: dK_j = dK_j + dSᵀ Q_i
                    q_desc = descriptor(across_rows, tile_at(queries, q_at))
                    add_dk(registers.dk, registers.ds, q_desc, n)
                    wgmma_commit_group()
                q_at, dout_at = following(queries, q_at), following(douts, dout_at)
                if adds_dq:
                    wait_but_two()  # dV is done: S takes the registers of P
                    release(douts, tile.dout_at, own.lane)
                # 10: the next Sᵀ, computed while dQ is stored.  After the last tile it reads old data and
                # is not used: products behind a branch would wait for each other.
                # Work that does not need the scores comes before the wait for them.
                if n + 1 < stop - first:
                    wait(queries, q_at)  # Q_i has arrived
                    wait(douts, dout_at)
                issue_scores(s, k_desc, queries, q_at)
                # Read the next tile's bits while the products run; after the last tile they are not used.
                fetch(seen, next_entry(item, n), own_col, own, line, work)
                row, is_whole = rows_of(next_entry(item, n), item, extras)
                largest_top = largest_top_of(shifts_at(memory, q_at, 2 * own.lane))
                if adds_dq:
                    wait_but_two()  # dQ is done
                    own_share, own_turn = share_of(item, tile.row, base, delta.shape[1], extras)
                    own_share, ds_at = int32(own_share + me), following(slopes, ds_at)
                    if not lags:
                        share, turn = own_share, own_turn
                    if n > 0 or not lags:
                        release(slopes, before, own.lane)
                        dq_at = hand_over(memory, dq_at, registers.dq, share, turn, own)
                    share, turn = own_share, own_turn
                wait_for_all()  # dK, and the next Sᵀ
                release(queries, tile.q_at, own.lane)
                if has_dv and not adds_dq:
                    release(douts, tile.dout_at, own.lane)
            if adds_dq:
                if lags and first < stop:  # the share of the last tile
                    before = preceding(slopes, ds_at)
                    wait(slopes, before)  # dS is complete
                    issue_dq(registers.dq, memory, tile_at(slopes, before), own)
                    wait_for_all()
                    release(slopes, before, own.lane)
                    dq_at = hand_over(memory, dq_at, registers.dq, share, turn, own)
                bar_sync(CONSUMERS_BARRIER, consumer_threads)  # all consumers have read the keys
            # 18: write dK_j, dV_j
            dk = dk_map, registers.dk, float32(work.scale) * slope_scale_of(extras)
            dv = dv_map, registers.dv, scale_of(extras)
            # Addresses that depend on this lane are not kept during the products.
            writer = ConsumerThread(me, own.thread, recomputed(own.lane), own.warp)
            write_gradients(writer, memory, dk, dv, item, registers.p)
            release_alone(keys, at)  # each thread releases K for itself: it has read the number
            at = following(keys, at)
            number = next_item(memory, keys, at)
        if adds_dq:
            end_sums(memory, dq_at, own)

    return consume
