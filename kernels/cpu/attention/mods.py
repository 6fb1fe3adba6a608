"""Compile ``mask_mod`` and ``score_mod``, user functions of one score, to passes over a tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import NumbaError, from_dtype, int64, njit, types, void

from kernels.cpu.attention.tile_scores import make_target
from kernels.cpu.runtime.function_pointers import address_of, array_at
from kernels.problem.question import Problem
from kernels.scores.program import PLAIN, Features, make_score_program

#: Number of tiles that are unfinished because a user function raised.
_FAILURES = np.zeros(1, np.int64)

#: The arguments of a pass after the tile and its slope: batch, head, line, lane, width, by_keys.
_NUMBERS = (int64,) * 6


@lru_cache(maxsize=64)
def own_mod(function: Callable[..., Any]) -> Any:
    """Return the compiled user function; each function is compiled once."""
    if hasattr(function, "py_func"):
        return function
    # An out-of-bounds index into an array is an error, as in Python.
    return njit(error_model="numpy", boundscheck=True)(function)


def _make_pass(mods: Features, real: Any) -> Any:
    """Return the pass of the user functions over a tile; see :func:`pass_address`."""
    mods = mods._replace(
        **{name: own_mod(mod) for name, mod in mods._asdict().items() if callable(mod)}
    )
    target, minus_inf, failures = make_target(real), real(-np.inf), _FAILURES.ctypes.data
    modified, is_shown, _ = make_score_program(mods._replace(derivative=None), target)
    with_derivatives = make_score_program(mods, target._replace(order=2)).modified

    @njit(error_model="numpy")
    def at_place(tile, slope, i, j, place):
        if slope.shape[0] == 0:
            score = modified(tile[i, j], place, None)[0]
        else:
            score, derivative, second = with_derivatives(tile[i, j], place, None)
            if len(slope) > len(tile):
                below = len(tile) + i
                slope[below, j] = second * slope[i, j] ** 2 + derivative * slope[below, j]
            slope[i, j] *= derivative
        tile[i, j] = score if is_shown(place, None) else minus_inf

    @njit(error_model="numpy")
    def user_pass(tile, slope, batch, head, line, lane, width, by_keys):
        # A function called by its address cannot raise.  If the user function does, the tile stays
        # unfinished, and _FAILURES tells the caller.
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
    """Compile the pass of the user functions; return its dispatcher and address, or None and the reason.

    The dispatcher is kept because it owns the code at the address.
    """
    tile = types.Array(from_dtype(dtype), 2, "C")
    try:
        dispatcher = _make_pass(mods, dtype.type)
        return dispatcher, address_of(dispatcher, void(tile, tile, *_NUMBERS))
    except (NumbaError, TypeError) as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1]


def pass_address(problem: Problem) -> int:
    """Return the address of the pass of the user functions over a tile, 0 if a call has none.

    The pass takes a tile of scores, (lines, lanes), their derivatives as ``score_pass`` does, and the
    numbers of :class:`tile_scores.TilePosition`.
    """
    mods = problem.features.of_users
    return 0 if mods == PLAIN else _compiled(mods, problem.dtype)[1]


def failures() -> int:
    """Return the number of tiles that failing user functions left unfinished so far, in this process."""
    return int(_FAILURES[0])


def check_finished(before: int) -> None:
    """Check that no user function has raised since the count ``before`` of :func:`failures`.

    One that has, in this call or in a simultaneous one on another thread, raises a ValueError.
    """
    if failures() != before:
        raise ValueError(
            "mask_mod and score_mod must return a result for all indices and never raise, but one raised "
            'in this call; rung="naive" runs them as plain Python and shows where and why'
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
