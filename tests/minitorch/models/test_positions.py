"""Embeddings of positions in a grid, and their interpolation for a picture of another size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minitorch.models.positions import upsampled_grid

SIDES = st.integers(1, 9)


def centres(side: int) -> np.ndarray:
    """Return the rows and columns of the centres in a picture of side 1, (side², 2)."""
    at = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(at, at, indexing="ij"), axis=-1).reshape(-1, 2)


@given(st.integers(2, 9), SIDES, st.lists(st.floats(-4, 4), min_size=3, max_size=3))
def test_a_table_that_is_linear_in_row_and_column_stays_so(
    old: int, new: int, slopes: list[float]
) -> None:
    by_row, by_col, shift = slopes

    def plane(side: int) -> np.ndarray:
        row, col = centres(side).T
        return (by_row * row + by_col * col + shift)[:, None]  # (side², 1)

    np.testing.assert_allclose(upsampled_grid(plane(old), new), plane(new), atol=1e-12)


@given(SIDES, SIDES, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_it_commutes_with_turning_and_keeps_width_and_dtype(
    old: int, new: int, width: int, seed: int
) -> None:
    table = np.random.default_rng(seed).standard_normal((old**2, width)).astype(np.float32)

    def turned(x: np.ndarray, side: int) -> np.ndarray:
        return np.rot90(x.reshape(side, side, width)).reshape(-1, width)

    found = upsampled_grid(table, new)
    assert found.shape == (new**2, width) and found.dtype == table.dtype
    np.testing.assert_allclose(
        upsampled_grid(turned(table, old), new), turned(found, new), atol=1e-5
    )
    np.testing.assert_array_equal(upsampled_grid(table, old), table)
