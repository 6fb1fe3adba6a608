"""Module 2: tensors, their operations and their gradients, on the simple backend."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, data

from minitorch import (
    Context,
    Function,
    IndexingError,
    SimpleBackend,
    Tensor,
    TensorData,
    from_numpy,
    grad_central_difference,
    grad_check,
    rand,
    tensor,
    zeros,
)
from minitorch.autodiff import History

from ..strategies import small_floats
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import (
    shaped_tensors,
    shapes,
    tensors,
    vals,
)


@given(data())
def test_a_tensor_holds_the_numbers_it_was_made_of(data: DataObject) -> None:
    shape = data.draw(shapes())
    numbers = data.draw(vals(int(np.prod(shape)), small_floats)).to_numpy().reshape(shape)
    made = tensor(numbers.tolist())
    assert made.shape == shape
    for index in np.ndindex(*shape):
        assert made[index] == numbers[index]


# --- views -----------------------------------------------------------------------------------


def test_view_shares_the_elements() -> None:
    a = tensor([[2.0, 3.0, 4.0], [4.0, 5.0, 7.0]])
    for shape in ((6,), (1, 6), (6, 1), (3, 2), (2, 3), (1, 2, 3, 1)):
        flat = a.view(*shape)
        assert flat.shape == shape
        assert flat._tensor._storage is a._tensor._storage
        assert flat.to_numpy().reshape(-1).tolist() == [2.0, 3.0, 4.0, 4.0, 5.0, 7.0]


def test_view_needs_a_contiguous_tensor() -> None:
    a = tensor([[2.0, 3.0, 4.0], [4.0, 5.0, 7.0]])
    with pytest.raises(AssertionError, match=r"Must be contiguous to view: shape \(3, 2\)"):
        a.permute(1, 0).view(6)
    assert a.permute(1, 0).contiguous().view(6).to_numpy().tolist() == [
        2.0,
        4.0,
        3.0,
        5.0,
        4.0,
        7.0,
    ]


@given(tensors())
def test_derivative_of_view(a: Tensor) -> None:
    grad_check(lambda x: x.contiguous().view(x.size), a)


def test_the_gradient_of_a_view_may_arrive_permuted() -> None:
    # The gradient of permute is not contiguous; read in the order of its storage it is scrambled.
    numbers = np.arange(6.0)
    weights = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    a = tensor(numbers, requires_grad=True)
    (a.view(3, 2).permute(1, 0) * tensor(weights)).sum().backward()
    assert_close_arrays(a.grad, weights.T.reshape(-1), np.float64)


def test_contiguous_is_a_copy_only_where_it_must() -> None:
    a = tensor([[1.0, 2.0], [3.0, 4.0]])
    assert a.contiguous() is a
    copy = a.permute(1, 0).contiguous()
    copy[0, 0] = 9.0
    assert a[0, 0] == 1.0
    assert copy._tensor.is_contiguous()


# --- making and reading ----------------------------------------------------------------------


def test_tensors_are_made_of_numbers_and_nested_lists() -> None:
    assert tensor(5.0).shape == ()
    assert tensor([1, 2]).shape == (2,)
    assert tensor([[1], [2]]).shape == (2, 1)
    assert tensor(((1.0, 2.0, 3.0),)).shape == (1, 3)
    assert tensor([[[1]]]).shape == (1, 1, 1)
    assert tensor([1, 2]).dtype == np.float64


def test_item_reads_the_only_element() -> None:
    assert tensor(5.0).item() == tensor([5.0]).item() == tensor([[5.0]]).item() == 5.0
    assert isinstance(tensor(5.0).item(), float)
    with pytest.raises(AssertionError, match=r"item needs one element, shape \(2,\) has 2"):
        tensor([1.0, 2.0]).item()


def test_elements_are_read_and_written_by_index() -> None:
    a = zeros((2, 3))
    a[1, 2] = 4.0
    of_numpy: Any = (np.int64(0), 1)
    a[of_numpy] = 5.0
    assert a.to_numpy().tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 4.0]]
    assert tensor([1.0, 2.0])[1] == 2.0
    with pytest.raises(IndexingError, match=r"\(50, 2\) is out of range for shape \(2, 3\)"):
        a[50, 2]


def test_iterating_gives_the_rows() -> None:
    rows = list(tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [row.tolist() for row in rows] == [[1.0, 2.0], [3.0, 4.0]]


def test_rand_is_seeded_by_pythons_random() -> None:
    import random

    random.seed(4)
    first = rand((2, 3)).to_numpy()
    random.seed(4)
    assert (rand((2, 3)).to_numpy() == first).all()
    assert ((first >= 0) & (first < 1)).all()


def test_names_default_to_the_id() -> None:
    a, b = tensor([1.0]), Tensor(TensorData([1.0], (1,)), name="x", backend=SimpleBackend)
    assert (a.name, b.name) == (str(a.unique_id), "x")


def test_a_tensor_is_hashed_by_what_it_is_and_not_by_its_numbers() -> None:
    a, b = tensor([1.0]), tensor([1.0])
    assert {a: 1, b: 2}[a] == 1


def test_a_tensor_equals_nothing_that_is_no_number() -> None:
    assert (tensor([1.0]) == None) is False  # noqa: E711
    assert (tensor([1.0]) != None) is True  # noqa: E711
    assert tensor([1.0]) not in ["1.0", None]


def test_a_number_may_stand_on_either_side() -> None:
    a = tensor([[1.0, 2.0], [4.0, 8.0]])
    array = a.to_numpy()
    numbers: list[Any] = [3, 3.0, np.float64(3.0), np.int64(3), np.float32(3.0)]
    for number in numbers:
        n = float(number)
        for result, expected in (
            (a + number, array + n), (number + a, n + array),
            (a - number, array - n), (number - a, n - array),
            (a * number, array * n), (number * a, n * array),
            (a / number, array / n), (number / a, n / array),
            (a**number, array**n),
            (a < number, array < n), (number < a, n < array),
            (a > number, array > n), (number > a, n > array),
            (a == number, array == n), (number == a, n == array),
            (a != number, array != n), (number != a, n != array),
        ):  # fmt: skip
            assert_close_arrays(result, np.asarray(expected, float), np.float64)


def test_all_asks_every_element() -> None:
    a = tensor([[1.0, 0.0], [-2.0, 3.0]])
    assert a.all().to_numpy().tolist() == [0.0]
    assert a[1].all().to_numpy().tolist() == [1.0]
    assert a.all(0).to_numpy().tolist() == [[1.0, 0.0]]
    assert a.all(-1).to_numpy().tolist() == [[0.0], [1.0]]


@given(shaped_tensors(2))
def test_a_tensor_is_close_to_itself(two: list[Tensor]) -> None:
    a, b = two
    assert a.is_close(a + 0.0).contiguous().all().item() == 1.0
    expected = np.abs(a.to_numpy() - b.to_numpy()) < 1e-2
    assert (a.is_close(b).to_numpy() == expected).all()


# --- leaves, constants and histories ---------------------------------------------------------


def test_only_what_requires_a_gradient_has_a_history() -> None:
    leaf, constant = tensor([1.0], requires_grad=True), tensor([2.0])
    assert (leaf.is_leaf(), leaf.is_constant(), leaf.requires_grad()) == (True, False, True)
    assert (constant.is_leaf(), constant.is_constant()) == (False, True)
    inner = leaf * constant
    assert (inner.is_leaf(), inner.is_constant()) == (False, False)
    assert [parent is leaf for parent in inner.parents] == [True, False]
    assert (constant * constant).history is None
    assert inner.detach().is_constant()


def test_requires_grad_makes_a_fresh_leaf() -> None:
    a = tensor([1.0], requires_grad=True)
    b = a * 2.0
    b.requires_grad_(True)
    assert b.is_leaf()
    (b * 3.0).backward()
    assert (b.grad is not None and b.grad.item(), a.grad) == (3.0, None)
    b.requires_grad_(False)
    assert b.is_constant()


def test_constants_and_inner_tensors_get_no_gradient() -> None:
    a, c = tensor([2.0], requires_grad=True), tensor([5.0])
    b = a * c
    (b * b).backward()
    assert (b.grad, c.grad) == (None, None)
    assert a.grad is not None
    assert a.grad.item() == 2 * 2.0 * 25.0


def test_gradients_add_up_until_they_are_dropped() -> None:
    a = tensor([3.0], requires_grad=True)
    for expected in (6.0, 12.0):
        (a * a).backward()
        assert a.grad is not None
        assert a.grad.item() == expected
    a.zero_grad_()
    assert a.grad is None


def test_a_tensor_used_twice_gets_both_shares() -> None:
    a = tensor([2.0], requires_grad=True)
    b = a * 3.0
    (b * b + b).backward()
    assert a.grad is not None
    assert a.grad.item() == 2 * 9 * 2.0 + 3.0


def test_leaves_do_not_share_their_gradients() -> None:
    a, b = tensor([1.0], requires_grad=True), tensor([1.0], requires_grad=True)
    (a + b).backward()
    (a * 4.0).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.item(), b.grad.item()) == (5.0, 1.0)


def test_gradients_are_constants() -> None:
    a = tensor([2.0], requires_grad=True)
    (a * a).backward()
    assert a.grad is not None
    assert a.grad.is_constant()


def test_backward_needs_a_gradient_of_the_same_shape() -> None:
    a = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(AssertionError, match=r"needs shape \(1,\), got \(2,\)"):
        (a * 2.0).backward()
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(3,\)"):
        (a * 2.0).backward(tensor([1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        (a * 2.0).backward(tensor([1.0]))
    assert a.grad is None


def test_a_deep_graph_needs_no_deep_stack() -> None:
    a = tensor([1.0], requires_grad=True)
    b = a
    for _ in range(3000):
        b = b + 1.0
    b.backward()
    assert a.grad is not None
    assert a.grad.item() == 1.0


def test_a_graph_is_freed_with_its_last_tensor() -> None:
    # By reference counts alone: garbage that waits for a collection is memory that training lacks.
    a = tensor([[1.0, 2.0]], requires_grad=True)
    inner = a.exp() * a
    alive = weakref.ref(inner._tensor)
    out = (inner.sigmoid() * inner).sum()
    out.backward()
    del inner
    assert alive() is not None
    del out
    assert alive() is None


def test_a_function_gives_a_gradient_for_each_argument() -> None:
    class Forgetful(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Context, grad_output: Tensor) -> Tensor:
            return grad_output

    a = tensor([1.0], requires_grad=True)
    with pytest.raises(AssertionError, match=r"Forgetful.backward returned 1 gradients for 2"):
        Forgetful.apply(a, a).backward()


def test_forward_sees_no_history_and_saves_nothing_in_vain() -> None:
    seen: list[Context] = []

    class Spy(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor) -> Tensor:
            assert a.history is None
            ctx.save_for_backward(a)
            seen.append(ctx)
            return a * 1.0

        @staticmethod
        def backward(ctx: Context, grad_output: Tensor) -> Tensor:
            return grad_output

    made = Spy.apply(tensor([1.0], requires_grad=True))
    assert isinstance(made.history, History)
    assert (made.history.last_fn, made.history.ctx) == (Spy, seen[0])
    assert Spy.apply(tensor([1.0])).history is None
    assert [len(ctx.saved_values) for ctx in seen] == [1, 0]


# --- the gradient check itself ---------------------------------------------------------------


def test_grad_check_notices_a_wrong_gradient() -> None:
    class Twisted(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_values
            return grad_output * a, grad_output * b

    with pytest.raises(AssertionError, match="gradient of argument 0"):
        grad_check(Twisted.apply, tensor([2.0]), tensor([5.0]))


def test_grad_check_notices_a_missing_gradient() -> None:
    with pytest.raises(AssertionError, match=r"argument 0 of .* got no gradient"):
        grad_check(lambda a, b: a.detach() * b, tensor([2.0]), tensor([5.0]))


def test_central_difference_measures_one_element() -> None:
    a = from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]]).T, SimpleBackend)
    slope = grad_central_difference(lambda x: x * x, a, ind=(1, 0))
    assert abs(slope - 2 * 2.0) < 1e-6
