"""``mask_mod`` and ``score_mod``: plain functions of one score and its place, given by the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Function = Callable[..., Any]


class ScoreMod(NamedTuple):
    """A function of a score, ``(score, batch, head, row, col)``, and its derivative by the score."""

    function: Function
    derivative: Function | None = None


def check_mod(name: str, function: Any, arguments: str) -> None:
    """Check that a function takes its arguments by position, and what it returns at the first place.

    A compiled function cannot say that it forgot to return something, nor raise.

    Args:
        name: Of the option.
        function: The user's, or None.
        arguments: What it is called with, in words: "(batch, head, row, col)".

    Raises:
        TypeError: If it takes another number of them, or returns no bool or no number.
        ValueError: If it raises.
    """
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        signature = None
    try:
        if signature is not None:
            signature.bind(*range(arguments.count(",") + 1))
    except TypeError:
        raise TypeError(
            f"{name} is called with {arguments}, got a function of {signature}; let it take these "
            "by position"
        ) from None
    of_score = arguments.startswith("(score")
    places = (0.0, 0, 0, 0, 0) if of_score else (0, 0, 0, 0)
    try:
        result = function(*places)
    except Exception as error:
        raise ValueError(
            f"{name} must give a result for every place and never raise, got {type(error).__name__}: "
            f"{error} at {arguments} = {places}"
        ) from error
    kinds = (int, float, np.number) if of_score else (bool, np.bool_)
    if not isinstance(result, kinds):
        raise TypeError(
            f"{name} must return {'a number' if of_score else 'True or False'}, got {result!r} "
            f"({type(result).__name__}) at {arguments} = {places}; is a return missing?"
        )


def as_score_mod(value: Any) -> ScoreMod | None:
    """Return what a user gives as ``score_mod``, a function or a pair with its derivative, as one.

    Raises:
        TypeError: If one of them does not take (score, batch, head, row, col).
    """
    if value is None:
        return None
    mod = ScoreMod(*value) if isinstance(value, (tuple, list)) else ScoreMod(value)
    for name, function in zip(("score_mod", "the derivative of score_mod"), mod, strict=True):
        check_mod(name, function, "(score, batch, head, row, col)")
    return mod


def check_derivative(mod: ScoreMod | None) -> None:
    """Check that a gradient can be taken.

    Raises:
        ValueError: If there is a ``score_mod`` without its derivative.
    """
    if mod is not None and mod.derivative is None:
        raise ValueError(
            "a gradient through score_mod needs its derivative by the score, got the function alone; "
            "give score_mod=(function, derivative), both of (score, batch, head, row, col)"
        )


def evaluate(function: Function, dtype: Any, *arguments: Any) -> Any:
    """Call a function of numbers for each element of arrays that broadcast, as plain Python does.

    Args:
        function: The user's.
        dtype: Of the result.
        arguments: Arrays.

    Returns:
        An array of the broadcast shape.
    """
    shape = np.broadcast_shapes(*(np.shape(argument) for argument in arguments))
    out = np.empty(shape, dtype)
    for place, values in enumerate(
        np.nditer([*arguments], ["refs_ok", "zerosize_ok"], order="C") if shape else ()
    ):
        out.flat[place] = function(*(value.item() for value in values))
    if not shape:
        out[...] = function(*(np.asarray(argument).item() for argument in arguments))
    return out
