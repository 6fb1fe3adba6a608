"""Module 2: tensors, their operations and their gradients, on the simple backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, permutations

from minitorch import MathTestVariable, Tensor, grad_check, tensor

from ..strategies import result_of
from ..support.mistakes import assert_close_or_explain
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import Array, laid_out, lattice, shapes, sum_to

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
@pytest.mark.parametrize("fn", one_arg + two_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_functions_are_those_of_numbers(fn: Fn, data: DataObject) -> None:
    name, on_floats, on_tensors = fn
    drawn = [on_lattice(data)]
    if fn in two_arg:
        drawn.append(on_lattice(data, first=0.06, shape=drawn[0][1].shape))
    arrays, tensors = zip(*drawn, strict=True)
    assert_close_arrays(on_tensors(*tensors), applied(on_floats, *arrays), np.float64, name)


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
    values = out.to_numpy().copy()
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
        if "relu" in name:
            mistakes["the operands of relu_back_zip are exchanged"] = NUMBERS
        what = f"gradient of {name} in {letter}"
        assert_close_or_explain(x.grad.to_numpy(), 3.0 * slope, what, mistakes)
    assert np.array_equal(out.to_numpy(), values), (
        f"backward of {name} overwrites what forward has saved and returned: compute a new tensor"
    )


@pytest.mark.task2_4
@pytest.mark.parametrize("fn", one_arg + red_arg, ids=lambda fn: fn[0])
@few
@given(data())
def test_one_derivative(fn: Fn, data: DataObject) -> None:
    grad_check(fn[2], on_lattice(data)[1])


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
