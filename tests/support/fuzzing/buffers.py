"""Arrays between canaries: memory around and between their elements that nobody may read or write.

What lies around an operand, and in the gaps of its layout, is poison: NaN for a kernel that reads it, and
bytes whose change shows a kernel that writes there.  Results get such memory too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kernels.runtime.memory import Memory, row_major_strides

from ..layouts import POISON, write_once

#: Bytes of poison before and after an array, more than a vector and a line of the cache.
MARGIN = 192


def placed(array: Any, misaligned: bool = False) -> Any:
    """Return a copy with the same strides as far as they are, its own memory between canaries."""
    low = sum(min(step, 0) * (n - 1) for step, n in zip(array.strides, array.shape, strict=True))
    high = sum(max(step, 0) * (n - 1) for step, n in zip(array.strides, array.shape, strict=True))
    size = high - low + array.itemsize if array.size else 0
    buffer = np.full(size + 2 * MARGIN + 1, POISON, np.uint8)
    start = -(-(buffer.ctypes.data + MARGIN) // 64) * 64 - buffer.ctypes.data
    start = start if start + size + 64 <= len(buffer) else MARGIN
    start += (-(buffer.ctypes.data + start)) % array.itemsize + (1 if misaligned else 0)
    out = np.ndarray(array.shape, array.dtype, buffer, start - low, array.strides)
    write_once(out, array)
    out.flags.writeable = array.flags.writeable
    return out


def whole_buffer(array: Any) -> Any:
    """Return all bytes that a :func:`placed` array lies among."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Untouched:
    """All bytes of some arrays and of the memory around them, as they were.

    Args:
        arrays: By name; other values are left out.
    """

    def __init__(self, arrays: dict[str, Any]):
        self.arrays = {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)}
        self.before = {name: self._state(x) for name, x in self.arrays.items()}

    @staticmethod
    def _state(array: Any) -> Any:
        if array.dtype.hasobject:
            return [id(x) for x in array.reshape(-1)]
        whole = whole_buffer(array)
        return array.shape, array.strides, array.flags.writeable, whole.tobytes()

    def check(self, what: str) -> None:
        """Raise an AssertionError that names the arrays that have changed."""
        changed = [name for name, x in self.arrays.items() if self._state(x) != self.before[name]]
        assert not changed, f"{what} has changed {changed}, or memory beside them"


@contextmanager
def guarded_results() -> Iterator[list[Any]]:
    """Let results lie between canaries too, NaN until they are written; yield them.

    Yields:
        What has been allocated: its memory's bytes, and where in them it lies.
    """
    made: list[Any] = []

    def guarded(shape: Any, dtype: Any, strides: Any) -> Any:
        like = np.ndarray(shape, dtype, np.zeros(1, np.uint8).repeat(64), 0, (0,) * len(shape))
        steps = tuple(step * like.itemsize for step in strides)
        blank = np.lib.stride_tricks.as_strided(like, shape, steps) if like.size else like
        low = sum(step * (n - 1) for step, n in zip(steps, shape, strict=True))
        buffer = np.full((low + like.itemsize if blank.size else 0) + 2 * MARGIN, POISON, np.uint8)
        start = MARGIN + (-(buffer.ctypes.data + MARGIN)) % like.itemsize
        made.append((buffer, start, len(buffer) - 2 * MARGIN))
        return np.ndarray(shape, dtype, buffer, start, steps)

    def empty(self: Any, shape: Any, dtype: Any) -> Any:
        return guarded(tuple(shape), dtype, row_major_strides(tuple(shape)))

    original = Memory.empty_as

    def empty_as(self: Any, array: Any, shape: Any, dtype: Any) -> Any:
        found = original(self, array, shape, dtype)
        return guarded(found.shape, found.dtype, [step // found.itemsize for step in found.strides])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "empty", empty)
        patch.setattr(Memory, "empty_as", empty_as)
        yield made


def check_margins(made: list[Any]) -> None:
    """Check that nothing was written before or after what :func:`guarded_results` gave."""
    for buffer, start, size in made:
        outside = np.concatenate([buffer[:start], buffer[start + size :]])
        assert (outside == POISON).all(), f"a result of {size} bytes was written beyond its memory"
