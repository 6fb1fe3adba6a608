"""Module 2: tensors, their operations and their gradients, on the simple backend."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from minitorch import Context, Function, Tensor, grad_check, rand, tensor

from ..support.tolerances import assert_close_arrays

# --- views -----------------------------------------------------------------------------------


def test_view_shares_the_elements() -> None:
    a = tensor([[2.0, 3.0, 4.0], [4.0, 5.0, 7.0]])
    for shape in ((6,), (1, 6), (6, 1), (3, 2), (2, 3), (1, 2, 3, 1)):
        flat = a.view(*shape)
        assert flat.shape == shape
        assert flat._tensor._storage is a._tensor._storage
        assert flat.to_numpy().reshape(-1).tolist() == [2.0, 3.0, 4.0, 4.0, 5.0, 7.0]


def test_the_gradient_of_a_view_may_arrive_permuted() -> None:
    # The gradient of permute is not contiguous; read in the order of its storage it is scrambled.
    numbers = np.arange(6.0)
    weights = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    a = tensor(numbers, requires_grad=True)
    (a.view(3, 2).permute(1, 0) * tensor(weights)).sum().backward()
    assert_close_arrays(a.grad, weights.T.reshape(-1), np.float64)


# --- making and reading ----------------------------------------------------------------------


def test_tensors_are_made_of_numbers_and_nested_lists() -> None:
    assert tensor(5.0).shape == ()
    assert tensor([1, 2]).shape == (2,)
    assert tensor([[1], [2]]).shape == (2, 1)
    assert tensor(((1.0, 2.0, 3.0),)).shape == (1, 3)
    assert tensor([[[1]]]).shape == (1, 1, 1)
    assert tensor([1, 2]).dtype == np.float64


def test_a_tensor_is_hashed_by_what_it_is_and_equals_nothing_that_is_no_number() -> None:
    a, b = tensor([1.0]), tensor([1.0])
    assert {a: 1, b: 2}[a] == 1
    assert (a == None, a != None) == (False, True)  # noqa: E711
    assert a not in ["1.0", None]
    assert a.contiguous() is a


def test_item_reads_the_only_element() -> None:
    assert tensor(5.0).item() == tensor([5.0]).item() == tensor([[5.0]]).item() == 5.0
    assert isinstance(tensor(5.0).item(), float)


def test_rand_is_seeded_by_pythons_random() -> None:
    import random

    random.seed(4)
    first = rand((2, 3)).to_numpy()
    random.seed(4)
    assert (rand((2, 3)).to_numpy() == first).all()
    assert ((first >= 0) & (first < 1)).all()


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
    (b * b + b).backward()
    assert (b.grad, c.grad) == (None, None)
    assert a.grad is not None and a.grad.is_constant()
    assert a.grad.item() == 2 * 2.0 * 25.0 + 5.0


def test_gradients_add_up_until_they_are_dropped() -> None:
    a = tensor([3.0], requires_grad=True)
    for expected in (6.0, 12.0):
        (a * a).backward()
        assert a.grad is not None
        assert a.grad.item() == expected
    a.zero_grad_()
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
