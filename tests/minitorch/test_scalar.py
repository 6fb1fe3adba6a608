"""Module 1: scalars, their values and their derivatives."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis.strategies import SearchStrategy, floats, sampled_from

from minitorch import MathTestVariable, Scalar, central_difference, derivative_check, operators
from minitorch.scalar_functions import Inv, Mul, Neg, unwrap_tuple, wrap_tuple

from ..strategies import assert_close, result_of, small_floats

scalars: SearchStrategy[Scalar] = small_floats.map(Scalar)
small_scalars: SearchStrategy[Scalar] = small_floats.map(lambda x: Scalar(x / 10.0))

Fn = tuple[str, Callable[..., float], Callable[..., Scalar]]
one_arg, two_arg, _ = MathTestVariable._comp_testing()

# Where a function jumps or bends, its slope is not what a central difference measures; near a pole
# the difference is too coarse. Hypothesis finds such points: it reads the constants of our source.
EDGES: dict[str, Callable[..., float]] = {
    "inv": lambda a: a + 3.5,
    "relu": lambda a: a + 5.5,
    "complex": lambda a: a + 0.7,
    "div2": lambda a, b: b + 5.5,
    "gt2": lambda a, b: a + 1.2 - b,
    "lt2": lambda a, b: a + 1.2 - b,
    "eq2": lambda a, b: a - b - 5.5,
}


def away_from_edges(name: str, *xs: Scalar) -> bool:
    return name not in EDGES or abs(EDGES[name](*(x.data for x in xs))) > 1e-2


NOT_ZERO = floats(min_value=0.25, max_value=4.0).flatmap(lambda x: sampled_from([x, -x]))
#: What is written → the same on Scalars, its value, and its slope in each Scalar.
Row = tuple[Callable[..., Scalar], Callable[..., float], tuple[Callable[..., float], ...]]
FUNCTIONS: dict[str, Row] = {
    "a + b": (lambda a, b: a + b, lambda a, b: a + b, (lambda a, b: 1.0, lambda a, b: 1.0)),
    "a - b": (lambda a, b: a - b, lambda a, b: a - b, (lambda a, b: 1.0, lambda a, b: -1.0)),
    "a * b": (lambda a, b: a * b, lambda a, b: a * b, (lambda a, b: b, lambda a, b: a)),
    "1 / a": (lambda a: 1.0 / a, lambda a: 1.0 / a, (lambda a: -1.0 / a**2,)),
    "-a": (lambda a: -a, lambda a: -a, (lambda a: -1.0,)),
    "a < b": (lambda a, b: a < b, operators.lt, (lambda a, b: 0.0, lambda a, b: 0.0)),
    "a > b": (lambda a, b: a > b, lambda a, b: float(a > b), (lambda a, b: 0.0, lambda a, b: 0.0)),
    "a == b": (lambda a, b: a == b, operators.eq, (lambda a, b: 0.0, lambda a, b: 0.0)),
    "(a * a).log()": (
        lambda a: (a * a).log(), lambda a: operators.log(a * a), (lambda a: 2.0 * a / (a * a + 1e-6),)
    ),
    "a.exp()": (lambda a: a.exp(), operators.exp, (operators.exp,)),
    "a.sigmoid()": (
        lambda a: a.sigmoid(), operators.sigmoid,
        (lambda a: operators.sigmoid(a) * operators.sigmoid(-a),),
    ),
    "a.relu()": (lambda a: a.relu(), operators.relu, (lambda a: float(a > 0.0),)),
}  # fmt: skip
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def called(name: str, x: float, y: float) -> tuple[str, list[Scalar], Scalar]:
    """Apply a function of the table; return what to say in an error, its inputs and its result."""
    on_scalars, _, slopes = FUNCTIONS[name]
    inputs = [Scalar(x), Scalar(y)][: len(slopes)]
    at = ", ".join(f"{letter} = {v.data}" for letter, v in zip("ab", inputs, strict=False))
    return f"{name} at {at}", inputs, result_of(f"{name} at {at}", on_scalars, *inputs)


# --- task 1.1: central difference ------------------------------------------------------------


@pytest.mark.task1_1
def test_central_difference_measures_slopes() -> None:
    def third(a: float, b: float, c: float) -> float:
        return a - b * c * c

    for f, point, arg, expected in (
        (operators.id, (5,), 0, 1.0),
        (operators.add, (5, 10), 0, 1.0),
        (operators.mul, (5, 10), 0, 10.0),
        (operators.mul, (5, 10), 1, 5.0),
        (operators.exp, (2.0,), 0, operators.exp(2.0)),
        (third, (1, 2, 3), 2, -12.0),
    ):
        slope = central_difference(f, *point, arg=arg)
        assert slope == pytest.approx(expected, abs=1e-2), (
            f"central_difference({f.__name__}, {', '.join(map(str, point))}, arg={arg}) is {slope}, "
            f"expected {expected}: divide by 2 epsilon, and move argument {arg} only"
        )


@pytest.mark.task1_1
def test_central_difference_is_two_sided() -> None:
    slope = central_difference(lambda x: x * x, 1.0, epsilon=0.5)
    assert slope == pytest.approx(2.0), (
        f"the slope of x² at 1 with epsilon 0.5 is {slope}, expected 2.0: the two-sided difference "
        "(f(x + epsilon) - f(x - epsilon)) / (2 epsilon) is exact there"
    )


# --- task 1.2: scalars, forward --------------------------------------------------------------


@pytest.mark.task1_2
@each_function
@settings(max_examples=10)
@given(NOT_ZERO, NOT_ZERO)
def test_a_function_has_its_value_and_records_how_it_was_computed(
    name: str, x: float, y: float
) -> None:
    call, inputs, out = called(name, x, y)
    expected = FUNCTIONS[name][1](*(v.data for v in inputs))
    assert out.data == pytest.approx(expected), f"{call} is {out.data}, expected {expected}"
    history = out.history
    assert history is not None and history.last_fn is not None, (
        f"{call}: the result has no history; return what apply of the ScalarFunction returns"
    )
    if name in ("a * b", "1 / a", "a.exp()", "a.sigmoid()", "a.relu()"):
        assert history.ctx is not None and history.ctx.saved_values, (
            f"{call}: {history.last_fn.__name__}.forward saves nothing, and backward will need it"
        )


@pytest.mark.task1_2
@pytest.mark.parametrize("fn", one_arg)
@settings(max_examples=30)
@given(scalars)
def test_one_args(fn: Fn, a: Scalar) -> None:
    name, on_floats, on_scalars = fn
    assume(away_from_edges(name, a))
    got, expected = on_scalars(a).data, on_floats(a.data)
    assert got == pytest.approx(expected), f"{name}({a.data}) is {got}, expected {expected}"


@pytest.mark.task1_2
@pytest.mark.parametrize("fn", two_arg)
@settings(max_examples=30)
@given(scalars, scalars)
def test_two_args(fn: Fn, a: Scalar, b: Scalar) -> None:
    name, on_floats, on_scalars = fn
    assume(away_from_edges(name, a, b))
    got, expected = on_scalars(a, b).data, on_floats(a.data, b.data)
    assert got == pytest.approx(expected), (
        f"{name}({a.data}, {b.data}) is {got}, expected {expected}"
    )


# --- task 1.4: backward ----------------------------------------------------------------------


@pytest.mark.task1_4
@each_function
@settings(max_examples=10)
@given(NOT_ZERO, NOT_ZERO)
def test_a_function_has_its_slopes(name: str, x: float, y: float) -> None:
    call, inputs, out = called(name, x, y)
    out.backward(3.0)
    for letter, v, slope in zip("ab", inputs, FUNCTIONS[name][2], strict=False):
        expected = 3.0 * slope(*(v.data for v in inputs))
        assert v.derivative == pytest.approx(expected), (
            f"derivative of {call} in {letter}: backward(3.0) gives {v.derivative}, expected {expected}"
        )


@pytest.mark.task1_4
@pytest.mark.parametrize("fn", one_arg)
@settings(max_examples=30)
@given(scalars)
def test_one_derivative(fn: Fn, a: Scalar) -> None:
    name, _, on_scalars = fn
    assume(away_from_edges(name, a))
    derivative_check(on_scalars, a)


@pytest.mark.task1_4
@pytest.mark.parametrize("fn", two_arg)
@settings(max_examples=30)
@given(small_scalars, small_scalars)
def test_two_derivative(fn: Fn, a: Scalar, b: Scalar) -> None:
    name, _, on_scalars = fn
    assume(away_from_edges(name, a, b))
    derivative_check(on_scalars, a, b)


# --- the rest of the contract ----------------------------------------------------------------


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


@given(scalars)
def test_reflected_operators_have_the_right_slopes(a: Scalar) -> None:
    assume(abs(a.data) > 0.1)
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


@pytest.mark.task1_2
def test_a_scalar_equals_nothing_that_is_no_number() -> None:
    for other in (None, "1.0"):
        call = f"Scalar(1.0) == {other!r}, where __eq__ is to return NotImplemented,"
        equal = result_of(call, lambda other=other: Scalar(1.0) == other)
        assert equal is False, f"{call} is {equal!r}, expected False"


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
