"""Module 0: the functions of numbers, and the functions of functions."""

from collections.abc import Callable

import numba
import pytest
from hypothesis import assume, given, settings
from hypothesis.strategies import floats

from minitorch import MathTest, operators
from minitorch.operators import (
    add,
    eq,
    exp,
    id,
    inv,
    inv_back,
    is_close,
    log,
    log_back,
    lt,
    max,
    mul,
    neg,
    relu,
    relu_back,
    sigmoid,
)

from ..strategies import small_floats


def test_relu_of_an_int_is_a_float() -> None:
    assert isinstance(relu(2), float)


@given(floats(min_value=0.1, max_value=100), small_floats)
def test_pow_and_tanh_are_those_of_math(x: float, y: float) -> None:
    assert operators.pow(x, y) == pytest.approx(x**y)
    assert operators.pow(-x, 3.0) == pytest.approx(-(x**3))
    assert operators.tanh(y) == pytest.approx(2.0 * sigmoid(2.0 * y) - 1.0, abs=1e-12)


ONE_NUMBER: tuple[Callable[[float], float], ...] = (
    exp,
    id,
    inv,
    log,
    neg,
    relu,
    sigmoid,
    operators.tanh,
)
TWO_NUMBERS: tuple[Callable[[float, float], float], ...] = (
    add,
    eq,
    inv_back,
    is_close,
    log_back,
    lt,
    max,
    mul,
    operators.pow,
    relu_back,
)


def test_every_operator_compiles() -> None:
    """The backends compile these very functions."""
    for f in ONE_NUMBER:
        compiled = numba.njit("float64(float64)")(f)
        assert compiled(1.75) == pytest.approx(f(1.75)), f.__name__
    for f in TWO_NUMBERS:
        compiled = numba.njit("float64(float64, float64)")(f)
        assert compiled(1.75, -2.0) == pytest.approx(f(1.75, -2.0)), f.__name__


def test_operators_with_branches_compile_for_float32() -> None:
    """There the branches have different types, a float32 and a literal."""
    for f in (relu, sigmoid):
        compiled = numba.njit("float32(float32)")(f)
        for x in (-1.75, 1.75):
            assert compiled(x) == pytest.approx(f(x), rel=1e-6), f.__name__


one_arg, two_arg, red_arg = MathTest._tests()


@pytest.mark.parametrize("fn", one_arg)
@settings(max_examples=30)
@given(small_floats)
def test_one_args(fn: tuple[str, Callable[[float], float]], x: float) -> None:
    name, f = fn
    assume(name != "inv" or x != -3.5)
    assert isinstance(f(x), float)


@pytest.mark.parametrize("fn", two_arg)
@settings(max_examples=30)
@given(small_floats, small_floats)
def test_two_args(fn: tuple[str, Callable[[float, float], float]], x: float, y: float) -> None:
    name, f = fn
    assume(name != "div2" or y != -5.5)
    assert isinstance(f(x, y), float)


def test_the_list_of_test_functions_is_the_published_one() -> None:
    """Test ids are made from the place in this list."""
    assert [name for name, _ in one_arg] == [
        *("addConstant", "complex", "cube", "div", "exp", "explog", "inv", "log", "multConstant"),
        *("neg", "relu", "sig", "square", "subConstant"),
    ]
    assert [name for name, _ in two_arg] == ["add2", "div2", "eq2", "gt2", "lt2", "mul2"]
    assert [name for name, _ in red_arg] == ["mean_full_red", "mean_red", "sum_red"]
    assert [f([1.0, 2.0, 6.0]) for _, f in red_arg] == [3.0, 3.0, 9.0]
