"""Ranges of positions that a device keeps, and positions in a grid."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=64)
def kept_range(start: int, stop: int, step: int = 1) -> Any:
    """Return a range as a read-only array, which is copied to a device once."""
    found = np.arange(start, stop, step)
    found.setflags(write=False)
    return found


def grid_sines(side: int, width: int) -> npt.NDArray[np.float64]:
    """Return sines and cosines of the row and the column of each place in a square, (side², width).

    Places that are near each other have similar vectors.  A quarter of the width has the sines of rows with
    periods from 2.5 to 2 side, the others their cosines, and the sines and cosines of columns.

    Args:
        side: Of the square, which is read row by row.
        width: Of a vector; a multiple of 4.

    Raises:
        ValueError: If it is none.

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.5, for one dimension.
    """
    if width % 4:
        raise ValueError(
            f"positions in a grid need an embedding whose width is a multiple of 4, got {width}"
        )
    frequencies = 2.0 * np.pi / np.geomspace(2.5, 2.0 * side, width // 4)
    rows, cols = (x[:, None] * frequencies for x in np.divmod(np.arange(side**2), side))
    return np.concatenate([np.sin(rows), np.cos(rows), np.sin(cols), np.cos(cols)], axis=1)
