"""NaN in relu, maxima, softmax and pooling: it reaches the result, as in NumPy and PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, booleans, data, integers, sampled_from

import minitorch
from minitorch import operators

from ...tensor_strategies import on_every_backend


def with_nan(seed: int, shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
    rng = np.random.default_rng(seed)
    array = rng.standard_normal(shape).astype(dtype)
    array[tuple(rng.integers(0, shape))] = np.nan
    return array


@on_every_backend
@given(data())
def test_nan_reaches_the_result(backend: Any, data: DataObject) -> None:
    dtype, dim = (
        data.draw(sampled_from([np.float16, np.float32, np.float64])),
        data.draw(integers(0, 1)),
    )
    array = with_nan(data.draw(integers(0, 99)), (3, 5), dtype)
    x = minitorch.from_numpy(array if data.draw(booleans()) else np.asfortranarray(array), backend)
    largest = array.max(dim, keepdims=True)
    np.testing.assert_array_equal(x.relu().to_numpy(), np.maximum(array, 0))
    np.testing.assert_array_equal(minitorch.max(x, dim).to_numpy(), largest)
    marks = np.where(np.isnan(largest), np.isnan(array), array == largest)
    np.testing.assert_array_equal(minitorch.argmax(x, dim).to_numpy(), marks)
    for softmax in (minitorch.softmax, minitorch.plain()(minitorch.softmax)):
        is_nan = np.isnan(softmax(x, dim).to_numpy())
        np.testing.assert_array_equal(is_nan, np.broadcast_to(np.isnan(largest), array.shape))


@pytest.mark.parametrize("dim", [0, 1])
def test_nan_reaches_the_result_of_large_folds_and_pools(dim: int) -> None:
    for seed in range(20):
        array = with_nan(seed, (70, 200) if dim else (200, 70), np.float32)
        found = minitorch.max(minitorch.from_numpy(array), dim).to_numpy()
        np.testing.assert_array_equal(found, array.max(dim, keepdims=True))
    image = with_nan(0, (1, 2, 4, 6))
    pooled = minitorch.maxpool2d(minitorch.from_numpy(image), (2, 3)).to_numpy()
    np.testing.assert_array_equal(pooled, image.reshape(1, 2, 2, 2, 2, 3).max((3, 5)))


def test_nan_reaches_the_result_of_numbers() -> None:
    assert all(math.isnan(operators.max(*pair)) for pair in ((math.nan, 1.0), (1.0, math.nan)))
    assert math.isnan(operators.relu(math.nan)) and math.isnan(
        minitorch.Scalar(math.nan).relu().data
    )
