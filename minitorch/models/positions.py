"""Positions of packed sequences, and embeddings of positions in a grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import whole


def grid_sines(side: int, width: int) -> npt.NDArray[np.float64]:
    """Return sines and cosines of the row and the column of each place in a square, (side², width).

    Places that are near each other have similar vectors.  A quarter of the width has the sines of rows with
    periods from 2.5 to 2 side, the others their cosines, and the sines and cosines of columns.

    Args:
        side: Of the square, which is read row by row.
        width: Of a vector; a multiple of 4.

    Raises:
        ValueError: If it is not.

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.5, for one dimension.
    """
    if width % 4:
        raise ValueError(
            f"positions in a grid need an embedding whose width is a multiple of 4, got {width}"
        )
    frequencies = 2.0 * np.pi / np.geomspace(2.5, 2.0 * side, width // 4)
    rows, cols = (x[:, None] * frequencies for x in np.divmod(np.arange(side**2), side))
    return np.concatenate([np.sin(rows), np.cos(rows), np.sin(cols), np.cos(cols)], axis=1)


def packed_positions(
    lengths: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where packed sequences begin and end, and the position of each token in its own.

    Args:
        lengths: Number of tokens of each sequence, (count,).

    Returns:
        The cumulative lengths, (count + 1,), and the positions, (total,).
    """
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return sums, np.arange(sums[-1]) - np.repeat(sums[:-1], lengths)


def upsampled_grid(table: npt.NDArray[Any], side: int) -> npt.NDArray[Any]:
    """Interpolate the embeddings of the places in a square for a square of a different size.

    Both squares cover the same picture, so that a place keeps its part of it: the centre of place i of n
    lies at (i + 1/2) / n.  Between centres the interpolation is bilinear.  Beyond the outermost ones it
    goes on with the same slope, so that a table that is linear in row and column stays linear.

    Args:
        table: (old side², width), read row by row.
        side: Of the new square.

    Returns:
        (side², width), of the table's dtype.

    Raises:
        ValueError: If the table is not two-dimensional, its row count is no square, or ``side`` is below 1.
    """
    rows = table.shape[0] if table.ndim == 2 else 0
    old = math.isqrt(rows)
    if old < 1 or old**2 != rows:
        raise ValueError(
            "a table of positions in a grid has the shape (side squared, width), got "
            f"{table.shape}; pass the embeddings of square images"
        )
    weights = _between(old, whole("side", side, 1))  # (side, old)
    grid = table.reshape(old, old, -1).astype(np.float64)
    found = np.einsum("ri,cj,ijw->rcw", weights, weights, grid, optimize=True)
    return found.reshape(side**2, -1).astype(table.dtype)


def _between(old: int, new: int) -> npt.NDArray[np.float64]:
    """Return the weight of each old place in each new one along one axis, (new, old)."""
    weights = np.zeros((new, old))
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    left = np.clip(np.floor(centres).astype(int), 0, max(old - 2, 0))
    share = centres - left if old > 1 else np.zeros(new)  # below 0 or above 1 beyond the centres
    weights[np.arange(new), left] = 1.0 - share
    weights[np.arange(new), np.minimum(left + 1, old - 1)] += share
    return weights
