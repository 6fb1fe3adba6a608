"""Apply options to a tile of scores in the registers of Hopper's forward kernel.

A lane's elements are (t, i), as in ``dropout_bits``.  A tile without masked elements is whole.  Whole and
partial tiles have separate functions, so that the frequent whole ones test nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32

from kernels.cuda.attention.flash3_wgmma.dropout_bits import offset_of
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    distance_of,
    edge_at,
    element_of,
    scaled_by,
    score_target,
)
from kernels.cuda.attention.options.tile_scores import is_inside_columns
from kernels.cuda.device.branchless import tanh
from kernels.cuda.device.emitted import unrolled
from kernels.cuda.runtime.kernel import device_function
from kernels.scores.program import PLAIN, Features, make_score_program


@cache
def make_apply_options(features: Features, cols: int) -> Callable[..., None]:
    """Return ``apply_options(whole, s, seen, place, scale, extras)`` for tiles of ``cols`` columns.

    It replaces the products in ``s`` by scores, minus infinity where masked.  If options modify scores,
    these are natural logarithms; otherwise they are still products, whose order a positive scale does not
    change.  ``place`` is a ``score_terms.LanePlace``.  ``seen`` holds the lane's bits of a boolean mask
    and, for partial tiles, of a block mask, and behind them the words of a 16-bit floating mask.
    """
    of_all = features._replace(dropout=False).of_elements != PLAIN
    apply_whole, apply_edge = (_make_apply(features, cols, is_edge) for is_edge in (False, True))

    @device_function
    def apply_options(whole, s, seen, place, scale, extras):
        if not whole:
            apply_edge(s, seen, place, scale, extras)
        elif of_all:
            apply_whole(s, seen, place, scale, extras)

    return apply_options


def _make_apply(features: Features, cols: int, is_edge: bool) -> Callable[..., None]:
    """Return ``apply(s, seen, place, scale, extras)`` for whole or for partial tiles."""
    minus_inf, modifies_scores = np.float32(-math.inf), features.modifies_scores
    has_blocks = is_edge and features.has_patterns
    # The words of a block mask hide what is out of bounds, too.
    has_bounds = is_edge and not has_blocks
    target = score_target(features, cols, tanh, derives=False)
    modified, is_shown, _ = make_score_program(features._replace(block_mask=has_blocks), target)
    element, offset = element_of(features, has_columns=not is_edge), offset_of(False)
    distance_from, has_softcap = distance_of(features), features.softcap
    scaled = scaled_by(features)

    def apply_to(s, seen, t, given):
        place, distance, edge, factor, extras = given
        for i in range(4):
            at, x = element(place, distance, seen, t, i), s[t, i]
            if modifies_scores:
                x, _ = modified(scaled(x, factor), at, extras)
            x = x if is_shown(at, extras) else minus_inf
            if has_bounds:
                r, c = offset(t, i)
                x = x if is_inside_columns(edge, r, c) else minus_inf
            s[t, i] = x

    apply_to_all = unrolled(cols // 8, apply_to)

    @device_function
    def apply(s, seen, place, scale, extras):
        factor = float32(scale)
        if has_softcap:
            factor = factor / extras.softcap
        distance, edge = distance_from(place, extras), edge_at(place, extras)
        apply_to_all(s, seen, (place, distance, edge, factor, extras))

    return apply
