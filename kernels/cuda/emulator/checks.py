"""Checks of the accesses of a kernel: races, indices out of bounds, and memory that nothing has written."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Race(RuntimeError):
    """The result depends on which of two threads comes first."""


class Uninitialised(RuntimeError):
    """Memory is read that nothing has written."""


class MemoryAccess(NamedTuple):
    """One access to an element.

    Attributes:
        block: Index of the thread's block.
        thread: Number of the thread in its block.
        epoch: Barriers of the block so far.
        step: Meetings of the warp so far.
        line: The line of the kernel: its file and number.
        is_atomic: An atomic operation.
    """

    block: Any
    thread: int
    epoch: int
    step: int
    line: tuple[str, int]
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


def source_of(line: tuple[str, int]) -> str:
    """Return a line of a file with its number, for a message."""
    text, place = linecache.getline(*line).strip(), f"line {line[1]} of {Path(line[0]).name}"
    return f"{place} (`{text}`)" if text else place


def is_garbage(values: Any) -> Any:
    """Tell which floating-point numbers have the bits with which memory begins; no computation has them."""
    values = np.asarray(values)
    bits = np.dtype(f"u{values.itemsize}")
    return (values != values) & (values.view(bits) == np.iinfo(bits).max)


def _assigned(text: str, kind: str) -> list[str]:
    """Return the names to which a line assigns shared or local arrays, in their order."""
    names = []
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(text.strip())):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                names += [ast.unparse(name) for name, one in pairs if kind in ast.unparse(one)]
    return names


class Checks:
    """The accesses of one launch.

    Args:
        device: What the kernel finds under the name ``cuda``.
    """

    def __init__(self, device: Any):
        self.device = device
        self.elements: dict[int, _Element] = {}
        self.early: list[tuple[MemoryAccess, str, Checked, tuple[int, ...]]] = []
        self.barriers: set[tuple[str, int]] = set()  # the lines of those that threads have reached

    def argument(self, name: str, value: Any) -> Any:
        """Return an argument of the kernel in the form that is checked."""
        return Checked(value, name, self, False) if isinstance(value, np.ndarray) else value

    def shared(self, array: Array, frame: FrameType) -> Checked:
        """Return a shared array in the form that is checked, named by the line that asks for it."""
        line = frame.f_code.co_filename, frame.f_lineno
        _refuse_variable_shape(frame)
        names = _assigned(linecache.getline(*line), ".shared.")
        earlier = sum(
            place[0].co_filename == line[0] and one.line == line
            for place, one in self.device.block.static.items()
        )
        found = Checked(array, names[earlier] if earlier < len(names) else "memory", self, True)
        found.line = line
        return found

    def local(self, array: Array, frame: FrameType) -> Array:
        """Return a local array of floating-point numbers, whose garbage cannot be read."""
        _refuse_variable_shape(frame)
        if array.dtype.kind != "f":
            return array
        found = array.view(_Local)
        names = _assigned(linecache.getline(frame.f_code.co_filename, frame.f_lineno), ".local.")
        found.name = names[0] if names else "memory"
        return found

    def access(self, array: Checked, key: tuple[int, ...], at: int, kind: str, new: Any) -> None:
        """Note an access; raise a :class:`Race` with an earlier one that no barrier separates."""
        device = self.device
        block, frame = device.block, sys._getframe(2)
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
            if write is None and array.is_shared:
                self.early.append((now, array.name, array, key))
            elif write is not None and not write.is_before(now):
                raise Race(self._race(array, key, write, "writes", now, "reads"))
            for read in element.reads[-2:]:
                if read.thread == number and read.line == now.line:
                    return
            element.reads.append(now)
            return
        if write is not None and not (write.is_atomic and now.is_atomic):
            is_same = kind == "write" and array.array[key] == new
            if not write.is_before(now) and not is_same:
                raise Race(self._race(array, key, write, "writes", now, "writes"))
        for read in element.reads:
            if not read.is_before(now):
                raise Race(self._race(array, key, read, "reads", now, "writes"))
        element.write, element.reads = now, []

    def _race(
        self,
        array: Checked,
        key: tuple[int, ...],
        one: MemoryAccess,
        does: str,
        two: MemoryAccess,
        other: str,
    ) -> str:
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

    def end_launch(self, kernel: str, given: tuple[Any, ...], own: tuple[Any, ...]) -> None:
        """Note the elements of device arrays that a kernel has left out, for a copy to the host."""
        for array, checked in zip(given, own, strict=False):
            if not isinstance(checked, Checked) or not hasattr(array, "gpu_data"):
                continue
            lines = {
                element.write.line for at, element in self.elements.items()
                if element.write is not None and checked.holds(at)
            }  # fmt: skip
            if lines and checked.dtype.kind == "f" and is_garbage(checked.array).any():
                where = " and in ".join(map(source_of, sorted(lines)))
                array.gpu_data.left_out.append(
                    f"of which the kernel {kernel} has written others, in {where}; do the grid and the "
                    "condition of this line cover every element, and the index each of them once?"
                )

    def end_block(self) -> None:
        """Raise :class:`Uninitialised` if the block has read shared memory that no thread had written."""
        if not self.early:
            self._forget()
            return
        now, name, array, key = self.early[0]
        lines = sorted({
            element.write.line for at, element in self.elements.items()
            if element.write is not None and array.holds(at)
        })  # fmt: skip
        first = array.first
        text = f"{self._who(now)} reads {array.element(key)} in {source_of(now.line)}"
        own = self.elements[array.address(key)].write
        if own is not None:
            text += f" before {self._who(own)} writes it in {source_of(own.line)}; write it first"
        elif lines:
            text += f", which no thread has written; {name} is written in " + " and in ".join(
                map(source_of, lines)
            )
            text += f", elements {first(lines)} of it; write this element there too"
        else:
            text += f", and no line of the kernel has written {name}"
        raise Uninitialised(text)

    def _forget(self) -> None:
        """Forget shared memory, which the next block has anew."""
        block = self.device.block
        start = block.shared.__array_interface__["data"][0]
        stop = start + len(block.shared)
        shared = [at for at in self.elements if start <= at < stop]
        for at in shared:
            del self.elements[at]


def _refuse_variable_shape(frame: FrameType) -> None:
    """Raise a TypeError if a line asks for a shared or local array whose shape a compiler cannot know."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno)
    for shape in re.findall(r"\b(?:shared|local)\.array\((.+?), *[\w.]+\)", text):
        words = set(re.findall(r"\w+", shape))
        arguments = words & {*code.co_varnames[: code.co_argcount]}
        if arguments or words & {"blockDim", "gridDim", "threadIdx", "blockIdx"}:
            raise TypeError(
                f"the shape of a shared or local array must be a constant that the compiler knows, got "
                f"{shape}; name a constant of the module, such as TILE = 16"
            )


class _Local(np.ndarray):
    """A thread's own array of floating-point numbers, which begins as garbage."""

    name = "memory"

    def __array_finalize__(self, whole: Any) -> None:
        self.name = getattr(whole, "name", "memory")

    def __getitem__(self, key: Any) -> Any:
        try:
            value = super().__getitem__(key)
        except IndexError:
            raise IndexError(
                f"index {key} is out of bounds of the local array {self.name} of shape {self.shape}"
            ) from None
        if not isinstance(value, np.ndarray) and value != value and is_garbage(value):
            raise Uninitialised(f"it reads the local array {self.name}[{key}] before it writes it")
        return value


class Checked:
    """An array of a kernel whose accesses are checked.

    Args:
        array: The array.
        name: How the kernel calls it.
        checks: The checks of the launch.
        is_shared: It is in shared memory, which begins as garbage.
    """

    def __init__(self, array: Array, name: str, checks: Checks, is_shared: bool):
        self.array, self.name, self.checks, self.is_shared = array, name, checks, is_shared
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides
        self.size, self.ndim = array.size, array.ndim
        self._start = array.__array_interface__["data"][0]
        self.line: tuple[str, int] | None = None

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array.astype(dtype or self.dtype, copy=bool(copy))

    def __getitem__(self, key: Any) -> Any:
        place = self._place(key)
        if place is None:
            return Checked(self.array[key], self.name, self.checks, self.is_shared)
        self.checks.access(self, *place, "read", None)
        value = self.array[place[0]]
        if value != value and not self.is_shared and is_garbage(value):
            raise Uninitialised(f"it reads {self.element(place[0])}, which nothing has written")
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self._place(key)
        if place is not None:
            self.checks.access(self, *place, "write", value)
        else:
            part = np.arange(self.size).reshape(self.shape)[key]
            for at, new in zip(part.flat, np.broadcast_to(value, part.shape).flat, strict=True):
                one = tuple(map(int, np.unravel_index(at, self.shape)))
                self.checks.access(self, one, self.address(one), "write", new)
        self.array[key if place is None else place[0]] = value

    def update(self, key: Any, change: Callable[[Any], Any]) -> Any:
        """Change an element atomically, and return what it was."""
        place = self._place(key)
        if place is None:
            raise TypeError(
                f"an atomic operation takes one element of {self.name}, got index {key}"
            )
        self.checks.access(self, *place, "update", None)
        old = self.array[place[0]]
        self.array[place[0]] = change(old)
        return old

    def _place(self, key: Any) -> tuple[tuple[int, ...], int] | None:
        """Return the index of an element and its address; None for a part of the array."""
        keys = key if type(key) is tuple else (key,)
        if len(keys) == self.ndim:
            at = self._start
            for i, size, step in zip(keys, self.shape, self.strides, strict=True):
                if type(i) is not int or not 0 <= i < size:
                    break
                at += i * step
            else:
                return keys, at  # as nearly always
        if len(keys) < self.ndim or any(type(one) is slice for one in keys):
            return None
        at, found = self._start, []
        for i, size, step in zip(keys, self.shape, self.strides, strict=False):
            if not hasattr(i, "__index__"):
                raise TypeError(
                    f"the array {self.name} has integer indices, got {i!r}; use // for a quotient"
                )
            one = int(i)
            if one < 0:
                one += size
                self._warn_of_the_end(keys)
            if not 0 <= one < size:
                break
            found.append(one)
            at += one * step
        if len(found) != len(self.shape) or len(keys) != len(self.shape):
            shown = ", ".join(map(str, keys))
            raise IndexError(
                f"index ({shown}) is out of bounds of the array {self.name} of shape {self.shape}"
            )
        return tuple(found), at

    def _warn_of_the_end(self, keys: tuple[Any, ...]) -> None:
        """Warn of a computed index below zero, which numba counts from the end of the array."""
        frame = sys._getframe(3)
        line = frame.f_code.co_filename, frame.f_lineno
        if not re.search(r"[\[,]\s*-\s*\d", linecache.getline(*line)):
            warnings.warn(
                f"{self.element(keys)} in {source_of(line)} is an element at the end of the array, because "
                "the index is negative; test for it if that is not meant",
                stacklevel=4,
            )

    def address(self, key: tuple[int, ...]) -> int:
        """Return the address of an element."""
        return self._start + sum(i * step for i, step in zip(key, self.strides, strict=True))

    def holds(self, at: int) -> bool:
        """Tell whether an address lies in the array."""
        return self._start <= at < self._start + self.array.nbytes

    def first(self, lines: Any) -> str:
        """Return the range of the elements that were written."""
        elements = self.checks.elements
        written = sorted(
            (at - self._start) // self.array.itemsize
            for at, element in elements.items()
            if element.write is not None and self.holds(at)
        )
        ends = [np.unravel_index(i, self.shape) for i in (written[0], written[-1])]
        return " to ".join(str(list(map(int, end))) for end in ends)

    def element(self, key: tuple[int, ...]) -> str:
        """Return the name of an element."""
        kind = "the shared array " if self.is_shared else ""
        return f"{kind}{self.name}[{', '.join(map(str, key))}]"
