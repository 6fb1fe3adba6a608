"""``mask_mod`` and ``score_mod`` compiled: a user's function of one score, over a whole tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types, void
from numba.core.errors import NumbaError

from kernels.cpu.attention.tile_scores import MOD_NUMBERS, MOD_SCALAR
from kernels.cpu.runtime.function_pointers import address_of, array_at
from kernels.problem.question import Problem

#: How many tiles a user's function has left unfinished, because it raised.
_FAILURES = np.zeros(1, np.int64)

#: What a tile does with the function's value.
REPLACES, MULTIPLIES, HIDES = "replaces", "multiplies", "hides"


def _over_tile(function: Any, use: str) -> Any:
    """Return a function that fills ``target``, (lines, lanes), from ``source`` of the same shape.

    Where the user's function raises, the tile stays as far as it is, and ``_FAILURES`` counts it: what is
    called by its address cannot raise, and a result of which a part is missing must not be returned.
    """
    wide, failures = MOD_SCALAR, _FAILURES.ctypes.data

    def replaces(target, source, i, j, batch, head, row, col):
        target[i, j] = target.dtype.type(function(wide(source[i, j]), batch, head, row, col))

    def multiplies(target, source, i, j, batch, head, row, col):
        target[i, j] *= target.dtype.type(function(wide(source[i, j]), batch, head, row, col))

    def hides(target, source, i, j, batch, head, row, col):
        if not function(batch, head, row, col):
            target[i, j] = target.dtype.type(-np.inf)

    element = njit(error_model="numpy")(
        {REPLACES: replaces, MULTIPLIES: multiplies, HIDES: hides}[use]
    )

    def over_tile(target, source, batch, head, line, lane, width, by_keys):
        try:
            for i in range(target.shape[0]):
                for j in range(width):
                    row, col = (line + i, lane + j) if by_keys else (lane + j, line + i)
                    element(target, source, i, j, batch, head, row, col)
        except Exception:
            array_at(failures, (1,), (8,), np.int64)[0] += 1

    return over_tile


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any], use: str, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Compile a user's function for tiles: its dispatcher and address, or None and why not.

    The dispatcher is kept, for the address is that of its code.
    """
    tile = types.Array(from_dtype(dtype), 2, "C")
    try:
        # An index beyond an array that the function reads is an error here, as it is in Python.
        compile_ = njit(error_model="numpy", boundscheck=True)
        inner = function if hasattr(function, "py_func") else compile_(function)
        dispatcher = njit(error_model="numpy")(_over_tile(inner, use))
        return dispatcher, address_of(dispatcher, void(tile, tile, *MOD_NUMBERS))
    except (NumbaError, TypeError) as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1]


def mod_address(function: Callable[..., Any] | None, use: str, dtype: np.dtype[Any]) -> int:
    """Return the address of a user's function over a tile, 0 for None.

    Args:
        function: The user's, one that :func:`why_not_compiled` has nothing against; the same object
            is compiled once.
        use: ``REPLACES``, ``MULTIPLIES`` or ``HIDES``.
        dtype: Of the scores.
    """
    return 0 if function is None else _compiled(function, use, dtype)[1]


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
    function, derivative = problem.score_mod or (None, None)
    for name, mod, use in (
        ("mask_mod", problem.mask_mod, HIDES),
        ("score_mod", function, REPLACES),
        ("the derivative of score_mod", derivative, MULTIPLIES),
    ):
        if mod is not None:
            dispatcher, reason = _compiled(mod, use, problem.dtype)
            if dispatcher is None:
                return f"numba cannot compile {name} ({reason})"
    return None
