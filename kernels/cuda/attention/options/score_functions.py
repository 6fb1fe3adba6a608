"""What the options of a call make of one score, one probability, one visit: for every CUDA rung.

A kernel is compiled for the options that a call has (:class:`Features`); the functions of an option that
it has not are empty and cost nothing.  What the options need, arrays and numbers, reaches a kernel as its
last argument, one :class:`Extras`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import int64, types, uint32, uint64

from kernels.cuda.attention.options.mods import mask_function, numbers_of_mods, score_function
from kernels.cuda.device.one_source import PHILOX, is_visible
from kernels.cuda.runtime.kernel import array_type, device_function, scalar_type
from kernels.problem.question import Problem
from kernels.runtime.dtypes import BITS
from kernels.sparsity.block_mask import FULL, PARTIAL

keep = PHILOX.keep


class Features(NamedTuple):
    """What a kernel is compiled for beyond q, k and v.

    Attributes:
        softcap: Scores are capped.
        slopes: ALiBi's.
        mask: "bool", "float", "float16" or "bfloat16" where a rung reads a floating mask as it is, or "".
        dropout: Probabilities are dropped.
        block_mask: Tiles are listed.
        packed: Sequences are packed.
        mask_mod: The user's function, or None.
        score_mod: The user's function, or None.
        derivative: Of score_mod, or None.
        whole_tiles: The block mask hides nothing of a tile that is listed: a kernel is told so.
    """

    softcap: bool = False
    slopes: bool = False
    mask: str = ""
    dropout: bool = False
    block_mask: bool = False
    packed: bool = False
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    derivative: Callable[..., Any] | None = None
    whole_tiles: bool = False

    @property
    def bends(self) -> bool:
        """Whether a score that is seen is another number than scale · q · k."""
        return bool(self.softcap or self.slopes or self.has_bias or self.score_mod)

    @property
    def has_bias(self) -> bool:
        """Whether a mask is added to scores."""
        return self.mask not in ("", "bool")

    @property
    def of_elements(self) -> Features:
        """The options that make anything of the elements of a whole tile: all but which tiles there are."""
        return self._replace(block_mask=False, whole_tiles=False, packed=False)


PLAIN = Features()


def features_of(problem: Problem) -> Features:
    """Return what a kernel for a problem must have."""
    score_mod, derivative = problem.score_mod or (None, None)
    return Features(
        softcap=problem.softcap > 0.0,
        slopes=problem.slopes,
        mask=problem.mask,
        dropout=problem.dropout_p > 0.0,
        block_mask=problem.block_mask is not None,
        packed=problem.sequences is not None,
        mask_mod=problem.mask_mod,
        score_mod=score_mod,
        derivative=derivative,
    )


class Extras(NamedTuple):
    """What the options of a call need in a kernel; a number 0 stands for an array that is not there.

    Attributes:
        lower: Row ``row`` sees no column before row + lower.
        upper: Nor after row + upper.
        heads: Query heads of the call: a kernel's (batch, head) has the flat number b · heads of the
            kernel + h, and the call's head is its remainder.
        diagonal: Of ALiBi.
        softcap: The cap.
        seed: Of dropout.
        threshold: Of dropout, see ``philox.keep``.
        keep_scale: What it multiplies by what it keeps, see ``philox.keep_scale``.
        slopes: (batch, heads, 1, 1).
        mask: (own batches, heads, seq_q, seq_k).
        mask_batch: (batch,) int64.
        states: (1 or heads, query blocks, key blocks) int32, see ``BlockMask``.
        patterns: (count, block_q, block_k) bool.
        tile_ptr: See ``TileList``; for the kernel's own tiles and direction.
        tile_ids: Likewise.
        tile_full: Likewise.
        tiles: (tiles, 6) int64: where the kernel's tiles of packed sequences are, ``sequences.Tile``.
    """

    lower: Any
    upper: Any
    heads: Any
    diagonal: Any
    softcap: Any
    seed: Any
    threshold: Any
    keep_scale: Any
    slopes: Any = 0
    mask: Any = 0
    mask_batch: Any = 0
    states: Any = 0
    patterns: Any = 0
    tile_ptr: Any = 0
    tile_ids: Any = 0
    tile_full: Any = 0
    tiles: Any = 0


@cache
def extras_type(features: Features, dtype: np.dtype[Any]) -> Any:
    """Return numba's type of :class:`Extras` for a kernel."""
    real, none = scalar_type(dtype), int64

    def where(has: Any, kind: Any) -> Any:
        return kind if has else none

    mask = array_type({"bool": np.dtype(bool), "float": dtype}.get(features.mask, BITS), 4)
    ints, flags = types.Array(types.int32, 1, "A"), types.Array(types.boolean, 1, "A")
    listed = features.block_mask
    kinds = Extras(
        int64, int64, int64, int64, real, int64, int64, real,
        where(features.slopes, array_type(dtype, 4)),
        where(features.mask, mask),
        where(features.mask, types.Array(int64, 1, "A")),
        where(listed, types.Array(types.int32, 3, "A")),
        where(listed, types.Array(types.boolean, 3, "A")),
        where(listed, ints),
        where(listed, ints),
        where(listed, flags),
        where(features.packed, types.Array(int64, 2, "A")),
    )  # fmt: skip
    return types.NamedTuple(kinds, Extras)


class ScoreFunctions(NamedTuple):
    """The functions that :func:`make_score_functions` returns.

    Attributes:
        score_of: ``(score, flat, b, h, row, col, extras)``: what becomes of scale · q · k, natural
            logarithms as in the paper; minus infinity where the row does not see the column.
        score_and_slope: The same arguments; also its derivative by scale · q · k, zero where the score is
            minus infinity.
        kept: ``(flat, row, col, extras)``: what dropout multiplies a probability by.
        bend: ``(score, flat, row, col, extras)``: softcap and score_mod, and their derivative.
        add: ``(score, b, h, row, col, extras)``: what ALiBi and a floating mask make of a score.
        in_mask: ``(flat, b, h, row, col, extras)``: whether a boolean mask lets the row see the column.
        in_mod: Likewise ``mask_mod``.
    """

    score_of: Callable[..., Any]
    score_and_slope: Callable[..., Any]
    kept: Callable[..., Any]
    bend: Callable[..., Any]
    add: Callable[..., Any]
    in_mask: Callable[..., Any]
    in_mod: Callable[..., Any]


@cache
def make_score_functions(features: Features, dtype: np.dtype[Any]) -> ScoreFunctions:
    """Return the device functions for a kernel's features; those of absent options do nothing.

    ``flat`` is the number of (batch, head), b · heads of the kernel + h; with packed sequences the
    sequence takes the place of the batch in it, and row and column count from its start.
    """
    one, zero = dtype.type(1), dtype.type(0)
    minus_inf = dtype.type(-math.inf)
    bend, add = _make_bend(features, dtype), _make_add(features, dtype)
    in_mask = _in_mask if features.mask == "bool" else _always
    in_mod, in_blocks = _make_in_mod(features, dtype), _make_in_blocks(features)

    @device_function
    def is_seen(flat, b, h, row, col, extras):
        if not is_visible(row, col, extras.lower, extras.upper):
            return False
        if not in_blocks(flat, b, h, row, col, extras):
            return False
        if not in_mask(flat, b, h, row, col, extras):
            return False
        return in_mod(flat, b, h, row, col, extras)

    @device_function
    def score_and_slope(score, flat, b, h, row, col, extras):
        score, slope = bend(score, flat, row, col, extras)
        score = add(score, b, h, row, col, extras)
        score = score if is_seen(flat, b, h, row, col, extras) else minus_inf
        # The derivative of a user's function may be infinite where its score is hidden.
        return score, (zero if score == minus_inf else slope)

    @device_function
    def score_of(score, flat, b, h, row, col, extras):
        score, _ = score_and_slope(score, flat, b, h, row, col, extras)
        return score

    @device_function
    def all_kept(flat, row, col, extras):
        return one

    @device_function
    def kept(flat, row, col, extras):
        # TASK 5.6: keep(…) decides; what is kept counts keep_scale, which extras has.
        return extras.keep_scale if keep(extras.seed, flat, row, col, extras.threshold) else zero
        # END TASK 5.6

    own_kept = kept if features.dropout else all_kept
    return ScoreFunctions(score_of, score_and_slope, own_kept, bend, add, in_mask, in_mod)


def _make_bend(features: Features, dtype: np.dtype[Any]) -> Any:
    """Return softcap and score_mod, with their derivative: ``(score, flat, row, col, extras)``."""
    one, real = dtype.type(1), scalar_type(dtype)

    @device_function
    def no_cap(score, extras):
        return score, one

    @device_function
    def cap(score, extras):
        bent = real(math.tanh(score / extras.softcap))
        return extras.softcap * bent, one - bent * bent

    cap_score = cap if features.softcap else no_cap
    if features.score_mod is None:

        @device_function
        def bend(score, flat, row, col, extras):
            return cap_score(score, extras)

        return bend

    function = score_function(features.score_mod, dtype)
    derivative = score_function(features.derivative or _no_derivative, dtype)

    @device_function
    def bend_by_mod(score, flat, row, col, extras):
        score, slope = cap_score(score, extras)
        batch, head = numbers_of_mods(flat, extras)
        slope = real(slope * derivative(score, batch, head, row, col, None))
        return real(function(score, batch, head, row, col, None)), slope

    return bend_by_mod


def _no_derivative(score, batch, head, row, col):
    return 1.0


def _make_add(features: Features, dtype: np.dtype[Any]) -> Any:
    """Return what ALiBi and a floating mask add: ``(score, b, h, row, col, extras)``."""
    real = scalar_type(dtype)

    @device_function
    def no_bias(score, b, h, row, col, extras):
        return score

    @device_function
    def alibi(score, b, h, row, col, extras):
        distance = abs(row + extras.diagonal - col)
        return score - extras.slopes[b, h, 0, 0] * real(distance)

    @device_function
    def mask_bias(score, b, h, row, col, extras):
        # TASK 5.6: Add the element of the mask, mask_at(…).
        return score + mask_at(b, h, row, col, extras)
        # END TASK 5.6

    subtract = alibi if features.slopes else no_bias
    add_mask = mask_bias if features.mask == "float" else no_bias

    @device_function
    def add(score, b, h, row, col, extras):
        return add_mask(subtract(score, b, h, row, col, extras), b, h, row, col, extras)

    return add


@device_function
def mask_at(b, h, row, col, extras):
    """Return an element of a mask.

    Places are unsigned: a signed one may be negative, to count from the end, and each would be tested.
    """
    return extras.mask[uint64(extras.mask_batch[uint64(b)]), uint64(h), uint64(row), uint64(col)]


@device_function
def _always(flat, b, h, row, col, extras):
    return True


@device_function
def _in_mask(flat, b, h, row, col, extras):
    # TASK 5.6: The element of a boolean mask, mask_at(…).
    return bool(mask_at(b, h, row, col, extras))
    # END TASK 5.6


def _make_in_mod(features: Features, dtype: np.dtype[Any]) -> Any:
    """Return whether mask_mod lets a row see a column."""
    if features.mask_mod is None:
        return _always
    mask_mod = mask_function(features.mask_mod, dtype)

    @device_function
    def in_mod(flat, b, h, row, col, extras):
        batch, head = numbers_of_mods(flat, extras)
        return bool(mask_mod(batch, head, row, col))

    return in_mod


@device_function
def block_at(flat, row, col, extras):
    """Return the state of the block that an element is in, and its place there."""
    # A division of 64 bits takes several times as long as one of 32.
    rows, cols = uint32(extras.patterns.shape[1]), uint32(extras.patterns.shape[2])
    line = flat % extras.heads % extras.states.shape[0]
    i, j = uint32(row) // rows, uint32(col) // cols
    state = extras.states[uint64(line), uint64(i), uint64(j)]
    return state, uint32(row) % rows, uint32(col) % cols


def _make_in_blocks(features: Features) -> Any:
    """Return whether the block mask lets a row see a column."""

    @device_function
    def in_blocks(flat, b, h, row, col, extras):
        state, r, c = block_at(flat, row, col, extras)
        if state < PARTIAL:
            return state == FULL
        return bool(extras.patterns[uint64(state - PARTIAL), uint64(r), uint64(c)])

    return in_blocks if features.block_mask else _always
