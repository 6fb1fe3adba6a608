"""What the options of attention make of a tile of scores: each is one pass over it, in the cache.

Computes   the scores of a tile from scale · q · k, with their derivative.
Source     ``reference.scores``, in the same order.
Tile       (lines, lanes), lanes contiguous: lanes are query rows and lines are key columns, or with
           ``by_keys`` the reverse.  The arrays of the options are viewed in the tile's order, too.
Units      scores are in base e where an option computes with them, else in base 2; see ``flash2``.
Compiled   apart from the kernels, which call a pass by its address, and only when a call needs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float64, from_dtype, int64, njit, types, void

from kernels.cpu.matmul.tile_product import tanh
from kernels.cpu.runtime.function_pointers import address_of, array_at, call
from kernels.problem.operands import PER_HEAD
from kernels.runtime.jit import FASTMATH, njit_cached

#: How ``attn_mask`` is read.
BOOL_MASK, FLOAT_MASK = 1, 2
#: Bytes.
CACHE_LINE = 64
#: States of a block; see ``BlockMask``.
HIDDEN, FULL, PARTIAL = 0, 1, 2

#: An array by its address: of four dimensions, bytes to step through each.
ARRAY = np.dtype([("address", "i8"), ("shape", "i8", (4,)), ("strides", "i8", (4,))])

#: The options of a call, as one record that every pass receives.
SETTINGS = np.dtype(
    [
        ("q", ARRAY),  # (batch, heads, seq_q, head_dim), and so the other operands
        ("k", ARRAY),
        ("v", ARRAY),
        ("out", ARRAY),
        ("lse", ARRAY),  # (batch, heads, seq_q, 1)
        ("dout", ARRAY),
        ("delta", ARRAY),  # as lse
        ("dq", ARRAY),  # as q
        ("dk", ARRAY),
        ("dv", ARRAY),
        ("table", ARRAY),  # (tiles, 6, 1, 1), see ``call_record.tile_table``
        ("product", "i8"),  # address of ``products.product``
        ("tiles", "i8"),
        ("parts", "i8"),
        ("part_rows", "i8"),
        ("phase", "i8"),
        ("block_q", "i8"),
        ("block_k", "i8"),
        ("factor", "f8"),  # multiplies q · k: the scale, times log2(e) where scores are in base 2
        ("unit", "f8"),  # P = 2^(unit · (S - L)): 1 where scores are in base 2, else log2(e)
        ("scale", "f8"),
        ("lower", "i8"),
        ("upper", "i8"),
        ("bends", "i8"),  # the derivative of a score by scale · q · k is not 1
        ("score_pass", "i8"),  # addresses; 0 where there is nothing to do
        ("keep_pass", "i8"),
        ("by_keys", "i8"),
        ("heads", "i8"),
        ("softcap", "f8"),
        ("score_mod", "i8"),  # addresses, as mask_mod
        ("derivative", "i8"),
        ("mask_mod", "i8"),
        # (batch, heads, 1, 1); an address of 0 where the call has none
        *((name, ARRAY) for name in PER_HEAD),
        ("diagonal", "i8"),
        ("mask_kind", "i8"),
        ("mask", ARRAY),  # (mask batches, heads, lines, lanes), as bytes if it is boolean
        ("mask_batch", ARRAY),  # (batch, 1, 1, 1) int64
        ("states", ARRAY),  # of the block mask: (its heads, 1, line blocks, lane blocks) int32
        ("patterns", ARRAY),  # (count, 1, lines, lanes) bytes
        ("pattern_heads", "i8"),  # heads of the block mask
        ("listed", "i8"),  # the tiles to visit come from a list, as ``TileList`` has it
        ("tile_ptr", ARRAY),  # (lines + 1, 1, 1, 1) int32, and so the next two
        ("tile_ids", ARRAY),
        ("tile_full", ARRAY),  # bytes
        ("seed", "i8"),
        ("threshold", "i8"),
        ("kept", "f8"),  # ``philox.keep_scale``
    ],
    align=True,
)


class Place(NamedTuple):
    """Where a tile lies.

    Attributes:
        batch: As the kernel counts.
        head: Likewise.
        flat: Number of (batch, head), as the kernel and the caller count.
        sequence: Number of the packed sequence.
        line: First line.
        lane: First lane.
        width: Lanes that are there; a tile may have more, whose values are not used.
        partial: The block mask hides a part of the tile.
    """

    batch: Any
    head: Any
    flat: Any
    sequence: Any
    line: Any
    lane: Any
    width: Any
    partial: Any


@njit
def view(array, dtype):
    """Return the array that an ``ARRAY`` names."""
    n, step = array.shape, array.strides
    return array_at(
        array.address, (n[0], n[1], n[2], n[3]), (step[0], step[1], step[2], step[3]), dtype
    )


@njit
def rows_of(array, batch, head, start, count, dtype):
    """Return rows of one head, (count, dim), of the array that an ``ARRAY`` names."""
    step = array.strides
    address = array.address + batch * step[0] + head * step[1] + start * step[2]
    return array_at(address, (count, array.shape[3]), (step[2], step[3]), dtype)


SETTINGS_TYPE = types.Array(from_dtype(SETTINGS), 1, "C")


@njit(fastmath=FASTMATH)
def cap_scores(tile, slope, cap):
    """S becomes cap · tanh(S / cap); its derivative is 1 - tanh²."""
    real = tile.dtype.type
    size, inverse, one = real(cap), real(1.0 / cap), real(1)
    for i in range(tile.shape[0]):
        s = tile[i]  # (lanes,)
        for lane in range(tile.shape[1]):
            s[lane] = tanh(s[lane] * inverse)
    for i in range(slope.shape[0]):
        s, derivative = tile[i], slope[i]  # (lanes,)
        for lane in range(tile.shape[1]):
            derivative[lane] = one - s[lane] * s[lane]
    for i in range(tile.shape[0]):
        s = tile[i]  # (lanes,)
        for lane in range(tile.shape[1]):
            s[lane] *= size


@njit(fastmath=FASTMATH)
def add_distance(tile, weight, first):
    """S += weight · |first + lane - line|."""
    real = tile.dtype.type
    for i in range(tile.shape[0]):
        s = tile[i]  # (lanes,)
        for lane in range(tile.shape[1]):
            s[lane] += weight * real(abs(np.int32(first - i) + np.int32(lane)))


@njit(fastmath=FASTMATH)
def copy_tile(source, target):
    """Copy what a mask says of a tile; each row of a mask lies along the tile's lines or its lanes.

    Args:
        source: (lines, width), any strides.
        target: (lines, lanes), lanes >= width; the rest is left alone.
    """
    if abs(source.strides[0]) < abs(source.strides[1]):  # read in the order of memory
        # One element of each cache line first: a processor waits for many lines at once, but not where
        # it has a whole line to copy before it sees the next.
        for i in range(0, source.shape[0], CACHE_LINE // source.itemsize):
            for lane in range(source.shape[1]):
                target[i, lane] = source[i, lane]
        for lane in range(source.shape[1]):
            for i in range(source.shape[0]):
                target[i, lane] = source[i, lane]
    else:
        for i in range(source.shape[0]):
            for lane in range(source.shape[1]):
                target[i, lane] = source[i, lane]


@njit(fastmath=FASTMATH)
def hide_unkept(tile, kept):
    """S becomes minus infinity where ``kept``, (lines, lanes) bytes, is 0."""
    minus_inf = tile.dtype.type(-np.inf)
    for i in range(tile.shape[0]):
        s, keep = tile[i], kept[i]  # (lanes,)
        for lane in range(len(keep)):
            s[lane] = s[lane] if keep[lane] != 0 else minus_inf


@njit(fastmath=FASTMATH)
def hide_blocks(tile, states, patterns, line, lane, width):
    """S becomes minus infinity where the blocks that the tile meets hide it."""
    minus_inf = tile.dtype.type(-np.inf)
    block_line, block_lane = patterns.shape[1], patterns.shape[2]
    top, lines = line, tile.shape[0]
    while top < line + lines:
        i = top // block_line
        bottom = min((i + 1) * block_line, line + lines)
        left = lane
        while left < lane + width:
            j = left // block_lane
            right = min((j + 1) * block_lane, lane + width)
            state = states[i, j]
            if state == HIDDEN:
                tile[top - line : bottom - line, left - lane : right - lane] = minus_inf
            elif state >= PARTIAL:
                pattern = patterns[state - PARTIAL]  # (block_line, block_lane)
                for r in range(top, bottom):
                    for c in range(left, right):
                        if pattern[r - i * block_line, c - j * block_lane] == 0:
                            tile[r - line, c - lane] = minus_inf
            left = right
        top = bottom


@njit(fastmath=FASTMATH)
def blocks_hide(o, place, lines):
    """Tell whether the block mask hides a whole tile of so many lines; never without a block mask."""
    if o.states.address == 0:
        return False
    states = view(o.states, np.int32)[place.flat % o.heads % o.pattern_heads, 0]
    size = o.patterns.shape
    for i in range(place.line // size[2], (place.line + lines - 1) // size[2] + 1):
        for j in range(place.lane // size[3], (place.lane + place.width - 1) // size[3] + 1):
            if states[i, j] != HIDDEN:
                return False
    return True


@njit_cached(fastmath=FASTMATH)
def score_pass(tile, slope, settings, place):
    """Turn scale · q · k into scores; bounds of what a row sees are the kernel's own.

    Args:
        tile: (lines, lanes), read and written.
        slope: (lines, lanes), the derivative of a score, written; (0, lanes) where it is not needed.
        settings: (1,) of :data:`SETTINGS`.
        place: A :class:`Place`.
    """
    o = settings[0]
    lines, lanes = tile.shape
    end_line, end_lane = place.line + lines, place.lane + place.width
    user = (
        place.flat // o.heads + place.sequence, place.flat % o.heads, place.line, place.lane,
        place.width, o.by_keys,
    )  # fmt: skip
    if o.softcap > 0:
        cap_scores(tile, slope, o.softcap)
    elif o.derivative != 0:
        slope[:] = 1
    if o.derivative != 0:
        call(o.derivative, (slope, tile, *user))
    if o.score_mod != 0:
        call(o.score_mod, (tile, tile, *user))
    if o.slopes.address != 0:
        # |row + diagonal - col|, whichever of the two the lanes are
        diagonal = -o.diagonal if o.by_keys else o.diagonal
        weight = -view(o.slopes, tile.dtype)[place.batch, place.head, 0, 0]
        add_distance(tile, weight, place.lane + diagonal - place.line)
    if o.mask_kind == FLOAT_MASK:
        batch = view(o.mask_batch, np.int64)[place.batch, 0, 0, 0]
        own = view(o.mask, tile.dtype)[batch, place.head]  # (all lines, all lanes)
        added = np.zeros((lines, lanes), tile.dtype)  # (lines, lanes)
        copy_tile(own[place.line : end_line, place.lane : end_lane], added)
        for i in range(lines):
            s, plus = tile[i], added[i]  # (lanes,)
            for lane in range(lanes):
                s[lane] += plus[lane]
    if o.mask_kind == BOOL_MASK:
        batch = view(o.mask_batch, np.int64)[place.batch, 0, 0, 0]
        shown = view(o.mask, np.uint8)[batch, place.head]  # (all lines, all lanes)
        kept = np.ones((lines, lanes), np.uint8)  # (lines, lanes)
        copy_tile(shown[place.line : end_line, place.lane : end_lane], kept)
        hide_unkept(tile, kept)
    if place.partial != 0 and o.states.address != 0:
        states = view(o.states, np.int32)[place.flat % o.heads % o.pattern_heads, 0]
        patterns = view(o.patterns, np.uint8)[:, 0]  # (count, block_line, block_lane)
        hide_blocks(tile, states, patterns, place.line, place.lane, place.width)
    if o.mask_mod != 0:
        call(o.mask_mod, (tile, tile, *user))


PLACE_TYPE = types.NamedTuple([int64] * len(Place._fields), Place)


@cache
def score_address(dtype: np.dtype[Any]) -> int:
    """Return the address of the score pass for one dtype."""
    scalar = from_dtype(dtype)
    tile = types.Array(scalar, 2, "C")
    signature = void(tile, tile, SETTINGS_TYPE, PLACE_TYPE)
    return address_of(score_pass, signature)


#: The arguments of a compiled mod after the two tiles: batch, head, line, lane, width, by_keys.
MOD_NUMBERS = (int64,) * 6
#: Scores reach a user's function as Python's numbers do.
MOD_SCALAR = float64
