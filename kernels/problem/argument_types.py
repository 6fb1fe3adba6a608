"""Checks of the types of arrays and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.common.arguments import shown

#: Maximum rows or columns of a tile; the scores of a larger one do not fit into fast memory.
MAX_TILE = 4096


def check_tile(tile: Any) -> tuple[int, int] | None:
    """Return the requested tile as two ints, or None if it is None.

    Anything but a pair of whole numbers raises a TypeError, and a side that is not from 1 to
    ``MAX_TILE`` a ValueError.
    """
    if tile is None:
        return None
    sides = tuple(tile) if isinstance(tile, Sequence) and not isinstance(tile, str) else ()
    if not (len(sides) == 2 and all(map(is_whole, sides))):
        raise TypeError(
            f"tile must be (block_q, block_k), two whole numbers, or None for the rung's default, got "
            f"{shown(tile)}"
        )
    if not (min(sides) >= 1 and max(sides) <= MAX_TILE):
        raise ValueError(
            f"tile must be (block_q, block_k), each from 1 to {MAX_TILE}, got {sides}; the scores of a "
            "larger tile do not fit into fast memory; None uses the rung's default"
        )
    return int(sides[0]), int(sides[1])


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_array(name: str, operand: Any) -> None:
    """Check that an operand is an array or a tensor of any library; otherwise raise a TypeError."""
    shape, dtype = getattr(operand, "shape", None), getattr(operand, "dtype", None)
    if shape is None or dtype is None or isinstance(operand, np.generic):
        raise TypeError(
            f"{name} must be an array or a tensor, got {type(operand).__name__}; convert it first"
        )
