"""FlashAttention-3 backward by query tiles: dQ, which a block sums in registers, the same on every run.

Two products more than the kernel by key tiles would need to add it up, and nothing to wait for: dS
stays in the registers of the warpgroup that computed it, as P does in the forward kernel, whose loop
this is.  Measured on an H200 at N = 16,384 in bfloat16, with the kernel by key tiles: 458 TFLOP/s at d
= 64 and 526 at 128, where additions do 493 and 554.
"""

from __future__ import annotations

from functools import cache

from numba import float32, float64, int32, types, uint8, uint32, void

from kernels.cuda.attention.flash3_wgmma.backward.elementwise import make_passes
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    MAPS,
    ROW_NUMBERS,
    QueryLayout,
    block_bytes,
    query_tiles,
    square_place,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.backward.tile_walk import make_row_base, make_visits_of
from kernels.cuda.attention.flash3_wgmma.layout import (
    CLEAR_BARRIER,
    SHAPE,
    WARPGROUP_BARRIER,
    Schedule,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import words_type
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tiles import (
    broadcast_number,
    init_stages,
    make_accumulate,
    make_clear_rows,
    make_load_tile,
    make_multiply,
    make_pack,
    make_put_tile,
    make_write_tile,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.one_source import first_full_tile, full_tiles_stop
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
    make_cp_async_bulk_wait_group,
)
from kernels.cuda.ptx.copies import align_up, global_address, shared_address, st_shared
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features


@cache
def dq_kernel(
    layout: QueryLayout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the kernel by query tiles for one layout, two widths and one dtype.

    Args:
        layout: Of the block.
        widths: Columns that it is compiled for.
        dtype: "float16" or "bfloat16": of q, k, v, dout and dq.
        features: Options of the call.
    """
    consumers, block_q, block_k = layout.consumers, layout.block_q, layout.block_k
    k_stages, v_stages = layout.k_stages, layout.v_stages
    head_panels, value_panels = widths.head_panels, widths.value_panels
    head_tiles, key_tiles, depth_steps = widths.head // 8, block_k // 8, block_k // 16
    q_panel, k_panel = block_q * LINE, block_k * LINE
    rows_size = (head_panels + value_panels) * q_panel
    k_size, v_size = head_panels * k_panel, value_panels * k_panel
    tiles = query_tiles(layout, widths)
    dout_offset, k_offset, v_offset = tiles["dout"], tiles["k"], tiles["v"]
    barrier_offset, number_offset = tiles["barriers"], tiles["number"]
    # Barriers of eight bytes, one of each kind for the rows or a stage.
    rows_empty, k_full = 8, 16
    k_empty = k_full + 8 * k_stages
    v_full = k_empty + 8 * k_stages
    v_empty = v_full + 8 * v_stages
    consumer_warps, consumer_threads = 4 * consumers, WARPGROUP * consumers

    load_q, load_dout = (make_load_tile(n, q_panel) for n in (head_panels, value_panels))
    load_k, load_v = (make_load_tile(n, k_panel) for n in (head_panels, value_panels))
    put_dq = make_put_tile(head_panels, q_panel, features.packed)
    multiply_qk, multiply_dout_v = (
        make_multiply(block_k, dtype, width, q_panel, k_panel) for width in widths
    )
    accumulate, pack_tile = make_accumulate(widths.head, dtype, block_k), make_pack(dtype, block_k)
    write_dq = make_write_tile(widths.head, dtype, q_panel)
    next_k, next_v = make_next(k_stages), make_next(v_stages)
    # Rows of all run along the depth of S and dP, and those of k across that of dS K.
    along = descriptor_layout(LINE, 16, 8 * LINE)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_but_one = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    wait_for_reads = make_cp_async_bulk_wait_group(0, is_read=True)
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    visits_of, tile_of, pattern_of = make_visits_of(features, block_q, block_k, False)
    elements, row_base = (
        make_elements(features, block_q, block_k, False),
        make_row_base(features.packed),
    )
    factor_of, slope_scale_of = elements.factor, elements.slope_scale
    words, own_of, has_patterns = elements.words, line_of(features), features.has_patterns
    weigh, slope_of = make_passes(features, block_q, block_k, dtype, False)
    is_packed = features.packed
    clear_keys = make_clear_rows(consumer_threads, block_k, head_panels)

    def flash3_dq(
        q_map, k_map, v_map, dout_map, dq_map, lse, delta, next_item, shape, scale, schedule,
        mask_words, extras,
    ):  # fmt: skip
        """Fill dq, tile after tile.

        Computes: dq for tiles of query rows of (batch, head), one after the other
        Source: FlashAttention-3, Algorithm 2, for the order of the products; FlashAttention-2,
            Algorithm 2, lines 10, 11, 13, 14 and 15, by rows
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, 2 rows and block_k / 4 columns of S and dP, and of dQ 2 rows
            and head_dim / 4 columns, scattered as wgmma scatters them
        Shared: q_tile (block_q, head_dim), later dq, and dout_tile (block_q, value_dim); stages of
            k_tile (block_k, head_dim) and v_tile (block_k, value_dim), in panels of 64 columns,
            128-byte swizzle; barriers
        Registers: dq_acc (head_dim / 8, 4), s and dp (block_k / 8, 4), ds (block_k / 16, 4) packed
            pairs
        Global traffic: reads q, dout, lse and delta once, k and v once per query tile; writes dq once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        shared = cuda.shared.array(0, uint8)  # q, dout, k, v, barriers, number of the item
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers = tile + barrier_offset
        seq_q, seq_k, heads = shape.rows, shape.cols, shape.heads
        warpgroup, lane = own_warpgroup(), int32(cuda.threadIdx.x % 32)
        items = int32(schedule.tiles * schedule.heads)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 1)
            mbarrier_init(barriers + rows_empty, consumer_warps)
            init_stages(barriers + k_full, k_stages, 1, consumer_warps)
            init_stages(barriers + v_full, v_stages, 1, consumer_warps)
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == 0:
                q_tensor, dout_tensor = global_address(q_map), global_address(dout_map)
                k_tensor, v_tensor = global_address(k_map), global_address(v_map)
                k_stage, k_phase, v_stage, v_phase = int32(0), int32(0), int32(0), int32(0)
                item, phase = int32(cuda.blockIdx.x), int32(0)
                while item < items:
                    following = cuda.atomic.add(next_item, 0, 1)  # it is there when it is needed
                    y, _, row, first_q, _, first_k, _, first, stop = visits_of(
                        item, schedule, seq_q, seq_k, extras
                    )
                    b, h = int32(y // heads), int32(y % heads)
                    row += first_q
                    # 9: load Q_i, dO_i, and say which they are
                    mbarrier_wait(barriers + rows_empty, phase ^ 1)  # the last dQ is copied
                    phase = phase ^ 1
                    st_shared(tile + number_offset, item)
                    mbarrier_arrive_expect_tx(barriers, rows_size)
                    load_q(tile, q_tensor, barriers, row, h * shape.q_by_head, b * shape.q_by_batch)
                    load_dout(
                        tile + dout_offset, dout_tensor, barriers, row, h * shape.dout_by_head,
                        b * shape.dout_by_batch,
                    )  # fmt: skip
                    for n in range(int32(stop - first)):
                        col = first_k + tile_of(stop - 1 - n, extras) * block_k
                        # 6: load K_j, V_j
                        full = barriers + k_full + 8 * k_stage
                        mbarrier_wait(barriers + k_empty + 8 * k_stage, k_phase ^ 1)  # K was read
                        mbarrier_arrive_expect_tx(full, k_size)
                        load_k(
                            tile + k_offset + k_stage * k_size, k_tensor, full, col, h * shape.k_by_head,
                            b * shape.k_by_batch,
                        )  # fmt: skip
                        k_stage, k_phase = next_k(k_stage, k_phase)
                        full = barriers + v_full + 8 * v_stage
                        mbarrier_wait(barriers + v_empty + 8 * v_stage, v_phase ^ 1)  # V was read
                        mbarrier_arrive_expect_tx(full, v_size)
                        load_v(
                            tile + v_offset + v_stage * v_size, v_tensor, full, col, h * shape.v_by_head,
                            b * shape.v_by_batch,
                        )  # fmt: skip
                        v_stage, v_phase = next_v(v_stage, v_phase)
                    item = int32(cuda.gridDim.x + following)
                mbarrier_wait(barriers + rows_empty, phase ^ 1)  # the last number was read
                st_shared(tile + number_offset, items)  # no more of them
                mbarrier_arrive(barriers)  # the consumers may end
                # The last block to end sets the counters back for the next launch.
                if cuda.atomic.add(next_item, 1, 1) == cuda.gridDim.x - 1:
                    next_item[0], next_item[1] = 0, 0
        else:
            claim()
            me, thread = int32(warpgroup - 1), int32(cuda.threadIdx.x % WARPGROUP)
            warp = int32(thread // 32)
            # Of the warpgroup's 64 rows a thread has two, eight apart; of eight columns two.
            dq_acc = cuda.local.array((head_tiles, 4), float32)  # (64, head_dim) / 128: dQ
            s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
            dp = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: dP, then dS
            ds = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: dS
            # (words,) each, bits: what of P dropout keeps; what is seen, and then pairs of a mask
            kept, seen = cuda.local.array(words, uint32), cuda.local.array(words, uint32)
            factor = float32(scale) * factor_of(extras)
            k_stage, k_phase, v_stage, v_phase = int32(0), int32(0), int32(0), int32(0)
            phase = int32(0)
            own_tile = tile + me * (ROWS * LINE)  # of q, and then of dq
            q_desc, dout_desc = (
                descriptor(along, own_tile),
                descriptor(along, own_tile + dout_offset),
            )
            r, c = square_place(lane)
            line = me * ROWS + warp * 16 + r
            mbarrier_wait(barriers, phase)  # Q_i and dO_i are there, and the item's number
            item = broadcast_number(tile + number_offset, lane)
            while item < items:
                phase = phase ^ 1
                y, flat, row, first_q, rows, first_k, cols, first, stop = visits_of(
                    item, schedule, seq_q, seq_k, extras
                )
                b, h = int32(y // heads), int32(y % heads)
                own = own_of(flat, b, h, rows, cols, extras)
                own_row = int32(row + me * ROWS + warp * 16 + lane // 4)
                row_stop = min(row + block_q, rows)
                full = int32(first_full_tile(row_stop, block_k, extras.lower))
                full_stop = int32(full_tiles_stop(row, block_k, cols, extras.upper))
                line_of = row_base(flat, y, first_q, extras) + own_row
                shift_0, shift_1 = lse[y, line_of], lse[y, line_of + 8]
                delta_0, delta_1 = delta[y, line_of], delta[y, line_of + 8]
                # dQ = 0 is what the first dS K begins with
                if first < stop:
                    # 10: S = Q_i K_jᵀ, the first
                    mbarrier_wait(barriers + k_full + 8 * k_stage, k_phase)  # K_j is there
                    k_desc = descriptor(along, tile + k_offset + k_stage * k_size)
                    wgmma_fence()
                    multiply_qk(s, q_desc, k_desc)
                    wgmma_commit_group()
                    wait_for_all()  # S is there
                    left = int32(cols - tile_of(stop - 1, extras) * block_k)
                    if is_packed and left < block_k:  # the rest is the next sequence's
                        clear_keys(
                            int32(cuda.threadIdx.x - WARPGROUP), left,
                            tile + k_offset + k_stage * k_size,
                        )  # fmt: skip
                        fence_proxy_async()  # the zeros are visible to products
                        bar_sync(CLEAR_BARRIER, consumer_threads)  # the rest is zeros
                before = int32(0)  # the stage of the keys before
                for n in range(int32(stop - first)):
                    j = tile_of(stop - 1 - n, extras)
                    # 13: dP = dO_i V_jᵀ, computed while the exponentials are taken
                    mbarrier_wait(barriers + v_full + 8 * v_stage, v_phase)  # V_j is there
                    v_desc = descriptor(along, tile + v_offset + v_stage * v_size)
                    wgmma_fence()
                    multiply_dout_v(dp, dout_desc, v_desc)
                    wgmma_commit_group()
                    # 11: P = exp(S - L_i)
                    own_col = int32(j * block_k + 2 * (lane % 4))
                    place = LanePlace(lane, own_row, own_col, own)
                    # The words of a block mask hide what is out of bounds, too.
                    is_whole = has_patterns or full <= j < full_stop
                    weigh(
                        s, ds, kept, seen, mask_words, (shift_0, shift_1), factor, is_whole,
                        pattern_of(stop - 1 - n, extras), place, extras,
                    )  # fmt: skip
                    wait_for_all()  # dP is there, and V_j was read; so were the keys of the last dS K
                    if lane == 0:
                        mbarrier_arrive(barriers + v_empty + 8 * v_stage)
                        if n > 0:
                            mbarrier_arrive(barriers + k_empty + 8 * before)
                    v_stage, v_phase = next_v(v_stage, v_phase)
                    # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                    slope_of(s, dp, kept, (delta_0, delta_1), is_whole, place, extras)
                    # The accumulators of dP lie as the left operand of dS K does.
                    pack_tile(ds, dp)
                    before = k_stage
                    k_stage, k_phase = next_k(k_stage, k_phase)
                    # 10: the next S.  After the last one it is of what lies there, and nobody's: products
                    # behind a branch would wait for each other.
                    if n + 1 < stop - first:
                        mbarrier_wait(barriers + k_full + 8 * k_stage, k_phase)  # K_j is there
                    wgmma_fence()
                    k_desc = descriptor(along, tile + k_offset + k_stage * k_size)
                    multiply_qk(s, q_desc, k_desc)
                    wgmma_commit_group()
                    # 15: dQ_i = dQ_i + dS K_j
                    k_desc = descriptor(across, tile + k_offset + before * k_size)
                    accumulate(dq_acc, ds, k_desc, n)
                    wgmma_commit_group()
                    wait_but_one()  # the next S is there; dS K may go on
                wait_for_all()  # dQ is whole, and the last keys were read
                if first < stop and lane == 0:
                    mbarrier_arrive(barriers + k_empty + 8 * before)
                # Write dQ_i, by way of the tile of q, which this warpgroup has read to the end
                factor_of_dq = float32(scale) * slope_scale_of(extras)
                write_dq(tile, line, c, dq_acc, factor_of_dq, first < stop, ds)
                fence_proxy_async()  # the copy engine sees them
                bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # all rows of the warpgroup are there
                b, h = int32(y // heads), int32(y % heads)
                own_first, left = first_q + row + me * ROWS, rows - row - me * ROWS
                if is_packed or thread == 0:
                    put_dq(dq_map, own_tile, thread, b, h, own_first, left)
                    cp_async_bulk_commit_group()
                    wait_for_reads()  # the copy has read the tile
                bar_sync(WARPGROUP_BARRIER + me, WARPGROUP)  # and copied: another q may come
                if lane == 0:  # which has read the number for its warp
                    mbarrier_arrive(barriers + rows_empty)
                mbarrier_wait(barriers, phase)  # the next rows are there, and the item's number
                item = broadcast_number(tile + number_offset, lane)

    schedule = types.NamedUniTuple(int32, 3, Schedule)
    counters = types.Array(int32, 1, "C")
    gradient = array_type(BITS, 4) if features.packed else MAPS
    signature = void(
        MAPS, MAPS, MAPS, MAPS, gradient, ROW_NUMBERS, ROW_NUMBERS, counters, SHAPE, float64,
        schedule, words_type(features), extras_type(features, FLOAT32, by_words=True),
    )  # fmt: skip
    return Kernel(flash3_dq, signature, layout.threads, block_bytes(tiles))
