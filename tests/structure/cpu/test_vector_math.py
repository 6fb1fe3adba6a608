"""exp2, exp, log and tanh of compiled loops: how precise they are, and that loops around them vectorise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats
from numba import njit

from kernels.cpu.runtime import vector_math
from kernels.runtime.jit import FASTMATH, fingerprint
from minitorch import fast_ops, operators
from minitorch.accelerated import cpu_loops as fast_loops

from ...tensor_strategies import on_dtypes

Array = np.ndarray[Any, Any]
NAMES = ["exp2", "exp", "log", "tanh"]
#: Units in the last place.
BOUNDS = {"exp2": 1.0, "exp": 1.0, "log": 1.0, "tanh": 2.75}
on_functions = pytest.mark.parametrize("name", NAMES)


def loop_of(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a loop around a function of one number, as those of the backend are."""

    @njit(error_model="numpy", **options)
    def loop(x, out):
        for i in range(len(x)):
            out[i] = function(x[i])

    return loop


LOOPS = {name: loop_of(getattr(vector_math, name)) for name in NAMES}


def applied(name: str, x: Array) -> Array:
    out = np.empty_like(x)
    LOOPS[name](x, out)
    return out


def exact(name: str, x: Array) -> Array:
    """Return what NumPy says, in more digits."""
    wide = np.float64 if x.dtype == np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        return getattr(np, name)(x.astype(wide))


def units_off(got: Array, wanted: Array) -> Array:
    """Return errors in units in the last place; 0 where both are infinite or NaN alike."""
    with np.errstate(all="ignore"):
        rounded = wanted.astype(got.dtype)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        unit = np.spacing(np.minimum(np.abs(rounded), np.finfo(got.dtype).max))
        return np.where(same, 0.0, np.abs(got - wanted) / np.abs(unit))


def everywhere(name: str, dtype: Any) -> Array:
    """Return some of all numbers of a dtype: as many in each binade, of both signs."""
    if dtype == np.float32:
        x = np.arange(0, 1 << 32, 8191, dtype=np.uint64).astype(np.uint32).view(np.float32)
    else:
        x = np.random.default_rng(0).integers(0, 1 << 64, 1 << 18, np.uint64).view(np.float64)
    if name == "exp2":  # for which it is made: 0 below the normal numbers, and nothing above these
        limit = np.finfo(dtype).maxexp - 2
        return x[~(np.abs(x) > limit)]
    return x


@on_functions
@on_dtypes
def test_the_error_is_within_its_bound(name: str, dtype: Any) -> None:
    # Most numbers are tiny or huge: where the function bends, more of them.
    near = np.random.default_rng(1).uniform(-1.0, 1.0, 1 << 18)
    for x in (everywhere(name, dtype), (2.0 * near).astype(dtype), (100.0 * near).astype(dtype)):
        off = units_off(applied(name, x), exact(name, x))
        worst = off.argmax()
        assert off[worst] <= BOUNDS[name], f"{name}({x[worst]!r}) is off by {off[worst]:.3g} units"


@on_functions
@on_dtypes
def test_what_is_not_a_plain_number(name: str, dtype: Any) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.array([np.nan, -np.inf, 0.0, -0.0, tiny, -tiny, -1.0, np.inf], dtype)
    if name == "exp2":
        x = x[:-1]
    got, wanted = applied(name, x), exact(name, x).astype(dtype)
    assert (units_off(got, wanted) <= BOUNDS[name]).all()
    np.testing.assert_array_equal(np.signbit(got[2:4]), np.signbit(wanted[2:4]))


@given(floats(width=32, allow_nan=False))
@settings(max_examples=200)
def test_the_hyperbolic_tangent_is_odd_and_at_most_1(number: float) -> None:
    for dtype in (np.float32, np.float64):
        up, down = applied("tanh", np.array([number, -number], dtype))
        assert up == -down
        assert abs(up) <= 1.0


@pytest.mark.parametrize("name", ["exp", "log", "tanh"])
def test_a_caller_may_reorder_its_own_sums(name: str) -> None:
    # x - n ln2 in two steps, or 2^n in two factors, would not survive it.
    x = np.linspace(-104.0, 89.0, 200001, dtype=np.float32)
    fast = np.empty_like(x)
    loop_of(getattr(vector_math, name), fastmath=FASTMATH)(x, fast)
    assert units_off(fast, exact(name, x)).max() <= BOUNDS[name]


@pytest.mark.parametrize("fn", [operators.exp, operators.sigmoid, operators.log, operators.tanh])
def test_loops_around_operators_vectorise(fn: Callable[[float], float]) -> None:
    loop = loop_of(njit(fast_loops.vectorised(fn)))
    x = np.ones(100, np.float32)
    loop(x, x.copy())
    (code,) = loop.inspect_llvm().values()
    assert re.search(r"call .*<\d+ x (float|double)> @llvm.fmuladd", code)
    assert not re.search(r"@(expf?|logf?|tanhf?)\(", code)


@pytest.mark.parametrize("fn", [operators.exp, operators.sigmoid, operators.log, operators.tanh])
def test_what_is_compiled_is_the_code_of_operators(fn: Any) -> None:
    vectorised = fast_loops.vectorised(fn)
    assert vectorised.__code__ is fn.__code__  # type: ignore[attr-defined]
    x = np.linspace(-3.0 if fn is not operators.log else 0.0, 3.0, 101)
    out = np.empty_like(x)
    loop_of(njit(vectorised))(x, out)
    np.testing.assert_allclose(out, [fn(number) for number in x], rtol=1e-15, atol=1e-16)


def test_the_fingerprint_of_a_loop_covers_what_stands_in_for_math(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = fast_ops.tensor_map(fast_loops.vectorised(operators.exp))
    before = fingerprint(loop)
    monkeypatch.setattr(vector_math.exp, "implementations", (lambda x: x * 2.0,))
    assert fingerprint(loop) != before
