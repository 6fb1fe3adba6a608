"""Module 2: storage, shape and strides; indexing and broadcasting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from hypothesis.strategies import DataObject, data, permutations

from minitorch import (
    IndexingError,
    TensorData,
    broadcast_index,
    index_to_position,
    shape_broadcast,
    to_index,
)

from ..strategies import result_of
from ..tensor_strategies import indices, shapes, small_floats, tensor_data

numbered = tensor_data(small_floats)


# --- task 2.1: storage and indexing ----------------------------------------------------------


@pytest.mark.task2_1
def test_permute_exchanges_shape_and_strides_together() -> None:
    layout = TensorData(np.arange(24.0), (2, 3, 4))
    for order, shape, strides in (
        ((1, 0, 2), (3, 2, 4), (4, 12, 1)),
        ((1, 2, 0), (3, 4, 2), (4, 1, 12)),
    ):
        call = f"permute{order} of shape (2, 3, 4) and strides (12, 4, 1)"
        got = result_of(call, layout.permute, *order)
        assert (got.shape, got.strides) == (shape, strides), (
            f"{call} gives shape {got.shape} and strides {got.strides}, expected {shape} and {strides}: "
            "dimension i of the result is dimension order[i], in both"
        )


@pytest.mark.task2_1
def test_index_and_position_by_hand() -> None:
    index = np.full(4, -7)  # a scratch buffer, longer than the shape
    for ordinal, expected in ((1, [0, 1]), (2, [0, 2]), (3, [1, 0]), (5, [1, 2])):
        to_index(ordinal, np.array([2, 3]), index)
        assert index[:2].tolist() == expected, (
            f"element {ordinal} of shape (2, 3) has index {index[:2].tolist()}, expected {expected}: the "
            "last dimension runs fastest; remainder and quotient by its size"
        )
        call = f"index_to_position({index.tolist()}, [1, 2]), an index in a buffer that is longer,"
        position = result_of(call, index_to_position, index, np.array([1, 2]))
        assert position == expected[0] + 2 * expected[1], (
            f"index {index.tolist()} with strides [1, 2] has position {position}, expected "
            f"{expected[0] + 2 * expected[1]}: there are as many dimensions as strides, and an index may "
            "be a longer buffer"
        )


@pytest.mark.task2_1
@given(numbered)
def test_indices_run_through_the_tensor_in_row_major_order(layout: TensorData) -> None:
    assert [tuple(map(int, i)) for i in layout.indices()] == list(np.ndindex(*layout.shape))


@pytest.mark.task2_1
@given(shapes())
def test_to_index_gives_each_index_once(shape: tuple[int, ...]) -> None:
    index = np.full(len(shape) + 2, -7)  # a scratch buffer, longer than the shape
    seen = set()
    for ordinal in range(int(np.prod(shape))):
        to_index(ordinal, np.array(shape), index)
        seen.add(tuple(index[: len(shape)].tolist()))
        assert index[len(shape) :].tolist() == [-7, -7], "it wrote beyond the shape"
    assert seen == set(np.ndindex(*shape))


@pytest.mark.task2_1
@given(numbered)
def test_each_index_has_a_position_of_its_own(layout: TensorData) -> None:
    positions = [layout.index(index) for index in layout.indices()]
    assert sorted(positions) == list(range(layout.size))
    assert positions == [
        index_to_position(np.array(index), layout._strides) for index in layout.indices()
    ]


@pytest.mark.task2_1
@given(data())
def test_permute_is_a_view_with_the_dimensions_in_another_order(data: DataObject) -> None:
    layout = data.draw(numbered)
    order = data.draw(permutations(range(layout.dims)))
    permuted = layout.permute(*order)
    assert permuted._storage is layout._storage, (
        "permute copies the elements: the result has the same storage, and other strides"
    )
    np.testing.assert_array_equal(permuted.to_array(), layout.to_array().transpose(order))


@pytest.mark.task2_1
@given(data())
def test_set_changes_one_element(data: DataObject) -> None:
    layout = data.draw(numbered)
    index = data.draw(indices(layout))
    expected = layout.to_array().copy()
    expected[tuple(index)] = 0.5
    layout.set(index, 0.5)
    assert layout.get(index) == 0.5
    np.testing.assert_array_equal(layout.to_array(), expected)


# --- task 2.2: broadcasting ------------------------------------------------------------------


@pytest.mark.task2_2
@pytest.mark.parametrize(
    ("shape1", "shape2", "result"),
    [
        ((1,), (5, 5), (5, 5)),
        ((5, 5), (1,), (5, 5)),
        ((1, 5, 5), (5, 5), (1, 5, 5)),
        ((5, 1, 5, 1), (1, 5, 1, 5), (5, 5, 5, 5)),
        ((2, 1), (3,), (2, 3)),
        ((2, 1), (0,), (2, 0)),
        ((), (2, 3), (2, 3)),
        ((), (), ()),
    ],
)
def test_shapes_that_broadcast(
    shape1: tuple[int, ...], shape2: tuple[int, ...], result: tuple[int, ...]
) -> None:
    for call in (shape_broadcast, TensorData.shape_broadcast):
        got = result_of(f"shape_broadcast({shape1}, {shape2})", call, shape1, shape2)
        assert got == result, (
            f"shape_broadcast({shape1}, {shape2}) is {got}, expected {result}: align at the right, and "
            "a size of 1 gives way to the other size, even to 0"
        )


@pytest.mark.task2_2
@pytest.mark.parametrize(
    ("shape1", "shape2"), [((5, 7, 5, 1), (1, 5, 1, 5)), ((5, 2), (5,)), ((2,), (3,))]
)
def test_shapes_that_do_not_broadcast(shape1: tuple[int, ...], shape2: tuple[int, ...]) -> None:
    try:
        got = shape_broadcast(shape1, shape2)
    except IndexingError as error:
        assert str(shape1) in str(error) and str(shape2) in str(error), (
            f"it names both shapes: {error}"
        )
    else:
        pytest.fail(
            f"shape_broadcast({shape1}, {shape2}) is {got}, expected an IndexingError: two sizes fit if "
            "they are equal or one of them is 1"
        )


@pytest.mark.task2_2
@given(shapes(), shapes())
def test_shapes_broadcast_as_in_numpy(shape1: tuple[int, ...], shape2: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(shape1, shape2)
    except ValueError:
        try:
            got = shape_broadcast(shape1, shape2)
        except IndexingError:
            return
        pytest.fail(f"shape_broadcast({shape1}, {shape2}) is {got}, expected an IndexingError")
    else:
        assert shape_broadcast(shape1, shape2) == expected


@pytest.mark.task2_2
@given(mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=4, max_side=3))
def test_broadcast_index_finds_the_element_that_numpy_finds(drawn) -> None:
    shape, big_shape = drawn.input_shapes[0], drawn.result_shape
    ordinals = np.arange(int(np.prod(shape))).reshape(shape)
    expected = np.broadcast_to(ordinals, big_shape)
    index = np.full(len(shape) + 2, -7)  # a scratch buffer, longer than the shape
    for big_index in np.ndindex(*big_shape):
        call = f"broadcast_index({big_index}, {big_shape}, {shape}, out_index)"
        arrays = [np.array(x) for x in (big_index, big_shape, shape)]
        result_of(call, broadcast_index, *arrays, index)
        assert tuple(arrays[0]) == big_index, "it changes big_index, which the caller still needs"
        own = tuple(map(int, index[: len(shape)]))
        assert all(i < size for i, size in zip(own, shape, strict=True)), (
            f"index {own} lies outside of shape {shape}: a dimension of size 1 has index 0 only"
        )
        assert ordinals[own] == expected[big_index], (
            f"{call} gives {own}: align the two shapes at the right"
        )
        assert index[len(shape) :].tolist() == [-7, -7], "it wrote beyond the shape"
