"""What options make of a tile of scores in Hopper's forward kernel, in the registers of its lanes.

A lane's elements are (t, i), as in ``dropout_bits``.  A tile of which bounds and lists hide nothing is
whole; for whole tiles and for the others there is a function each: the many whole ones test nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, has_bit
from kernels.cuda.attention.flash3_wgmma.packed_mask import QUAD, STEP, make_block_bits, make_pairs
from kernels.cuda.attention.options.mods import (
    FIRST_PLACE,
    mask_function,
    numbers_of_mods,
    score_function,
)
from kernels.cuda.attention.options.score_functions import PLAIN, Features, mask_at
from kernels.cuda.attention.options.tile_scores import make_tile_scores
from kernels.cuda.device.emitted import unrolled
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.copies import st_shared_v4
from kernels.cuda.ptx.numbers import UNPACK, ex2, rcp
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda

#: The named barrier at which all consumers meet.
EVERYONE = 7
#: Of the Taylor series of tanh(x) / x in x², from the last to the first.
_SERIES = tuple(np.float32(x) for x in (-17 / 315, 2 / 15, -1 / 3, 1.0))
#: Below this the series is taken: the error of what is left out is as small there as a rounding.
_SMALL, _TWICE_LOG2_E = np.float32(0.25), np.float32(2 * LOG2_E)


@device_function
def tanh(x):
    """Return the hyperbolic tangent, to some units in the last place, without a branch."""
    last, third, second, first = _SERIES
    square = x * x
    small = x * (((last * square + third) * square + second) * square + first)
    large = float32(1) - float32(2) * rcp(ex2(x * _TWICE_LOG2_E) + float32(1))
    return small if abs(x) < _SMALL else large


class Elements(NamedTuple):
    """The functions that :func:`make_elements` returns, and what a kernel must know beside them.

    Both ``whole`` and ``edge`` are ``(s, seen, lane, place, scale, extras)``: of the products in ``s`` they
    make scores, minus infinity where hidden.  ``place`` is (flat, own, b, h, row, col, seq_q, seq_k), where
    (row, col) is the lane's first element; ``seen`` are its bits of a boolean mask, of which a block mask
    may take some, and behind them words of a floating mask of 16 bits.

    Attributes:
        bends: Scores are natural logarithms; else still products, which the scale, if it is positive,
            leaves in their order.
        of_all: There is anything to do in tiles that are whole.
        own: ``(flat, extras)``: batch and head as mods get them, the same for all tiles of a line.
        whole: For tiles that are.
        edge: For the others.
    """

    bends: bool
    of_all: bool
    own: Callable[..., Any]
    whole: Callable[..., None]
    edge: Callable[..., None]


@device_function
def _no_numbers(flat, extras):
    return int64(0), int64(0)


def has_mods(features: Features) -> bool:
    """Tell whether a user's functions get the places of elements."""
    return features.score_mod is not None or features.mask_mod is not None


def numbers_of(features: Features) -> Callable[..., Any]:
    """Return ``Elements.own``; without a mod nobody asks for the numbers."""
    return numbers_of_mods if has_mods(features) else _no_numbers


def distance_of(features: Features) -> Callable[..., Any]:
    """Return ``distance(row, col, extras)``: how far ALiBi says that places are apart, else row - col."""

    @device_function
    def from_diagonal(row, col, extras):
        return float32(row + extras.diagonal - col)

    @device_function
    def difference(row, col, extras):
        return float32(int32(row - col))

    return from_diagonal if features.slopes else difference


def difference_of(features: Features) -> Callable[..., Any]:
    """Return ``difference(distance, extras)``: row - col, of what ``distance_of`` gives."""

    @device_function
    def without_diagonal(distance, extras):
        return distance - float32(extras.diagonal)

    @device_function
    def itself(distance, extras):
        return distance

    return without_diagonal if features.slopes else itself


@cache
def make_elements(features: Features, cols: int) -> Elements:
    """Return the functions for tiles of ``cols`` columns."""
    of_all = features._replace(dropout=False).of_elements != PLAIN
    return Elements(
        features.bends,
        of_all,
        numbers_of(features),
        _make_apply(features, cols, False),
        _make_apply(features, cols, True),
    )


def seen_words(features: Features, cols: int) -> int:
    """Return how many words a lane has in ``seen``."""
    has_pairs = features.mask in UNPACK
    return bit_words(cols) + (QUAD * (cols // STEP) if has_pairs else 0)


def pairs_of(
    features: Features, cols: int
) -> tuple[Callable[..., None], Callable[..., Any]] | None:
    """Return the functions of ``make_pairs`` for all words of a tile, or None without such a mask."""
    if features.mask not in UNPACK:
        return None
    return make_pairs(features.mask, bit_words(cols))


def _make_bend(features: Features) -> Callable[..., Any]:
    """Return ``bend(x, row, col, distance, own, b, h, scale, extras)``: the score of a product.

    ``own`` are batch and head as mods get them.
    """
    # Without one nothing calls it.
    score_mod: Any = features.score_mod and score_function(features.score_mod, FLOAT32, float32)
    has_softcap, has_slopes, has_bias = features.softcap, features.slopes, features.mask == "float"
    minus_inf, difference = np.float32(-math.inf), difference_of(features)

    @device_function
    def cap(x, scale, extras):
        return extras.softcap * tanh(x * (float32(scale) / extras.softcap))

    @device_function
    def scaled(x, scale, extras):
        return x * float32(scale)

    @device_function
    def modified(x, row, col, distance, own, extras):
        return float32(score_mod(x, own[0], own[1], row, col, difference(distance, extras)))

    @device_function
    def alibi(x, distance, b, h, extras):
        return x - extras.slopes[b, h, 0, 0] * abs(distance)

    @device_function
    def biased(x, row, col, b, h, extras):
        bias = mask_at(b, h, row, col, extras)
        # What the mask hides may be NaN, and would stay it.
        return bias if bias == minus_inf else x + bias

    @device_function
    def not_modified(x, row, col, distance, own, extras):
        return x

    @device_function
    def not_far(x, distance, b, h, extras):
        return x

    @device_function
    def not_biased(x, row, col, b, h, extras):
        return x

    first = cap if has_softcap else scaled
    second = modified if score_mod else not_modified
    third, fourth = alibi if has_slopes else not_far, biased if has_bias else not_biased

    @device_function
    def bend(x, row, col, distance, own, b, h, scale, extras):
        x = second(first(x, scale, extras), row, col, distance, own, extras)
        return fourth(third(x, distance, b, h, extras), row, col, b, h, extras)

    @device_function
    def same(x, row, col, distance, own, b, h, scale, extras):
        return x

    return bend if features.bends else same


@cache
def _make_apply(features: Features, cols: int, is_edge: bool) -> Callable[..., None]:
    """Return one of the two functions of :class:`Elements`."""
    tiles, minus_inf = cols // 8, np.float32(-math.inf)
    bounds = make_tile_scores(PLAIN, FLOAT32)
    edge_of, bounded = bounds.edge, bounds.score
    bend, distance_from = _make_bend(features), distance_of(features)
    has_mask, has_mod = features.mask == "bool", features.mask_mod is not None
    mask_mod: Any = features.mask_mod and mask_function(features.mask_mod, FLOAT32)
    has_places = has_mods(features)
    has_blocks = is_edge and features.block_mask and not features.whole_tiles
    see_blocks = _make_see_blocks(cols, has_mask) if has_blocks else _see_all
    has_seen, has_pairs = has_mask or has_blocks, features.mask in UNPACK
    pairs: Any = pairs_of(features, cols)
    add_pair: Any = pairs and pairs[1]

    def apply_to(s, seen, t, given):
        edge, distance, row, col, seq_q, seq_k, flat, own, b, h, scale, extras = given
        last_row, last_col = int32(seq_q - 1), int32(seq_k - 1)
        for i in range(4):
            r, c = 8 * (i // 2), 8 * t + i % 2
            # Within the arrays, so that loads need no branch.
            at_row = int32(min(int32(row + r), last_row))
            at_col = int32(min(int32(col + c), last_col)) if is_edge else int32(col + c)
            far = distance + float32(r - c)
            x = bend(s[t, i], at_row, at_col, far, own, b, h, scale, extras)
            if has_pairs:
                x = add_pair(x, seen, t, i)
            if has_seen:
                x = x if has_bit(seen, t, i) else minus_inf
            if has_mod:
                x = x if mask_mod(own[0], own[1], at_row, at_col) else minus_inf
            if is_edge:
                x = bounded(x, False, True, edge, flat, b, h, row, r, col, c, seq_q, seq_k, extras)
            s[t, i] = x

    apply_to_all = unrolled(tiles, apply_to)

    @device_function
    def apply(s, seen, lane, place, scale, extras):
        flat, own, b, h, row, col, seq_q, seq_k = place
        edge = edge_of(row, col, seq_q, seq_k, extras)
        distance = distance_from(row, col, extras)
        see_blocks(seen, lane, row, col, seq_q, seq_k, flat, extras)
        if has_places:  # which says to the compiler how large they are
            row, col = int32(row & FIRST_PLACE), int32(col & FIRST_PLACE)
        given = edge, distance, row, col, seq_q, seq_k, flat, own, b, h, scale, extras
        apply_to_all(s, seen, given)

    return apply


@device_function
def _see_all(seen, lane, row, col, seq_q, seq_k, flat, extras):
    pass


@cache
def _make_see_blocks(cols: int, has_mask: bool) -> Callable[..., None]:
    """Return ``see_blocks(seen, lane, row, col, seq_q, seq_k, flat, extras)``.

    It takes from a lane's bits what the block mask hides; without a boolean mask there are none before.
    """
    words, block_bits = bit_words(cols), make_block_bits(cols)

    @device_function
    def see_blocks(seen, lane, row, col, seq_q, seq_k, flat, extras):
        # One by one: a loop that is not unrolled would put them into local memory.
        bits = block_bits(0, lane, flat, row, col, seq_q, seq_k, extras)
        seen[0] = uint32(seen[0] & bits) if has_mask else bits
        if words > 1:
            bits = block_bits(1, lane, flat, row, col, seq_q, seq_k, extras)
            seen[1] = uint32(seen[1] & bits) if has_mask else bits

    return see_blocks


@cache
def make_clear_unseen(consumers: int, block_k: int, panels: int) -> Callable[..., None]:
    """Return ``clear_unseen(thread, lane, s, left, bytes_, seen, tile)``, for all threads of all consumers.

    It makes zeros of the rows of a tile of values for which no row has a probability in ``s``: zero times
    what is not finite would be NaN.  ``left`` is how many rows there are from the lane's first one on: one
    beyond the end may see what no other does.  ``bytes_`` is shared memory as bytes, of which block_k, from
    ``seen`` on, are its own; ``thread`` is the number among the consumers' threads.

    Args:
        consumers: Warpgroups that multiply.
        block_k: Rows of the tile.
        panels: Of the tile.
    """
    threads, tiles, chunks = WARPGROUP * consumers, block_k // 8, LINE // 16

    @device_function
    def clear_unseen(thread, lane, s, left, bytes_, seen, tile):
        for n in range(thread, block_k, threads):
            bytes_[seen + n] = 0
        bar_sync(EVERYONE, threads)  # nothing has been seen yet
        for t in range(tiles):
            for i in range(4):
                if s[t, i] != 0 and 8 * (i // 2) < left:
                    bytes_[seen + 8 * t + 2 * (lane % 4) + i % 2] = 1
        bar_sync(EVERYONE, threads)  # everybody has said what it sees
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        for n in range(thread, panels * block_k * chunks, threads):
            if bytes_[seen + n // chunks % block_k] == 0:  # a row of a panel is a line: any order
                st_shared_v4(tile + n * 16, zeros)
        fence_proxy_async()  # products see the zeros
        bar_sync(EVERYONE, threads)  # what nobody sees is zeros

    return clear_unseen
