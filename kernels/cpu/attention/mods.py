"""``mask_mod`` and ``score_mod`` compiled: a user's function of one score, over a whole tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, int64, njit, types, void
from numba.core.errors import NumbaError

from kernels.cpu.attention.tile_scores import make_target
from kernels.cpu.runtime.function_pointers import address_of, array_at
from kernels.problem.question import Problem
from kernels.scores.program import PLAIN, Features, make_score_program

#: How many tiles a user's function has left unfinished, because it raised.
_FAILURES = np.zeros(1, np.int64)

#: The arguments of a pass after the tile and its slope: batch, head, line, lane, width, by_keys.
_NUMBERS = (int64,) * 6


@lru_cache(maxsize=64)
def _own(function: Callable[..., Any]) -> Any:
    """Return a user's function compiled; the same function is compiled once."""
    if hasattr(function, "py_func"):
        return function
    # An index beyond an array that the function reads is an error here, as it is in Python.
    return njit(error_model="numpy", boundscheck=True)(function)


def _make_pass(mods: Features, real: Any) -> Any:
    """Return the pass of users' functions over a tile; see :func:`pass_address`."""
    mods = mods._replace(
        **{name: _own(mod) for name, mod in mods._asdict().items() if callable(mod)}
    )
    target, minus_inf, failures = make_target(real), real(-np.inf), _FAILURES.ctypes.data
    modified, is_shown, _ = make_score_program(mods._replace(derivative=None), target)
    with_derivative = make_score_program(mods, target).modified

    @njit(error_model="numpy")
    def at_place(tile, slope, i, j, place):
        if slope.shape[0] == 0:
            score = modified(tile[i, j], place, None)[0]
        else:
            score, derivative = with_derivative(tile[i, j], place, None)
            slope[i, j] *= derivative
        tile[i, j] = score if is_shown(place, None) else minus_inf

    @njit(error_model="numpy")
    def user_pass(tile, slope, batch, head, line, lane, width, by_keys):
        # What is called by its address cannot raise: where the user's function does, the tile stays as far
        # as it is, and the caller learns it from _FAILURES.
        try:
            for i in range(tile.shape[0]):
                for j in range(width):
                    row, col = (line + i, lane + j) if by_keys else (lane + j, line + i)
                    at_place(tile, slope, i, j, (batch, head, row, col))
        except Exception:
            array_at(failures, (1,), (8,), np.int64)[0] += 1

    return user_pass


@lru_cache(maxsize=64)
def _compiled(mods: Features, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Compile the pass of users' functions: its dispatcher and address, or None and why not.

    The dispatcher is kept, for the address is that of its code.
    """
    tile = types.Array(from_dtype(dtype), 2, "C")
    try:
        dispatcher = _make_pass(mods, dtype.type)
        return dispatcher, address_of(dispatcher, void(tile, tile, *_NUMBERS))
    except (NumbaError, TypeError) as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1]


def pass_address(problem: Problem) -> int:
    """Return the address of the users' functions over a tile, 0 if a call has none.

    The pass takes a tile of scores and their derivative, (lines, lanes) each, or (0, lanes) where no
    derivative is needed, and the numbers of :class:`tile_scores.Place`.

    Args:
        problem: A call that :func:`why_not_compiled` has nothing against.
    """
    mods = problem.features.of_users
    return 0 if mods == PLAIN else _compiled(mods, problem.dtype)[1]


def failures() -> int:
    """Return how many tiles users' functions have left unfinished so far, in this process."""
    return int(_FAILURES[0])


def check_finished(before: int) -> None:
    """Check that no user's function has raised since :func:`failures` was asked.

    Raises:
        ValueError: If one has; also if it was that of another call, on another thread meanwhile.
    """
    if failures() != before:
        raise ValueError(
            "mask_mod and score_mod must give a result for every place and never raise, and one of them "
            'raised in this call; rung="naive" runs them as plain Python and shows where and why'
        )


def why_not_compiled(problem: Problem) -> str | None:
    """Return why numba cannot compile the functions of a problem, or None."""
    mods = problem.features.of_users
    if mods == PLAIN or _compiled(mods, problem.dtype)[0] is not None:
        return None
    for name, alone in (
        ("mask_mod", Features(mask_mod=mods.mask_mod)),
        ("score_mod", Features(score_mod=mods.score_mod)),
        ("the derivative of score_mod", mods._replace(mask_mod=None)),
    ):
        dispatcher, reason = _compiled(alone, problem.dtype)
        if dispatcher is None:
            return f"numba cannot compile {name} ({reason})"
    raise AssertionError("each function compiles alone")
