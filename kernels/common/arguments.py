"""Checks of single arguments, whole numbers and host arrays, and their form in error messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

#: Types of real numbers; a bool is an int, but not meant as one.
NUMBERS = (int, float, np.integer, np.floating, ml_dtypes.bfloat16)


def shown(value: Any) -> str:
    """Return a short description of a value for an error message."""
    kind = type(value).__name__
    if hasattr(type(value), "shape") and not isinstance(value, np.generic):
        what = "an array" if isinstance(value, np.ndarray) else f"a {kind}"
        return f"{what} of shape {tuple(value.shape)} of {value.dtype}"
    text = repr(value)
    fits = len(text) <= 40 and "\n" not in text
    return f"{text} ({kind})" if fits else f"a value of type {kind}"


def short(number: Any) -> str:
    """Return a number for an error message, cut to its first digits."""
    text = repr(number)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Check that a value is a whole number of at least ``least``, and return it.

    Anything else raises a TypeError; if there is a ``least``, a number that is less, or has more than
    64 bits, a ValueError.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {shown(value)}") from None
    if least is not None and not least <= number < 2**64:
        bound = f"{least} or more" if number < least else "less than 2**64"
        raise ValueError(f"{name} must be {bound}, got {short(number)}")
    return number


def is_number(value: Any) -> bool:
    """Tell whether a value is a real number of Python, NumPy or ``ml_dtypes``."""
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def number(name: str, value: Any) -> float:
    """Check that a value is a number, and return it as a float, whose bounds the caller checks.

    NumPy rounds the other side of a comparison to a narrow dtype, in which many bounds are 0 or
    infinite. An int that is too large becomes infinity, and anything else raises a TypeError.
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, such as 0.5, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def not_negative(  # beyond module 3
    name: str, value: Any, below: float = math.inf, hint: str = ""
) -> float:
    """Check that a value is a number from 0 up to, but excluding, ``below``, and return it as a float.

    A ValueError has ``hint`` at the end of its message.
    """
    found = number(name, value)
    if not 0.0 <= found < below:
        raise ValueError(f"{name} must be in [0, {below:g}), got {short(value)}{hint}")
    return found


def flag(name: str, value: Any) -> bool:
    """Check that a value is True or False, and return it; otherwise raise a TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str]) -> str:  # beyond module 4
    """Check that a value is one of some names, and return it; otherwise raise a ValueError."""
    known = tuple(names)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(value)}")
    return value


def listed(name: str, value: Any) -> list[Any]:
    """Return the entries of a list or another iterable; raise a TypeError for anything else."""
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{name} must be a list or a tuple, got {shown(value)}") from None


def as_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of a NumPy subclass as a plain array, in native byte order.

    A ``numpy.matrix`` would keep two dimensions in any reshape.  The mask of a masked array would be
    lost, and it raises a TypeError.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"masked arrays are not supported, got one of shape {array.shape}; fill it with "
            "array.filled(value), or pass its mask to attention as attn_mask"
        )
    array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def shape_of(name: str, value: Any) -> tuple[int, ...]:  # beyond module 3
    """Return the shape of a tensor, an array or nested lists; a ValueError says that lists are ragged."""
    shape = getattr(value, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) else as_host_array(name, value).shape


def as_host_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Convert lists or an array to an array on the host.

    Ragged lists raise a ValueError, and what NumPy cannot read, or a masked array, a TypeError.
    """
    if isinstance(value, np.ndarray):
        return as_plain(value)
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        if isinstance(value, (list, tuple)):
            raise ValueError(
                f"{name} must be numbers in nested lists of equal lengths, got {shown(value)}; pad the "
                "shorter ones"
            ) from None
        raise TypeError(
            f"{name} must be an array on the host, got {shown(value)} ({error}); copy it there first"
        ) from None
