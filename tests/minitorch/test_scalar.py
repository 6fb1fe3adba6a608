"""Module 1: scalars, their values and their derivatives."""

import numpy as np
import pytest
from hypothesis import assume, given

from minitorch import Scalar, derivative_check, operators
from minitorch.scalar_functions import Inv, Mul, Neg, unwrap_tuple, wrap_tuple

from ..strategies import assert_close, small_floats


@given(small_floats, small_floats)
def test_simple(x: float, y: float) -> None:
    a, b = Scalar(x), Scalar(y)
    assert (a + b).data == x + y
    assert (a - b).data == x - y
    assert (a * b).data == x * y
    assert (-a).data == -x
    assert a.relu().data == operators.relu(x)
    assert a.sigmoid().data == operators.sigmoid(x)
    assert a.exp().data == operators.exp(x)
    assert (a * a).log().data == operators.log(x * x)


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


@given(small_floats)
def test_reflected_operators_have_the_right_slopes(x: float) -> None:
    assume(abs(x) > 0.1)
    a = Scalar(x)
    derivative_check(lambda x: 2 - x, a)
    derivative_check(lambda x: 2 / x, a)


@given(small_floats, small_floats)
def test_comparisons_serve_as_conditions(x: float, y: float) -> None:
    a, b = Scalar(x), Scalar(y)
    assert bool(a < b) == (x < y)
    assert bool(a > b) == (x > y)
    assert bool(a == b) == (x == y)
    assert bool(a != b) == (x != y)
    assert bool(a < 1) == (x < 1)
    assert (a == a).data == 1.0


def test_a_scalar_cannot_be_hashed() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Scalar(1.0))


def test_a_scalar_of_an_int_holds_a_float() -> None:
    a = Scalar(3)
    assert isinstance(a.data, float)
    assert repr(a) == "Scalar(3.000000)"


def test_names_are_kept_and_default_to_the_id() -> None:
    a, b = Scalar(1.0), Scalar(1.0, name="x_1")
    assert a.name == str(a.unique_id)
    assert b.name == "x_1"
    assert a.unique_id != b.unique_id


def test_leaves_do_not_share_a_history() -> None:
    a, b = Scalar(1.0), Scalar(1.0)
    assert a.history is not b.history


def test_a_function_of_numbers_alone_gives_a_scalar_over_leaves() -> None:
    quarter = Inv.apply(4)
    assert isinstance(quarter, Scalar)
    assert quarter.data == 0.25
    assert [leaf.is_leaf() for leaf in quarter.parents] == [True]
    assert Mul.apply(2.0, 3.0).data == 6.0


def test_a_function_whose_result_is_no_float_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"Neg.forward returned -5 of type int"):
        Neg.apply(5)


def test_a_function_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="type str"):
        _ = Scalar(1.0) + "1"  # pyright: ignore[reportOperatorIssue]


def test_relu_is_flat_at_its_kink() -> None:
    a = Scalar(0.0)
    out = a.relu()
    out.backward()
    assert (out.data, a.derivative) == (0.0, 0.0)


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


def test_derivative_check_can_be_repeated() -> None:
    a = Scalar(2.0)
    derivative_check(lambda x: x * x, a)
    derivative_check(lambda x: x * x, a)
    assert a.derivative == 4.0


def test_wrap_and_unwrap_a_tuple() -> None:
    assert wrap_tuple(1.0) == (1.0,)
    assert wrap_tuple((1.0, 2.0)) == (1.0, 2.0)
    assert unwrap_tuple((1.0,)) == 1.0
    assert unwrap_tuple((1.0, 2.0)) == (1.0, 2.0)
