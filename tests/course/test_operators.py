"""Module 0: the functions of numbers, and the functions of functions."""

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis.strategies import DataObject, SearchStrategy, data, floats, lists, sampled_from

from minitorch import operators
from minitorch.operators import (
    add,
    addLists,
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
    negList,
    prod,
    reduce,
    relu,
    relu_back,
    sigmoid,
    sum,
    zipWith,
)

from ..strategies import assert_close, result_of, small_floats

# --- task 0.1: operators ---------------------------------------------------------------------

Numbers = SearchStrategy[float]


ANY = small_floats
POSITIVE = floats(min_value=0.0, max_value=100.0)
NOT_ZERO = floats(min_value=0.01, max_value=100.0).flatmap(lambda x: sampled_from([x, -x]))
#: Operator, the same in Python's own words, and the numbers that it is tried with.
OPERATORS: tuple[tuple[Callable[..., float], Callable[..., float], tuple[Numbers, ...]], ...] = (
    (mul, lambda x, y: x * y, (ANY, ANY)),
    (id, lambda x: x, (ANY,)),
    (add, lambda x, y: x + y, (ANY, ANY)),
    (neg, lambda x: -x, (ANY,)),
    (lt, lambda x, y: 1.0 if x < y else 0.0, (ANY, ANY)),
    (eq, lambda x, y: 1.0 if x == y else 0.0, (ANY, ANY)),
    (max, lambda x, y: x if x > y else y, (ANY, ANY)),
    (is_close, lambda x, y: 1.0 if abs(x - y) < 0.01 else 0.0, (ANY, ANY)),
    (sigmoid, lambda x: 0.5 + 0.5 * math.tanh(0.5 * x), (ANY,)),
    (relu, lambda x: x if x > 0.0 else 0.0, (ANY,)),
    (log, lambda x: math.log(x + operators.EPS), (POSITIVE,)),
    (exp, math.exp, (ANY,)),
    (inv, lambda x: 1.0 / x, (NOT_ZERO,)),
    (log_back, lambda x, d: d / (x + operators.EPS), (POSITIVE, ANY)),
    (inv_back, lambda x, d: -d / (x * x), (NOT_ZERO, ANY)),
    (relu_back, lambda x, d: d if x > 0.0 else 0.0, (ANY, ANY)),
)


@pytest.mark.task0_1
@pytest.mark.parametrize(
    ("operator", "formula", "numbers"), OPERATORS, ids=[row[0].__name__ for row in OPERATORS]
)
@given(data())
def test_an_operator_computes_what_its_name_says(
    operator: Callable[..., float],
    formula: Callable[..., float],
    numbers: tuple[Numbers, ...],
    data: DataObject,
) -> None:
    args = [data.draw(number) for number in numbers]
    call = f"{operator.__name__}({', '.join(map(repr, args))})"
    got, want = result_of(call, operator, *args), formula(*args)
    # A bool, an int or a class of one's own would not do: backends compile these functions.
    assert type(got) is float, f"{call} returns {got!r} of type {type(got).__name__}, not a float"
    assert math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-12), (
        f"{call} returns {got!r}, expected {want!r}"
    )


@pytest.mark.task0_1
@pytest.mark.parametrize(
    ("operator", "args", "want"),
    [
        (lt, (1.5, 1.5), 0.0),
        (eq, (1.5, 1.5), 1.0),
        (max, (1.5, 1.5), 1.5),
        (max, (math.nan, 1.5), math.nan),
        (max, (1.5, math.nan), math.nan),
        (relu, (0.0,), 0.0),
        (relu, (math.nan,), math.nan),
        (relu_back, (0.0, 3.0), 0.0),
        (log, (0.0,), math.log(operators.EPS)),
        (log_back, (0.0, 1.0), 1.0 / operators.EPS),
    ],
)
def test_an_operator_at_its_edge(
    operator: Callable[..., float], args: tuple[float, ...], want: float
) -> None:
    got = result_of(f"{operator.__name__}{args}, expected to be {want!r},", operator, *args)
    is_right = math.isclose(got, want) or (got != got and want != want)
    assert is_right, f"{operator.__name__}{args} returns {got!r}, expected {want!r}"


# --- task 0.2: properties --------------------------------------------------------------------


@pytest.mark.task0_2
@given(small_floats, small_floats)
def test_sigmoid(a: float, b: float) -> None:
    """It lies in [0, 1], 1 - sigmoid(a) = sigmoid(-a), it crosses one half at 0 and rises."""
    # TASK 0.2: Assert the range, 1 - sigmoid(a) = sigmoid(-a), the value at 0, and that it rises.
    assert 0.0 <= sigmoid(a) <= 1.0
    assert 1.0 - sigmoid(a) == pytest.approx(sigmoid(-a))
    assert sigmoid(0.0) == 0.5
    # Within 25 of zero: further out a step is smaller than a float64 near 1 can show.
    low, high = sorted((a / 4.0, b / 4.0))
    assert sigmoid(low) <= sigmoid(high)
    assert sigmoid(low) < sigmoid(high + 1e-3)
    # END TASK 0.2


@pytest.mark.task0_2
@given(small_floats, small_floats, small_floats)
def test_transitive(a: float, b: float, c: float) -> None:
    """If a < b and b < c, then a < c."""
    # TASK 0.2: Assert that a < b and b < c imply a < c, with lt.
    assert lt(a, c) >= lt(a, b) * lt(b, c)
    # END TASK 0.2


@pytest.mark.task0_2
@given(small_floats, small_floats)
def test_symmetric(a: float, b: float) -> None:
    """A product does not depend on the order of its factors."""
    # TASK 0.2: Assert that the order of two factors does not matter.
    assert mul(a, b) == mul(b, a)
    # END TASK 0.2


@pytest.mark.task0_2
@given(small_floats, small_floats, small_floats)
def test_distribute(a: float, b: float, c: float) -> None:
    """Multiplication distributes over addition."""
    # TASK 0.2: Assert x (y + z) = x y + x z, with assert_close.
    assert_close(mul(a, add(b, c)), add(mul(a, b), mul(a, c)))
    # END TASK 0.2


@pytest.mark.task0_2
@given(small_floats)
def test_other(x: float) -> None:
    """A property that relates operators, such as: the logarithm undoes the exponential."""
    # TASK 0.2: A property of your own choice: which pair of operators belongs together?
    assume(x > -4.0)
    assert_close(log(exp(x)), x)
    # END TASK 0.2


# --- task 0.3: functions of functions --------------------------------------------------------

number_lists = lists(small_floats, min_size=5, max_size=5)


@pytest.mark.task0_3
@given(small_floats, small_floats, small_floats, small_floats)
def test_add_lists_adds_pairs(a: float, b: float, c: float, d: float) -> None:
    first, second = addLists([a, b], [c, d])
    assert first == a + c
    assert second == b + d


@pytest.mark.task0_3
@given(number_lists, number_lists)
def test_sum_distribute(xs: list[float], ys: list[float]) -> None:
    """The sum of two lists' sums is the sum of the lists' sum."""
    # TASK 0.3: Assert that sum(xs) + sum(ys) is the sum of addLists(xs, ys).
    assert_close(add(sum(xs), sum(ys)), sum(addLists(xs, ys)))
    # END TASK 0.3


@pytest.mark.task0_3
@given(lists(small_floats))
def test_sum_adds_up_any_list(xs: list[float]) -> None:
    total = result_of(f"sum({xs})", sum, xs)
    assert total == pytest.approx(math.fsum(xs), abs=1e-9), f"sum({xs}) is {total}"
    assert isinstance(sum([]), float)


@pytest.mark.task0_3
@given(small_floats, small_floats, small_floats)
def test_prod_multiplies_up(x: float, y: float, z: float) -> None:
    assert prod([]) == 1.0, (
        f"prod([]) is {prod([])}, expected 1.0: begin with what changes no product"
    )
    assert prod([x, y, z]) == pytest.approx(x * y * z)


@pytest.mark.task0_3
@given(lists(small_floats))
def test_neg_list_changes_every_sign(xs: list[float]) -> None:
    before, expected = [*xs], [-x for x in xs]
    negated = negList(xs)
    assert xs == before, "negList changes the list that it gets: make another one"
    assert list(negated) == expected
    assert list(negated) == expected, "the result can be read only once"


# --- the rest of the contract ----------------------------------------------------------------


@pytest.mark.task0_3
def test_reduce_starts_at_start_and_goes_from_the_left() -> None:
    empty = result_of("reduce(fn, 7.0)([])", reduce(add, 7.0), [])
    assert empty == 7.0, f"reduce(fn, 7.0)([]) is {empty}: the result for an empty list is start"
    digits = reduce(lambda total, x: 10 * total + x, 0.0)([1.0, 2.0, 3.0])
    assert digits == 123.0, (
        f"with fn(a, b) = 10 a + b, reduce(fn, 0.0)([1.0, 2.0, 3.0]) is {digits}, expected 123.0: "
        "fn gets the value so far first, then the next element, from left to right"
    )


@pytest.mark.task0_3
def test_lists_of_different_length_are_refused() -> None:
    try:
        pairs = list(zipWith(add)([1.0, 2.0], [1.0]))
    except ValueError:
        return
    pytest.fail(
        f"zipWith of two numbers and of one gives {pairs}, without an error: zip(strict=True)"
    )


@pytest.mark.task0_1
def test_sigmoid_does_not_overflow_far_from_zero() -> None:
    call = "sigmoid(-1e6), where e^-x overflows and e^x / (1 + e^x), which is the same, does not,"
    assert result_of(call, sigmoid, -1e6) == 0.0
    assert result_of("sigmoid(1e6)", sigmoid, 1e6) == 1.0


@pytest.mark.task0_1
def test_is_close_is_an_absolute_hundredth() -> None:
    assert is_close(1.0, 1.009) and is_close(1.009, 1.0)
    assert not is_close(1.0, 1.011) and not is_close(1.011, 1.0)
    assert not is_close(1e9, 1e9 + 1.0)
