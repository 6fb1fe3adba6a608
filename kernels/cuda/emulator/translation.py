"""The functions of a kernel in the form that the emulated GPU runs.

A kernel runs from its own source.  What it names is found in its closures and modules and replaced: a
device function by its own source, the module ``numba.cuda`` by the emulated device, a type by a conversion
to it, and an instruction by a function that does the same on NumPy arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import types

from .device import DEVICE, MEETING, dtype_of

#: Packages whose functions run as they are.
_OTHERS = {*sys.stdlib_module_names, "numba", "numpy", "ml_dtypes"} - {"__main__"}
#: What a function of ``math`` raises an error for, and a GPU computes.
_BEYOND = {
    name: getattr(np, name)
    for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh")
} | {"pow": np.power}


class Integer:
    """An integer type of a kernel: it converts, keeping the low bits, and says what an array is of."""

    def __init__(self, dtype: np.dtype[Any]):
        self.dtype = dtype
        self._bits = 8 * dtype.itemsize
        self._mask, self._half = (1 << self._bits) - 1, 1 << self._bits - 1
        self._is_signed = dtype.kind == "i"

    def __call__(self, value: Any) -> Any:
        kept = int(value) & self._mask
        if self._is_signed and kept & self._half:
            kept -= self._mask + 1
        return self.dtype.type(kept)


@cache
def _real(function: Any) -> Any:
    """Return a function of ``math`` as it is on a GPU: float32 stays float32, and nothing raises."""
    beyond = _BEYOND.get(function.__name__)

    def real(x: Any, *more: Any) -> Any:
        try:
            result = function(x, *more)
        except (ValueError, OverflowError):
            if beyond is None:
                raise
            return beyond(x, *more)
        return np.float32(result) if type(x) is np.float32 and type(result) is float else result

    return real


class _Module:
    """A module of which what is asked for is translated."""

    def __init__(self, find: Callable[[str], Any]):
        self._find = find

    def __getattr__(self, name: str) -> Any:
        found = self._find(name)
        setattr(self, name, found)
        return found


class Translation:
    """A kernel as the emulated GPU runs it.

    Args:
        source: The kernel.

    Attributes:
        kernel: The function that each thread calls.
        meets: Whether its threads may wait for each other.
        has_instructions: Whether it names instructions in PTX.
    """

    def __init__(self, source: Callable[..., None]):
        self.meets = self.has_instructions = False
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no other object gets the number of one that is known
        self.kernel = self._of(source)

    def _of(self, value: Any) -> Any:
        """Return what stands for a value of the source."""
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = self._translation(value)
        return self._known[id(value)]

    def _translation(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return self._module(value)
        if isinstance(value, types.Number):
            return self._type(dtype_of(value))
        if hasattr(value, "ptx"):
            self.meets = self.has_instructions = True
            engines = import_module("kernels.cuda.emulator.tensor_cores.engines")
            return engines.instruction(value.ptx)
        if isinstance(value, tuple):
            return getattr(value, "_make", tuple)(map(self._of, value))
        if isinstance(value, BuiltinFunctionType) and value.__module__ == "math":
            return _real(value)
        function = getattr(value, "py_func", value)
        if isinstance(function, FunctionType) and not _is_foreign(function.__module__):
            return self._function(value, function)
        return value

    @staticmethod
    @cache
    def _type(dtype: np.dtype[Any]) -> Any:
        return dtype.type if dtype.kind in "fb" else Integer(dtype)

    def _module(self, value: ModuleType) -> Any:
        name = value.__name__
        if name in ("numba.cuda", "kernels.cuda.emulator.api"):
            return DEVICE
        if _is_foreign(name) and name not in ("math", "numba"):
            return value
        return _Module(lambda part: self._of(getattr(value, part)))

    def _function(self, value: Any, function: FunctionType) -> Any:
        names = dict(function.__globals__)
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, cells
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self._known[id(value)] = copy  # a function may name itself
        used = _names(function.__code__)
        self.meets = self.meets or not MEETING.isdisjoint(used)
        for name in used:
            if name in names:
                names[name] = found = self._of(names[name])
                if isinstance(found, _Module):  # what waits in it must be known before the launch
                    for part in used:
                        getattr(found, part, None)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                content = old.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
            cell.cell_contents = self._of(content)
        return copy


def _is_foreign(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] in _OTHERS or name.startswith("kernels.cuda.emulator.")


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, those within it included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


@cache
def translated(source: Callable[..., None]) -> Translation:
    """Return the translation of a kernel, kept as long as the process runs, as machine code is."""
    return Translation(source)
