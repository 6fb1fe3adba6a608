"""A GPU in Python for tiny kernels of tensor-core instructions: its threads are greenlets, in turns.

It runs the source of a kernel as it is.  Functions and instructions that the source names are found in its
closures and modules and replaced: a device function by its own source, an instruction by what its PTX says,
done on NumPy arrays by ``kernels.cuda.ptx.emulated.warp``.

It does not forgive.  Memory begins as garbage; a copy under way leaves garbage where it will arrive until
it has been waited for; engines see garbage where a thread stored and made no fence.  Whatever a GPU may do
in any order is drawn, of MINITORCH_SCHEDULE and the block's place: which thread runs next, and whether an
engine reads what it was given at once or at last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from random import Random
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba import types
from numba.np.numpy_support import as_dtype

from kernels.runtime.targets import cuda, libdevice

from .engines import GROUP, OF_ENGINES, Engines, MemoryBarrier, Product, TensorMap
from .instructions import (
    APART,
    GARBAGE,
    GLOBAL,
    INSTRUCTIONS,
    WARP,
    Array,
    ThreadState,
)

#: Bytes of a block for its static shared arrays.
STATIC = 1 << 15
#: Where functions come from that are replaced by their own source.
OURS = ("kernels", "tests")

#: What an instruction begins with → the method that does it.
_METHODS = INSTRUCTIONS | OF_ENGINES
#: What the functions of the driver's mathematical library compute.
LIBDEVICE = {
    "fsub_rn": np.subtract,
    "umulhi": lambda x, y: np.uint32(int(x) * int(y) >> 32),
}
#: What the orders of threads are drawn of; with the same number they are the same.
_SCHEDULE = os.environ.get("MINITORCH_SCHEDULE", "0")
#: Threads that come late.
_late: set[int] = set()


@contextmanager
def held_back(*threads: int) -> Iterator[None]:
    """Let threads of each block run only when no other can: what is computed must not depend on it."""
    _late.update(threads)
    try:
        yield
    finally:
        _late.clear()


#: How probable it is for a warp and for a warpgroup that it comes late.
LATE = 0.25
#: How probable it is that one of those who come late is next while others could be; with 0 when none can.
STILL = (0.0, 0.05)
#: How probable it is that a copy comes before the next turn; with 0 it comes when all wait.
COMING = (0.0, 0.01, 0.3)


class _Turns:
    """Threads that run one at a time, in an order that is drawn: each until it waits for others.

    Attributes:
        now: Whose turn it is.
        copies: What the copy engine has still to bring: functions that do.
        drawn: Returns a number from 0 to 1, another each time.
    """

    def __init__(self, count: int, index: tuple[int, int]):
        self.now, self._count = 0, count
        self.copies: list[Callable[[], None]] = []
        draw = Random(f"{_SCHEDULE} {index}")
        self.drawn = draw.random
        self._copies_come = draw.choice(COMING)
        self._late_come = 0.0 if _late else draw.choice(STILL)
        late = set(_late)
        for size in () if late else (WARP, GROUP):
            for first in range(0, count, size):
                late.update(range(first, first + size) if draw.random() < LATE else ())
        # Who may run, and of those that come late who may.
        self._ready: tuple[list[int], list[int]] = [], []
        self._ready_of = [self._ready[i in late] for i in range(count)]
        self.wake(range(count))
        self._hub = getcurrent()

    def take(self, thread: Callable[[], None]) -> None:
        """Run a function in each thread; raise what one of them raises."""
        running = [greenlet(thread) for _ in range(self._count)]
        for one in running:
            one.gr_context = copy_context()  # how NumPy warns
        try:
            for number in iter(self._next, None):
                self.now = number
                running[number].switch()
            if not all(one.dead for one in running):
                raise RuntimeError("threads wait for others, which wait too or have ended")
        finally:
            for one in running:
                one.throw()  # ends it where it waits

    def _next(self) -> int | None:
        soon, late = self._ready
        while self.copies and (not (soon or late) or self.drawn() < self._copies_come):
            self.copies.pop(int(self.drawn() * len(self.copies)))()
        ready = late if late and (not soon or self.drawn() < self._late_come) else soon
        if not ready:
            return None
        place = int(self.drawn() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def wake(self, numbers: Iterable[int]) -> None:
        """Let threads go on when the turn comes to them."""
        for number in numbers:
            self._ready_of[number].append(number)

    def wait(self) -> None:
        """Stop this thread until it is woken and the turn comes to it."""
        self._hub.switch()


class _Meeting:
    """Threads that wait for each other, hand in a value each, and get a result each."""

    def __init__(self, count: int, turns: _Turns):
        self.values: list[Any] = [None] * count
        self.results: list[Any] = []
        self.arrived: list[int] = []
        self.turns = turns

    def hold(self, value: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        """Return the own result of what ``act`` makes of all values."""
        number = self.turns.now
        index = number % len(self.values)
        self.values[index] = value
        self.arrived.append(number)
        if len(self.arrived) == len(self.values):
            self.results = act(self.values)
            self.turns.wake(self.arrived)  # who came last need not be the first to go on
            self.arrived = []
        self.turns.wait()
        return self.results[index]


class EmulatedBlock(Engines):
    """One block of threads that run a kernel.

    Args:
        grid: Blocks.
        index: Which one this is.
        threads: Of a block.
        shared_bytes: Dynamic shared memory.
        memory: Global memory: arrays by number.
        maps: What tensor maps say, by the address of each.
    """

    def __init__(
        self, grid: tuple[int, int], index: tuple[int, int], threads: int, shared_bytes: int,
        memory: list[Array], maps: dict[int, TensorMap],
    ):  # fmt: skip
        self.grid, self.index, self.threads = grid, index, threads
        self.dynamic = -(-shared_bytes // 16) * 16
        self.shared = np.full(self.dynamic + STATIC, GARBAGE, np.uint8)
        self.unfenced = np.zeros(len(self.shared), bool)
        self.static: dict[Any, int] = {}
        self.end = self.dynamic
        self.memory, self.maps = memory, maps
        self.states = [ThreadState() for _ in range(threads)]
        self.named: dict[int, tuple[int, list[int]]] = {}
        self.barriers: dict[int, MemoryBarrier] = {}
        self.products: list[list[Product]] = [[] for _ in range(threads // GROUP)]
        self.turns = _Turns(threads, index)
        self.everyone = _Meeting(threads, self.turns)
        self.warps = [_Meeting(WARP, self.turns) for _ in range(threads // WARP)]
        self.groups = [_Meeting(GROUP, self.turns) for _ in range(threads // GROUP)]
        self.known: dict[int, Any] = {}
        self.kept: list[Any] = []  # so that no other object gets the number of one that is known

    def run(self, source: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Run the kernel; raise what one of its threads raises."""
        kernel = self.translate(source)

        def thread() -> None:
            kernel(*args)
            self.check_ended()

        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.turns.take(thread)

    # -- what a kernel names ---------------------------------------------------------------------

    def translate(self, value: Any) -> Any:
        """Return what stands for a value of the source."""
        if id(value) not in self.known:
            self.kept.append(value)
            self.known[id(value)] = self._translation(value)
        return self.known[id(value)]

    def _translation(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            if value is cuda:
                return self._cuda()
            if value is libdevice:
                return SimpleNamespace(**LIBDEVICE)
            is_ours = value.__name__.startswith(OURS)
            return _Module(lambda name: self.translate(getattr(value, name))) if is_ours else value
        if hasattr(value, "ptx"):
            return self._instruction(value.ptx)
        if getattr(value, "__module__", None) == libdevice.__name__:
            return LIBDEVICE[value.__name__]
        if isinstance(value, types.Number):
            return _Cast(as_dtype(value))
        function = getattr(value, "py_func", value)
        if not isinstance(function, FunctionType) or not function.__module__.startswith(
            ("kernels", "tests")
        ):
            return value
        names = dict(function.__globals__)
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, cells
        )
        self.known[id(value)] = copy  # a function may name itself
        for name in function.__code__.co_names:
            if name in names:
                names[name] = self.translate(names[name])
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.translate(old.cell_contents)
        return copy

    def _cuda(self) -> Any:
        thread = _Place(lambda: (self.turns.now, 0, 0))
        return SimpleNamespace(
            threadIdx=thread,
            blockIdx=_Place(lambda: (*self.index, 0)),
            gridDim=_Place(lambda: (*self.grid, 1)),
            syncthreads=lambda: self.everyone.hold(None, lambda values: values),
            syncthreads_or=lambda value: self.everyone.hold(
                bool(value), lambda values: [any(values)] * len(values)
            ),
            syncwarp=lambda: self._meet(None, lambda values: values),
            threadfence=lambda: None,
            ballot_sync=lambda mask, value: self._meet(
                bool(value), lambda values: [sum(x << i for i, x in enumerate(values))] * WARP
            ),
            any_sync=lambda mask, value: self._meet(
                bool(value), lambda values: [any(values)] * WARP
            ),
            shfl_sync=lambda mask, value, lane: self._meet(
                (value, lane), lambda values: [values[values[i][1]][0] for i in range(WARP)]
            ),
            shfl_xor_sync=lambda mask, value, step: self._meet(
                (value, step), lambda values: [values[i ^ values[i][1]][0] for i in range(WARP)]
            ),
            atomic=SimpleNamespace(add=_atomic_add),
            shared=SimpleNamespace(array=self._shared_array),
            local=SimpleNamespace(array=_local_array),
        )

    def _shared_array(self, shape: Any, kind: Any) -> Array:
        """Return dynamic shared memory, or a static array of the line of the kernel that asks."""
        if shape == 0:
            return self.shared[: self.dynamic].view(kind.dtype)
        frame = sys._getframe(1)
        place, count = (frame.f_code, frame.f_lineno), int(np.prod(shape)) * kind.dtype.itemsize
        if place not in self.static:
            self.static[place] = self.end
            self.end += -(-count // 16) * 16
        start = self.static[place]
        return self.shared[start : start + count].view(kind.dtype).reshape(shape)

    def _meet(self, value: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        return self.warps[self.turns.now // WARP].hold(value, act)

    def _meet_group(self, value: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        return self.groups[self.turns.now // GROUP].hold(value, act)

    # -- instructions ----------------------------------------------------------------------------

    def _instruction(self, ptx: str) -> Callable[..., Any]:
        for pattern, name in _METHODS.items():
            if (found := re.match(pattern, ptx)) is not None:
                return partial(getattr(self, name), *found.groups())
        raise NotImplementedError(f"the emulated GPU does not know {ptx!r}; add what it does")


class _Module:
    """A module of ours, of which what is asked for is translated."""

    def __init__(self, find: Callable[[str], Any]):
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return self._find(name)


class _Place:
    """A place in three dimensions, asked for anew each time."""

    def __init__(self, find: Callable[[], tuple[int, int, int]]):
        self._find = find

    x = property(lambda self: self._find()[0])
    y = property(lambda self: self._find()[1])
    z = property(lambda self: self._find()[2])


def _local_array(shape: Any, kind: Any) -> Array:
    array = np.empty(shape, kind.dtype)
    array.view(np.uint8)[...] = GARBAGE
    return array


class _Cast:
    """A number type of a kernel: it converts, and says what an array is of."""

    def __init__(self, dtype: np.dtype[Any]):
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        if self.dtype.kind == "f":
            return self.dtype.type(value)
        bits = 8 * self.dtype.itemsize
        kept = int(value) & ((1 << bits) - 1)
        is_negative = self.dtype.kind == "i" and kept >> (bits - 1)
        return self.dtype.type(kept - (1 << bits) if is_negative else kept)


def _atomic_add(array: Array, index: Any, value: Any) -> Any:
    """Add, and return what was there before; threads run one at a time."""
    before = array[index]
    array[index] += value
    return before


def leaves(record: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what a tuple contains, and what tuples in it contain."""
    for entry in record:
        yield from leaves(entry) if isinstance(entry, tuple) else (entry,)


def launch(
    kernel: Any, grid: tuple[int, int], *args: Any, maps: dict[int, TensorMap] | None = None
) -> None:
    """Run a ``device.Kernel`` on NumPy arrays, and tuples and numbers, block after block.

    Args:
        kernel: With its threads and shared memory.
        grid: Blocks.
        args: Its arguments.
        maps: What tensor maps say, by their place among the arrays of the arguments.
    """
    memory = []
    # Arrays in tuples come last, for tensor maps count those that are arguments themselves.
    nested = [array for arg in args if isinstance(arg, tuple) for array in leaves(arg)]
    for array in (*args, *nested):
        if isinstance(array, np.ndarray):
            while isinstance(array.base, np.ndarray):
                array = array.base
            memory.append(array.ravel(order="K").view(np.uint8))
    at = {GLOBAL + i * APART: tensor_map for i, tensor_map in (maps or {}).items()}
    for y in range(grid[1]):
        for x in range(grid[0]):
            block = EmulatedBlock(grid, (x, y), kernel.threads, kernel.shared_bytes, memory, at)
            block.run(kernel.source, args)
