"""The options of one score and one probability, compiled for every CUDA rung.

``kernels.scores.program`` defines each option.  This module adds how CUDA kernels read the array of an
option, and dropout.  A kernel is compiled for the options that a call has, and absent options cost
nothing.  The arrays and numbers of options reach a kernel as its last argument, one :class:`Extras`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.options.cached_rows import (  # beyond module 5
    cached_rows_type,
    make_cached_masks,
)
from kernels.cuda.attention.options.mods import (  # beyond module 5
    mask_function,
    numbers_type,
    score_function,
)
from kernels.cuda.device.one_source import NEAR_SOFTMAX, PHILOX, SOFTMAX
from kernels.cuda.runtime.kernel import array_type, device_function, scalar_type
from kernels.problem.options import AXES
from kernels.runtime.dtypes import BITS
from kernels.runtime.types import int64, types, uint32, uint64
from kernels.scores.program import (
    Features,
    Place,
    ScoreProgram,
    ScoreTarget,
    make_score_program,
)
from kernels.scores.program import make_row_end as make_row_end_for
from kernels.scores.visibility import make_masks
from kernels.sparsity.block_mask import FULL, PARTIAL

keep = PHILOX.keep
distance_of = make_masks(device_function).distance


class Extras(NamedTuple):
    """The kernel arguments for the options of a call; 0 replaces an array that the call does not have.

    Attributes:
        lower: Columns before row + lower are masked.
        upper: Columns after row + upper are masked.
        heads: Query heads of the call.  The flat index of (batch, head) in a kernel is
            b · heads of the kernel + h; the head of the call is its remainder modulo this.
        diagonal: Shift of ALiBi's diagonal.
        softcap: The bound of softcap; 0 without one.
        over_cap: 1 / softcap; 0 without a softcap.
        seed: Seed of dropout.
        threshold: The threshold of dropout, see ``philox.keep``.
        keep_scale: Factor of the kept probabilities, see ``philox.keep_scale``.
        slopes: (batch, heads, 1, 1).
        sink: (batch, heads, 1, 1).
        mask: (own batches, heads, seq_q, seq_k).
        mask_batch: (batch,) int64.
        states: (1, heads, or batches · heads; query blocks, key blocks) int32, see ``BlockMask``.
        patterns: (count, block_q, block_k) bool.
        tile_ptr: See ``TileList``; for the kernel's own tiles and direction.
        tile_ids: See ``TileList``.
        tile_full: See ``TileList``.
        tile_patterns: (entries,) int32: for each entry 0, or 1 + the index of the tile's words; takes the
            place of ``patterns`` and ``tile_full`` in kernels that read words.
        pattern_words: Words of the tiles that differ, uint32.
        origin: (4,) int64, a ``problem.question.DropoutOrigin``: where the dropout bits of the call begin.
        table: The array that ``score_mod`` reads.
        table_tops: See ``table_gradient.TableSums``, as the next two.
        table_sums: (copies, elements, words) int64.
        table_unit: A number.
        tiles: (tiles, 6) int64: where the kernel's tiles of packed sequences are, ``sequences.Tile``; for a
            call on a cache a ``CachedRows``.
        mask_numbers: The numbers that ``mask_mod`` captures.
        score_numbers: The numbers that ``score_mod`` captures.
    """

    lower: Any
    upper: Any
    heads: Any
    diagonal: Any
    softcap: Any
    over_cap: Any
    seed: Any
    threshold: Any
    keep_scale: Any
    slopes: Any = 0
    sink: Any = 0
    mask: Any = 0
    mask_batch: Any = 0
    states: Any = 0
    patterns: Any = 0
    tile_ptr: Any = 0
    tile_ids: Any = 0
    tile_full: Any = 0
    tile_patterns: Any = 0
    pattern_words: Any = 0
    origin: Any = 0
    table: Any = 0
    table_tops: Any = 0
    table_sums: Any = 0
    table_unit: Any = 0
    tiles: Any = 0
    mask_numbers: Any = ()
    score_numbers: Any = ()


@cache
def extras_type(features: Features, dtype: np.dtype[Any], by_words: bool = False) -> Any:
    """Return numba's type of :class:`Extras` for a kernel with sums of ``dtype``.

    ``by_words`` tells whether it reads the partial tiles of a block mask as words.
    """
    real, listed = scalar_type(dtype), features.block_mask
    by_elements, by_words = listed and not by_words, listed and by_words
    mask = array_type({"bool": np.dtype(bool), "float": dtype}.get(features.mask, BITS), 4)
    ints, flags = types.Array(types.int32, 1, "A"), types.Array(types.boolean, 1, "A")
    numbers = int64, int64, int64, int64, real, real, int64, int64, real
    tiles: Any = types.Array(int64, 2, "A")
    if features.cache is not None:  # beyond module 5
        tiles = cached_rows_type(features.is_paged)
    arrays = (
        (features.slopes, array_type(dtype, 4)),
        (features.sink, array_type(dtype, 4)),
        (features.mask, mask),
        (features.mask, types.Array(int64, 1, "A")),
        (listed, types.Array(types.int32, 3, "A")),
        (by_elements, types.Array(types.boolean, 3, "A")),
        (listed, ints),
        (listed, ints),
        (by_elements, flags),
        (by_words, ints),
        (by_words, types.Array(uint32, 1, "C")),
        (features.moved, types.Array(int64, 1, "A")),
        (features.score_table, table_type(features, dtype)),
        (features.learns_table, array_type(dtype, 1)),
        (features.learns_table, types.Array(int64, 3, "A")),
        (features.learns_table, real),
        (features.packed or features.cache, tiles),
    )
    of_mods = types.Tuple(()), types.Tuple(())
    of_mods = of_functions(features, dtype)  # beyond module 5
    found = [kind if has else int64 for has, kind in arrays]
    return types.NamedTuple([*numbers, *found, *of_mods], Extras)


def table_type(features: Features, dtype: np.dtype[Any]) -> Any:
    """Return numba's type of the array that ``score_mod`` reads; that of None without one."""
    return array_type(dtype, features.score_table) if features.score_table else types.none


def of_functions(features: Features, dtype: np.dtype[Any]) -> tuple[Any, Any]:  # beyond module 5
    """Return numba's types of the numbers of ``mask_mod`` and ``score_mod``."""
    score = features.score_mod
    mods = features.mask_mod, score.function if score else None
    return numbers_type(mods[0], dtype), numbers_type(mods[1], dtype)


class ScoreFunctions(NamedTuple):
    """The functions of a kernel for the options of a score; ``make_score_functions`` returns them.

    A place is a record with the fields of ``kernels.scores.program.Place``, or more.

    Attributes:
        score_of: ``(score, place, extras)``: the score after all options, from scale · q · k; natural
            logarithms as in the paper, and minus infinity where it is masked.
        score_and_slope: The score and its derivative by scale · q · k, which is zero where it is masked.
        kept: ``(place, extras)``: the factor of dropout for a probability.
        program: The score program.
    """

    score_of: Callable[..., Any]
    score_and_slope: Callable[..., Any]
    kept: Callable[..., Any]
    program: ScoreProgram


@cache
def make_first_bit(moved: bool) -> Callable[..., tuple[Any, Any, Any]]:
    """Return ``first_bit(place, extras)``: batch_head, row and column of a place in the dropout mask.

    If ``moved``, the call is a part of a larger attention, and the extras have its ``DropoutOrigin``.
    """

    @device_function
    def first_bit(place, extras):
        if not moved:
            return place.batch * extras.heads + place.head, place.row, place.col
        heads, head, row, col = (
            extras.origin[0],
            extras.origin[1],
            extras.origin[2],
            extras.origin[3],
        )
        return place.batch * heads + place.head + head, place.row + row, place.col + col

    return first_bit


@cache
def make_score_functions(
    features: Features, dtype: np.dtype[Any], order: int = 1
) -> ScoreFunctions:
    """Return the device functions for a kernel's features; those of absent options do nothing.

    ``order`` is the highest derivative of a score that the program computes.
    """
    one, zero, minus_inf = dtype.type(1), dtype.type(0), dtype.type(-math.inf)
    target = cuda_target(dtype, order, table_type(features, dtype))
    if features.cache is not None:  # beyond module 5
        target = target._replace(**make_cached_masks(mask_at))
    program = make_score_program(features, target)
    (modified, _, is_visible), drops = program, features.dropout
    first_bit = make_first_bit(features.moved)

    @device_function
    def score_and_slope(score, place, extras):
        score, slope, _ = modified(score, place, extras)
        score = score if is_visible(place, extras) else minus_inf
        # The derivative of a user's function may be infinite where its score is masked.
        return score, (zero if score == minus_inf else slope)

    @device_function
    def score_of(score, place, extras):
        score, _ = score_and_slope(score, place, extras)
        return score

    @device_function
    def kept(place, extras):
        if not drops:
            return one
        flat, row, col = first_bit(place, extras)
        # TASK 5.6: keep(…) decides; what is kept counts keep_scale, which extras has.
        is_kept = keep(extras.seed, flat, row, col, extras.threshold)
        return extras.keep_scale if is_kept else zero
        # END TASK 5.6

    return ScoreFunctions(score_of, score_and_slope, kept, program)


@cache
def make_row_end(
    features: Features, dtype: np.dtype[Any], near: bool = False
) -> Callable[..., Any]:
    """Return ``end_row(row_sum, shift, b, h, extras)``: a row's 1 / l, which multiplies O, and L.

    If ``near``, both may be off by a unit in the last place.
    """
    softmax = NEAR_SOFTMAX if near else SOFTMAX
    return make_row_end_for(features, device_function, softmax, scalar_type(dtype), _sink)


@cache
def cuda_target(dtype: np.dtype[Any], order: int = 1, table: Any = types.none) -> ScoreTarget:
    """Return the target of CUDA kernels: a place is one element, and a call its :class:`Extras`.

    ``table`` is the :func:`table_type` of the call.
    """
    real, has_table = scalar_type(dtype), table != types.none

    @device_function
    def tanh(score):
        return real(math.tanh(score))

    def function_of_score(function: Callable[..., Any]) -> Any:  # beyond module 5
        device_mod = score_function(function, dtype, table)

        @device_function
        def by_function(score, place, extras):
            last = extras.table if has_table else None
            numbers = extras.score_numbers
            return device_mod(numbers, score, place.batch, place.head, place.row, place.col, last)

        return by_function

    def function_of_place(function: Callable[..., Any]) -> Any:  # beyond module 5
        device_mod = mask_function(function, dtype)

        @device_function
        def in_mod(place, extras):
            numbers = extras.mask_numbers
            return bool(device_mod(numbers, place.batch, place.head, place.row, place.col))

        return in_mod

    @device_function
    def distance(place, extras):
        return real(distance_of(place.row, place.col, extras.diagonal))

    return ScoreTarget(
        compile=device_function,
        one=dtype.type(1),
        tanh=tanh,
        score_function=function_of_score,  # beyond module 5
        mask_function=function_of_place,  # beyond module 5
        element=element_of,
        distance=distance,
        bias=_bias,
        in_mask=_in_mask,
        in_blocks=_in_blocks,
        order=order,
    )


@device_function
def place_of(place, row, col):
    """Return the place of the element (row, col) of the same batch and head."""
    return Place(place.b, place.h, place.batch, place.head, row, col)


@device_function
def mask_at(place, extras):
    """Return the element of a mask at a place: a record with ``b``, ``h``, ``row`` and ``col``."""
    # Unsigned: a signed index may be negative, to count from the end, and each would be tested.
    batch = uint64(extras.mask_batch[uint64(place.b)])
    return extras.mask[batch, uint64(place.h), uint64(place.row), uint64(place.col)]


@device_function
def block_at(place, extras):
    """Return the state of the block that an element is in, and the element's row and column there.

    The place of the element is a record with ``batch``, ``head``, ``row`` and ``col``.
    """
    # A division of 64 bits takes several times as long as one of 32.
    rows, cols = uint32(extras.patterns.shape[1]), uint32(extras.patterns.shape[2])
    row, col = uint32(place.row), uint32(place.col)
    flat = uint32(place.batch) * uint32(extras.heads) + uint32(place.head)
    line = uint32(flat) % uint32(extras.states.shape[0])
    state = extras.states[uint64(line), uint64(row // rows), uint64(col // cols)]
    return state, row % rows, col % cols


@cache
def element_of(name: str) -> Any:
    """Return ``element(place, extras)``, which reads the array of an option in ``options.AXES``."""
    index, by_row, by_col = Extras._fields.index(name), "q" in AXES[name], "k" in AXES[name]

    @device_function
    def element(place, extras):
        array = extras[index]  # (batch, heads, seq_q or 1, seq_k or 1)
        return array[place.b, place.h, place.row if by_row else 0, place.col if by_col else 0]

    return element


@device_function
def _sink(b, h, extras):
    return extras.sink[b, h, 0, 0]


@device_function
def _bias(place, extras):
    # TASK 5.6: The element of a floating mask, mask_at(…).
    return mask_at(place, extras)
    # END TASK 5.6


@device_function
def _in_mask(place, extras):
    # TASK 5.6: The element of a boolean mask, mask_at(…).
    return bool(mask_at(place, extras))
    # END TASK 5.6


@device_function
def _in_blocks(place, extras):
    state, r, c = block_at(place, extras)
    if state < PARTIAL:
        return state == FULL
    return bool(extras.patterns[uint64(state - PARTIAL), uint64(r), uint64(c)])
