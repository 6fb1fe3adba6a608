"""The checks of one launch: races, and shared memory that is read before it is written."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from .checked_arrays import (
    Array,
    Checked,
    Line,
    Local,
    Uninitialised,
    assigned,
    is_garbage,
    line_of,
    refuse_variable_shape,
    source_of,
)


class Race(RuntimeError):
    """The result depends on which of two threads comes first."""


class MemoryAccess(NamedTuple):
    """One access of a thread to an element of memory on the emulated GPU.

    Attributes:
        block: Index of the thread's block.
        thread: Number of the thread in its block.
        epoch: Barriers of the block so far.
        step: Meetings of the warp so far.
        line: The line of the kernel.
        is_atomic: An atomic operation.
    """

    block: Any
    thread: int
    epoch: int
    step: int
    line: Line
    is_atomic: bool

    def is_before(self, other: MemoryAccess) -> bool:
        """Tell whether a barrier, or the program of one thread, orders this access before a later one."""
        if self.block != other.block:
            return False
        if self.thread == other.thread or self.epoch != other.epoch:
            return True
        return self.thread // 32 == other.thread // 32 and self.step != other.step


class _Element:
    """The accesses to one element since the last that all others are ordered after."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: MemoryAccess | None = None
        self.reads: list[MemoryAccess] = []


class Checks:
    """The accesses of one launch.

    A race is kept until its block ends, for it may be the result of a barrier that not every thread
    reaches, which is the better message.

    Args:
        device: What the kernel finds under the name ``cuda``.
    """

    def __init__(self, device: Any):
        self.device = device
        self.elements: dict[int, _Element] = {}
        self.race = ""  # the message of the first one
        self.early: tuple[MemoryAccess, Checked, tuple[int, ...]] | None = None
        self.barriers: set[Line] = set()  # those that threads have reached
        self._barrier: Line | None = None  # the last one

    def argument(self, name: str, value: Any) -> Any:
        """Return an argument of the kernel in the form that is checked."""
        return Checked(value, name, self, False) if isinstance(value, np.ndarray) else value

    def shared(self, array: Array, frame: FrameType) -> Checked:
        """Return a shared array in the form that is checked, named by the line that asks for it."""
        line = line_of(frame)
        refuse_variable_shape(frame)
        names = assigned(linecache.getline(*line), ".shared.")
        earlier = sum(one.line == line for one in self.device.block.static.values())
        name = names[earlier] if earlier < len(names) else "memory"
        return Checked(array, name, self, True, line)

    def local(self, array: Array, frame: FrameType) -> Array:
        """Return a local array of floating-point numbers, whose garbage cannot be read."""
        refuse_variable_shape(frame)
        if array.dtype.kind != "f":
            return array
        found = array.view(Local)
        found.name = [*assigned(linecache.getline(*line_of(frame)), ".local."), "memory"][0]
        return found

    def reach(self, frame: FrameType) -> None:
        """Note that a thread reaches a barrier; it waits in vain if others wait at another one."""
        line, block = line_of(frame), self.device.block
        self.barriers.add(line)
        if block.everyone.arrived and line != self._barrier:
            block.turns.wait()
        self._barrier = line

    def access(self, array: Checked, key: tuple[int, ...], at: int, kind: str, new: Any) -> None:
        """Note an access, and whether it races with an earlier one that no barrier separates."""
        if self.race:
            return
        block, frame = self.device.block, sys._getframe(2)
        number = block.turns.now
        now = MemoryAccess(
            block.index, number, block.everyone.rounds, block.warps[number // 32].rounds,
            (frame.f_code.co_filename, frame.f_lineno), kind == "update",
        )  # fmt: skip
        element = self.elements.get(at)
        if element is None:
            element = self.elements[at] = _Element()
        write = element.write
        if kind == "read":
            if write is None and array.is_shared and self.early is None:
                self.early = now, array, key
            elif write is not None and not write.is_before(now):
                self.race = self._race(array, key, (write, "writes"), (now, "reads"))
            for read in element.reads[-2:]:
                if read.thread == number and read.line == now.line:
                    return
            element.reads.append(now)
            return
        if write is not None and not (write.is_atomic and now.is_atomic):
            is_same = kind == "write" and array.array[key] == new
            if not write.is_before(now) and not is_same:
                self.race = self._race(array, key, (write, "writes"), (now, "writes"))
        for read in element.reads:
            if not self.race and not read.is_before(now):
                self.race = self._race(array, key, (read, "reads"), (now, "writes"))
        element.write, element.reads = now, []

    def _race(
        self, array: Checked, key: tuple[int, ...],
        earlier: tuple[MemoryAccess, str], later: tuple[MemoryAccess, str],
    ) -> str:  # fmt: skip
        (one, does), (two, other) = earlier, later
        text = (
            f"a race on {array.element(key)}: {self._who(one)} {does} it in {source_of(one.line)}, and "
            f"{self._who(two)} {other} it in {source_of(two.line)}"
        )
        if one.block != two.block:
            return (
                f"{text}; blocks run in any order; give each element to one, or use cuda.atomic.add"
            )
        if does == other or (one.line == two.line and not array.is_shared):
            return f"{text}; give each element to one thread, or use cuda.atomic.add"
        first, last = sorted([one.line, two.line])
        is_again = first[0] == last[0] and (  # the lines of two files have no order
            any(first < barrier < last for barrier in self.barriers)
            or (self.elements[array.address(key)].write is not None and one.line >= two.line)
        )
        where = "at the end of the loop" if is_again else "between the two lines"
        return f"{text}, with no barrier in between; call cuda.syncthreads() {where}"

    def _who(self, access: MemoryAccess) -> str:
        thread = tuple(self.device.place_of(access.thread))
        return f"thread {thread} of block {tuple(access.block)}"

    def _written(self, array: Checked) -> dict[int, Line]:
        """Return the addresses of an array that have been written, in order, and the lines."""
        return {
            at: element.write.line for at, element in sorted(self.elements.items())
            if element.write is not None and array.holds(at)
        }  # fmt: skip

    def end_launch(self, kernel: str, given: tuple[Any, ...], own: tuple[Any, ...]) -> None:
        """Note the elements of device arrays that a kernel has left out, for a copy to the host."""
        for array, checked in zip(given, own, strict=False):
            if not isinstance(checked, Checked) or not hasattr(array, "gpu_data"):
                continue
            lines = self._written(checked).values()
            if lines and checked.dtype.kind == "f" and is_garbage(checked.array).any():
                array.gpu_data.left_out.append(
                    f"of which the kernel {kernel} has written others, in {_joined(lines)}; do the grid "
                    "and the condition of this line cover every element, and the index each of them once?"
                )

    def end_block(self) -> None:
        """Raise the error that the block has made, and forget shared memory, which the next has anew.

        Raises:
            Race: If two of its accesses race.
            Uninitialised: If it has read shared memory that no thread had written.
        """
        if self.race:
            raise Race(self.race)
        if self.early is not None:
            raise Uninitialised(self._too_early(*self.early))
        shared = self.device.block.shared
        start = shared.__array_interface__["data"][0]
        for at in [at for at in self.elements if start <= at < start + len(shared)]:
            del self.elements[at]

    def _too_early(self, now: MemoryAccess, array: Checked, key: tuple[int, ...]) -> str:
        text = f"{self._who(now)} reads {array.element(key)} in {source_of(now.line)}"
        own, written = self.elements[array.address(key)].write, self._written(array)
        if own is not None:
            return (
                f"{text} before {self._who(own)} writes it in {source_of(own.line)}; write it first"
            )
        if not written:
            return f"{text}, and no line of the kernel has written {array.name}"
        ends = " to ".join(str([*map(int, array.index(at))]) for at in (min(written), max(written)))
        return (
            f"{text}, which no thread has written; {array.name} is written in "
            f"{_joined(written.values())}, elements {ends} of it; write this element there too"
        )


def _joined(lines: Any) -> str:
    """Return the names of some lines, each once."""
    return " and in ".join(map(source_of, sorted(set(lines))))
