"""Products and transposes of tiles on the CPU: what the attention kernels do with registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from kernels.cpu.attention.tiles import add_rows, pack_transposed
from kernels.cpu.matmul.tile_product import add_product, product_address, set_product
from kernels.cpu.matmul.vector_registers import LANES

from ...support.tolerances import assert_close_arrays

DTYPES = st.sampled_from([np.float32, np.float64])
SIZES = st.integers(1, 40)
#: What a kernel must leave alone.
UNTOUCHED = 7.0


@njit
def multiply(address: int, c: Any, a: Any, b: Any, add: bool) -> None:
    """Call either product as a kernel does."""
    if add:
        add_product(address, c, a, b)
    else:
        set_product(address, c, a, b)


@njit
def pack(source: Any, factor: Any, target: Any) -> None:
    """Call ``pack_transposed`` as a kernel does."""
    pack_transposed(source, factor, target)


@njit
def add(source: Any, factor: Any, target: Any) -> None:
    """Call ``add_rows`` as a kernel does."""
    add_rows(source, factor, target)


def rows_within(rng: np.random.Generator, rows: int, cols: int, dtype: Any) -> tuple[Any, Any]:
    """Return rows of random numbers, and the larger array of ``UNTOUCHED`` that they lie in."""
    around = np.full((rows + 2, cols), UNTOUCHED, dtype)
    around[1:-1] = rng.standard_normal((rows, cols))
    return around[1:-1], around


@given(
    dtype=DTYPES, rows=SIZES, depth=st.integers(0, 40), vectors=st.integers(1, 5),
    layout=st.sampled_from(["rows", "transposed", "steps"]), adds=st.booleans(), seed=SIZES,
)  # fmt: skip
def test_a_product_of_tiles_is_that_of_numpy(
    dtype: Any, rows: int, depth: int, vectors: int, layout: str, adds: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((depth, rows) if layout == "transposed" else (rows, depth)).astype(
        dtype
    )
    if layout == "transposed":
        a = a.T
    elif layout == "steps":
        a = np.repeat(a, 2, axis=1)[:, ::2]
    b = rng.standard_normal((depth, vectors * LANES)).astype(dtype)
    c, around = rows_within(rng, rows, vectors * LANES, dtype)
    expected = (c if adds else 0) + a.astype(np.float64) @ b.astype(np.float64)
    multiply(product_address(np.dtype(dtype)), c, a, b, adds)
    assert_close_arrays(c, expected, dtype, size=max(depth, 1) ** 0.5)
    assert (around[[0, -1]] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_does_not_depend_on_where_in_the_tile_it_stands(dtype: Any) -> None:
    # Blocks at the edges have other shapes, and the same order of additions.
    rng = np.random.default_rng(0)
    a = np.repeat(rng.standard_normal((1, 37)).astype(dtype), 21, axis=0)
    b = np.repeat(rng.standard_normal((37, 1)).astype(dtype), 5 * LANES, axis=1)
    c = np.empty((21, 5 * LANES), dtype)
    multiply(product_address(np.dtype(dtype)), c, a, b, False)
    assert len(np.unique(c)) == 1


@given(dtype=DTYPES, rows=SIZES, dim=SIZES, more=st.integers(0, 5), steps=st.booleans())
def test_a_packed_tile_is_the_scaled_transpose_and_zeros(
    dtype: Any, rows: int, dim: int, more: int, steps: bool
) -> None:
    rng = np.random.default_rng(rows)
    source = rng.standard_normal((rows, 2 * dim)).astype(dtype)
    source = source[:, ::2] if steps else source[:, :dim]
    target, around = rows_within(rng, dim, rows + more, dtype)
    pack(source, dtype(0.5), target)
    np.testing.assert_array_equal(target[:, :rows], dtype(0.5) * source.T)
    assert (target[:, rows:] == 0).all()
    assert (around[[0, -1]] == UNTOUCHED).all()


@given(dtype=DTYPES, rows=SIZES, dim=SIZES, transposed=st.booleans())
def test_rows_are_added_wherever_they_lie(
    dtype: Any, rows: int, dim: int, transposed: bool
) -> None:
    rng = np.random.default_rng(dim)
    source = rng.standard_normal((rows + 1, dim + 3)).astype(dtype)
    target = np.ones((dim, rows), dtype).T if transposed else np.ones((rows, dim), dtype)
    add(source, dtype(2), target)
    assert_close_arrays(target, 1 + 2 * source[:rows, :dim].astype(np.float64), dtype)
