"""Arrays whose indices are checked, and whose elements cannot be read before they are written."""

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
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: A line of a kernel: its file and number.
Line = tuple[str, int]


class Uninitialised(RuntimeError):
    """Memory is read that nothing has written."""


def line_of(frame: FrameType) -> Line:
    """Return the line that a frame runs."""
    return frame.f_code.co_filename, frame.f_lineno


def source_of(line: Line) -> str:
    """Return a line of a file with its number, for a message."""
    text, place = linecache.getline(*line).strip(), f"line {line[1]} of {Path(line[0]).name}"
    return f"{place} (`{text}`)" if text else place


def is_garbage(values: Any) -> Any:
    """Tell which floating-point numbers have the bits with which memory begins; no computation has them."""
    values = np.asarray(values)
    bits = np.dtype(f"u{values.itemsize}")
    return (values != values) & (values.view(bits) == np.iinfo(bits).max)


def assigned(text: str, kind: str) -> list[str]:
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


def refuse_variable_shape(frame: FrameType) -> None:
    """Raise a TypeError if a line asks for a shared or local array whose shape a compiler cannot know."""
    code, text = frame.f_code, linecache.getline(*line_of(frame))
    unknown = {
        "blockDim",
        "gridDim",
        "threadIdx",
        "blockIdx",
        *code.co_varnames[: code.co_argcount],
    }
    for shape in re.findall(r"\b(?:shared|local)\.array\((.+?), *[\w.]+\)", text):
        if not unknown.isdisjoint(re.findall(r"\w+", shape)):
            raise TypeError(
                f"the shape of a shared or local array must be a constant that the compiler knows, got "
                f"{shape}; name a constant of the module, such as TILE = 16"
            )


class Local(np.ndarray):
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
        line: The line that asks for it, of shared memory.
    """

    def __init__(
        self, array: Array, name: str, checks: Any, is_shared: bool, line: Line | None = None
    ):
        self.array, self.name, self.checks, self.is_shared = array, name, checks, is_shared
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides
        self.size, self.ndim = array.size, array.ndim
        self._start = array.__array_interface__["data"][0]
        self.line = line

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
        line = line_of(sys._getframe(3))
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

    def index(self, at: int) -> tuple[Any, ...]:
        """Return the index of the element at an address, of an array in row-major order."""
        return np.unravel_index((at - self._start) // self.array.itemsize, self.shape)

    def element(self, key: tuple[int, ...]) -> str:
        """Return the name of an element."""
        kind = "the shared array " if self.is_shared else ""
        return f"{kind}{self.name}[{', '.join(map(str, key))}]"
