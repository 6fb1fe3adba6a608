"""Tasks 0.2 and 0.3: a property test is worth something if it notices a broken operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.strategies import lists, tuples

from minitorch import operators

from ..strategies import small_floats
from . import test_operators as properties

#: Examples of a property test, the same ones each time. A group costs little more than one example does.
GROUPS, EXAMPLES_OF_GROUP = 10, 20
DRAWN = {float: small_floats, list[float]: properties.number_lists}


def run_often(test: str) -> None:
    """Run a property test with more examples than a test run has, which may be very few."""
    body = getattr(properties, test).hypothesis.inner_test
    example = tuples(*(DRAWN[x.annotation] for x in signature(body).parameters.values()))

    # No search for the smallest example.
    @settings(max_examples=GROUPS, derandomize=True, database=None, phases=[Phase.generate])
    @given(lists(example, min_size=EXAMPLES_OF_GROUP, max_size=EXAMPLES_OF_GROUP))
    def run(examples: list[tuple[Any, ...]]) -> None:
        for values in examples:
            with suppress(UnsatisfiedAssumption):
                body(*values)

    run()


add, exp, log, lt, mul = (operators.add, operators.exp, operators.log, operators.lt, operators.mul)

CYCLE = "goes round in a circle, so that a < b and b < c do not give a < c"

#: Test → broken operators that it must notice, each alone: name, what stands in its place, and what is
#: wrong with that.
BROKEN: list[tuple[str, str, Callable[..., Any], str]] = [
    ("test_sigmoid", "sigmoid", lambda x: 2.0 * operators.EPS + x, "is x and leaves [0, 1]"),
    ("test_sigmoid", "sigmoid", lambda x: 0.5, "is 0.5 everywhere and does not rise"),
    ("test_sigmoid", "sigmoid", lambda x: 1.0 if x > 0.0 else 0.0, "is 0 at x = 0, and not 0.5"),
    ("test_sigmoid", "sigmoid", lambda x: 1.0 / (1.0 + 2.0 ** min(x, 500.0)), "falls"),
    ("test_transitive", "lt", lambda x, y: 1.0 if (y - x) % 3.0 >= 1.5 else 0.0, CYCLE),
    ("test_transitive", "lt", lambda x, y: 1.0 if 0.0 < (y - x) % 3.0 < 2.0 else 0.0, CYCLE),
    ("test_symmetric", "mul", lambda x, y: x * y + x, "is x y + x"),
    ("test_symmetric", "mul", lambda x, y: x - y, "is x - y"),
    ("test_distribute", "mul", lambda x, y: x * y + 1.0, "is x y + 1"),
    ("test_distribute", "add", lambda x, y: x + y + 1.0, "is x + y + 1"),
    ("test_sum_distribute", "sum", lambda xs: 1.0 + float(len(list(xs))), "counts the numbers"),
    ("test_sum_distribute", "addLists", lambda xs, ys: list(xs), "is the first list"),
]
MARKS = {"test_sum_distribute": pytest.mark.task0_3}

#: The property of one's own choice may be of any operator: one of these must be noticed.
ANY: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x - y + 1.0,
    "eq": lambda x, y: 1.0 if x != y else 0.0,
    "exp": lambda x: exp(x) + 1.0,
    "id": lambda x: x + 1.0,
    "inv": lambda x: 1.0 / x + 1.0,
    "is_close": lambda x, y: 1.0 if abs(x - y) > 1.0 else 0.0,
    "log": lambda x: log(x) + 1.0,
    "lt": lambda x, y: 1.0 - lt(y, x),
    "max": lambda x, y: x if x < y else y - 1.0,
    "mul": lambda x, y: x * y + x + 1.0,
    "neg": lambda x: -x + 1.0,
    "relu": lambda x: x - 1.0,
    "sigmoid": lambda x: x,
}


@cache
def accept_right_operators(test: str) -> None:
    """Run a property test as it is, once for all operators that it must notice."""
    run_often(test)


def notices(
    test: str, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Tell whether a property test fails when an operator is replaced by a broken one."""
    with monkeypatch.context() as patch:
        for module in (operators, properties):
            if hasattr(module, name):
                patch.setattr(module, name, broken)
        try:
            run_often(test)
        except Exception:
            return True
    return False


@pytest.mark.parametrize(
    ("test", "name", "broken", "how"),
    [
        pytest.param(*case, marks=MARKS.get(case[0], pytest.mark.task0_2), id=f"{case[0]}-{i}")
        for i, case in enumerate(BROKEN)
    ],
)
def test_a_property_test_notices_a_broken_operator(
    test: str, name: str, broken: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_right_operators(test)
    if not notices(test, name, broken, monkeypatch):
        pytest.fail(f"{test} passes with a broken {name}, one that {how}", pytrace=False)


@pytest.mark.task0_2
def test_the_property_of_your_own_notices_a_broken_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept_right_operators("test_other")
    noticed = (notices("test_other", name, broken, monkeypatch) for name, broken in ANY.items())
    if not any(noticed):
        pytest.fail(
            f"test_other passes whichever operator is broken: {', '.join(ANY)}", pytrace=False
        )
