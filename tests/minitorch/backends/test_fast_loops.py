"""Large folds and broadcasts on the fast backend: their results, precision and determinism.

``tests/structure/cpu/test_fast_loops.py`` tests how they are computed.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from minitorch import FastOps, from_numpy, operators

from ...tensor_strategies import on_dtypes


@pytest.mark.parametrize("right", [(1,), (20_001,), (5, 1)], ids=str)
def test_long_rows_that_something_is_broadcast_to(right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 20_001), right))
    a, b = from_numpy(x), from_numpy(y)
    np.testing.assert_array_equal((a * b).to_numpy(), x * y)
    np.testing.assert_array_equal((b < a).to_numpy(), 1.0 * (y < x))


@pytest.mark.parametrize("shape", [(1, 300_001), (50, 7001), (7001, 50), (4, 300, 300)], ids=str)
def test_the_same_bits_with_any_number_of_threads(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    a, threads = from_numpy(array), numba.get_num_threads()
    for dim in range(len(shape)):
        found = []
        try:
            for count in {1, threads}:
                numba.set_num_threads(count)
                found.append((a.sum(dim).to_numpy(), a.exp().sigmoid().to_numpy()))
        finally:
            numba.set_num_threads(threads)
        for several in found[1:]:
            for one, other in zip(found[0], several, strict=True):
                np.testing.assert_array_equal(one, other)


@on_dtypes
@pytest.mark.parametrize(("shape", "dim"), [((1 << 20,), 0), ((8, 1 << 17), 1), ((1 << 17, 8), 0)])
def test_a_long_sum_is_about_as_precise_as_its_rounding(
    shape: tuple[int, ...], dim: int, dtype: Any
) -> None:
    array = np.random.default_rng(0).uniform(0.0, 1.0, shape).astype(dtype)
    exact = array.astype(np.longdouble).sum(dim, keepdims=True)
    off = np.abs(from_numpy(array).sum(dim).to_numpy() - exact) / np.spacing(exact.astype(dtype))
    assert off.max() <= 4.0, f"off by {off.max():.3g} units in the last place"


def test_a_fold_starts_from_what_it_is_told() -> None:
    a = from_numpy(np.ones((3, 20_000), np.float32))
    for dim, expected in ((0, 5.0 + 3.0), (1, 5.0 + 20_000.0)):
        assert (FastOps.reduce(operators.add, 5.0)(a, dim).to_numpy() == expected).all()


def test_a_function_whose_order_matters_is_folded_in_order() -> None:
    a = from_numpy(np.arange(1.0, 50_001.0))
    assert FastOps.reduce(lambda x, y: y, 0.0)(a, 0).item() == 50_000.0
