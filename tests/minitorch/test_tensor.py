"""Module 2: tensors, their operations and their gradients, on the simple backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, permutations

from minitorch import (
    Context,
    Function,
    IndexingError,
    MathTestVariable,
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

from ..strategies import result_of, small_floats
from ..support.mistakes import assert_close_or_explain
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import (
    Array,
    laid_out,
    lattice,
    shaped_tensors,
    shapes,
    sum_to,
    tensors,
    vals,
)

Fn = tuple[str, Callable[..., float], Callable[..., Tensor]]
one_arg, two_arg, red_arg = MathTestVariable._comp_testing()

few = settings(max_examples=15)


def on_lattice(data: DataObject, *, first: float = 0.03, shape: Any = None) -> tuple[Array, Tensor]:
    """Draw an array and a tensor of the same elements, away from jumps, bends and poles."""
    array = data.draw(lattice(data.draw(shapes()) if shape is None else shape, first))
    return array, data.draw(laid_out(array))


def applied(fn: Callable[..., float], *operands: Array) -> Array:
    """Apply a function of floats to arrays that broadcast."""
    return np.vectorize(fn, otypes=[np.float64])(*operands)


NUMBERS = np.array([[-2.0, 0.5, 1.5], [0.25, -0.75, 3.0]])
OTHERS = np.array([[1.0, -4.0, 0.5], [2.0, 0.75, -1.0]])
SIGMOIDS = 1.0 / (1.0 + np.exp(-NUMBERS))
ZEROS = np.zeros((2, 3))
#: What is written → its value at NUMBERS and OTHERS.
VALUES: dict[str, tuple[Callable[..., Tensor], Array]] = {
    "a * b": (lambda a, b: a * b, NUMBERS * OTHERS),
    "a.sigmoid()": (lambda a, b: a.sigmoid(), SIGMOIDS),
    "a.relu()": (lambda a, b: a.relu(), np.maximum(NUMBERS, 0.0)),
    "a.exp()": (lambda a, b: a.exp(), np.exp(NUMBERS)),
    "(a * a).log()": (lambda a, b: (a * a).log(), np.log(NUMBERS**2 + 1e-6)),
    "a.sum(0)": (lambda a, b: a.sum(0), NUMBERS.sum(0, keepdims=True)),
    "a.sum(1)": (lambda a, b: a.sum(1), NUMBERS.sum(1, keepdims=True)),
    "a < b": (lambda a, b: a < b, (NUMBERS < OTHERS) * 1.0),
    "a == b": (lambda a, b: a == b, (NUMBERS == OTHERS) * 1.0),
    "a.is_close(a + 0.001)": (lambda a, b: a.is_close(a + 0.001), ZEROS + 1.0),
}


# --- task 2.3: operations --------------------------------------------------------------------


@given(data())
def test_a_tensor_holds_the_numbers_it_was_made_of(data: DataObject) -> None:
    shape = data.draw(shapes())
    numbers = data.draw(vals(int(np.prod(shape)), small_floats)).to_numpy().reshape(shape)
    made = tensor(numbers.tolist())
    assert made.shape == shape
    for index in np.ndindex(*shape):
        assert made[index] == numbers[index]


@pytest.mark.task2_3
@pytest.mark.parametrize("name", VALUES)
def test_a_function_has_its_value(name: str) -> None:
    function, expected = VALUES[name]
    inputs = [tensor(x.tolist()) for x in (NUMBERS, OTHERS)]
    out = result_of(name, function, *inputs)
    mistakes = {}
    if name == "a < b":
        mistakes = {"the operands are exchanged": (NUMBERS > OTHERS) * 1.0}
    elif "sum" in name:
        dim = int(name[-2])
        mistakes = {
            "these are products": NUMBERS.prod(dim, keepdims=True),
            "the dimension is to stay, with size 1": NUMBERS.sum(dim),
        }
    assert_close_or_explain(out.to_numpy(), expected, name, mistakes)


@pytest.mark.task2_3
@pytest.mark.parametrize("fn", one_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_one_args(fn: Fn, data: DataObject) -> None:
    _, on_floats, on_tensors = fn
    array, a = on_lattice(data)
    assert_close_arrays(on_tensors(a), applied(on_floats, array), np.float64, fn[0])


@pytest.mark.task2_3
@pytest.mark.parametrize("fn", two_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_two_args(fn: Fn, data: DataObject) -> None:
    _, on_floats, on_tensors = fn
    array_a, a = on_lattice(data)
    array_b, b = on_lattice(data, first=0.06, shape=a.shape)
    assert_close_arrays(on_tensors(a, b), applied(on_floats, array_a, array_b), np.float64, fn[0])


@pytest.mark.task2_3
@pytest.mark.parametrize("fn", red_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_reductions(fn: Fn, data: DataObject) -> None:
    name, on_floats, on_tensors = fn
    array, a = on_lattice(data)
    columns = array.reshape(len(array), -1).T if "full" not in name else array.reshape(1, -1)
    expected = np.array([on_floats(column.tolist()) for column in columns])
    shape = (1,) if "full" in name else (1, *array.shape[1:])
    assert_close_arrays(on_tensors(a), expected.reshape(shape), np.float64, name)


@pytest.mark.task2_3
@given(data())
def test_permute_reorders_the_dimensions(data: DataObject) -> None:
    array, a = on_lattice(data)
    order = data.draw(permutations(range(a.dims)))
    np.testing.assert_array_equal(a.permute(*order).to_numpy(), array.transpose(order))


# --- task 2.4: gradients ---------------------------------------------------------------------

#: What is written → its slope in each tensor, at NUMBERS and OTHERS; in log, at their absolute values.
SLOPES: dict[str, tuple[Callable[..., Tensor], tuple[Array, ...]]] = {
    "a * b": (lambda a, b: a * b, (OTHERS, NUMBERS)),
    "a.sigmoid()": (lambda a: a.sigmoid(), (SIGMOIDS * (1.0 - SIGMOIDS),)),
    "a.relu()": (lambda a: a.relu(), ((NUMBERS > 0.0) * 1.0,)),
    "a.exp()": (lambda a: a.exp(), (np.exp(NUMBERS),)),
    "a.log()": (lambda a: a.log(), (1.0 / (np.abs(NUMBERS) + 1e-6),)),
    "a.sum(0)": (lambda a: a.sum(0), (ZEROS + 1.0,)),
    "a.sum(1)": (lambda a: a.sum(1), (ZEROS + 1.0,)),
    "a < b": (lambda a, b: a < b, (ZEROS, ZEROS)),
    "a == b": (lambda a, b: a == b, (ZEROS, ZEROS)),
}


@pytest.mark.task2_4
@pytest.mark.parametrize("name", SLOPES)
def test_a_function_has_its_slopes(name: str) -> None:
    function, slopes = SLOPES[name]
    arrays = [np.abs(x) if "log" in name else x for x in (NUMBERS, OTHERS)][: len(slopes)]
    inputs = [tensor(x.tolist(), requires_grad=True) for x in arrays]
    out = result_of(name, function, *inputs)
    result_of(f"backward of {name}", out.backward, tensor(np.full(out.shape, 3.0).tolist()))
    for letter, x, slope in zip("ab", inputs, slopes, strict=False):
        assert x.grad is not None, f"{name} gives {letter} no gradient"
        mistakes = {"the gradient that is passed in is not multiplied by the slope": ZEROS + 3.0}
        if len(slopes) == 2:
            mistakes["each factor gets the other one times the gradient"] = 3.0 * (
                NUMBERS if letter == "a" else OTHERS
            )
        if "sigmoid" in name:
            mistakes["the slope of sigmoid is out (1 - out)"] = 3.0 * SIGMOIDS
        what = f"gradient of {name} in {letter}"
        assert_close_or_explain(x.grad.to_numpy(), 3.0 * slope, what, mistakes)


@pytest.mark.task2_4
@pytest.mark.parametrize("fn", one_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_one_derivative(fn: Fn, data: DataObject) -> None:
    grad_check(fn[2], on_lattice(data)[1])


@pytest.mark.task2_4
@pytest.mark.parametrize("fn", two_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_two_derivatives(fn: Fn, data: DataObject) -> None:
    _, a = on_lattice(data)
    _, b = on_lattice(data, first=0.06, shape=a.shape)
    grad_check(fn[2], a, b)


@pytest.mark.task2_4
@pytest.mark.parametrize("fn", two_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_two_derivatives_of_operands_that_broadcast(fn: Fn, data: DataObject) -> None:
    _, a = on_lattice(data)
    _, row = on_lattice(data, first=0.06, shape=(1, *a.shape[1:]))
    _, last = on_lattice(data, first=0.06, shape=a.shape[-1:])
    grad_check(fn[2], a, row)
    grad_check(fn[2], last, a + 0.06)


@pytest.mark.task2_4
@pytest.mark.parametrize("fn", red_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_derivatives_of_reductions(fn: Fn, data: DataObject) -> None:
    grad_check(fn[2], on_lattice(data)[1])


@pytest.mark.task2_4
def test_the_gradient_of_a_permutation_of_three() -> None:
    array = np.arange(8.0).reshape(2, 2, 2)
    a = tensor(array.tolist(), requires_grad=True)
    a.permute(1, 2, 0).backward(tensor(array.transpose(1, 2, 0).tolist()))
    mistakes = {
        "the gradient is permuted by the same order again, not by the inverse order": (
            array.transpose(1, 2, 0).transpose(1, 2, 0)
        ),
        "the gradient is not permuted back": array.transpose(1, 2, 0),
    }
    assert a.grad is not None
    assert_close_or_explain(a.grad.to_numpy(), array, "gradient of permute(1, 2, 0)", mistakes)


@pytest.mark.task2_4
@given(data())
def test_gradients_are_permuted_back(data: DataObject) -> None:
    array, a = on_lattice(data)
    order = data.draw(permutations(range(a.dims)))
    a.requires_grad_(True)
    a.permute(*order).backward(tensor(array.transpose(order) * 2.0))
    assert_close_arrays(a.grad, array * 2.0, np.float64, f"gradient of permute{tuple(order)}")


@pytest.mark.task2_4
@given(data())
def test_a_gradient_has_the_shape_of_its_tensor(data: DataObject) -> None:
    array_a, a = on_lattice(data)
    kept = tuple(data.draw(permutations(range(a.dims)))[: a.dims // 2])
    shape = tuple(size if dim in kept else 1 for dim, size in enumerate(a.shape))
    array_b, b = on_lattice(data, shape=shape[data.draw(permutations(range(2)))[0] :] or (1,))
    a.requires_grad_(True)
    b.requires_grad_(True)
    out = a * b
    out.backward(tensor(np.ones(out.shape)))
    ones = np.ones(out.shape)
    assert_close_arrays(a.grad, sum_to(ones * array_b, a.shape), np.float64, "gradient of a", 50)
    assert_close_arrays(b.grad, sum_to(ones * array_a, b.shape), np.float64, "gradient of b", 50)


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
