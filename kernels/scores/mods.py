"""``mask_mod`` and ``score_mod``: plain functions of one score and its place, given by the user."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
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


class _Same:
    """An object that equals itself and nothing else, whatever it says of equality.

    Args:
        value: Kept, so that no other object gets its address meanwhile.
    """

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _comparable(value: Any) -> Any:
    """Return a number or a text, or a tuple of them, by type and value, anything else by what it is."""
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, float):
        return type(value), value.hex()  # 0.0 equals -0.0, and NaN not itself
    if type(value) is tuple:
        return tuple(map(_comparable, value))
    return (type(value), value) if isinstance(value, (int, str, bytes)) else _Same(value)


def _used_of(value: Any, names: tuple[str, ...]) -> Any:
    """Return what code with some names may use of a global: of a module, the attributes so called."""
    if not isinstance(value, ModuleType):
        return _comparable(value)
    return tuple(_comparable(vars(value)[name]) for name in names if name in vars(value))


def _content(function: FunctionType) -> tuple[Any, ...]:
    """Return all that decides what a plain function computes: equal contents compile to equal code.

    Raises:
        ValueError: If a cell is still empty.
    """
    code, world = function.__code__, function.__globals__
    names = tuple(_names(code))
    return (
        code,
        tuple(map(_comparable, function.__defaults__ or ())),
        tuple(_comparable(cell.cell_contents) for cell in function.__closure__ or ()),
        tuple(_used_of(world[name], names) for name in names if name in world),
    )


class _Kept:
    """A function whose content alone decides whether another one is the same.

    Args:
        function: A user's.
    """

    def __init__(self, function: FunctionType):
        self.function, self.content = function, _content(function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


@lru_cache(maxsize=256)
def _checked(name: str, kept: _Kept, arguments: str) -> Function:
    check_mod(name, kept.function, arguments)
    source = kept.function
    cells = tuple(CellType(cell.cell_contents) for cell in source.__closure__ or ())
    # A copy: kernels know a function by what it is, and this one captures what it captured now.
    return FunctionType(
        source.__code__, source.__globals__, source.__name__, source.__defaults__, cells
    )


def as_mod(name: str, function: Any, arguments: str) -> Function | None:
    """Check a user's function; return the one that stands for all that compute the same.

    A lambda written inside a loop is a new function at each turn, and would be compiled at each.  Two of
    one source whose captured numbers, defaults and globals are equal are one here; where a number has
    changed since, the function is another, and is compiled anew.

    Args:
        name: Of the option.
        function: The user's, or None.
        arguments: As in :func:`check_mod`.

    Raises:
        TypeError: As in :func:`check_mod`.
        ValueError: As in :func:`check_mod`.
    """
    kept = None
    if type(function) is FunctionType and not function.__kwdefaults__:
        with suppress(ValueError):  # a cell is still empty
            kept = _Kept(function)
    if kept is not None:
        return _checked(name, kept, arguments)
    check_mod(name, function, arguments)
    return function


def as_score_mod(value: Any) -> ScoreMod | None:
    """Return what a user gives as ``score_mod``, a function or a pair with its derivative, as one.

    Raises:
        TypeError: If one of them does not take (score, batch, head, row, col).
    """
    if value is None:
        return None
    mod = ScoreMod(*value) if isinstance(value, (tuple, list)) else ScoreMod(value)
    arguments = "(score, batch, head, row, col)"
    function = as_mod("score_mod", mod.function, arguments)
    assert function is not None
    return ScoreMod(function, as_mod("the derivative of score_mod", mod.derivative, arguments))


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

    Raises:
        ValueError: If the function raises.
    """

    def result(*values: Any) -> Any:
        try:
            return function(*values)
        except Exception as error:
            raise ValueError(
                "mask_mod and score_mod must give a result for every place and never raise, got "
                f"{type(error).__name__}: {error} at {values}"
            ) from error

    shape = np.broadcast_shapes(*map(np.shape, arguments))
    places: Any = np.nditer([*arguments], ["zerosize_ok"], order="C")
    results = (result(*(value.item() for value in values)) for values in places)
    return np.fromiter(results, dtype, math.prod(shape)).reshape(shape)
