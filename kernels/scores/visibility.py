"""Causal and window bounds: which key columns are visible to a query row, for every compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..common.geometry import same


class Masks(NamedTuple):
    """Functions of a position: its visibility and its distance for ALiBi; ``make_masks`` returns them."""

    is_visible: Callable[[Any, Any, Any, Any], Any]
    distance: Callable[[Any, Any, Any], Any]


def make_masks(compile_: Callable[[Any], Any]) -> Masks:
    """Return the functions that test elements for visibility, for one compiler (see ``geometry``)."""

    @compile_
    def is_visible(row, col, lower, upper):
        """Tell whether a column is within row + lower and row + upper, both inclusive.

        A causal mask is an upper bound, and a window has both.  A missing bound lies beyond the first or
        the last column.
        """
        # Not "and": rows and columns may be arrays that broadcast.
        return (row + lower <= col) & (col <= row + upper)

    @compile_
    def distance(row, col, diagonal):
        """Return ALiBi's distance between a row and a column."""
        return abs(row + diagonal - col)

    return Masks(is_visible, distance)


#: For plain Python; rows and columns may be arrays that broadcast.
is_visible, distance = make_masks(same)
