"""Apply the options of attention to a tile of scores: each option is one pass over the tile in cache.

Computes   the scores of a tile from scale · q · k, with their derivative.
Source     ``scores.program``, compiled for one option at a time: a loop without branches is vectorised,
           and kernels are compiled once for all combinations.
Tile       (lines, lanes), lanes contiguous: lanes are query rows and lines are key columns, or with
           ``by_keys`` the reverse.  The arrays of the options are viewed in the tile's order, too.
Compiled   separately from the kernels, which call a pass by its address, and only when a call needs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float64, from_dtype, int64, njit, types, void

from kernels.cpu.matmul.tile_product import tanh
from kernels.cpu.runtime.function_pointers import address_of, array_at, call
from kernels.problem.options import AXES
from kernels.runtime.jit import FASTMATH, njit_cached
from kernels.scores.program import Features, ScoreTarget, make_score_program
from kernels.sparsity.elements import compiled_mod

#: The kinds of ``attn_mask``.
BOOL_MASK, FLOAT_MASK = 1, 2
#: Dtype of the scores that a user function receives, that of Python floats.
MOD_SCALAR = float64
#: Bytes.
CACHE_LINE = 64
#: States of a block; see ``BlockMask``.
HIDDEN, FULL, PARTIAL = 0, 1, 2

#: An array of four dimensions: its address, sizes, and strides in bytes.
ARRAY = np.dtype([("address", "i8"), ("shape", "i8", (4,)), ("strides", "i8", (4,))])

#: The options of a call, as one record that every pass receives.
SETTINGS = np.dtype(
    [
        ("q", ARRAY),  # (batch, heads, seq_q, head_dim), and so the other operands
        ("k", ARRAY),
        ("v", ARRAY),
        ("out", ARRAY),
        ("lse", ARRAY),  # (batch, heads, seq_q, 1)
        ("lse_rest", ARRAY),  # as lse
        ("dout", ARRAY),
        ("delta", ARRAY),  # as lse
        ("dq", ARRAY),  # as q
        ("dk", ARRAY),
        ("dv", ARRAY),
        *((f"{name}_tangent", ARRAY) for name in ("q", "k", "v", "out", "lse", "delta")),
        ("table", ARRAY),  # (tiles, 6, 1, 1), see ``call_record.tile_table``
        ("product", "i8"),  # address of ``products.product``
        ("tiles", "i8"),
        ("parts", "i8"),
        ("part_rows", "i8"),
        # of ``flash_decoding``: lines and sums of parts, and how many are finished
        ("of_parts", ARRAY),  # (groups, parts, lines, value_dim + 2)
        ("finished", ARRAY),  # (groups, 1, 1, 1) int64
        # of a cache; an address of 0 where the keys are those of the call
        ("lengths", ARRAY),  # (batch, 1, 1, 1) int64
        ("pages", ARRAY),  # (batch, pages of a sequence, 1, 1) int32
        ("k_form", "i8"),  # how k and v are loaded, see ``key_cache.form_of``
        ("v_form", "i8"),
        ("is_loaded", "i8"),  # whether one of them is not read in place
        ("cache_mask", "i8"),  # the kind of ``mask``, which the score pass does not apply
        ("phase", "i8"),
        ("block_q", "i8"),
        ("block_k", "i8"),
        ("scale", "f8"),
        ("lower", "i8"),
        ("upper", "i8"),
        (
            "modifies_scores",
            "i8",
        ),  # derivatives of a score by scale · q · k that are needed, not 1 and 0
        ("score_pass", "i8"),  # addresses; 0 if there is nothing to do
        ("keep_pass", "i8"),
        ("by_keys", "i8"),
        ("heads", "i8"),
        ("softcap", "f8"),
        ("user_pass", "i8"),  # address of the user's functions, or 0
        ("table_pass", "i8"),  # address of ``mods.table_pass_address``, or 0
        ("score_table", ARRAY),  # what a user function reads, with sizes of 1 at the end
        ("numbers", "i8"),  # address of those of ``mask_mod`` and ``score_mod``, 8 bytes each
        # (batch, heads, lines, lanes), repeated by strides of 0; an address of 0 where the call has none
        *((name, ARRAY) for name in AXES),
        ("diagonal", "i8"),
        ("mask_kind", "i8"),
        ("mask", ARRAY),  # (mask batches, heads, lines, lanes), as bytes if it is boolean
        ("mask_batch", ARRAY),  # (batch, 1, 1, 1) int64
        ("states", ARRAY),  # of the block mask: (its heads, 1, line blocks, lane blocks) int32
        ("patterns", ARRAY),  # (count, 1, lines, lanes) bytes
        ("pattern_heads", "i8"),  # lists of the block mask: 1, or for each head or (batch, head)
        ("listed", "i8"),  # whether the tiles to visit come from a ``TileList``
        ("tile_ptr", ARRAY),  # (lines + 1, 1, 1, 1) int32, and so the next two
        ("tile_ids", ARRAY),
        ("tile_full", ARRAY),  # bytes
        ("seed", "i8"),
        ("threshold", "i8"),
        ("kept", "f8"),  # ``philox.keep_scale``
        # where the dropout bits of the call begin: a ``problem.question.DropoutOrigin``
        ("whole_heads", "i8"),
        ("first_head", "i8"),
        ("first_row", "i8"),
        ("first_col", "i8"),
    ],
    align=True,
)


class TilePosition(NamedTuple):
    """The position of a tile of scores."""

    batch: Any  #: Index of the batch in the kernel's arrays.
    head: Any  #: Index of the head.
    flat: Any  #: Index of (batch, head), in the kernel's and the caller's order.
    sequence: Any  #: Index of the packed sequence.
    line: Any  #: First line.
    lane: Any  #: First lane.
    width: Any  #: Number of valid lanes; a tile may have more, whose values are not used.
    partial: Any  #: Whether the block mask masks a part of the tile.


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


class Cap(NamedTuple):
    """The constants of a softcap, in the dtype of the scores."""

    softcap: Any
    over_cap: Any


class Apart(NamedTuple):
    """The inputs of ALiBi for a score: the slope of the head and the distance ±(row + diagonal - col)."""

    slope: Any
    distance: Any


class OfUsers(NamedTuple):
    """The arguments of user functions in addition to the score and its position."""

    table: Any  #: The array that a ``score_mod`` reads, or None.
    of_mask: Any  #: The numbers of ``mask_mod``.
    of_score: Any  #: The numbers of ``score_mod``.


@cache
def make_target(real, has_table=False):
    """Return the score program's target of tiles of one dtype.

    A pass applies one option, and its ``place`` is the input of that option for an element: :class:`Apart`
    for ALiBi, the mask's element for a mask, the caller's (batch, head, row, col) for a user function,
    whose ``call`` is :class:`OfUsers`.  With ``has_table``, the function reads the table.
    """

    def score_function(function):
        function = compiled_mod(function, "numpy")

        @njit
        def at_place(score, place, call):
            return real(
                function(call.of_score, MOD_SCALAR(score), place[0], place[1], place[2], place[3])
            )

        @njit
        def with_table(score, place, call):
            return real(
                function(
                    call.of_score,
                    MOD_SCALAR(score),
                    place[0],
                    place[1],
                    place[2],
                    place[3],
                    call.table,
                )
            )

        return with_table if has_table else at_place

    def mask_function(function):
        function = compiled_mod(function, "numpy")

        @njit
        def at_place(place, call):
            return function(call.of_mask, place[0], place[1], place[2], place[3])

        return at_place

    of_head, of_score = njit(lambda place, call: place.slope), njit(lambda place, call: place)
    return ScoreTarget(
        compile=njit(fastmath=FASTMATH, error_model="numpy"),
        one=real(1),
        tanh=tanh,
        score_function=score_function,
        mask_function=mask_function,
        element=lambda name: of_head if name == "slopes" else of_score,
        distance=njit(lambda place, call: real(abs(place.distance))),
        bias=of_score,
        in_mask=njit(lambda place, call: place != 0),
        in_blocks=None,  # a block mask masks rectangles: ``hide_blocks``
    )


@njit(fastmath=FASTMATH)
def copy_tile(source, target):
    """Copy (lines, width) elements of a mask, of any strides, to a tile of as many lanes or more.

    Rows of the mask run along the tile's lines or its lanes.
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
def hide_blocks(tile, states, patterns, line, lane, width):
    """Set the scores of masked blocks to minus infinity."""
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
                own_lines = slice(top - i * block_line, bottom - i * block_line)
                own_lanes = slice(left - j * block_lane, right - j * block_lane)
                shown = patterns[state - PARTIAL, own_lines, own_lanes]
                kept = np.empty((bottom - top, right - left), np.uint8)  # contiguous, for vectors
                copy_tile(shown, kept)
                for r in range(bottom - top):
                    s, keep = tile[top - line + r, left - lane : right - lane], kept[r]
                    for c in range(right - left):
                        s[c] = s[c] if keep[c] != 0 else minus_inf
            left = right
        top = bottom


@njit(fastmath=FASTMATH)
def blocks_hide(o, place, lines):
    """Tell whether the block mask masks a whole tile of so many lines; False without a block mask."""
    if o.states.address == 0:
        return False
    states = view(o.states, np.int32)[place.flat % o.pattern_heads, 0]
    size = o.patterns.shape
    for i in range(place.line // size[2], (place.line + lines - 1) // size[2] + 1):
        for j in range(place.lane // size[3], (place.lane + place.width - 1) // size[3] + 1):
            if states[i, j] != HIDDEN:
                return False
    return True


def make_score_pass(real):
    """Return the pass over a tile of scores of one dtype."""
    target, minus_inf, one = make_target(real), real(-np.inf), real(1)
    capped = make_score_program(Features(softcap=True), target._replace(order=2)).modified
    less_distance = make_score_program(Features(slopes=True), target).modified
    biased = make_score_program(Features(mask="float"), target).modified
    in_mask = make_score_program(Features(mask="bool"), target).is_shown

    @njit(fastmath=FASTMATH)
    def add_array(tile, array, batch, where):
        """Add an array of (batches, heads, all lines, all lanes) to a tile, of one batch."""
        own = view(array, real)[batch, where.head]  # (all lines, all lanes)
        own = own[where.line : where.line + tile.shape[0], where.lane : where.lane + where.width]
        bias = np.zeros(tile.shape, tile.dtype)  # (lines, lanes)
        copy_tile(own, bias)
        for i in range(tile.shape[0]):
            s, b = tile[i], bias[i]  # (lanes,)
            for lane in range(tile.shape[1]):
                s[lane] = biased(s[lane], b[lane], None)[0]

    @njit_cached(fastmath=FASTMATH)
    def score_pass(tile, slope, settings, where):
        """Turn scale · q · k, (lines, lanes), into scores, but for the causal and window bounds.

        The derivatives of a score are written to ``slope``: (lines, lanes) for the first, as many lines
        below it for the second, or (0, lanes) if not needed.
        """
        o = settings[0]
        lines, lanes = tile.shape
        if o.softcap > 0:
            cap = Cap(real(o.softcap), real(1.0 / o.softcap))
            for i in range(lines):
                s = tile[i]  # (lanes,)
                if o.modifies_scores == 0:
                    for lane in range(lanes):
                        s[lane] = capped(s[lane], None, cap)[0]
                elif o.modifies_scores == 1:
                    derivative = slope[i]  # (lanes,)
                    for lane in range(lanes):
                        s[lane], derivative[lane], _ = capped(s[lane], None, cap)
                else:
                    derivative, second = slope[i], slope[lines + i]  # (lanes,)
                    for lane in range(lanes):
                        s[lane], derivative[lane], second[lane] = capped(s[lane], None, cap)
        elif o.modifies_scores != 0:
            slope[:lines], slope[lines:] = one, real(0)
        if o.user_pass != 0:
            # A masked score stays minus infinity.
            call(o.user_pass, (
                tile, slope, where.flat // o.heads + where.sequence, where.flat % o.heads,
                where.line, where.lane, where.width, o.by_keys, settings,
            ))  # fmt: skip
        if o.slopes.address != 0:
            # |row + diagonal - col|, whichever of the two the lanes are
            diagonal = -o.diagonal if o.by_keys else o.diagonal
            first = where.lane + diagonal - where.line
            weight = view(o.slopes, real)[where.batch, where.head, 0, 0]
            for i in range(lines):
                s = tile[i]  # (lanes,)
                for lane in range(lanes):
                    apart = Apart(weight, np.int32(first - i) + np.int32(lane))
                    s[lane] = less_distance(s[lane], apart, None)[0]
        if o.mask_kind == FLOAT_MASK:
            add_array(tile, o.mask, view(o.mask_batch, np.int64)[where.batch, 0, 0, 0], where)
        if o.mask_kind == BOOL_MASK:
            batch = view(o.mask_batch, np.int64)[where.batch, 0, 0, 0]
            shown = view(o.mask, np.uint8)[batch, where.head]  # (all lines, all lanes)
            kept = np.ones((lines, lanes), np.uint8)  # (lines, lanes)
            own_lines = slice(where.line, where.line + lines)
            copy_tile(shown[own_lines, where.lane : where.lane + where.width], kept)
            for i in range(lines):
                s, keep = tile[i], kept[i]  # (lanes,)
                for lane in range(lanes):
                    s[lane] = s[lane] if in_mask(keep[lane], None) else minus_inf
        if where.partial != 0 and o.states.address != 0:
            states = view(o.states, np.int32)[where.flat % o.pattern_heads, 0]
            patterns = view(o.patterns, np.uint8)[:, 0]  # (count, block_line, block_lane)
            hide_blocks(tile, states, patterns, where.line, where.lane, where.width)

    return score_pass


TILE_POSITION_TYPE = types.NamedTuple([int64] * len(TilePosition._fields), TilePosition)


@cache
def score_address(dtype: np.dtype[Any]) -> int:
    """Return the address of the score pass for one dtype."""
    scalar = from_dtype(dtype)
    tile = types.Array(scalar, 2, "C")
    signature = void(tile, tile, SETTINGS_TYPE, TILE_POSITION_TYPE)
    return address_of(make_score_pass(dtype.type), signature)
