"""User's functions of a score: which are the same, and that none is taken as it was before."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import make_problem
from kernels.scores.mods import as_mod

from ...support.tolerances import assert_close_arrays

PLACE = "(batch, head, row, col)"


def reach(limit: Any) -> Any:
    """Return a function made anew, that hides what is further away than ``limit``."""
    return lambda batch, head, row, col: row - col <= limit


@pytest.mark.parametrize(
    "make", [lambda: 3, lambda: 3.5, lambda: np.int64(3), lambda: np.float32(3), lambda: (3, 4.5)]
)
def test_functions_of_one_source_and_equal_numbers_are_one(make: Any) -> None:
    limits = make(), make()
    first, second = (
        (lambda b, h, r, c, limit=limit: r < limit[0]) if isinstance(limit, tuple) else reach(limit)
        for limit in limits
    )
    assert first is not second
    assert as_mod("mask_mod", first, PLACE) is as_mod("mask_mod", second, PLACE)


@given(st.permutations([1, 1.0, True, 2, np.int64(1), 0.0, -0.0]))
def test_numbers_of_another_type_or_value_make_another_function(limits: list[Any]) -> None:
    mods = [as_mod("mask_mod", reach(limit), PLACE) for limit in limits]
    assert len({id(mod) for mod in mods}) == len(limits)


def outputs(mod: Any) -> tuple[Any, Any]:
    """Return attention under a ``mask_mod``: by the compiled kernel, and by the textbook."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 4)) for _ in range(3))
    (out, _), (expected, _) = (
        kernels.flash_attention_forward(q, k, v, mask_mod=mod, rung=rung)
        for rung in ("auto", "naive")
    )
    return out, expected


LIMIT = 2
LIMITS = np.full(9, 2)
SETTINGS = ModuleType("settings")


def within_limit(batch: int, head: int, row: int, col: int) -> bool:
    return abs(row - col) < LIMIT


def within_setting(batch: int, head: int, row: int, col: int) -> bool:
    return abs(row - col) < SETTINGS.limit


def test_a_number_that_has_changed_since_the_last_call_is_taken_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, reused = 2, np.empty(9, np.int64)

    def captured(batch: int, head: int, row: int, col: int) -> bool:
        return abs(row - col) < limit

    def within_array(batch: int, head: int, row: int, col: int) -> bool:
        return abs(row - col) < reused[row]

    def within_global(batch: int, head: int, row: int, col: int) -> bool:
        return abs(row - col) < LIMITS[row]

    mods = captured, within_limit, within_setting, within_array, within_global
    results = []
    for limit in (2, 4):
        monkeypatch.setattr(f"{__name__}.LIMIT", limit)
        SETTINGS.limit = limit  # type: ignore[attr-defined]
        reused[:] = LIMITS[:] = limit
        for mod in mods:
            out, expected = outputs(mod)
            assert_close_arrays(out, expected, np.float64, "out")
            results.append(out)
    of_2, of_4 = results[: len(mods)], results[len(mods) :]
    for of_both in (of_2, of_4):
        assert all(np.array_equal(of_both[0], other) for other in of_both)
    assert not np.allclose(of_2[0], of_4[0])


def test_a_checked_function_is_not_run_again_in_python() -> None:
    calls = []

    def counting(batch: int, head: int, row: int, col: int) -> bool:
        calls.append(row)
        return True

    q = np.ones((1, 4, 2))
    for _ in range(3):
        make_problem(q, q, q, mask_mod=counting)
    assert len(calls) == 1
