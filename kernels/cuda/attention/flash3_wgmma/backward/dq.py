"""FlashAttention-3 backward by query tiles: dQ, summed in the registers of a block in a fixed order.

It serves wide heads, and block masks in the deterministic mode.  This takes two products more than adding
dQ up in the kernel by key tiles, but no waiting: dS stays in the registers of the warpgroup that computed
it, as P does in the forward kernel, which has the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cuda.attention.flash3_wgmma.backward.elementwise import (
    LOG2_OF_E,
    has_large_row,
    make_fetch_bits,
    make_passes,
    make_weigh,
)
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    QueryLayout,
    query_tiles,
    shift_place,
)
from kernels.cuda.attention.flash3_wgmma.backward.producer import (
    BackwardPipelines,
    backward_pipelines,
    make_produce,
)
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.layout import (
    MAPS,
    ROW_NUMBERS,
    KernelForm,
    Widths,
    result_type,
    work_type,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import LanePlace, line_of
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_row_base, make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ALONG,
    broadcast_number,
    make_accumulate,
    make_clear_rows,
    make_issue,
    make_multiply,
    make_pack,
    make_write_results,
    own_thread,
)
from kernels.cuda.device.pipeline import (
    following,
    make_prologue,
    opaque,
    placed,
    release,
    start,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, block_bytes, own_warpgroup
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    make_wgmma_wait_group,
    wgmma_commit_group,
)
from kernels.cuda.runtime.kernel import Kernel, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, uint32, void
from kernels.scores.program import PLAIN, Features


def _make_consume(form: KernelForm, pipelines: BackwardPipelines) -> Callable[..., None]:
    """Return ``consume(me, memory, dq_map, shifts, delta, work)``.

    The threads of consumer ``me`` call it; it multiplies and writes dq.
    """
    layout, widths, dtype, features, _ = form
    block_q, block_k = layout.block_q, layout.block_k
    head_tiles, key_tiles, depth_steps = widths.head // 8, block_k // 8, block_k // 16
    q_panel, k_panel, has_patterns = block_q * LINE, block_k * LINE, features.has_patterns
    tiles, (of_rows, of_keys, of_values) = query_tiles(layout, widths), pipelines
    dout_offset, number_offset, is_packed = tiles["dout"], tiles["number"], features.packed
    multiply_qk, multiply_dout_v = (
        make_multiply(block_k, dtype, width, q_panel, k_panel) for width in widths
    )
    issue_qk, weigh = make_issue(multiply_qk), make_weigh(form, multiply_dout_v)
    accumulate, pack_tile = make_accumulate(widths.head, dtype, block_k), make_pack(dtype, block_k)
    # Rows of all run along the depth of S and dP, and those of k across that of dS K.
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_but_one = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    _, item_of, tile_of, pattern_of = make_walk(features, block_q, block_k)
    elements, row_base = make_elements(form), make_row_base(is_packed)
    factor_of, words, fetch = elements.factor, elements.words, make_fetch_bits(form)
    slope_scale_of, own_of = elements.slope_scale, line_of(features)
    largest_top, lower, *_, slope_of = make_passes(form)
    has_tops = features.modifies_scores
    clear_keys = make_clear_rows(layout.consumers, block_k, widths.head_panels)
    write_dq = make_write_results(form, 0)

    @device_function
    def consume(me, memory, dq_map, shifts, delta, work):
        own, extras = own_thread(me), work.extras
        # A thread has two of the warpgroup's 64 rows, eight apart, and two of eight columns.
        dq_acc = cuda.local.array((head_tiles, 4), float32)  # (64, head_dim) / 128: dQ
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        dp = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: dP, then dS
        ds = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: dS
        # (words,) each: bits of the elements that dropout keeps; visible bits, then pairs of a mask
        kept, seen = cuda.local.array(words, uint32), cuda.local.array(words, uint32)
        factor = factor_of(work.scale, extras)
        rows, at = placed(of_rows, memory), start()
        keys, k_at = placed(of_keys, memory), start()
        values, v_at = placed(of_values, memory), start()
        own_tile = memory + me * (ROWS * LINE)  # of q, and then of dq
        q_desc, dout_desc = descriptor(ALONG, own_tile), descriptor(ALONG, own_tile + dout_offset)
        wait(rows, at)  # Q_i, dO_i and the item's number have arrived
        number = broadcast_number(memory + number_offset, own.lane)
        while number < int32(work.schedule.tiles * work.schedule.heads):
            item = item_of(number, work)
            first, stop, y, line = item.first, item.stop, item.line, own_of(item, extras)
            own_row = int32(item.place + me * ROWS + own.warp * 16 + own.lane // 4)
            of_line = row_base(item.flat, y, item.first_q, extras) + own_row
            of_row = shift_place(of_line)
            own_shifts = shifts[y, of_row], shifts[y, of_row + 8]
            numbers = own_shifts, (shifts[y, of_row + ROWS], shifts[y, of_row + ROWS + 8])
            is_large, own_factor = has_large_row(largest_top(numbers)), factor
            if not has_tops and is_large:
                own_factor = LOG2_OF_E
            deltas = delta[y, of_line], delta[y, of_line + 8]
            # The first dS K begins with dQ = 0.
            if first < stop:
                # 10: S = Q_i K_jᵀ, the first
                wait(keys, k_at)  # K_j has arrived
                issue_qk(s, q_desc, descriptor(ALONG, tile_at(keys, k_at)))
                fetch(seen, int32(stop - 1), own_row, own, line, work)
                wait_for_all()  # S is complete
                left = int32(item.cols - tile_of(stop - 1, extras) * block_k)
                if is_packed and left < block_k:  # the other keys belong to the next sequence
                    clear_keys(left, tile_at(keys, k_at))
            before = start()  # the stage of the keys before
            for n in range(int32(stop - first)):
                j = tile_of(stop - 1 - n, extras)
                if not has_tops and is_large:
                    lower(s, numbers, float32(work.scale))
                col = int32(j * block_k + 2 * (own.lane % 4))
                place = LanePlace(own.lane, own_row, col, line)
                wait(values, v_at)  # V_j has arrived
                v_desc = descriptor(ALONG, tile_at(values, v_at))
                # The words of a block mask also hide positions out of bounds.
                is_whole = has_patterns or item.full <= j < item.full_stop
                pattern = pattern_of(stop - 1 - n, extras)
                large_rows, marks = (is_large, numbers), (is_whole, pattern)
                # 11: P = exp(S - L_i)     13: dP = dO_i V_jᵀ, computed meanwhile
                bits, product = (kept, seen), (dp, dout_desc, v_desc)
                weigh((s, ds), bits, large_rows, own_factor, marks, place, work, product)
                wait_for_all()  # dP is complete; V_j and the keys of the last dS K were read
                release(values, v_at, own.lane)
                if n > 0:
                    release(keys, before, own.lane)
                v_at = following(values, v_at)
                # 14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
                slope_of(s, dp, kept, deltas, is_whole, place, extras)
                # The accumulators of dP lie as the left operand of dS K does.
                pack_tile(ds, dp)
                before, k_at = k_at, following(keys, k_at)
                # 10: the next S.  After the last tile it reads old data and is not used: products behind
                # a branch would wait for each other.
                if n + 1 < stop - first:
                    wait(keys, k_at)  # K_j has arrived
                issue_qk(s, q_desc, descriptor(ALONG, tile_at(keys, k_at)))
                # 15: dQ_i = dQ_i + dS K_j
                accumulate(dq_acc, ds, descriptor(across, tile_at(keys, before)), n)
                wgmma_commit_group()
                # Read the next tile's bits while the products run; after the last tile they are not used.
                fetch(seen, int32(max(stop - 2 - n, first)), own_row, own, line, work)
                wait_but_one()  # the next S is complete; dS K may go on
            wait_for_all()  # dQ is complete, and the last keys were read
            if first < stop:
                release(keys, before, own.lane)
            # Write dQ_i, by way of the tile of q, which this warpgroup has read to the end
            dq = dq_map, dq_acc, float32(work.scale) * slope_scale_of(extras)
            write_dq(own, memory, dq, dq, item, ds)
            release(rows, at, own.lane)  # lane 0 has read the number for its warp
            at = following(rows, at)
            wait(rows, at)  # the next rows and the item's number have arrived
            number = broadcast_number(memory + number_offset, own.lane)

    return consume


@cache
def dq_kernel(
    layout: QueryLayout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the kernel by query tiles for one layout, two widths and one dtype."""
    form = KernelForm(layout, widths, dtype, features)
    pipelines, barriers = backward_pipelines(form)
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce, consume = make_produce(form, pipelines), _make_consume(form, pipelines)

    def flash3_dq(q_map, k_map, v_map, dout_map, dq_map, shifts, delta, work):
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
        Global traffic: reads q, dout, shifts and delta once, k and v once per query tile; writes dq once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        memory = enter()  # q, dout, k, v, barriers, number of the item
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                maps, first = (q_map, k_map, v_map, dout_map), int32(cuda.blockIdx.x)
                produce(memory, maps, shifts, delta, first, work)
        else:
            take_registers()
            consume(int32(warpgroup - 1), opaque(memory), dq_map, shifts, delta, work)

    rows = ROW_NUMBERS, ROW_NUMBERS
    signature = void(*[MAPS] * 4, result_type(features), *rows, work_type(features))
    return Kernel(flash3_dq, signature, layout.threads, block_bytes(query_tiles(layout, widths)))
