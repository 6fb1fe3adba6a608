"""Name a barrier that a kernel lacks: two threads of a block use an element, and no barrier is between.

Likewise an element that is read though no thread of the block has written it.

The simulator runs threads in some order, so a kernel without a barrier may compute the right thing. Here
each access to shared memory is noted with the number of barriers that its thread has passed. A pair of a
write and a read by two threads after the same number of barriers is an error in any order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.runtime.targets import IS_SIMULATOR

_lock = threading.Lock()


class _Watched(np.ndarray):
    """A shared array that notes who reads and writes its elements."""

    places: Any  # the number of each element
    written: dict[int, tuple[Any, Any, int]]  # element → thread, its block and barriers, line
    read: dict[int, tuple[Any, Any, int]]

    def __getitem__(self, key: Any) -> Any:
        self._note(key, self.written, self.read, "reads", "writes")
        self._refuse_unwritten(key)
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(key, self.read, self.written, "writes", "reads")
        np.asarray(self)[key] = value

    def _refuse_unwritten(self, key: Any) -> None:
        thread: Any = threading.current_thread()
        for place in np.ravel(self.places[key]).tolist():
            writer = self.written.get(place)
            if writer is None or writer[1][0] != _xyz(thread.blockIdx):
                frame = _frame_of_task()
                raise AssertionError(
                    f"thread {_number(thread)} reads {self._name_of(place, frame)} in line "
                    f"{frame.f_lineno} of {Path(frame.f_code.co_filename).name}, and no thread of "
                    "the block has written it: either cuda.syncthreads() is missing above line "
                    f"{frame.f_lineno}, or it lies beyond the end of a tile, or was to be filled with 0"
                )

    def _name_of(self, place: int, frame: Any) -> str:
        name = next((n for n, x in frame.f_locals.items() if x is self), "shared memory")
        return f"{name}[{', '.join(map(str, np.unravel_index(place, self.shape)))}]"

    def _note(self, key: Any, others: Any, own: Any, does: str, did: str) -> None:
        thread: Any = threading.current_thread()
        # The simulator's blocks use one array, one after the other.
        passed = _xyz(thread.blockIdx), getattr(thread, "barriers_passed", 0)
        frame = _frame_of_task()
        for place in np.ravel(self.places[key]).tolist():
            other = others.get(place)
            if other and other[0] is not thread and other[1] == passed:
                raise AssertionError(
                    f"thread {_number(thread)} {does} {self._name_of(place, frame)} in line "
                    f"{frame.f_lineno}, thread {_number(other[0])} {did} it in line {other[2]}, and "
                    "no barrier is between: cuda.syncthreads() is missing above line "
                    f"{max(frame.f_lineno, other[2])} of {Path(frame.f_code.co_filename).name}"
                )
            before = own.get(place)
            if before and before[1] == passed and before[0] is not thread and own is self.read:
                continue  # two that read: the first is enough
            own[place] = thread, passed, frame.f_lineno


def _xyz(dim: Any) -> tuple[int, int, int]:
    return dim.x, dim.y, dim.z


def _number(thread: Any) -> str:
    x, y, z = _xyz(thread.threadIdx)
    return f"({x}, {y}, {z})" if y or z else str(x)


@cache
def _has_tasks(file: str) -> bool:
    return file.endswith(".py") and "# END TASK" in Path(file).read_text(encoding="utf-8")


def _frame_of_task() -> Any:
    """Return the frame that a student writes, not that of a helper which it calls."""
    frame: Any = sys._getframe(3)
    inner = frame
    while frame is not None and not _has_tasks(frame.f_code.co_filename):
        frame = frame.f_back
    return frame or inner


@pytest.fixture(scope="module")
def missing_barriers() -> Iterator[None]:
    """Fail a kernel in the simulator, and say where, if it lacks a barrier."""
    if not IS_SIMULATOR:
        yield
        return
    from numba.cuda.simulator import kernel, kernelapi

    shared, thread = kernelapi.FakeCUDAShared, kernel.BlockThread
    make, wait = shared.array, thread.syncthreads

    def array(self: Any, shape: Any, dtype: Any) -> Any:
        if isinstance(shape, int) and shape == 0:
            return make(self, shape, dtype)
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        with _lock:
            if place not in self._allocations:
                kind = np.dtype(getattr(dtype, "name", dtype))
                made = np.empty(shape, kind).view(_Watched)
                made.places = np.arange(made.size).reshape(made.shape)
                made.written, made.read = {}, {}
                self._allocations[place] = made
            return self._allocations[place]

    def syncthreads(self: Any) -> None:
        wait(self)
        self.barriers_passed = getattr(self, "barriers_passed", 0) + 1

    shared.array, thread.syncthreads = array, syncthreads
    yield
    shared.array, thread.syncthreads = make, wait
