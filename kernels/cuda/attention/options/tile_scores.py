"""Apply the options to the scores, probabilities and gradients of one tile of flash2.

A tile is whole if bounds and lists mask none of its elements; only then are their tests left out.

P = 2^((S - top) · unit - shift), in this order: where S is large, log2 e times it could overflow, and has
lost what S - top still has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.options.score_functions import make_score_functions, place_of
from kernels.cuda.attention.options.table_gradient import make_add_reads  # beyond module 5
from kernels.cuda.device.vector import EXP2, MINUS
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import int32
from kernels.scores.program import PLAIN, Features


class TilePlace(NamedTuple):
    """The first element of a tile or of a thread's part of a tile, and the ends of the sequences.

    Attributes:
        b, h, batch, head, row, col: See ``kernels.scores.program.Place``.
        seq_q: Query rows of the sequence.
        seq_k: Key columns of the sequence.
    """

    b: Any
    h: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    seq_q: Any
    seq_k: Any


@device_function
def moved_to(place, row, col):
    """Return a ``TilePlace`` of the same tile that begins at (row, col)."""
    return TilePlace(place.b, place.h, place.batch, place.head, row, col, place.seq_q, place.seq_k)


@device_function
def moved(place, rows, cols):
    """Return a ``TilePlace`` moved by rows and columns."""
    return moved_to(place, place.row + rows, place.col + cols)


class TileElement(NamedTuple):
    """The position of one score relative to the first score of a thread.

    Attributes:
        r: Rows from the thread's first element, a compile-time constant.
        c: Columns from it, also a compile-time constant, so that the bounds are two comparisons with
            constants.
        whole: Whether bounds and lists mask nothing in the tile.
        listed: Whether the element is visible in the lists.
        edge: :func:`edge_from` of the thread's first element.
        place: The :class:`TilePlace` of the thread's first element.
    """

    r: Any
    c: Any
    whole: Any
    listed: Any
    edge: Any
    place: Any


class RowTerms(NamedTuple):
    """The numbers of a row with which P and dS are computed from the scores.

    Attributes:
        unit: log2 e, or without options also times a factor of the product.
        top: L of the row is this, and ``shift``.
        shift: In base 2.
        delta: D of the row.
        ds_unit: The unit of dS.
    """

    unit: Any
    top: Any
    shift: Any
    delta: Any
    ds_unit: Any


class TileScores(NamedTuple):
    """Functions that compute scores and gradients of a tile; ``make_tile_scores`` returns them.

    Rows beyond the end need a comparison only if keys sum over rows.

    Attributes:
        score: ``(product, element, extras)``: the score after all options, minus infinity where masked.
        gradient: ``(product, dp, row, kept, element, extras)``: P before dropout, and dS, the gradient of
            scale · q · k, from a :class:`RowTerms` and the factor of dropout.
        derived: ``(product, element, extras)``: the score, and its first and second derivative by the
            product, which are 0 where it is masked.
    """

    score: Callable[..., Any]
    gradient: Callable[..., Any]
    derived: Callable[..., Any]


@device_function
def edge_from(row, col, seq_q, seq_k, extras):
    """Return the limits of a thread's elements in one tile, whose first one is at (row, col).

    They are the least and the greatest c - r within the bounds, and the remaining columns and rows.
    """
    return (
        int32(row + extras.lower - col),
        int32(row + extras.upper - col),
        int32(seq_k - col),
        int32(seq_q - row),
    )


@device_function
def edge_of(place, extras):
    """Return :func:`edge_from` for a thread's first element, a ``TilePlace``."""
    return edge_from(place.row, place.col, place.seq_q, place.seq_k, extras)


@device_function
def is_inside_columns(edge, r, c):
    """Tell whether the element (r, c) from a thread's first one is within the bounds and the columns.

    ``edge`` is the result of :func:`edge_from` for the first one; r and c are compile-time constants.
    """
    return (edge[0] <= c - r) & (c - r <= edge[1]) & (c < edge[2])


@device_function
def is_inside(edge, r, c):
    """Tell whether an element is also within the rows; see :func:`is_inside_columns`."""
    return is_inside_columns(edge, r, c) & (r < edge[3])


@cache
def make_tile_scores(
    features: Features,
    dtype: np.dtype[Any],
    of_bias: bool = False,
    by_keys: bool = False,
    exp2: Any = None,
    order: int = 1,
) -> TileScores:
    """Return the functions of elements for a kernel's options.

    Args:
        features: Options of the kernel.
        dtype: Dtype of its scores.
        of_bias: Whether the gradient is that of a floating mask, not of scale · q · k.
        by_keys: Whether keys sum over rows.  A row beyond the end must then not contribute, whatever a user
            function returns for its score.
        exp2: The function 2**x in the dtype; the one of ``device.vector`` when None.
        order: The highest derivative that ``derived`` computes.
    """
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    exp2, minus = exp2 or EXP2[dtype], MINUS[dtype]
    is_in_bounds = is_inside if by_keys else is_inside_columns
    has_lists = features.has_lists  # they are in the bits of a tile, ``listed``

    @device_function
    def is_seen(e):
        return e.whole or is_in_bounds(e.edge, e.r, e.c) & (e.listed or not has_lists)

    @device_function
    def bounded_score(product, element, extras):
        return product if is_seen(element) else minus_inf

    @device_function
    def bounded_gradient(product, dp, row, kept, element, extras):
        # Masked elements are 0 whatever lse and delta are: those of a row with a NaN are NaN.  The unit
        # may be negative, and -inf is no score then.
        seen = is_seen(element)
        p = exp2((product - row.top) * row.unit - row.shift) if seen else zero
        return p, (p * (dp - row.delta) if seen else zero)

    @device_function
    def bounded(product, element, extras):
        score = bounded_score(product, element, extras)
        return score, (zero if score == minus_inf else one), zero

    if features.of_elements == PLAIN:
        return TileScores(bounded_score, bounded_gradient, bounded)
    has_mod = features.score_mod is not None
    of_scores = features._replace(block_mask=False, mask_mod=None)
    modified, is_shown, _ = make_score_functions(of_scores, dtype, order).program
    # The masks of calls on a cache are counted from the ends of the sequences.
    element_of = place_of if features.cache is None else moved_to

    learns = features.learns_table and not of_bias
    add_reads: Any = None
    if learns:  # beyond module 5
        add_reads = make_add_reads(of_scores, dtype, by_keys)

    @device_function
    def place_in_arrays(element):
        r, c, place = element.r, element.c, element.place
        # Within the arrays, so that loads need no branch and many are under way at a time.
        row, col = min(place.row + r, place.seq_q - 1), min(place.col + c, place.seq_k - 1)
        return element_of(place, row, col)

    @device_function
    def all_derived(product, element, extras):
        r, c, whole, listed, edge, _ = element
        at = place_in_arrays(element)
        score, slope, bend = modified(product, at, extras)
        seen = is_shown(at, extras) & (listed or not has_lists)
        if not whole:
            seen = seen & is_in_bounds(edge, r, c)
        return (score if seen else minus_inf), slope, bend

    @device_function
    def score_of(product, element, extras):
        score, _, _ = all_derived(product, element, extras)
        return score

    @device_function
    def derived(product, element, extras):
        score, slope, bend = all_derived(product, element, extras)
        # A derivative of a user's function may be infinite where its score is masked.
        is_score = score != minus_inf
        return score, (slope if is_score else zero), (bend if is_score else zero)

    @device_function
    def gradient_of(product, dp, row, kept, element, extras):
        score, slope, _ = all_derived(product, element, extras)
        p = exp2(minus(score, row.top) * row.unit - row.shift)
        ds = p * (dp * kept - row.delta)
        if learns:
            # Rows and columns beyond the ends are no elements, even of a whole tile.
            seen = (element.r < element.edge[3]) & (element.c < element.edge[2])
            own = ds * row.ds_unit if seen and score != minus_inf else zero
            add_reads(product, own, place_in_arrays(element), extras)
        if not of_bias:
            ds = ds * slope
        if has_mod:  # its derivative may be infinite where its score is masked
            ds = zero if score == minus_inf else ds
        return p, ds

    return TileScores(score_of, gradient_of, derived)
