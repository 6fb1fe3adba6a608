"""The consumers of the decoding kernel: they multiply, and compute the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.tile_steps import make_exponentials, make_rescale
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
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.copies import global_address, st_global, st_global_v2
from kernels.cuda.ptx.numbers import PACK, mul_rn
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
from kernels.runtime.types import float32, int32, int64, uint32
from kernels.scores.program import PLAIN

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-math.inf)
LOG2_OF_E = np.float32(LOG2_E)


class LaneRow(NamedTuple):
    """A query row of a lane in the decoding kernel: one token of one head."""

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
    score_of = make_tile_scores(form.features, FLOAT32, order=0).score

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
                        s[t, u] = score_of(x, element, extras)

    return to_scores


def make_write_rows(form: DecodingForm) -> Callable[..., None]:
    """Return ``write_rows(acc, rows, tops, sums, item, results, work)``, which writes an item's results.

    ``tops`` are m of a lane's two rows, natural logarithms, and ``sums`` are l.

    Those of a part of the keys are float32, in a batch of their own, and know nothing of sinks.
    """
    tiles, pack, is_split = form.widths.value // 8, PACK[form.dtype], form.is_split
    end_row = make_row_end(PLAIN if is_split else form.features, FLOAT32, near=True)
    size = 4 if is_split else 2

    @device_function
    def write_rows(acc, rows, tops, sums, item, results, work):
        (out, lse, rest), lane = results, int32(cuda.threadIdx.x % 4)
        b = int32(item.part * work.extras.tiles.lengths.shape[0] + item.b)
        for half in range(2):
            row, total = rows[half], sums[half]
            if row.is_there:
                # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
                shift = float32(shift_of(tops[half]))
                inverse, row_lse, row_rest = end_row(total, shift, item.b, row.h, work.extras)
                if lane == 0:
                    lse[b, row.h, row.token] = row_lse
                    rest[b, row.h, row.token] = row_rest
                # 14: write O_i; without keys the accumulators are undefined
                at = global_address(out) + int64(b) * out.strides[0] + 2 * size * lane
                at += int64(row.h) * out.strides[1] + int64(row.token) * out.strides[2]
                left = int32(out.shape[3] - 2 * lane)
                for t in range(tiles):
                    if 8 * t < left:
                        x, y = acc[t, 2 * half] * inverse, acc[t, 2 * half + 1] * inverse
                        if is_split:
                            st_global_v2(at + 8 * size * t, x, y)
                        else:
                            st_global(at + 8 * size * t, pack(x, y))

    return write_rows


def make_consume(form: DecodingForm, pipelines: DecodingPipelines) -> Callable[..., None]:
    """Return ``consume(me, memory, results, work)``, which the threads of consumer ``me`` call."""
    layout, widths, dtype, is_folded = form.layout, form.widths, form.dtype, form.is_folded
    block_k, q_panel, k_panel = layout.block_k, layout.rows * LINE, layout.block_k * LINE
    multiply = make_multiply(block_k, dtype, widths.head, q_panel, k_panel)
    accumulate, pack = make_accumulate(widths.value, dtype, block_k), make_pack(dtype, block_k)
    # Rescaled with every tile: a row does not depend on the others of its warp.
    rescale, exponentials = make_rescale(block_k, 0), make_exponentials(block_k)
    to_scores = make_to_scores(form)
    across = descriptor_layout(LINE, k_panel, 8 * LINE)
    wait_for_all, wait_for_scores = make_wgmma_wait_group(0), make_wgmma_wait_group(1)
    item_of = make_item_of(block_k)
    clear_values = make_clear_rows(layout.consumers, block_k, widths.value_panels)
    write_rows = make_write_rows(form)
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
                    # 9: m_new = max(m, rowmax S)
                    # 10, first half: O = diag(e^(m - m_new)) O, l = e^(m - m_new) l
                    maxima, shifts, sums, has_large = rescale(
                        s, acc, unit, factor, maxima, shifts, sums, has_large
                    )
                    if n > 0:  # the last P V is done
                        release(values, before, own.lane)
                    # 9: P = exp(S - m_new), l = l + rowsum P
                    sums = exponentials(s, 0, factor, shifts[0], shifts[1], sums[0], sums[1])
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
            write_rows(acc, rows, tops, (sum_0, sum_1), item, results, work)

    return consume
