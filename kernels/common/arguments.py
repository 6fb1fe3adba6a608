"""Single arguments of any function: whole numbers, arrays on the host, and how an error text shows them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """Return a value for an error text: what it is, and of which type unless that is long."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} of {value.dtype}"
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 40 else f"a value of type {kind}"


def short(number: Any) -> str:
    """Return a number for an error text; one of a thousand digits says as much by its first."""
    text = repr(number)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number.

    Raises:
        TypeError: If it is none.
        ValueError: If it is less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {shown(value)}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be {least} or more, got {short(number)}")
    return number


def as_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return one of NumPy's subclasses as the array that it is, in the byte order of this machine.

    A ``numpy.matrix`` would stay of two dimensions however it is reshaped.

    Raises:
        TypeError: For a masked array: what it hides would come to light.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"every element of an array counts, got a masked array of shape {array.shape}; fill it with "
            "array.filled(value), or hand its mask to attention as attn_mask"
        )
    array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_host_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return what a caller gives as lists or as an array as an array on the host.

    Raises:
        ValueError: If lists have unequal lengths; it names the argument.
        TypeError: If the value lies on a device, NumPy cannot read it, or it is a masked array.
    """
    if isinstance(value, np.ndarray):
        return as_plain(value)
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        if isinstance(value, (list, tuple)):
            raise ValueError(
                f"{name} must be numbers in lists of equal lengths, got {shown(value)}; fill up the "
                "shorter ones"
            ) from None
        raise TypeError(
            f"{name} must be an array on the host, got {shown(value)} ({error}); copy it there first"
        ) from None
