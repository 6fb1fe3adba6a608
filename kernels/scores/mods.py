"""``mask_mod`` and ``score_mod``: user functions of one score and its indices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numba
import numpy as np

from kernels.common.arguments import shown

from .derivatives import derivative_of, reads_of, returns_one
from .templates import captured_by, changing_names, derived, kind_of, make_template, template_of

Function = Callable[..., Any]


#: The arguments of a ``score_mod`` and of its derivatives.
OF_SCORE = "(score, batch, head, row, col)"
#: The same with a ``score_table``.
OF_TABLE = "(score, batch, head, row, col, table)"


class ScoreMod(NamedTuple):
    """A ``score_mod`` function and its derivative with respect to the score.

    The derivative is None if it is not given and cannot be found.
    """

    function: Function
    derivative: Function | None = None

    @property
    def only_adds(self) -> bool:
        """Whether the function adds what does not depend on the score: its derivative is 1 everywhere."""
        return self.derivative is not None and returns_one(template_of(self.derivative))

    def reads(self, dims: int) -> tuple[Function, ...]:
        """Return the derivatives by the elements of a table of ``dims`` dimensions; see ``reads_of``.

        Raises:
            ValueError: If the function cannot be differentiated.
        """
        try:
            return reads_of(self.function, dims)
        except ValueError as error:
            raise ValueError(f"score_table has no gradient: {error}") from None


def varying(mask_mod: Any) -> Any:
    """Mark a ``mask_mod`` to be evaluated in every call, for each element that the call computes.

    Without the mark, the first call with given lengths evaluates the function once and stores a block
    mask, and later calls skip the tiles that it masks.  This does not pay off if the lengths, or a number
    that the function captures, change in every call.  The same function is returned, so that ``varying``
    also works as a decorator.

    Raises:
        TypeError: If it is not a plain function.
    """
    if not (callable(mask_mod) and hasattr(mask_mod, "__dict__")) or isinstance(mask_mod, type):
        raise TypeError(
            "varying marks a function of (batch, head, row, col), got "
            f"{type(mask_mod).__name__}; define the function with def or lambda"
        )
    marked: Any = mask_mod  # the type checker knows a function's own attributes alone
    marked.is_varying = True
    return marked


def is_varying(mask_mod: Function) -> bool:
    """Tell whether a function is marked by :func:`varying`."""
    return getattr(mask_mod, "is_varying", False)


def check_mod(name: str, function: Any, arguments: str, table: Any = None) -> None:
    """Check the arguments of a user function, if there is one, and its result for indices of 0.

    A compiled function cannot report a missing return statement, and cannot raise.  ``arguments`` are
    in words: "(batch, head, row, col)"; ``table`` is the shape of a last one that is an array.  Others, or
    a result that is neither a bool nor a number, raise a TypeError, and an error of the function a
    ValueError.
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
            f"{name} must take {arguments} by position, got a function of {signature}; change its "
            "parameters"
        ) from None
    of_score = arguments.startswith("(score")
    places: Any = (0.0, 0, 0, 0, 0) if of_score else (0, 0, 0, 0)
    places = places if table is None else (*places, np.broadcast_to(0.0, table))
    try:
        result = function(*places)
    except Exception as error:
        raise ValueError(
            f"{name} must return a result for all indices and never raise, got {type(error).__name__}: "
            f"{error} at {arguments} = {places}"
        ) from error
    kinds = (int, float, np.number) if of_score else (bool, np.bool_)
    if not isinstance(result, kinds):
        is_tensor = hasattr(result, "numpy")
        raise TypeError(
            f"{name} must return {'a number' if of_score else 'True or False'}, got {shown(result)} "
            f"at {arguments} = {places}; "
            + (
                "capture tensor.numpy() instead of a tensor"
                if is_tensor
                else "is a return missing?"
            )
        )


class _Same:
    """A wrapper that compares an object by identity, and keeps it alive so that its id is not reused."""

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
    """Return a key that compares numbers, arrays, strings and tuples by value, others by identity."""
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()  # its owner may refill it
    if isinstance(value, float):
        return type(value), value.hex()  # 0.0 equals -0.0, and NaN not itself
    if type(value) is tuple:
        return tuple(map(_comparable, value))
    return (type(value), value) if isinstance(value, (int, str, bytes)) else _Same(value)


def _used_of(value: Any, names: tuple[str, ...]) -> Any:
    """Return the key of a global; that of a module contains only the attributes in ``names``."""
    if not isinstance(value, ModuleType):
        return _comparable(value)
    return tuple(_comparable(vars(value)[name]) for name in names if name in vars(value))


def _content(function: FunctionType, is_changing: Callable[[str], bool]) -> tuple[Any, ...]:
    """Return the key of a plain function: functions with equal keys compile to equal code.

    Of a number that is changing, only the type is part of the key.  A cell that is still empty raises a
    ValueError.
    """
    code, world, defaults = function.__code__, function.__globals__, function.__defaults__ or ()
    names = tuple(_names(code))
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    captured = [
        (name, cell.cell_contents)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    ]

    def key(name: str, value: Any) -> Any:
        kind = kind_of(value) if is_changing(name) else None
        return _used_of(value, names) if kind is None else kind

    return (
        code,
        is_varying(function),
        tuple([key(*pair) for pair in zip(last, defaults, strict=True)]),
        tuple([key(*pair) for pair in captured]),
        tuple([key(name, world[name]) for name in names if name in world]),
    )


class _Kept:
    """A user function that is compared by its content; it was given with a table of this shape, or None."""

    def __init__(
        self,
        function: FunctionType,
        table: Any,
        is_changing: Callable[[str], bool] = lambda name: False,
    ):
        self.function, self.table = function, table
        self.content = _content(function, is_changing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


@lru_cache(maxsize=256)
def _checked(name: str, kept: _Kept, arguments: str, is_alone: bool) -> Function:
    check_mod(name, kept.function, arguments, kept.table)
    source, world = kept.function, kept.function.__globals__
    # A copy with the current values of all that it reads: kernels cache it by identity, and compile it for
    # the backward pass after the caller may have changed them.
    names = [*_names(source.__code__), "__builtins__", "__name__"]
    own = {name: _own(world[name]) for name in names if name in world}
    defaults = tuple(map(_own, source.__defaults__ or ()))
    cells = tuple(CellType(_own(cell.cell_contents)) for cell in source.__closure__ or ())
    copy: Any = FunctionType(source.__code__, own, source.__name__, defaults, cells)
    if is_varying(source):
        varying(copy)
    if not is_alone or numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # for breakpoints
        return copy
    count = arguments.count(",") + 1
    names = sorted(_changing_names(_Kept(copy, None, lambda name: True), count))
    if names:
        copy.template = _template(_Kept(copy, None, names.__contains__), count, tuple(names))
        world = captured_by(copy)
        copy.numbers = tuple([_plain(world[name]) for name in names])
    return copy


@lru_cache(maxsize=256)
def _changing_names(kept: _Kept, count: int) -> frozenset[str]:
    return changing_names(kept.function, count)


@lru_cache(maxsize=256)
def _template(kept: _Kept, count: int, names: tuple[str, ...]) -> Any:
    return make_template(kept.function, count, names)


def _plain(number: Any) -> Any:
    return float(number) if isinstance(number, float) else int(number)


def _own(value: Any) -> Any:
    """Return a copy of an array, or of a tuple of them, and any other value unchanged."""
    if type(value) is tuple:
        return tuple(map(_own, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def as_mod(
    name: str, function: Any, arguments: str, table: Any = None, is_alone: bool = True
) -> Function | None:
    """Check a user function, and return the cached function with the same content.

    A lambda inside a loop is a new function in each iteration, and would be recompiled each time.
    Functions of the same source with equal captured values, defaults and globals are therefore replaced by
    one.  If ``is_alone``, not of a pair with a derivative, its numbers are arguments of what is compiled
    (:mod:`.templates`); if another value changes, the function is compiled again.  See :func:`check_mod`
    for the arguments.
    """
    kept = None
    if type(function) is FunctionType and not function.__kwdefaults__:
        with suppress(ValueError):  # a cell is still empty
            kept = _Kept(function, table)
    if kept is not None:
        return _checked(name, kept, arguments, is_alone)
    check_mod(name, function, arguments, table)
    return function


def as_mask_mod(value: Any) -> Function | None:
    """Convert the option ``mask_mod``, a function of (batch, head, row, col); see :func:`as_mod`."""
    return as_mod("mask_mod", value, "(batch, head, row, col)")


def as_score_mod(value: Any, table: Any = None) -> ScoreMod | None:
    """Convert the option ``score_mod``, a function or a pair of it and its derivative, to a ``ScoreMod``.

    ``table`` is the array of the option ``score_table``, or None.
    """
    if value is None or isinstance(value, ScoreMod):
        return value
    mod = ScoreMod(*value) if isinstance(value, (tuple, list)) else ScoreMod(value)
    own: Any = (OF_SCORE, None) if table is None else (OF_TABLE, tuple(table.shape))
    function = as_mod("score_mod", mod.function, *own, is_alone=mod.derivative is None)
    if function is None:
        raise TypeError("score_mod must be a function or a pair of it and its derivative, got None")
    derivative = as_mod("the derivative of score_mod", mod.derivative, *own, is_alone=False)
    return ScoreMod(function, derivative or _derivative_if_known(function))


@lru_cache(maxsize=256)
def _derivative_if_known(function: Function) -> Function | None:
    """Return the derivative of a function; None if it cannot be differentiated."""
    with suppress(ValueError):
        return derived(function)
    return None


def score_derivative(score_mod: Any) -> Function:
    """Return the derivative of a ``score_mod`` with respect to the score, as attention uses it.

    The function is differentiated by the syntax tree of its source.  ``inspect.getsource`` returns the
    source of the derivative, and ``score_derivative`` of the result is the second derivative.

    Args:
        score_mod: A function of (score, batch, head, row, col), from local variables, arithmetic,
            comparisons, conditions, loops whose course does not depend on the score, functions of
            ``math``, their namesakes of NumPy, and other such functions.

    Returns:
        A function of the same arguments, which uses captured values as they are now.

    Raises:
        TypeError: If it is not a function of these arguments, or does not return a number.
        ValueError: If it cannot be differentiated; the message names the expression and its line.
    """
    if getattr(score_mod, "is_derivative", False):
        return derivative_of(score_mod)  # which may have no value at 0
    function = as_mod("score_mod", score_mod, OF_SCORE)
    if function is None:
        raise TypeError("score_mod must be a function, got None")
    return derivative_of(function)


#: The options that are user functions.
KEPT = frozenset(("mask_mod", "score_mod"))


def with_kept_mods(options: Mapping[str, Any], table: Any = None) -> dict[str, Any]:
    """Return options with functions of :data:`KEPT` that go on using what they capture now.

    ``table`` is the array of the option ``score_table``, or None.
    """
    score_mod = as_score_mod(options.get("score_mod"), table)
    return {**options, "mask_mod": as_mask_mod(options.get("mask_mod")), "score_mod": score_mod}


def check_derivative(mod: ScoreMod | None, order: int = 1) -> None:
    """Check that a ``score_mod`` has its derivatives up to an order; otherwise raise a ValueError."""
    if mod is None:
        return
    try:
        last = mod.derivative or derivative_of(mod.function)
        if order > 1:
            derived(last)
    except ValueError as error:
        what, advice = "a gradient", f"pass score_mod=(function, derivative), each of {OF_SCORE}"
        if mod.derivative is not None:
            what, advice = "a second derivative", "write the derivative in terms that can be"
        raise ValueError(
            f"{what} through score_mod needs that derivative with respect to the score, and the function "
            f"cannot be differentiated: {error}; {advice}"
        ) from None


def evaluate(function: Function, dtype: Any, *arguments: Any, table: Any = None) -> Any:
    """Call a function of numbers for each element of arrays that broadcast, in plain Python.

    The function also receives the table, unless it is None.  Any error of it becomes a ValueError.
    """
    more = () if table is None else (table,)

    def result(*values: Any) -> Any:
        try:
            return function(*values, *more)
        except Exception as error:
            raise ValueError(
                "mask_mod and score_mod must return a result for all indices and never raise, got "
                f"{type(error).__name__}: {error} at {values}"
            ) from error

    shape = np.broadcast_shapes(*map(np.shape, arguments))
    places: Any = np.nditer([*arguments], ["zerosize_ok"], order="C")
    results = (result(*(value.item() for value in values)) for values in places)
    return np.fromiter(results, dtype, math.prod(shape)).reshape(shape)


def add_read_gradients(
    mod: ScoreMod, ds: Any, score: Any, place: Any, table: Any, total: Any
) -> None:
    """Add the gradient of a table to ``total``, of its shape, in plain Python.

    ``ds`` are the gradients of the modified scores, ``score`` the scores before, and ``place`` their batch,
    head, row and column, all of which broadcast.
    """
    dims = np.ndim(table)
    for read in mod.reads(dims):
        found = evaluate(read, "f8,i8,i8,i8", score, *place, table=table)
        weights = np.where(ds == 0, 0.0, found["f0"] * ds)
        np.add.at(total, tuple(found[name] for name in ("f1", "f2", "f3")[:dims]), weights)
