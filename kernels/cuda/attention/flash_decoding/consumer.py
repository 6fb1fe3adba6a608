"""The consumers of the decoding kernel: they multiply, compute the softmax, and merge parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint16, uint32, uint64

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.forward.tile_steps import make_softmax_step, rescale_rows
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ALONG,
    make_accumulate,
    make_clear_rows,
    make_multiply,
    make_pack,
    own_thread,
)
from kernels.cuda.attention.flash_decoding.layout import (
    DecodingForm,
    DecodingPipelines,
    make_item_of,
)
from kernels.cuda.attention.options.score_functions import make_row_end
from kernels.cuda.attention.options.tile_scores import (
    TileElement,
    TilePlace,
    edge_of,
    make_tile_scores,
)
from kernels.cuda.device.one_source import numbers_of_mods, shift_of
from kernels.cuda.device.pipeline import following, placed, release, start, tile_at, wait
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.barriers import bar_sync
from kernels.cuda.ptx.copies import ld_shared, st_shared
from kernels.cuda.ptx.numbers import PACK, ex2, mul_rn
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

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-math.inf)
LOG2_OF_E = np.float32(LOG2_E)
#: The named barrier of all consumers; 0 is ``cuda.syncthreads``.
BARRIER_NUMBER = 1


class LaneRow(NamedTuple):
    """A row of a lane: a query token of a head."""

    number: Any  # In the tile
    h: Any  # Head index
    token: Any
    is_there: Any  # Whether the tile has the row


@device_function
def lane_row(number, item, shape):
    """Return the :class:`LaneRow` of a row of a tile."""
    head, token = int32(number // shape.tokens), int32(item.token + number % shape.tokens)
    is_there = head < shape.group and token < shape.seq_q
    head = min(head, int32(shape.group - 1))  # of a row that is not there, options are read too
    return LaneRow(number, int32(item.key_head * shape.group + head), token, is_there)


def make_to_scores(form: DecodingForm) -> Callable[..., None]:
    """Return ``to_scores(s, rows, col, whole, item, scale, work)``.

    It replaces products by scores, minus infinity where masked.  Where the scale is folded into the
    exponent they are still products; otherwise natural logarithms.  ``col`` is the lane's first column.
    """
    tiles, is_folded = form.layout.block_k // 8, form.is_folded
    score_of, has_drafts = make_tile_scores(form.features, FLOAT32).score, form.has_drafts

    @device_function
    def to_scores(s, rows, col, whole, item, scale, work):
        shape, extras = work.shape, work.extras
        if not (is_folded and whole):
            for half in range(2):
                row = rows[half]
                heads = shape.group * shape.key_heads
                batch, head = numbers_of_mods(item.b * heads + row.h, extras)
                place = TilePlace(
                    int64(item.b), int64(row.h), batch, head, int64(item.first_row + row.token),
                    int64(col), int64(item.first_row + shape.seq_q), int64(item.length),
                )  # fmt: skip
                edge = edge_of(place, extras)
                for t in range(tiles):
                    for i in range(2):
                        u = 2 * half + i
                        x = s[t, u] if is_folded else mul_rn(s[t, u], scale)
                        element = TileElement(0, 8 * t + i, whole, True, edge, place)
                        x = score_of(x, element, extras)
                        if has_drafts:
                            draft = col + 8 * t + i - (item.length - shape.seq_q)
                            if 0 <= draft < shape.seq_q:
                                token = min(row.token, shape.seq_q - 1)
                                x = x if work.drafts[item.b, row.h, token, draft] else MINUS_INF
                        s[t, u] = x

    return to_scores


class RowState(NamedTuple):
    """m of a lane's two rows in natural logarithms, and l."""

    maxima: Any
    sums: Any


def make_parts(form: DecodingForm) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return the functions that write a part of the keys, and merge all parts of a tile.

    ``write_part(acc, rows, state, number, has_keys, work)`` writes the ``RowState`` of an item.
    ``merge_parts(acc, rows, item, work)`` fills ``acc`` and returns the state of all parts.
    """
    tiles, width, tile_rows = form.widths.value // 8, form.widths.value, form.layout.rows

    @device_function
    def write_part(acc, rows, state, number, has_keys, work):
        lane = int32(cuda.threadIdx.x % 4)
        for half in range(2):
            if rows[half].is_there:
                row = int64(number) * tile_rows + rows[half].number
                if lane == 0:
                    work.part_rows[uint64(2 * row)] = state.maxima[half]
                    work.part_rows[uint64(2 * row + 1)] = state.sums[half]
                at = row * width + 2 * lane
                if has_keys:
                    for t in range(tiles):
                        work.part_out[uint64(at + 8 * t)] = acc[t, 2 * half]
                        work.part_out[uint64(at + 8 * t + 1)] = acc[t, 2 * half + 1]

    @device_function
    def merge_row(acc, half, row, first, work):
        """Merge the parts of one row of a lane, in the order of the keys; return m and l."""
        shape, lane = work.shape, int32(cuda.threadIdx.x % 4)
        step, largest, total = int64(shape.row_tiles) * tile_rows, MINUS_INF, ZERO
        row_at = int64(first) * tile_rows + row.number
        for part in range(shape.parts):
            part_max = work.part_rows[uint64(2 * (row_at + part * step))]
            largest = max(largest, part_max if row.is_there else MINUS_INF)
        shift = float32(shift_of(largest))
        for t in range(tiles):
            acc[t, 2 * half] = ZERO
            acc[t, 2 * half + 1] = ZERO
        # All lanes alike: in a branch that some do not take, products could not use these registers.
        for part in range(shape.parts):
            at = row_at + part * step
            part_max = work.part_rows[uint64(2 * at)]
            is_there = row.is_there & (part_max != MINUS_INF)  # otherwise nothing was written
            weight = ex2((part_max - shift) * LOG2_OF_E)
            total += weight * work.part_rows[uint64(2 * at + 1)] if is_there else ZERO
            at = at * width + 2 * lane
            for t in range(tiles):
                x = work.part_out[uint64(at + 8 * t)]
                y = work.part_out[uint64(at + 8 * t + 1)]
                acc[t, 2 * half] += weight * x if is_there else ZERO
                acc[t, 2 * half + 1] += weight * y if is_there else ZERO
        return largest, total

    @device_function
    def merge_parts(acc, rows, item, work):
        shape = work.shape
        tile, row_tiles = uint32(item.tile), uint32(shape.row_tiles)
        first = int32(tile // row_tiles * uint32(shape.parts * shape.row_tiles) + tile % row_tiles)
        max_0, sum_0 = merge_row(acc, 0, rows[0], first, work)
        max_1, sum_1 = merge_row(acc, 1, rows[1], first, work)
        return RowState((max_0, max_1), (sum_0, sum_1))

    return write_part, merge_parts


def make_is_last(form: DecodingForm, flag: int) -> Callable[..., bool]:
    """Return ``is_last(memory, item, work)``: whether all other parts of the tile have ended."""
    threads = WARPGROUP * form.layout.consumers

    @device_function
    def is_last(memory, item, work):
        cuda.threadfence()  # the part is in memory
        bar_sync(BARRIER_NUMBER, threads)
        if cuda.threadIdx.x == WARPGROUP:
            before = cuda.atomic.add(work.arrived, item.tile, 1)
            ends = before == work.shape.parts - 1
            if ends:
                work.arrived[item.tile] = 0  # for the next launch
            st_shared(memory + flag, int32(ends))
        bar_sync(BARRIER_NUMBER, threads)
        cuda.threadfence()
        return cuda.shfl_sync(ALL_LANES, ld_shared(memory + flag), 0) != 0

    return is_last


def make_write_rows(form: DecodingForm) -> Callable[..., None]:
    """Return ``write_rows(acc, rows, state, item, results, extras)``, which writes a tile."""
    tiles, pack = form.widths.value // 8, PACK[form.dtype]
    end_row = make_row_end(form.features, FLOAT32, near=True)

    @device_function
    def write_rows(acc, rows, state, item, results, extras):
        (out, lse, rest), lane = results, int32(cuda.threadIdx.x % 4)
        for half in range(2):
            row, total = rows[half], state.sums[half]
            if row.is_there:
                # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
                shift = float32(shift_of(state.maxima[half]))
                inverse, row_lse, row_rest = end_row(total, shift, item.b, row.h, extras)
                if lane == 0:
                    lse[item.b, row.h, row.token] = row_lse
                    rest[item.b, row.h, row.token] = row_rest
                # 14: write O_i; without keys the accumulators are no one's
                for t in range(tiles):
                    col = 8 * t + 2 * lane
                    if col < out.shape[3]:
                        x, y = acc[t, 2 * half] * inverse, acc[t, 2 * half + 1] * inverse
                        pair = pack(x, y) if total != ZERO else uint32(0)
                        out[item.b, row.h, row.token, col] = uint16(pair & 0xFFFF)
                        out[item.b, row.h, row.token, col + 1] = uint16(pair >> 16)

    return write_rows


def make_consume(form: DecodingForm, pipelines: DecodingPipelines) -> Callable[..., None]:
    """Return ``consume(me, memory, results, work)``, which the threads of consumer ``me`` call."""
    layout, widths, dtype, is_folded = form.layout, form.widths, form.dtype, form.is_folded
    block_k, q_panel, k_panel = layout.block_k, layout.rows * LINE, layout.block_k * LINE
    multiply = make_multiply(block_k, dtype, widths.head, q_panel, k_panel)
    accumulate, pack = make_accumulate(widths.value, dtype, block_k), make_pack(dtype, block_k)
    # Rescaled with every tile: a row does not depend on the others of its warp.
    softmax_step, to_scores = make_softmax_step(block_k, 0), make_to_scores(form)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    item_of = make_item_of(block_k)
    clear_values = make_clear_rows(layout.consumers, block_k, widths.value_panels)
    (write_part, merge_parts), write_rows = make_parts(form), make_write_rows(form)
    is_last = make_is_last(form, pipelines.flag)
    value_tiles, key_tiles, depth_steps = widths.value // 8, block_k // 8, block_k // 16

    @device_function
    def natural(row_max, unit):
        return MINUS_INF if row_max == MINUS_INF else mul_rn(row_max, unit)

    @device_function
    def consume(me, memory, results, work):
        own, shape = own_thread(me), work.shape
        acc = cuda.local.array((value_tiles, 4), float32)  # (64, value_dim) / 128: O
        s = cuda.local.array((key_tiles, 4), float32)  # (64, block_k) / 128: S, then P
        p = cuda.local.array((depth_steps, 4), uint32)  # (64, block_k) / 128, in pairs: P
        scale = float32(work.scale)
        unit = scale if is_folded else ONE
        factor = unit * LOG2_OF_E
        queries, q_at = placed(pipelines.queries, memory), start()
        keys, values, at = (
            placed(pipelines.keys, memory), placed(pipelines.values, memory), start(),
        )  # fmt: skip
        tile_row = int32(me * ROWS + own.warp * 16 + own.lane // 4)
        for number in range(cuda.blockIdx.x, shape.items, cuda.gridDim.x):
            item = item_of(int32(number), work)
            extras = work.extras
            rows = lane_row(tile_row, item, shape), lane_row(int32(tile_row + 8), item, shape)
            # 5: O = 0, l = 0, m = -inf
            for t in range(value_tiles):
                for i in range(4):
                    acc[t, i] = ZERO
            maxima, shifts, sums = (MINUS_INF, MINUS_INF), (ZERO, ZERO), (ZERO, ZERO)
            has_large, before, has_keys = False, start(), item.begin < item.stop
            if has_keys:
                wait(queries, q_at)
                q_desc = descriptor(ALONG, tile_at(queries, q_at) + me * (ROWS * LINE))
                # 8: S = Q_i K_jᵀ, the first
                wait(keys, at)
                wgmma_fence()
                multiply(s, q_desc, descriptor(ALONG, tile_at(keys, at)))
                wgmma_commit_group()
                wait_for_all()
                release(keys, at, own.lane)
                left = int32(item.length - (item.stop - 1) * block_k)
                if left < block_k:
                    wait(values, at)
                    clear_values(left, tile_at(values, at))
                count = int32(item.stop - item.begin)
                # 6: for 1 <= j <= T_c, backwards: partially masked tiles come first
                for n in range(count):
                    j = int32(item.stop - 1 - n)
                    col = int32(j * block_k + 2 * (own.lane % 4))
                    whole = item.full <= j < item.full_stop
                    to_scores(s, rows, col, whole, item, scale, work)
                    # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                    maxima, shifts, sums, has_large, _, rescale_0, rescale_1 = softmax_step(
                        s, unit, factor, maxima, shifts, sums, has_large
                    )
                    wait_for_all()  # the last P V is done
                    if n > 0:
                        release(values, before, own.lane)
                    # 10, first half: O = diag(e^(m - m_new)) O
                    rescale_rows(acc, rescale_0, rescale_1)
                    pack(p, s)
                    before, at = at, following(keys, at)
                    has_next = n + 1 < count
                    if has_next:
                        wait(keys, at)  # the next K is there
                    wgmma_fence()
                    if has_next:
                        # 8: the next S = Q_i K_jᵀ, computed while P V is waited for
                        multiply(s, q_desc, descriptor(ALONG, tile_at(keys, at)))
                        wgmma_commit_group()
                    # 10, second half: O = O + P V_j
                    wait(values, before)  # V_j is there
                    accumulate(acc, p, descriptor(across, tile_at(values, before)), 1)
                    wgmma_commit_group()
                    wait_for_scores()  # the next S is there; P V may go on
                    if has_next:
                        release(keys, at, own.lane)
                wait_for_all()
                release(values, before, own.lane)
                release(queries, q_at, own.lane)
                q_at = following(queries, q_at)
            sum_0, sum_1 = sums
            for step in range(2):
                sum_0 += cuda.shfl_xor_sync(ALL_LANES, sum_0, 1 << step)
                sum_1 += cuda.shfl_xor_sync(ALL_LANES, sum_1, 1 << step)
            tops = natural(maxima[0], unit), natural(maxima[1], unit)
            state = RowState(tops, (sum_0, sum_1))
            is_whole = shape.parts == 1
            if not is_whole:
                write_part(acc, rows, state, number, has_keys, work)
                is_whole = is_last(memory, item, work)
                if is_whole:
                    state = merge_parts(acc, rows, item, work)
            if is_whole:
                write_rows(acc, rows, state, item, results, extras)

    return consume
