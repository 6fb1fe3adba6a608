"""Module 1: scalars, their values and their derivatives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats

from minitorch import Scalar, derivative_check, operators
from minitorch.operators import sigmoid
from minitorch.scalar_functions import Inv, Mul

from ..strategies import assert_close, small_floats


@given(small_floats)
def test_a_number_may_stand_on_either_side(x: float) -> None:
    a = Scalar(x + 200.0)
    for number in (3, 3.0, np.float64(3.0), True):
        n = float(number)
        assert (a + number).data == (number + a).data == a.data + n
        assert (a * number).data == (number * a).data == a.data * n
        assert (a - number).data == a.data - n
        assert (number - a).data == n - a.data
        assert_close((a / number).data, a.data / n)
        assert_close((number / a).data, n / a.data)


@given(small_floats, small_floats)
def test_comparisons_serve_as_conditions(x: float, y: float) -> None:
    a, b = Scalar(x), Scalar(y)
    assert bool(a < b) == (x < y)
    assert bool(a > b) == (x > y)
    assert bool(a == b) == (x == y)
    assert bool(a != b) == (x != y)
    assert bool(a < 1) == (x < 1)
    assert (a == a).data == 1.0


def test_a_function_of_numbers_alone_gives_a_scalar_over_leaves() -> None:
    quarter = Inv.apply(4)
    assert isinstance(quarter, Scalar)
    assert quarter.data == 0.25
    assert [leaf.is_leaf() for leaf in quarter.parents] == [True]
    assert Mul.apply(2.0, 3.0).data == 6.0


def test_sigmoid_survives_far_from_zero() -> None:
    a = Scalar(-1e6)
    a.sigmoid().backward()
    assert a.derivative == 0.0


def test_derivative_check_notices_a_wrong_derivative() -> None:
    class Twisted(Mul):
        @staticmethod
        def backward(ctx, d_output: float) -> tuple[float, float]:
            a, b = ctx.saved_values
            return d_output * a, d_output * b

    with pytest.raises(AssertionError, match="argument 0: backward gives 2"):
        derivative_check(Twisted.apply, Scalar(2.0), Scalar(5.0))


# -- operators ---------------------------------------------------------------------------------


@given(floats(min_value=0.1, max_value=100), small_floats)
def test_pow_and_tanh_are_those_of_math(x: float, y: float) -> None:
    assert operators.pow(x, y) == pytest.approx(x**y)
    assert operators.pow(-x, 3.0) == pytest.approx(-(x**3))
    assert operators.tanh(y) == pytest.approx(2.0 * sigmoid(2.0 * y) - 1.0, abs=1e-12)
