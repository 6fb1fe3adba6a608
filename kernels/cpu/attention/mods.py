"""Compile ``mask_mod`` and ``score_mod``, user functions of one score, to passes over a tile."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import NumbaError, float64, from_dtype, int64, njit, types, void

from kernels.cpu.attention.tile_scores import (
    MOD_SCALAR,
    SETTINGS_TYPE,
    OfUsers,
    make_target,
    view,
)
from kernels.cpu.runtime.function_pointers import address_of, array_at
from kernels.problem.question import Problem
from kernels.scores.derivatives import kinds_of
from kernels.scores.program import PLAIN, Features, make_score_program
from kernels.sparsity.elements import compiled_mod

#: Number of tiles that are unfinished because a user function raised.
_FAILURES = np.zeros(1, np.int64)

#: The arguments of a pass after the tiles: batch, head, line, lane, width, by_keys, settings.
_NUMBERS = (*(int64,) * 6, SETTINGS_TYPE)
#: Dimensions of a table → the function that drops the others of the record's array.
_OWN_DIMS = {
    0: njit(lambda array: None),
    1: njit(lambda array: array[:, 0, 0, 0]),
    2: njit(lambda array: array[:, :, 0, 0]),
    3: njit(lambda array: array[:, :, :, 0]),
}


@cache
def _reader(kinds: tuple[type, ...]) -> Any:
    """Return the function that reads numbers of some types, int or float, at an address into a tuple."""
    if not kinds:
        return njit(lambda address: ())
    dtype, rest = {int: np.int64, float: np.float64}[kinds[0]], _reader(kinds[1:])
    return njit(lambda address: (array_at(address, (1,), (8,), dtype)[0], *rest(address + 8)))


def _make_reader(mods: Features) -> Any:
    """Return the function that reads what user functions receive from the record of a call."""
    own_dims, score = _OWN_DIMS[mods.score_table], mods.score_mod
    mask_kinds, score_kinds = kinds_of(mods.mask_mod), kinds_of(score and score.function)
    of_mask, of_score, score_at = _reader(mask_kinds), _reader(score_kinds), 8 * len(mask_kinds)

    @njit
    def read(record, real):
        table = own_dims(view(record.score_table, real))
        return OfUsers(table, of_mask(record.numbers), of_score(record.numbers + score_at))

    return read


def _make_pass(mods: Features, real: Any, order: int, keeps_scores: bool) -> Any:
    """Return the pass of the user functions over a tile; see :func:`pass_address`."""
    read, minus_inf = _make_reader(mods), real(-np.inf)
    target = make_target(real, mods.score_table > 0)
    failures = _FAILURES.ctypes.data
    modified, is_shown, _ = make_score_program(mods, target._replace(order=0))
    with_derivatives = make_score_program(mods, target._replace(order=order)).modified

    @njit(error_model="numpy")
    def at_place(tile, slope, i, j, place, given):
        if keeps_scores:
            slope[i, j] = tile[i, j]
        if keeps_scores or slope.shape[0] == 0:
            score = modified(tile[i, j], place, given)[0]
        else:
            score, derivative, second = with_derivatives(tile[i, j], place, given)
            if order > 1:
                below = len(tile) + i
                slope[below, j] = second * slope[i, j] ** 2 + derivative * slope[below, j]
            slope[i, j] *= derivative
        tile[i, j] = score if is_shown(place, given) else minus_inf

    @njit(error_model="numpy")
    def user_pass(tile, slope, batch, head, line, lane, width, by_keys, settings):
        # A function called by its address cannot raise.  If the user function does, the tile stays
        # unfinished, and _FAILURES tells the caller.
        try:
            given = read(settings[0], real)
            for i in range(tile.shape[0]):
                for j in range(width):
                    row, col = (line + i, lane + j) if by_keys else (lane + j, line + i)
                    at_place(tile, slope, i, j, (batch, head, row, col), given)
        except Exception:
            array_at(failures, (1,), (8,), np.int64)[0] += 1

    return user_pass


@lru_cache(maxsize=64)
def _compiled(
    mods: Features, dtype: np.dtype[Any], order: int, keeps_scores: bool
) -> tuple[Any, Any]:
    """Compile the pass of the user functions; return its dispatcher and address, or None and the reason.

    The dispatcher is kept because it owns the code at the address.
    """
    tile = types.Array(from_dtype(dtype), 2, "C")
    try:
        dispatcher = _make_pass(mods, dtype.type, order, keeps_scores)
        return dispatcher, address_of(dispatcher, void(tile, tile, *_NUMBERS))
    except (NumbaError, TypeError) as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1]


def pass_address(problem: Problem, order: int, keeps_scores: bool) -> int:
    """Return the address of the pass of the user functions over a tile, 0 if a call has none.

    The pass takes a tile of scores, (lines, lanes), their derivatives as ``score_pass`` does, the numbers
    of :class:`tile_scores.TilePosition`, and the record of the call.  With ``keeps_scores``, it writes the
    scores before the functions to the second tile.
    """
    mods = problem.features.of_users
    return 0 if mods == PLAIN else _compiled(mods, problem.dtype, max(order, 1), keeps_scores)[1]


@lru_cache(maxsize=64)
def _table_pass(mods: Features, dtype: np.dtype[Any]) -> tuple[Any, int]:
    """Compile the pass that adds the gradient of a table; return its dispatcher and address."""
    read, failures, real = _make_reader(mods), _FAILURES.ctypes.data, dtype.type
    reads = mods.score_mod.reads(mods.score_table)
    add = _in_turn([compiled_mod(one, "numpy") for one in reads])

    @njit(error_model="numpy")
    def table_pass(ds, scores, total, batch, head, row, col, width, by_keys, settings):
        try:
            given = read(settings[0], real)
            for i in range(ds.shape[0]):
                for j in range(width):
                    if ds[i, j] != 0:
                        score, place = MOD_SCALAR(scores[i, j]), (batch, head, row + i, col + j)
                        add(total, MOD_SCALAR(ds[i, j]), score, place, given)
        except Exception:
            array_at(failures, (1,), (8,), np.int64)[0] += 1

    tile = types.Array(from_dtype(dtype), 2, "C")
    signature = void(tile, tile, types.Array(float64, 3, "A"), *_NUMBERS)
    try:
        return table_pass, address_of(table_pass, signature)
    except (NumbaError, TypeError):
        return None, 0


def _in_turn(reads: list[Any]) -> Any:
    """Return the function that adds the gradient of each element that an element of the scores reads."""
    if not reads:
        return njit(lambda total, ds, score, place, given: None)
    first, rest = reads[0], _in_turn(reads[1:])

    @njit(error_model="numpy", boundscheck=True)
    def add(total, ds, score, place, given):
        (batch, head, row, col), (table, _, numbers) = place, given
        weight, i, j, k = first(numbers, score, batch, head, row, col, table)
        if weight != 0:
            total[i, j, k] += ds * weight
        rest(total, ds, score, place, given)

    return add


def table_pass_address(problem: Problem) -> int:
    """Return the address of the pass that adds the gradient of a table over a tile; 0 if not compiled.

    The pass takes dS of a tile, (rows, lanes), the scores before the user's function, the gradient,
    (n, m, l) float64, and the last arguments of :func:`pass_address`.
    """
    if why_not_compiled(problem) is not None:
        return 0
    return _table_pass(problem.features.of_users, problem.dtype)[1]


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
    if mods == PLAIN or _compiled(mods, problem.dtype, 1, False)[0] is not None:
        return None
    of_scores = mods._replace(mask_mod=None)
    for name, alone, order in (
        ("mask_mod", Features(mask_mod=mods.mask_mod), 0),
        ("score_mod", of_scores, 0),
        ("the derivative of score_mod", of_scores, 1),
    ):
        dispatcher, reason = _compiled(alone, problem.dtype, order, False)
        if dispatcher is None:
            return f"numba cannot compile {name} ({reason})"
    raise AssertionError("each function compiles alone")
