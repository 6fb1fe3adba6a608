"""Writes into tensors: a backward pass must not compute with other values than those that were saved.

A write is noted with the memory that it changes, so that views, parts and arrays on it are covered too.  A
function saves only the number of writes so far.  If there were more by its backward pass, the memory of its
saved values, which has not been freed in between, is compared with theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np

from ..autodiff import Context, History
from ..scalars.modes import writes

#: Maximum number of pieces of memory whose last write is kept; beyond it, the oldest is forgotten.
MOST_PIECES = 1 << 16
#: The number of the last write to a piece of memory, by its first and last address, the newest last.
_last: dict[tuple[int, int], int] = {}
_lock = threading.Lock()


def wrote(*storages: Any) -> None:
    """Note that elements of some storages have changed; writing through NumPy is not noticed."""
    with _lock:
        writes.count += 1
        for span in map(_span, storages):
            _last.pop(span, None)
            _last[span] = writes.count
            if len(_last) > MOST_PIECES:
                del _last[next(iter(_last))]


def check_unwritten(history: History) -> None:
    """Check that the values that a function needs for its gradient are those that it saved.

    Raises:
        RuntimeError: If one has been written to.
    """
    function, ctx = history.last_fn, history.ctx or Context()
    values = ctx.saved_values
    if function.is_multilinear:
        needed, wanted = enumerate(history.inputs), ctx.needs_input_grad
        values = [x for i, x in needed if True in (*wanted[:i], *wanted[i + 1 :])]
    check_unwritten_values(function.__name__, values, ctx.saved_at)


def check_unwritten_values(function: str, values: Iterable[Any], since: int) -> None:
    """Check the values that a function of a name saved when there were ``since`` writes."""
    with _lock:
        newest = takewhile(lambda item: item[1] > since, reversed(_last.items()))
        newer = [span for span, _ in newest]
    for shape, storage in _storages(values) if newer else ():
        first, last = _span(storage)
        if any(first < end and start < last for start, end in newer):
            raise RuntimeError(
                f"the gradient of {function} needs a value of shape {tuple(shape)} that has been modified "
                "in place since the forward pass, by x[i] = number or by an optimiser; call backward() "
                "before the write, or write to a copy, such as x * 1.0"
            )


def _storages(values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the shape and the storage of each tensor and array among some values."""
    for value in values:
        data = getattr(value, "_tensor", value)
        storage = getattr(data, "_storage", data)
        if isinstance(storage, np.ndarray) or getattr(storage, "__cuda_ndarray__", False):
            yield data.shape, storage
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


def _span(array: Any) -> tuple[int, int]:
    """Return the address of an array's first byte, and that of the byte after its last."""
    array = getattr(array, "_ary", array)  # the emulated GPU's
    if 0 in array.shape:
        return 0, 0
    pointer = getattr(array, "device_ctypes_pointer", None)
    start = pointer.value or 0 if pointer is not None else array.__array_interface__["data"][0]
    ends = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    last = start + sum(max(end, 0) for end in ends)
    return start + sum(min(end, 0) for end in ends), last + array.dtype.itemsize
