"""The consumers of Hopper's dK and dV kernel, which multiply and write the gradients.

FlashAttention-3, Algorithm 3, with the numbered lines of FlashAttention-2, Algorithm 2.  All five products
are issued as soon as their operands are ready, and waited for where their results are needed.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import float32, int32, int64, uint32

from kernels.cuda.attention.flash3_wgmma.backward.dkdv_producer import KeyPipelines
from kernels.cuda.attention.flash3_wgmma.backward.elementwise import make_passes
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    KeyGradients,
    KeyLayout,
    dq_bytes,
    dq_share,
    key_tiles,
    square_place,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.backward.tile_walk import make_row_base, make_visits_of
from kernels.cuda.attention.flash3_wgmma.layout import (
    CLEAR_BARRIER,
    CONSUMERS_BARRIER,
    WARPGROUP_BARRIER,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tiles import (
    make_accumulate,
    make_clear_rows,
    make_multiply,
    make_multiply_dq,
    make_pack,
    make_put_tile,
    make_write_tile,
    store_pairs,
)
from kernels.cuda.device.one_source import is_full_tile
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
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    cp_reduce_async_bulk_add,
    make_cp_async_bulk_wait_group,
)
from kernels.cuda.ptx.copies import global_address, ld_shared, st_shared_v4_f32
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.scores.program import Features

#: Waits until the copies of this thread have read shared memory.
wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)


def _make_send_dq(layout: KeyLayout, widths: Widths, parts: KeyGradients) -> Callable[..., None]:
    """Return ``send_dq(memory, dq_acc, dq_sum, number, me, thread)``: add a consumer's share to dq_sum.

    ``number`` is the number of the share.  The copy engine adds it while the products go on.
    """
    dq_offset, share_size = key_tiles(layout, widths, parts)["dq"], dq_bytes(layout, widths)
    dq_tiles = dq_share(layout, widths).cols // 8

    @device_function
    def send_dq(memory, dq_acc, dq_sum, number, me, thread):
        own_share = memory + dq_offset + me * share_size
        for t in range(dq_tiles):
            st_shared_v4_f32(own_share + 16 * (t * WARPGROUP + thread), dq_acc[t])
        fence_proxy_async()  # the copy engine sees what was stored
        bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # the share is whole
        if thread == 0:
            cp_reduce_async_bulk_add(
                global_address(dq_sum) + number * share_size, own_share, share_size
            )
            cp_async_bulk_commit_group()

    return send_dq


def _make_write_gradients(
    layout: KeyLayout, widths: Widths, dtype: str, parts: KeyGradients, features: Features
) -> Callable[..., None]:
    """Return the function that writes a consumer's 64 keys of dK and dV through the tiles of K and V.

    The function is ``write_gradients(me, memory, dk_map, dv_map, dk_acc, dv_acc, factors, visit, pairs)``,
    where ``factors`` are those of dK and dV; ``pairs`` is overwritten.
    """
    has_dk, has_dv, _ = parts
    panels, k_panel = (widths.head_panels, widths.value_panels), layout.block_k * LINE
    tiles, is_packed = key_tiles(layout, widths, parts), features.packed
    # dV takes the place of V, or of K where V is not needed.
    dv_offset = tiles["v"] if has_dk else tiles["k"]
    put_dk, put_dv = (make_put_tile(n, k_panel, is_packed) for n in panels)
    write_dk, write_dv = (make_write_tile(width, dtype, k_panel) for width in widths)

    @device_function
    def write_gradients(me, memory, dk_map, dv_map, dk_acc, dv_acc, factors, visit, pairs):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        r, c = square_place(lane)
        line, is_seen = me * ROWS + int32(thread // 32) * 16 + r, visit.first < visit.stop
        if has_dk:
            write_dk(memory, line, c, dk_acc, factors[0], is_seen, pairs)
        if has_dv:
            write_dv(memory + dv_offset, line, c, dv_acc, factors[1], is_seen, pairs)
        fence_proxy_async()  # the copy engine sees them
        bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # all keys of the warpgroup are there
        own_keys = memory + me * (ROWS * LINE)
        key, left = visit.first_k + visit.place + me * ROWS, visit.cols - visit.place - me * ROWS
        if is_packed or thread == 0:
            if has_dk:
                put_dk(dk_map, own_keys, thread, visit.b, visit.h, key, left)
            if has_dv:
                put_dv(dv_map, own_keys + dv_offset, thread, visit.b, visit.h, key, left)
            cp_async_bulk_commit_group()
            wait_for_reads()  # the copies have read the tiles
        bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # and copied: other keys may come

    return write_gradients


def make_consume(
    layout: KeyLayout,
    widths: Widths,
    dtype: str,
    parts: KeyGradients,
    features: Features,
    pipelines: KeyPipelines,
) -> Callable[..., None]:
    """Return the function of the threads of consumer ``me``, which multiplies and writes the gradients.

    ``consume(me, memory, dk_map, dv_map, delta, dq_sum, shape, scale, schedule, mask_words, extras)``
    """
    has_dk, has_dv, adds_dq = parts
    consumers, block_q, block_k = layout.consumers, layout.block_q, layout.block_k
    head_tiles, value_tiles, row_tiles = widths.head // 8, widths.value // 8, block_q // 8
    depth_steps, consumer_threads = block_q // 16, WARPGROUP * consumers
    q_panel, k_panel, rows_size = block_q * LINE, block_k * LINE, block_q * WORD
    is_packed = features.packed
    tiles, (of_keys, of_queries, of_douts) = key_tiles(layout, widths, parts), pipelines
    v_offset, number_offset = tiles["v"], tiles["number"]
    shifts_offset, delta_offset = tiles["shifts"], tiles["delta"]
    ds_offset, ds_size = tiles["ds"], 2 * block_q * block_k
    share = dq_share(layout, widths)
    dq_tiles = share.cols // 8
    ds_step, k_step = (k_panel, 0) if share.by_rows else (0, share.step)
    multiply_qk, multiply_v_dout = (
        make_multiply(block_q, dtype, width, k_panel, q_panel) for width in widths
    )
    add_dk, add_dv = (make_accumulate(width, dtype, block_q) for width in widths)
    multiply_dq = make_multiply_dq(share.cols, dtype, block_k)
    pack_tile = make_pack(dtype, block_q)
    # Rows of all run along the depth of Sᵀ and dPᵀ, and across that of the other products.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across_rows = descriptor_layout(LINE, q_panel, 8 * LINE)
    across_keys = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_but_two = make_wgmma_wait_group(0), make_wgmma_wait_group(2)
    wait_for_dp = make_wgmma_wait_group(1 if has_dv else 0)
    wait_for_additions = make_cp_async_bulk_wait_group(0)
    visit_of, tile_of, pattern_of = make_visits_of(features, block_q, block_k, True)
    elements = make_elements(features, block_k, block_q, True)
    row_base = make_row_base(features.packed)
    scale_of, factor_of, slope_scale_of = elements.scale, elements.factor, elements.slope_scale
    words, own_of, has_patterns = elements.words, line_of(features), features.has_patterns
    fetch_bits = elements.fetch_bits
    has_large_row, lower, weigh, slope_of = make_passes(
        features, block_k, block_q, dtype, True, has_dv
    )
    clear_q, clear_dout = (
        make_clear_rows(consumer_threads, block_q, n)
        for n in (widths.head_panels, widths.value_panels)
    )
    clear_keys = make_clear_rows(consumer_threads, block_k, widths.head_panels)
    send_dq = _make_send_dq(layout, widths, parts)
    write_gradients = _make_write_gradients(layout, widths, dtype, parts, features)

    @device_function
    def next_item(memory, keys, at):
        wait(keys, at)  # K_j and V_j are there, and the item's number
        return ld_shared(memory + number_offset)

    @device_function
    def share_zeros():
        fence_proxy_async()  # the zeros are visible to products
        bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros

    @device_function
    def clear_tail_of_keys(left, k_tile):
        clear_keys(int32(cuda.threadIdx.x - WARPGROUP), left, k_tile)
        share_zeros()

    @device_function
    def clear_tails(left, q_tile, dout_tile):
        consumer_thread = int32(cuda.threadIdx.x - WARPGROUP)
        if has_dk:
            clear_q(consumer_thread, left, q_tile)
        if has_dv:
            clear_dout(consumer_thread, left, dout_tile)
        share_zeros()

    @device_function
    def issue_scores(s, k_desc, queries, at):
        multiply_qk(s, k_desc, descriptor(along, tile_at(queries, at)))
        wgmma_commit_group()

    @device_function
    def share_ds(ds_tile, ds, line, column, thread):
        for t in range(depth_steps):
            store_pairs(ds_tile, line, column, t, k_panel, ds[t])
        fence_proxy_async()  # products see what was stored
        if thread == 0:
            wait_for_reads()  # the tile of dq is free again
        bar_sync(CONSUMERS_BARRIER, consumer_threads)  # dS is whole

    @device_function
    def shifts_at(memory, at, row):
        return memory + shifts_offset + at.stage * 2 * rows_size + WORD * row

    @device_function
    def fetch(seen, mask_words, entry, lane, own_row, own_col, own, extras):
        row = int32(tile_of(entry, extras) * block_q)
        place = LanePlace(lane, int32(row + own_row), own_col, own)
        fetch_bits(seen, mask_words, pattern_of(entry, extras), place, extras)

    @device_function
    def consume(
        me, memory, dk_map, dv_map, delta, dq_sum, shape, scale, schedule, mask_words, extras
    ):
        thread, lane = int32(cuda.threadIdx.x % WARPGROUP), int32(cuda.threadIdx.x % 32)
        warp = int32(thread // 32)
        # A thread has two of its warpgroup's 64 keys (rows of dQ), eight apart, and two of eight columns.
        dk_acc = cuda.local.array((head_tiles, 4), float32)  # (64, head_dim) / 128: dK
        dv_acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: dV
        dq_acc = cuda.local.array((dq_tiles, 4), float32)  # (64, share.cols) / 128: dQ
        s = cuda.local.array((row_tiles, 4), float32)  # (64, block_q) / 128: Sᵀ, then Pᵀ
        dp = cuda.local.array((row_tiles, 4), float32)  # (64, block_q) / 128: dPᵀ, then dSᵀ
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_q) / 128, in pairs: Pᵀ
        ds = cuda.local.array((depth_steps, 4), uint32)  # (64, block_q) / 128, in pairs: dSᵀ
        # (words,) each, bits: what of P dropout keeps; what is seen, and then pairs of a mask
        kept, seen = cuda.local.array(words, uint32), cuda.local.array(words, uint32)
        factor, is_large = factor_of(scale, extras), False
        keys, at = placed(of_keys, memory), start()
        queries, q_at = placed(of_queries, memory), start()
        douts, dout_at = placed(of_douts, memory), start()
        r, c = square_place(lane)
        line = me * ROWS + warp * 16 + r  # of dSᵀ, that this lane gives stmatrix
        own_keys = memory + me * (ROWS * LINE)
        k_desc, v_desc = descriptor(along, own_keys), descriptor(along, own_keys + v_offset)
        own_row = int32(2 * (lane % 4))
        item = next_item(memory, keys, at)
        while item < int32(schedule.tiles * schedule.heads):
            visit = visit_of(item, schedule, shape, extras)
            first, stop, col = visit.first, visit.stop, visit.place
            rows, cols = visit.rows, visit.cols
            base = row_base(visit.flat, visit.y, visit.first_q, extras)
            own = own_of(visit.flat, visit.b, visit.h, rows, cols, extras)
            own_col = int32(col + me * ROWS + warp * 16 + lane // 4)
            # 7: dK_j = 0, dV_j = 0 is what the first products begin with
            # Rows beyond the end are the next sequence's.
            if is_packed and adds_dq and cols - col < block_k:
                clear_tail_of_keys(cols - col, memory)
            if first < stop:
                # 10: Sᵀ = K_j Q_iᵀ, the first
                wait(queries, q_at)  # Q_i, L_i are there
                wgmma_fence()
                issue_scores(s, k_desc, queries, q_at)
                fetch(seen, mask_words, first, lane, own_row, own_col, own, extras)
                is_large = has_large_row(shifts_at(memory, q_at, 2 * lane))
                wait_for_all()  # S is there
            for n in range(int32(stop - first)):
                row = int32(tile_of(first + n, extras) * block_q)
                q_now, dout_now = q_at, dout_at
                shifts_now = shifts_at(memory, q_now, own_row)
                delta_now = memory + delta_offset + dout_now.stage * rows_size + WORD * own_row
                dout_tile = tile_at(douts, dout_now)
                # The words of a block mask hide what is out of bounds, too.
                is_whole = has_patterns or is_full_tile(
                    row, block_q, rows, col, block_k, cols, extras.lower, extras.upper
                )
                if is_large:
                    lower(s, shifts_now, float32(scale))
                wait(douts, dout_now)  # dO_i, D_i are there
                dout_at = following(douts, dout_now)
                if is_packed and rows - row < block_q:  # the rest is the next sequence's
                    clear_tails(rows - row, tile_at(queries, q_now), dout_tile)
                if has_dk:
                    # 13: dPᵀ = V_j dO_iᵀ, computed while the exponentials are taken
                    wgmma_fence()
                    multiply_v_dout(dp, v_desc, descriptor(along, dout_tile))
                    wgmma_commit_group()
                # 11: P = exp(S - L_i); once packed, it is laid out as the left operand of Pᵀ dO
                place = LanePlace(lane, int32(row + own_row), own_col, own)
                weigh(
                    s, p, kept, seen, mask_words, shifts_now, factor, is_whole,
                    pattern_of(first + n, extras), place, extras,
                )  # fmt: skip
                if has_dv:
                    # 12: dV_j = dV_j + Pᵀ dO_i, computed while dS is
                    wgmma_fence()
                    add_dv(dv_acc, p, descriptor(across_rows, dout_tile), n)
                    wgmma_commit_group()
                if has_dk:
                    wait_for_dp()  # dP is there; Pᵀ dO may go on
                    # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                    slope_of(s, dp, kept, delta_now, is_whole, place, extras)
                    pack_tile(ds, dp)
                    if not has_dv:
                        cuda.syncwarp()  # all lanes have read their deltas
                        release(douts, dout_now, lane)
                ds_tile = memory + ds_offset + (n % 2) * ds_size
                if adds_dq:
                    share_ds(ds_tile, ds, line, c, thread)
                wgmma_fence()
                if adds_dq:
                    # 15: dQ_i += dS K_j, this consumer's share
                    ds_desc = descriptor(across_keys, ds_tile + me * ds_step)
                    multiply_dq(dq_acc, ds_desc, descriptor(across_keys, memory + me * k_step))
                    wgmma_commit_group()
                if has_dk:
                    # 16: dK_j = dK_j + dSᵀ Q_i
                    add_dk(dk_acc, ds, descriptor(across_rows, tile_at(queries, q_now)), n)
                    wgmma_commit_group()
                q_at = following(queries, q_now)
                if adds_dq:
                    wait_but_two()  # dV is done: S takes the registers of P
                    release(douts, dout_now, lane)
                # 10: the next Sᵀ, computed while dQ is stored.  After the last tile it reads old data and
                # is not used: products behind a branch would wait for each other.
                if n + 1 < stop - first:
                    wait(queries, q_at)  # Q_i is there
                issue_scores(s, k_desc, queries, q_at)
                # Read the next tile's bits while the products run; after the last tile they are not used.
                entry = int32(min(first + n + 1, stop - 1))
                fetch(seen, mask_words, entry, lane, own_row, own_col, own, extras)
                is_large = has_large_row(shifts_at(memory, q_at, 2 * lane))
                if adds_dq:
                    wait_but_two()  # dQ is done
                    slot = int64(visit.y) * (delta.shape[1] // block_q) + (base + row) // block_q
                    send_dq(memory, dq_acc, dq_sum, slot * consumers + me, me, thread)
                wait_for_all()  # dK, and the next Sᵀ
                release(queries, q_now, lane)
                if has_dv and not adds_dq:
                    release(douts, dout_now, lane)
            if adds_dq:
                bar_sync(CONSUMERS_BARRIER, consumer_threads)  # no one reads the keys any more
            # 18: write dK_j, dV_j
            factors = float32(scale) * slope_scale_of(extras), scale_of(extras)
            write_gradients(me, memory, dk_map, dv_map, dk_acc, dv_acc, factors, visit, p)
            release_alone(keys, at)  # each for itself: it has read the number
            at = following(keys, at)
            item = next_item(memory, keys, at)
        if thread == 0:
            wait_for_additions()  # to dQ, still on their way

    return consume
