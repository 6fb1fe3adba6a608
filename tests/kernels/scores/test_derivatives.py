"""Derivatives that are made from the source of a ``score_mod``, against difference quotients."""

from __future__ import annotations

import inspect
import linecache
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st
from numba import njit

import kernels
from minitorch import from_numpy, naive_attention

from ...support.attention.strategies import SCORE_MODS, Case
from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays

TABLE = np.array([0.5, -1.5, 0.25, 2.0])
STEP = 1e-3


@njit
def gentle(x: Any, y: Any) -> Any:
    slow = x / 4
    return slow * slow + math.sin(y)


PLACE = "score, batch, head, row, col"


def written(*lines: str, arguments: str = PLACE) -> Any:
    """Return the function that lines of source define, as a notebook cell would."""
    text = "\n".join((f"def drawn({arguments}):", *lines, ""))
    file = f"<cell {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    found = {"math": math, "np": np, "TABLE": TABLE, "gentle": gentle}
    exec(compile(text, file, "exec"), found)
    return found["drawn"]


UNARY = (
    "-{}", "abs({})", "math.sin({})", "np.cos({})", "math.tanh({})", "math.exp(-abs({}))", "{} ** 2",
    "math.sqrt(1 + {} ** 2)", "math.log(1.5 + math.fabs({}))", "(1 + {} ** 2) ** -0.5", "math.atan({})",
    "1.5 ** math.sin({})", "math.erf({})", "math.log1p(abs({}))", "float({})", "np.arctan({})",
    "np.square({})", "math.asin(math.tanh({}))", "math.acos(0.9 * math.sin({}))", "math.asinh({})",
    "math.acosh(1.5 + abs({}))", "math.atanh(0.9 * math.sin({}))", "math.sinh(math.sin({}))",
    "math.cosh(math.cos({}))", "math.tan(math.sin({}))", "math.erfc({})", "math.expm1(math.sin({}))",
    "np.exp2(math.sin({}))", "math.log2(1.5 + abs({}))", "math.log10(2 + abs({}))", "np.sign({}) * {}",
    "+{} * (round({}) + int({}))", "{} * (math.ceil({}) // 2 + math.trunc({}))",
    "{} * (math.floor({}) % 2)", "(TABLE[(row + col) % 4] + {}) % 3.5",
)  # fmt: skip
BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "{} / (1 + ({}) ** 2)", "min({}, {})", "max({}, 0.25, {})",
    "gentle({}, {})", "math.hypot({}, 1 + {})", "math.atan2({}, 2 + abs({}))", "math.copysign({}, {})",
    "(1 + abs({})) ** math.tanh({})", "np.fmod({}, 1 + abs({}))", "math.pow(1 + abs({}), math.cos({}))",
)  # fmt: skip
CONDITIONS = "{} < {}", "{} >= 0.5 and row > {}", "not {} > {}"


def expressions(leaves: tuple[str, ...]) -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        part = inner.map("({})".format)
        pair = st.tuples(part, part)
        chosen = st.tuples(st.sampled_from(CONDITIONS), pair, part, part).map(
            lambda x: f"{x[2]} if {x[0].format(*x[1])} else {x[3]}"
        )
        return st.one_of(
            st.builds(lambda form, x: form.replace("{}", x), st.sampled_from(UNARY), part),
            st.builds(lambda form, x: form.format(*x), st.sampled_from(BINARY), pair),
            chosen,
        )

    return st.recursive(st.sampled_from(leaves), grown, max_leaves=5)


FIRST = expressions(CONSTANTS := ("score", "score", "0.75", "-2", "row", "head", "TABLE[col]"))
LATER = expressions((*CONSTANTS, "a", "b"))


@st.composite
def functions(draw: st.DrawFn) -> Any:
    """Draw a function with variables, a branch and perhaps a loop."""
    condition = draw(st.sampled_from(CONDITIONS)).format("a", "b")
    lines = [
        f"    a, b = {draw(FIRST)}, {draw(FIRST)}",
        f"    if {condition}:",
        f"        a = {draw(LATER)}",
    ]
    if draw(st.booleans()):
        lines += ["    else:", f"        b *= {draw(LATER)}", "        score = b / 2"]
    if draw(st.booleans()):
        lines += ["    for i in range(2):", f"        a = math.tanh({draw(LATER)}) + i"]
    function = written(*lines, f"    return {draw(LATER)}")
    note(inspect.getsource(function))
    return function


def difference(function: Any, x: float, *place: int) -> float:
    """Return a difference quotient of order four; a place that is at or near a kink is rejected."""
    here = function(x, *place)

    def by(step: float) -> tuple[float, float]:
        right, left, far_right, far_left = (function(x + n * step, *place) for n in (1, -1, 2, -2))
        bend = (right + left - 2 * here) / step**2
        return (8 * (right - left) - (far_right - far_left)) / (12 * step), bend

    (coarse, bend), (fine, fine_bend) = by(STEP), by(STEP / 2)
    assume(abs(coarse - fine) <= 1e-7 * (1 + abs(fine)) and abs(bend - fine_bend) < 1)
    return fine


@at_most(150)
@given(functions(), st.floats(-3, 3), st.integers(0, 3), st.integers(0, 3))
def test_the_derivatives_are_the_limits_of_differences(
    function: Any, score: float, row: int, col: int
) -> None:
    try:
        derivative = kernels.score_derivative(function)
        second = kernels.score_derivative(derivative)
        place = 1, 2, row, col
        for one, next_ in ((function, derivative), (derivative, second)):
            expected = difference(one, score, *place)
            assert abs(next_(score, *place) - expected) <= 1e-5 * (1 + abs(expected))
    except OverflowError:
        assume(False)


@at_most(8)
@given(functions(), st.floats(-3, 3))
def test_a_derivative_is_compiled_as_the_function_is(function: Any, score: float) -> None:
    derivative = kernels.score_derivative(kernels.score_derivative(function))
    expected = derivative(score, 0, 1, 2, 3)
    assert math.isclose(njit(derivative)(score, 0, 1, 2, 3), expected, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("text", "at", "side"),
    [
        ("abs(score)", 0.0, 1.0),
        ("max(score, 0.0)", 0.0, 1.0),
        ("max(0.0, score)", 0.0, 0.0),
        ("min(2 * score, score)", 0.0, 2.0),
        ("score * score if score < 2 else 3 * score", 2.0, 3.0),
        ("score * score if score <= 2 else 3 * score", 2.0, 4.0),
        ("score ** 0 + score ** 1 + score ** 2", 0.0, 1.0),
    ],
)
def test_at_a_kink_the_derivative_is_that_of_the_side_that_the_function_takes(
    text: str, at: float, side: float
) -> None:
    assert kernels.score_derivative(written(f"    return {text}"))(at, 0, 0, 0, 0) == side


def test_the_source_of_a_derivative_can_be_read() -> None:
    def capped(score: float, batch: int, head: int, row: int, col: int) -> float:
        """Bound a score."""
        unused = score * 7  # noqa: F841
        return 5.0 * math.tanh(score / 5.0) - 0.5 * abs(row - col)

    assert inspect.getsource(kernels.score_derivative(capped)) == (
        "def derivative_of_capped(score, batch, head, row, col):\n"
        "    return 5.0 * ((1.0 - math.tanh(score / 5.0) ** 2) * 0.2)\n"
    )


def squared_times(by: float) -> Any:
    return lambda s, b, h, r, c: s * by * s


def test_lambdas_of_one_line_and_captured_values_do_not_mix() -> None:
    pair = (lambda s, b, h, r, c: s * s, lambda s, b, h, r, c: s * s * s)
    scaled = [lambda s, b, h, r, c, by=by: s * by for by in (2.0, 3.0)]
    grown = [squared_times(by) for by in (2.0, 3.0)]
    found = [kernels.score_derivative(one)(2.0, 0, 0, 0, 0) for one in (*pair, *scaled, *grown)]
    assert found == [4.0, 12.0, 2.0, 3.0, 8.0, 12.0]


#: What is refused → the source from its third line, the expression that the error names, and its line.
REFUSED = {
    "a loop that depends on the score": ("    while score > 1:\n        score -= 1", "score > 1", 3),
    "a range that depends on the score": (
        "    for i in range(int(score)):\n        score -= 1", "for i in range(int(score)):", 3),
    "a function without a rule": (
        "    head = 1\n    score = math.gamma(1 + score)", "math.gamma(1 + score)", 4),
    "an array that is written": ("    own = np.zeros(1)\n    own[0] = score", "own[0] = score", 4),
    "a statement": ("    try:\n        score = 1\n    finally:\n        pass", "try:", 3),
    "an attribute": ("    score = score.real", "score.real", 3),
    "an element": ("    score = (score, row)[0]", "(score, row)[0]", 3),
    "a pair from a call": ("    score, row = divmod(score, 2)", "divmod(score, 2)", 3),
    "a function within": ("    inner = lambda: score\n    return inner()", "lambda: score", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_expression_and_its_line(name: str) -> None:
    lines, expression, line = REFUSED[name]
    function = written("    batch = 2", lines, "    return score")
    with pytest.raises(ValueError) as caught:
        kernels.score_derivative(function)
    assert f"`{expression}` (<cell" in str(caught.value)
    assert f">:{line})" in str(caught.value)


def test_a_function_without_source_is_refused_until_it_has_a_derivative() -> None:
    found: dict[str, Any] = {}
    exec("def halved(score, batch, head, row, col): return score / 2", found)
    q = np.random.default_rng(0).standard_normal((2, 9, 4))
    out, lse = kernels.flash_attention_forward(q, q, q, score_mod=found["halved"])
    own = q, q, q, q, out, lse
    with pytest.raises(ValueError, match=r"source is not available.*\(function, derivative\)"):
        kernels.flash_attention_backward(*own, score_mod=found["halved"])
    kernels.flash_attention_backward(*own, score_mod=(found["halved"], lambda s, b, h, r, c: 0.5))


@pytest.mark.parametrize("pair", SCORE_MODS)
@pytest.mark.parametrize("rung", ["flash2", "naive"])
def test_gradients_of_arrays_are_those_with_a_derivative_by_hand(pair: Any, rung: str) -> None:
    rng = np.random.default_rng(1)
    operands = [rng.standard_normal((2, 2, rows, 5)) for rows in (70, 90, 90, 70)]
    found, expected = (
        Case(*operands, options={"score_mod": mod, "is_causal": True, "rung": rung}).call()
        for mod in (pair[0], pair)
    )
    for name, right in expected.items():
        assert_close_arrays(found[name], right, np.float64, name)


@pytest.mark.parametrize("pair", SCORE_MODS)
def test_gradients_of_tensors_are_those_with_a_derivative_by_hand(pair: Any) -> None:
    values = np.random.default_rng(2).standard_normal((2, 7, 4))
    gradients = []
    for attend, mod in ((naive_attention, pair), (naive_attention, pair[0]), (None, pair[0])):
        q = from_numpy(values)
        q.requires_grad_(True)
        options: dict[str, Any] = {"score_mod": mod, "softcap": 2.0}
        out = q.flash_attention(q, q, **options) if attend is None else attend(q, q, q, **options)
        (out * out).sum().backward()
        assert q.grad is not None
        gradients.append(q.grad.to_numpy())
    for found in gradients[1:]:
        assert_close_arrays(found, gradients[0], np.float64, "gradient")
