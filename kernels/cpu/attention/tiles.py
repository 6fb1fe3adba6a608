"""Common functions of the CPU attention kernels: which tiles they visit, and how a tile is loaded."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from kernels.common.geometry import make_geometry
from kernels.common.online_softmax import make_online_softmax, make_softmax_step
from kernels.cpu.attention.tile_scores import CACHE_LINE, view
from kernels.cpu.matmul.tile_product import exp2
from kernels.cpu.matmul.vector_registers import LANES, VECTOR_BYTES, transpose_square
from kernels.cpu.runtime.function_pointers import array_at, contiguous
from kernels.runtime.jit import FASTMATH
from kernels.scores.program import Features, make_row_end
from kernels.scores.visibility import make_masks

_GEOMETRY = make_geometry(njit)
ceil_div = _GEOMETRY.ceil_div
first_tile, tiles_stop = _GEOMETRY.first_tile, _GEOMETRY.tiles_stop
first_full_tile, full_tiles_stop = _GEOMETRY.first_full_tile, _GEOMETRY.full_tiles_stop
is_visible = make_masks(njit).is_visible
#: Numba lets a function inherit its caller's freedoms, and what lse loses would be simplified to 0.
_EXACTLY = njit(fastmath=False)
_SOFTMAX = make_online_softmax(_EXACTLY)
shift_of, inverse_sum, log_sum_exp = _SOFTMAX.shift_of, _SOFTMAX.inverse_sum, _SOFTMAX.log_sum_exp
merge_weight = _SOFTMAX.merge_weight
#: 0 in the narrowest dtype, so that it does not promote any other.
_ZERO = np.float32(0)


@_EXACTLY
def _own_shift(row_max):
    return _ZERO if row_max == -np.inf else row_max


_FAST = njit(fastmath=FASTMATH)
power, grown = make_softmax_step(_FAST, _own_shift, exp2, _FAST(lambda x, y: x - y))


@cache
def make_end_row(real):
    """Return ``end_row(row_sum, shift, b, h, o)`` for one dtype; see ``program.make_row_end``."""
    minus_inf = real(-np.inf)

    @njit
    def sink_of(b, h, o):
        return minus_inf if o.sink.address == 0 else view(o.sink, real)[b, h, 0, 0]

    return make_row_end(Features(sink=True), _EXACTLY, _SOFTMAX, real, sink_of)


@njit(fastmath=FASTMATH)
def lanes_for(lines):
    """Return the number of lanes of a tile for a number of rows, rounded up to whole vectors."""
    return ceil_div(lines, LANES) * LANES


@njit
def empty_tile(lines, lanes, dtype):
    """Return an array (lines, lanes) aligned to a cache line, so that no vector spans two."""
    size = lines * lanes
    buffer = np.empty(size + CACHE_LINE, dtype)
    skipped = -buffer.ctypes.data % CACHE_LINE // buffer.itemsize
    return buffer[skipped : skipped + size].reshape((lines, lanes))


@njit
def zero_tile(lines, lanes, dtype):
    """Return an aligned array (lines, lanes) of zeros."""
    tile = empty_tile(lines, lanes, dtype)
    tile[:] = 0
    return tile


@njit
def as_tile(buffer, lines, lanes):
    """Return the start of a contiguous buffer as a tile (lines, lanes); (0, lanes) for an empty one."""
    size = buffer.itemsize
    shape = (lines if buffer.size != 0 else 0, lanes)
    return contiguous(array_at(buffer.ctypes.data, shape, (lanes * size, size), buffer.dtype))


@njit(fastmath=FASTMATH)
def transpose(source, target):
    """Write the transpose of a tile: squares in registers, and single elements at the edges.

    The source is (rows, dim) with any strides, the target (dim, lanes) with lanes >= rows; the other
    lanes are unchanged.
    """
    rows, dim = source.shape
    side = VECTOR_BYTES // source.itemsize
    whole_rows = rows // side * side if source.strides[1] == source.itemsize else 0
    whole_dim = dim // side * side
    for row in range(0, whole_rows, side):
        for i in range(0, whole_dim, side):
            transpose_square(contiguous(source), row, i, target)
    for i in range(dim):
        lane = target[i]  # (lanes,)
        for row in range(whole_rows if i < whole_dim else 0, rows):
            lane[row] = source[row, i]


@njit(fastmath=FASTMATH)
def pack_transposed(source, factor, target):
    """Write factor * sourceᵀ to target, (dim, lanes), and zero the lanes beyond the source's rows."""
    transpose(source, target)
    rows = source.shape[0]
    for i in range(target.shape[0]):
        lane = target[i]  # (lanes,)
        lane[rows:] = 0
        for row in range(rows):
            lane[row] *= factor


@njit(fastmath=FASTMATH)
def add_rows(source, factor, target):
    """Add factor * source, contiguous rows, to (rows, dim) of any strides."""
    rows, dim = target.shape
    if target.strides[1] == target.itemsize:
        for r in range(rows):
            near, own = contiguous(target[r]), source[r]  # (dim,)
            for i in range(dim):
                near[i] += own[i] * factor
    else:
        for r in range(rows):
            for i in range(dim):
                target[r, i] += source[r, i] * factor


@njit(fastmath=FASTMATH)
def pack_rows(source, factor, target):
    """Write factor * source to contiguous rows and zero the columns beyond the source's."""
    dim = source.shape[1]
    for r in range(source.shape[0]):
        row = target[r]  # (columns,)
        row[dim:] = 0
        for i in range(dim):
            row[i] = factor * source[r, i]


@njit(fastmath=FASTMATH)
def multiply(tile, factors):
    """Multiply a tile in place by a tile of the same shape."""
    for i in range(tile.shape[0]):
        own, other = tile[i], factors[i]  # (lanes,)
        for lane in range(tile.shape[1]):
            own[lane] *= other[lane]


@njit(fastmath=FASTMATH)
def rescale_rows(acc, rescale):
    """Multiply the lanes of O, (value_dim, lanes), by factors."""
    for i in range(acc.shape[0]):
        own = acc[i]  # (lanes,)
        for lane in range(acc.shape[1]):
            own[lane] *= rescale[lane]


@njit(fastmath=FASTMATH)
def hide_out_of_bounds(s, line, lane, lower, upper):
    """Set masked scores to minus infinity: only lanes i + lower to i + upper are visible to line i.

    The bounds are those of ``Problem`` if lines are query rows, else ``-upper`` and ``-lower``.
    """
    minus_inf = s.dtype.type(-np.inf)
    for i in range(s.shape[0]):
        s_row = s[i]  # (lanes,)
        for j in range(s.shape[1]):
            visible = is_visible(line + i, lane + j, lower, upper)
            s_row[j] = s_row[j] if visible else minus_inf


@njit(fastmath=FASTMATH)
def entries(o, flat, tile, num_tiles, first, stop):
    """Return the range of visits of a tile: entries of the list, or tiles if there is no list."""
    if o.listed == 0:
        return first, stop
    line = flat % o.pattern_heads * num_tiles + tile
    tile_ptr = view(o.tile_ptr, np.int32)
    return np.int64(tile_ptr[line, 0, 0, 0]), np.int64(tile_ptr[line + 1, 0, 0, 0])


@njit(fastmath=FASTMATH)
def tile_of(o, entry):
    """Return the index of the visited tile, and 1 if the block mask masks a part of it."""
    if o.listed == 0:
        return entry, np.int64(0)
    full = view(o.tile_full, np.uint8)[entry, 0, 0, 0]
    return np.int64(view(o.tile_ids, np.int32)[entry, 0, 0, 0]), np.int64(full == 0)


@njit(fastmath=FASTMATH)
def tile_in_table(o, number):
    """Return a row of the table: sequence, first_q, seq_q, first_k, seq_k and start of a tile."""
    table = view(o.table, np.int64)
    return (
        table[number, 0, 0, 0], table[number, 1, 0, 0], table[number, 2, 0, 0],
        table[number, 3, 0, 0], table[number, 4, 0, 0], table[number, 5, 0, 0],
    )  # fmt: skip
