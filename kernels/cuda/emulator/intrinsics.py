"""What the intrinsics of the library and the functions of libdevice do, in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from .device import dtype_of


def _load(a: Any, *index: Any) -> tuple[Any, ...]:
    """Return four neighbouring elements."""
    last = index[-1]
    return tuple(a[(*index[:-1], slice(last, last + 4))])


def _store(a: Any, *index_and_values: Any) -> None:
    """Write four neighbouring elements."""
    *lead, last, w, x, y, z = index_and_values
    part = a[tuple(lead)] if lead else a
    part[last], part[last + 1], part[last + 2], part[last + 3] = w, x, y, z


def _load_words(a: Any, i: int) -> tuple[Any, ...]:
    """Return eight neighbours of a flat uint16 array as four words."""
    words = np.array([a[i + n] for n in range(8)], np.uint16).view(np.uint32)
    return tuple(words)


def _store_words(a: Any, i: int, *words: Any) -> None:
    """Write four words as eight neighbours of a flat uint16 array."""
    for n, bits in enumerate(np.array(words, np.uint32).view(np.uint16)):
        a[i + n] = bits


#: The name of an intrinsic → the function that does the same.
INTRINSICS: dict[str, Callable[..., Any]] = {
    "load_shared": _load, "load_global": _load, "load_row": _load,
    "store_shared": _store, "store_row": _store,
    "load_words": _load_words, "store_words": _store_words,
    "widen_float16": lambda bits: np.float32(np.uint16(bits).view(np.float16)),
    "narrow_float16": lambda x: np.float16(x).view(np.uint16),
}  # fmt: skip


def _reinterpret(result: np.dtype[Any], own: np.dtype[Any]) -> Callable[[Any], Any]:
    return lambda x: own.type(x).view(result)


def _load_at(result: np.dtype[Any], *_: Any) -> Callable[[int, int], Any]:
    """Return the function that reads an element at an address."""
    kind = np.ctypeslib.as_ctypes_type(result)
    return lambda address, i: result.type(
        kind.from_address(int(address) + int(i) * result.itemsize).value
    )


def _store_at(result: None, address: Any, i: Any, own: np.dtype[Any]) -> Callable[..., None]:
    """Return the function that writes an element at an address."""
    kind = np.ctypeslib.as_ctypes_type(own)

    def store(address: int, i: int, value: Any) -> None:
        kind.from_address(int(address) + int(i) * own.itemsize).value = own.type(value).item()

    return store


#: The name of an intrinsic → what makes the function from the dtypes of its result and arguments.
_TYPED: dict[str, Callable[..., Any]] = {
    "reinterpret": _reinterpret, "load_at": _load_at, "store_at": _store_at,
}  # fmt: skip


def known_intrinsic(define: Callable[..., Any]) -> Any:
    """Return the function that does what an intrinsic does, or None.

    Args:
        define: The function that the decorator takes.
    """
    if (make := _TYPED.get(define.__name__)) is None:
        return INTRINSICS.get(define.__name__)
    signature, _ = define(*[None] * len(inspect.signature(define).parameters))
    kinds = signature.return_type, *signature.args
    return make(*(None if kind == types.void else dtype_of(kind) for kind in kinds))


#: The functions of libdevice.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "fsub_rn": lambda x, y: np.float32(x) - np.float32(y),
    "dadd_rn": lambda x, y: np.float64(x) + np.float64(y),
    "exp2f": lambda x: np.exp2(np.float32(x)),
    "exp2": lambda x: np.exp2(np.float64(x)),
    "umulhi": lambda x, y: np.uint32(int(x) * int(y) >> 32),
}
