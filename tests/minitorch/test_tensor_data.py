"""Module 2: storage, shape and strides; indexing and broadcasting."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from minitorch import IndexingError, TensorData, shape_broadcast, strides_from_shape

from ..course.test_tensor_data import numbered


def test_strides_are_row_major_unless_given() -> None:
    assert TensorData([0.0] * 15, (3, 5)).strides == (5, 1)
    assert TensorData([0.0] * 15, (5, 3), (1, 5)).strides == (1, 5)
    assert strides_from_shape((2, 3, 4)) == (12, 4, 1)
    assert strides_from_shape(()) == ()


@given(numbered)
def test_a_tensor_is_contiguous_if_its_elements_lie_in_order(layout: TensorData) -> None:
    positions = [layout.index(index) for index in layout.indices()]
    assert layout.is_contiguous() == (positions == sorted(positions))


@given(numbered)
def test_to_array_shares_the_storage(layout: TensorData) -> None:
    view = layout.to_array()
    assert np.shares_memory(view, layout._storage)
    assert [layout.get(index) for index in layout.indices()] == view.reshape(-1).tolist()


@given(numbered)
def test_sample_draws_an_index_with_pythons_random(layout: TensorData) -> None:
    random.seed(3)
    first = [layout.sample() for _ in range(20)]
    random.seed(3)
    assert first == [layout.sample() for _ in range(20)]
    assert set(first) <= set(np.ndindex(*layout.shape))


def test_a_number_is_a_tensor_without_dimensions() -> None:
    layout = TensorData([4.0], ())
    assert (layout.size, layout.dims, layout.shape) == (1, 0, ())
    assert (layout.get(0), list(layout.indices())) == (4.0, [()])


def test_attributes_hold_plain_ints() -> None:
    layout = TensorData(np.zeros(6), (2, 3)).permute(1, 0)
    assert all(type(n) is int for n in (*layout.shape, *layout.strides, layout.size, layout.dims))
    assert layout._shape.dtype == layout._strides.dtype == np.int64
    of_numpy: Any = (np.int64(2), 1)
    assert shape_broadcast(of_numpy, (1, 3)) == (2, 3)
    assert type(shape_broadcast(of_numpy, (1, 3))[0]) is int


@pytest.mark.parametrize("index", [(5, 2), (0, -1), (0,), (0, 0, 0), 0], ids=str)
def test_an_index_outside_is_refused(index: tuple[int, ...] | int) -> None:
    layout = TensorData([0.0] * 15, (3, 5))
    with pytest.raises(IndexingError, match=r"\(3, 5\)"):
        layout.get(index)
    with pytest.raises(IndexingError, match=r"\(3, 5\)"):
        layout.set(index, 1.0)
