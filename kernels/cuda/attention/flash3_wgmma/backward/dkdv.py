"""FlashAttention-3 backward by key tiles: dK and dV, and by choice what they add to dQ.

What the forward kernel does with two products, a producer warpgroup and reallocated registers, this one
does with five.  Sᵀ and dPᵀ are computed rather than S and dP: a warpgroup then has 64 keys of its own,
and Pᵀ and dSᵀ are where the next products want their left operands, in its registers.  Only dQ needs
the keys of all warpgroups, and therefore dS in shared memory; what it adds is left to the copy engine.
Measured on an H200 at N = 16,384 in bfloat16: 493 TFLOP/s at d = 64 and 554 at 128, where flash2_mma
does 305 and 288.
"""

from __future__ import annotations

from functools import cache

from numba import float32, float64, int32, int64, types, uint8, uint32, void

from kernels.cuda.attention.flash3_wgmma.backward.elementwise import make_passes
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    MAPS,
    ROW_NUMBERS,
    KeyLayout,
    Parts,
    block_bytes,
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
    SHAPE,
    WARPGROUP_BARRIER,
    Schedule,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import words_type
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tiles import (
    init_stages,
    make_accumulate,
    make_clear_rows,
    make_fetch_rows,
    make_load_tile,
    make_multiply,
    make_multiply_dq,
    make_pack,
    make_put_tile,
    make_write_tile,
    store_pairs,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.one_source import is_full_tile
from kernels.cuda.device.warpgroups import ALIGNMENT, LINE, WARPGROUP, make_next, own_warpgroup
from kernels.cuda.ptx.barriers import (
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
    cp_reduce_async_bulk_add,
    make_cp_async_bulk_wait_group,
)
from kernels.cuda.ptx.copies import (
    align_up,
    global_address,
    ld_shared,
    shared_address,
    st_shared,
    st_shared_v4_f32,
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


@cache
def dkdv_kernel(
    layout: KeyLayout, widths: Widths, dtype: str, parts: Parts, features: Features = PLAIN
) -> Kernel:
    """Return the kernel by key tiles for one layout, two widths, one dtype and some gradients.

    Args:
        layout: Of the block.
        widths: Columns that it is compiled for.
        dtype: "float16" or "bfloat16": of q, k, v, dout, dk and dv.
        parts: Which gradients it computes.
        features: Options of the call.
    """
    has_dk, has_dv, adds_dq = parts
    consumers, block_q, block_k = layout.consumers, layout.block_q, layout.block_k
    q_stages, dout_stages = layout.q_stages, layout.dout_stages
    head_panels, value_panels = widths.head_panels, widths.value_panels
    head_tiles, value_tiles, row_tiles = widths.head // 8, widths.value // 8, block_q // 8
    depth_steps = block_q // 16
    q_panel, k_panel = block_q * LINE, block_k * LINE
    q_size, dout_size = head_panels * q_panel, value_panels * q_panel
    keys_size = head_panels * k_panel + (value_panels * k_panel if has_dk else 0)
    rows_size = block_q * WORD
    is_packed = features.packed
    tiles = key_tiles(layout, widths, parts)
    # dV takes the place of V, or of K where V is not needed.
    v_offset, dv_offset = tiles["v"], tiles["v"] if has_dk else tiles["k"]
    q_offset, dout_offset, barrier_offset = tiles["q"], tiles["dout"], tiles["barriers"]
    lse_offset, delta_offset, number_offset = tiles["lse"], tiles["delta"], tiles["number"]
    ds_offset, ds_size, dq_offset = tiles["ds"], 2 * block_q * block_k, tiles["dq"]
    # Barriers of eight bytes, one of each kind for the keys or a stage.
    keys_empty, q_full = 8, 16
    q_empty = q_full + 8 * q_stages
    dout_full = q_empty + 8 * q_stages
    dout_empty = dout_full + 8 * dout_stages
    consumer_warps, consumer_threads = 4 * consumers, layout.threads - WARPGROUP
    share = dq_share(layout, widths)
    dq_tiles, share_size = share.cols // 8, dq_bytes(layout, widths)
    ds_step, k_step = (k_panel, 0) if share.by_rows else (0, share.step)

    fetch_q, fetch_dout = (
        make_fetch_rows(panels, q_panel, rows_size, stages)
        for panels, stages in ((head_panels, q_stages), (value_panels, dout_stages))
    )
    load_k, load_v = (make_load_tile(n, k_panel) for n in (head_panels, value_panels))
    put_dk, put_dv = (make_put_tile(n, k_panel, is_packed) for n in (head_panels, value_panels))
    multiply_qk, multiply_v_dout = (
        make_multiply(block_q, dtype, width, k_panel, q_panel) for width in widths
    )
    add_dk, add_dv = (make_accumulate(width, dtype, block_q) for width in widths)
    multiply_dq = make_multiply_dq(share.cols, dtype, block_k)
    pack_tile = make_pack(dtype, block_q)
    write_dk, write_dv = (make_write_tile(width, dtype, k_panel) for width in widths)
    next_q, next_dout = make_next(q_stages), make_next(dout_stages)
    # Rows of all run along the depth of Sᵀ and dPᵀ, and across that of the other products.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across_rows = descriptor_layout(LINE, q_panel, 8 * LINE)
    across_keys = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_but_one = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    wait_but_two = make_wgmma_wait_group(2)
    wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)
    wait_for_additions = make_cp_async_bulk_wait_group(0)
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    visits_of, tile_of, pattern_of = make_visits_of(features, block_q, block_k, True)
    elements, row_base = (
        make_elements(features, block_k, block_q, True),
        make_row_base(features.packed),
    )
    scale_of, factor_of, slope_scale_of = elements.scale, elements.factor, elements.slope_scale
    words, own_of, has_patterns = elements.words, line_of(features), features.has_patterns
    weigh, slope_of = make_passes(features, block_k, block_q, dtype, True, has_dv)
    clear_q, clear_dout = (
        make_clear_rows(consumer_threads, block_q, n) for n in (head_panels, value_panels)
    )
    clear_keys = make_clear_rows(consumer_threads, block_k, head_panels)

    def flash3_dkdv(
        q_map, k_map, v_map, dout_map, dk_map, dv_map, lse, delta, dq_sum, next_item, shape, scale,
        schedule, mask_words, extras,
    ):  # fmt: skip
        """Fill dk and dv, tile after tile, and add to dq_sum what each tile gives.

        Computes: dk and dv for tiles of keys of (batch, head), one after the other, and their parts
            of dq / scale, in float32
        Source: FlashAttention-3, Algorithm 3; FlashAttention-2, Algorithm 2, for the numbered lines
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, 2 keys and block_q / 4 rows of Sᵀ and dPᵀ, 2 rows of dK and
            dV, and 2 rows of a consumer's share of dQ, scattered as wgmma scatters them
        Shared: k_tile (block_k, head_dim), v_tile (block_k, value_dim), later dk and dv; stages of
            q_tile (block_q, head_dim), dout_tile (block_q, value_dim), lse and delta (block_q,);
            with dq two of dSᵀ (block_k, block_q), and a tile of dq (block_q, head_dim) in float32;
            tiles of 16 bits in panels of 64 columns, 128-byte swizzle; barriers
        Registers: dk_acc (head_dim / 8, 4), dv_acc (value_dim / 8, 4), s and dp (block_q / 8, 4), p
            and ds (block_q / 16, 4) packed pairs, dq_acc
        Global traffic: reads k and v once, q, dout, lse and delta once per key tile; writes dk and
            dv once; with dq adds to dq_sum once per key tile
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        # k, v, q, dout, ds, dq, lse, delta, barriers, number of the item
        shared = cuda.shared.array(0, uint8)
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers = tile + barrier_offset
        seq_q, seq_k, heads = shape.rows, shape.cols, shape.heads
        warpgroup, lane = own_warpgroup(), int32(cuda.threadIdx.x % 32)
        items = int32(schedule.tiles * schedule.heads)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 1)
            mbarrier_init(barriers + keys_empty, consumer_threads)
            init_stages(barriers + q_full, q_stages, 1, consumer_warps)
            init_stages(barriers + dout_full, dout_stages, 1, consumer_warps)
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == 0:
                q_tensor, dout_tensor = global_address(q_map), global_address(dout_map)
                k_tensor, v_tensor = global_address(k_map), global_address(v_map)
                lse_rows, delta_rows = global_address(lse), global_address(delta)
                q_stage, q_phase, dout_stage, dout_phase = int32(0), int32(0), int32(0), int32(0)
                item, phase = int32(cuda.blockIdx.x), int32(0)
                while item < items:
                    following = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
                    # 5: for 1 <= j <= T_c
                    y, flat, col, first_q, rows, first_k, cols, first, stop = visits_of(
                        item, schedule, seq_q, seq_k, extras
                    )
                    base = row_base(flat, y, first_q, extras)
                    b, h = int32(y // heads), int32(y % heads)
                    # 6: load K_j, V_j, and say which they are
                    mbarrier_wait(barriers + keys_empty, phase ^ 1)  # the last dK and dV are copied
                    phase = phase ^ 1
                    st_shared(tile + number_offset, item)
                    mbarrier_arrive_expect_tx(barriers, keys_size)
                    key = first_k + col
                    load_k(tile, k_tensor, barriers, key, h * shape.k_by_head, b * shape.k_by_batch)
                    if has_dk:
                        load_v(
                            tile + v_offset, v_tensor, barriers, key, h * shape.v_by_head,
                            b * shape.v_by_batch,
                        )  # fmt: skip
                    # 8: for 1 <= i <= T_r, but only those that see a column of the tile
                    for n in range(int32(stop - first)):
                        row = int32(tile_of(first + n, extras) * block_q)
                        place = (int64(y) * lse.shape[1] + base + row) * WORD
                        row += first_q
                        # 9: load Q_i, L_i, then dO_i, D_i
                        fetch_q(
                            tile + q_offset + q_stage * q_size, q_tensor,
                            tile + lse_offset + q_stage * rows_size, lse_rows + place,
                            barriers + q_full + 8 * q_stage, q_phase, row, h * shape.q_by_head,
                            b * shape.q_by_batch,
                        )  # fmt: skip
                        q_stage, q_phase = next_q(q_stage, q_phase)
                        fetch_dout(
                            tile + dout_offset + dout_stage * dout_size, dout_tensor,
                            tile + delta_offset + dout_stage * rows_size, delta_rows + place,
                            barriers + dout_full + 8 * dout_stage, dout_phase, row, h * shape.dout_by_head,
                            b * shape.dout_by_batch,
                        )  # fmt: skip
                        dout_stage, dout_phase = next_dout(dout_stage, dout_phase)
                    item = int32(cuda.gridDim.x + following)
                mbarrier_wait(barriers + keys_empty, phase ^ 1)  # the last number was read
                st_shared(tile + number_offset, items)  # no more of them
                mbarrier_arrive(barriers)  # the consumers may end
                # The last block to end sets the counters back for the next launch.
                if cuda.atomic.add(next_item, 1, 1) == cuda.gridDim.x - 1:
                    next_item[0], next_item[1] = 0, 0
        else:
            claim()
            me, thread = int32(warpgroup - 1), int32(cuda.threadIdx.x % WARPGROUP)
            consumer_thread = int32(cuda.threadIdx.x - WARPGROUP)
            warp = int32(thread // 32)
            # Of its warpgroup's 64 keys, of dQ rows, a thread has two, eight apart; of eight columns two.
            dk_acc = cuda.local.array((head_tiles, 4), float32)  # (64, head_dim) / 128: dK
            dv_acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: dV
            dq_acc = cuda.local.array((dq_tiles, 4), float32)  # (64, share.cols) / 128: dQ
            s = cuda.local.array((row_tiles, 4), float32)  # (64, block_q) / 128: Sᵀ, then Pᵀ
            dp = cuda.local.array((row_tiles, 4), float32)  # (64, block_q) / 128: dPᵀ, then dSᵀ
            p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_q) / 128, in pairs: Pᵀ
            ds = cuda.local.array((depth_steps, 4), uint32)  # (64, block_q) / 128, in pairs: dSᵀ
            # (words,) each, bits: what of P dropout keeps; what is seen, and then pairs of a mask
            kept, seen = cuda.local.array(words, uint32), cuda.local.array(words, uint32)
            factor = float32(scale) * factor_of(extras)
            q_stage, q_phase, dout_stage, dout_phase = int32(0), int32(0), int32(0), int32(0)
            phase = int32(0)
            r, c = square_place(lane)
            line = me * ROWS + warp * 16 + r  # of dSᵀ, that this lane gives stmatrix
            own_keys = tile + me * (ROWS * LINE)
            k_desc, v_desc = descriptor(along, own_keys), descriptor(along, own_keys + v_offset)
            own_row = int32(2 * (lane % 4))
            mbarrier_wait(barriers, phase)  # K_j and V_j are there, and the item's number
            item = ld_shared(tile + number_offset)
            while item < items:
                phase = phase ^ 1
                y, flat, col, first_q, rows, first_k, cols, first, stop = visits_of(
                    item, schedule, seq_q, seq_k, extras
                )
                base = row_base(flat, y, first_q, extras)
                b, h = int32(y // heads), int32(y % heads)
                own = own_of(flat, b, h, rows, cols, extras)
                own_col = int32(col + me * ROWS + warp * 16 + lane // 4)
                # 7: dK_j = 0, dV_j = 0 is what the first products begin with
                # Rows beyond the end are the next sequence's.
                if is_packed and adds_dq and cols - col < block_k:
                    clear_keys(consumer_thread, cols - col, tile)
                    fence_proxy_async()  # the zeros are visible to products
                    bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros
                if first < stop:
                    # 10: Sᵀ = K_j Q_iᵀ, the first
                    mbarrier_wait(barriers + q_full + 8 * q_stage, q_phase)  # Q_i, L_i are there
                    q_desc = descriptor(along, tile + q_offset + q_stage * q_size)
                    wgmma_fence()
                    multiply_qk(s, k_desc, q_desc)
                    wgmma_commit_group()
                    wait_for_all()  # S is there
                for n in range(int32(stop - first)):
                    row = int32(tile_of(first + n, extras) * block_q)
                    q_now, dout_now = q_stage, dout_stage
                    lse_now = tile + lse_offset + q_now * rows_size + WORD * own_row
                    delta_now = tile + delta_offset + dout_now * rows_size + WORD * own_row
                    dout_tile = tile + dout_offset + dout_now * dout_size
                    # The words of a block mask hide what is out of bounds, too.
                    is_whole = has_patterns or is_full_tile(
                        row, block_q, rows, col, block_k, cols, extras.lower, extras.upper
                    )
                    # dO_i, D_i are there
                    mbarrier_wait(barriers + dout_full + 8 * dout_now, dout_phase)
                    dout_stage, dout_phase = next_dout(dout_stage, dout_phase)
                    if is_packed and rows - row < block_q:  # the rest is the next sequence's
                        if has_dk:
                            clear_q(consumer_thread, rows - row, tile + q_offset + q_now * q_size)
                        if has_dv:
                            clear_dout(consumer_thread, rows - row, dout_tile)
                        fence_proxy_async()  # the zeros are visible to products
                        bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros
                    if has_dk:
                        # 13: dPᵀ = V_j dO_iᵀ, computed while the exponentials are taken
                        dout_desc = descriptor(along, dout_tile)
                        wgmma_fence()
                        multiply_v_dout(dp, v_desc, dout_desc)
                        wgmma_commit_group()
                    # 11: P = exp(S - L_i), and packed as it lies the left operand of Pᵀ dO
                    place = LanePlace(lane, int32(row + own_row), own_col, own)
                    weigh(
                        s, p, kept, seen, mask_words, lse_now, factor, is_whole,
                        pattern_of(first + n, extras), place, extras,
                    )  # fmt: skip
                    if has_dv:
                        # 12: dV_j = dV_j + Pᵀ dO_i, computed while dS is
                        dout_desc = descriptor(across_rows, dout_tile)
                        wgmma_fence()
                        add_dv(dv_acc, p, dout_desc, n)
                        wgmma_commit_group()
                    if has_dk:
                        if has_dv:
                            wait_but_one()  # dP is there; Pᵀ dO may go on
                        else:
                            wait_for_all()  # dP is there
                        # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                        slope_of(s, dp, kept, delta_now, is_whole, place, extras)
                        pack_tile(ds, dp)
                        if not has_dv:
                            cuda.syncwarp()  # all lanes have read their deltas
                            if lane == 0:
                                mbarrier_arrive(barriers + dout_empty + 8 * dout_now)
                    ds_tile = tile + ds_offset + (n % 2) * ds_size
                    if adds_dq:
                        for t in range(depth_steps):
                            store_pairs(ds_tile, line, c, t, k_panel, ds[t])
                        fence_proxy_async()  # products see what was stored
                        if thread == 0:
                            wait_for_reads()  # the tile of dq is free again
                        bar_sync(CONSUMERS_BARRIER, consumer_threads)  # dS is whole
                    wgmma_fence()
                    if adds_dq:
                        # 15: dQ_i += dS K_j, this consumer's share
                        ds_desc = descriptor(across_keys, ds_tile + me * ds_step)
                        keys_desc = descriptor(across_keys, tile + me * k_step)
                        multiply_dq(dq_acc, ds_desc, keys_desc)
                        wgmma_commit_group()
                    if has_dk:
                        # 16: dK_j = dK_j + dSᵀ Q_i
                        q_desc = descriptor(across_rows, tile + q_offset + q_now * q_size)
                        add_dk(dk_acc, ds, q_desc, n)
                        wgmma_commit_group()
                    q_stage, q_phase = next_q(q_stage, q_phase)
                    if adds_dq:
                        wait_but_two()  # dV is done: S takes the registers of P
                        if lane == 0:
                            mbarrier_arrive(barriers + dout_empty + 8 * dout_now)
                    # 10: the next Sᵀ, computed while dQ is stored.  After the last one it is of what lies
                    # there, and nobody's: products behind a branch would wait for each other.
                    if n + 1 < stop - first:
                        mbarrier_wait(barriers + q_full + 8 * q_stage, q_phase)  # Q_i is there
                    q_desc = descriptor(along, tile + q_offset + q_stage * q_size)
                    multiply_qk(s, k_desc, q_desc)
                    wgmma_commit_group()
                    if adds_dq:
                        wait_but_two()  # dQ is done
                        own_share = tile + dq_offset + me * share_size
                        for t in range(dq_tiles):
                            st_shared_v4_f32(own_share + 16 * (t * WARPGROUP + thread), dq_acc[t])
                        fence_proxy_async()  # the copy engine sees what was stored
                        bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # the share is whole
                        if thread == 0:
                            slot = int64(y) * (lse.shape[1] // block_q) + (base + row) // block_q
                            number = slot * consumers + me
                            cp_reduce_async_bulk_add(
                                global_address(dq_sum) + number * share_size, own_share, share_size
                            )
                            cp_async_bulk_commit_group()
                    wait_for_all()  # dK, and the next Sᵀ
                    if lane == 0:
                        mbarrier_arrive(barriers + q_empty + 8 * q_now)
                        if has_dv and not adds_dq:
                            mbarrier_arrive(barriers + dout_empty + 8 * dout_now)
                if adds_dq:
                    bar_sync(CONSUMERS_BARRIER, consumer_threads)  # no one reads the keys any more
                # 18: write dK_j, dV_j, by way of the tiles of K and V
                if has_dk:
                    factor_of_dk = float32(scale) * slope_scale_of(extras)
                    write_dk(tile, line, c, dk_acc, factor_of_dk, first < stop, ds)
                if has_dv:
                    write_dv(tile + dv_offset, line, c, dv_acc, scale_of(extras), first < stop, p)
                fence_proxy_async()  # the copy engine sees them
                bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # all keys of the warpgroup are there
                b, h = int32(y // heads), int32(y % heads)
                key, left = first_k + col + me * ROWS, cols - col - me * ROWS
                if is_packed or thread == 0:
                    if has_dk:
                        put_dk(dk_map, own_keys, thread, b, h, key, left)
                    if has_dv:
                        put_dv(dv_map, own_keys + dv_offset, thread, b, h, key, left)
                    cp_async_bulk_commit_group()
                    wait_for_reads()  # the copies have read the tiles
                bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # and copied: other keys may come
                mbarrier_arrive(barriers + keys_empty)  # each for itself: it has read the number
                mbarrier_wait(barriers, phase)  # the next keys are there, and the item's number
                item = ld_shared(tile + number_offset)
            if thread == 0:
                wait_for_additions()  # to dQ, still on their way

    schedule = types.NamedUniTuple(int32, 3, Schedule)
    counters, sums = types.Array(int32, 1, "C"), types.Array(float32, 1, "C")
    gradients = array_type(BITS, 4) if is_packed else MAPS
    signature = void(
        MAPS, MAPS, MAPS, MAPS, gradients, gradients, ROW_NUMBERS, ROW_NUMBERS, sums, counters, SHAPE,
        float64, schedule, words_type(features), extras_type(features, FLOAT32, by_words=True),
    )  # fmt: skip
    return Kernel(flash3_dkdv, signature, layout.threads, block_bytes(tiles))
