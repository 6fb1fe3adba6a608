"""Module 1: scalars, their values and their derivatives."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats, sampled_from

from minitorch import Scalar, central_difference, operators

from ..strategies import result_of

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
        why = f"divide by 2 epsilon, and move argument {arg} only" if slope else "copy vals twice"
        assert slope == pytest.approx(expected, abs=1e-2), (
            f"central_difference({f.__name__}, {', '.join(map(str, point))}, arg={arg}) is {slope}, "
            f"expected {expected}: {why}"
        )


@pytest.mark.task1_1
def test_central_difference_is_two_sided() -> None:
    points: list[float] = []
    slope = central_difference(lambda x: (points.append(x), x * x)[1], 1.0, epsilon=0.5)
    assert slope == pytest.approx(2.0), (
        f"the slope of x² at 1 with epsilon 0.5 is {slope}, expected 2.0: the two-sided difference "
        "(f(x + epsilon) - f(x - epsilon)) / (2 epsilon) is exact there"
    )
    assert sorted(points) == [0.5, 1.5], (
        f"at 1 with epsilon 0.5, f is called with {points}, expected 1.5 and 0.5: move by epsilon"
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


# --- the rest of the contract ----------------------------------------------------------------


@pytest.mark.task1_2
def test_a_scalar_equals_nothing_that_is_no_number() -> None:
    for other in (None, "1.0"):
        call = f"Scalar(1.0) == {other!r}, where __eq__ is to return NotImplemented,"
        equal = result_of(call, lambda other=other: Scalar(1.0) == other)
        assert equal is False, f"{call} is {equal!r}, expected False"
