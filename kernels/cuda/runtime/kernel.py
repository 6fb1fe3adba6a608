"""The class of CUDA kernels, compiled at the first launch, and functions that kernels call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from types import CellType, FunctionType
from typing import Any

import numpy as np

from kernels.cuda.runtime.compiling import allow_shared_memory, check_arrays, compile_kernel
from kernels.cuda.runtime.launcher import Launcher  # beyond module 5
from kernels.runtime.launch_notes import Launched, thread  # beyond module 5
from kernels.runtime.numba_patches import compile_in_less_time
from kernels.runtime.targets import (
    cuda,
    driver,
    explained,
    launching,
    shared_memory_bytes,
)
from kernels.runtime.types import from_dtype, types

compile_in_less_time(cuda)  # before anything is compiled


def device_function(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call; inlined, which needs no GPU at compile time."""
    return cuda.jit(device=True, inline="always")(function)


@cache
def device_callable(function: Callable[..., Any], dtype: np.dtype[Any]) -> Any:
    """Return the device function for a user's function.

    A Python float in a function is a float64, and a float32 kernel would compute in float64 around it,
    which is 64 times slower on many GPUs.  The function is therefore compiled with the constants of its
    source, its module and its closure rounded to ``dtype``.
    """
    if not isinstance(function, FunctionType):
        return function

    def rounded(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(rounded, value))
        return dtype.type(value) if type(value) is float and dtype.kind == "f" else value

    code = function.__code__.replace(co_consts=tuple(map(rounded, function.__code__.co_consts)))
    names = {name: rounded(value) for name, value in function.__globals__.items()}
    cells = tuple(CellType(rounded(cell.cell_contents)) for cell in function.__closure__ or ())
    copy = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    return device_function(copy)


#: Threads of a warp.
WARP = 32
#: The mask of a warp's lanes, for its shuffles and votes.
ALL_LANES = 0xFFFFFFFF
#: Bytes of a float32 and of an int32.
WORD = 4


class Kernel:
    """A kernel and the types of its arguments, compiled or loaded from disk at the first launch.

    Arrays are typed with any strides, so that operands are read in place and no layout makes numba
    compile the kernel again.  ``threads`` is the maximum per block, which limits the registers that
    the compiler may use (0 sets no limit), ``shared_bytes`` the dynamic shared memory of a block, and
    ``resident`` the blocks that should fit on a multiprocessor at a time, which bounds the registers
    further.
    """

    def __init__(
        self,
        source: Callable[..., None],
        signature: Any,
        threads: int = 0,
        shared_bytes: int = 0,
        resident: int = 1,
    ):
        self.source = source
        self.signature = signature
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.resident = resident
        self.name = source.__qualname__.rsplit(".", 1)[-1]
        self._launching = launching(self.name)

    @property
    def launch_bounds(self) -> tuple[int, int] | None:
        """The launch bounds for the compiler: threads per block, and blocks per multiprocessor."""
        return (self.threads, self.resident) if self.threads else None

    @cached_property
    def _compiled(self) -> Any:
        """The kernel as numba has compiled it."""
        with explained(f"compiling the kernel {self.name}"):
            return compile_kernel(self.source, self.signature, self.launch_bounds)

    def _allow_shared_memory(self) -> None:
        if self.shared_bytes:
            allow_shared_memory(self._compiled, self.shared_bytes)

    @cached_property  # beyond module 5
    def _launcher(self) -> Launcher:  # beyond module 5
        """The launcher, which calls the driver."""
        own = self._compiled, self.signature, self.shared_bytes, self.name
        return Launcher(*own, self._allow_shared_memory)

    @cached_property
    def _launch(self) -> Callable[..., None]:
        """The function of grid, block and arguments that launches the kernel."""
        if driver is not None:  # beyond module 5
            return self._launcher.launch
        self._allow_shared_memory()

        def launch(grid: Any, block: Any, *args: Any) -> None:
            check_arrays(self.signature.args, args)
            self._compiled[grid, block, 0, self.shared_bytes](*args)

        return launch

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """Return the function that launches on (grid, block)."""
        grid, block = map(three, launch)

        def run(*args: Any) -> None:
            with self._launching:
                self._launch(grid, block, *args)
            if (launches := thread.noted) is not None:  # beyond module 5
                launches.append(self._launched(grid, block))

        return run

    def _launched(self, grid: Any, block: Any) -> Launched:  # beyond module 5
        registers = self._compiled.get_regs_per_thread()
        if isinstance(registers, dict):  # by signature, of which there is one
            (registers,) = registers.values()
        return Launched(self.name, grid, block, self.shared_bytes, registers)


class Adopted:
    """A kernel of numba that is launched like ours, and compiled for the types of its arguments.

    These are flat contiguous arrays, numbers and tuples of whole numbers.
    """

    def __init__(self, dispatcher: Any):
        self._dispatcher = dispatcher

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """Return the function that launches on (grid, block)."""
        if driver is None:
            return self._dispatcher[launch]
        source = self._dispatcher.py_func
        return lambda *args: _adopted(source, tuple(map(_type_of, args)))[launch](*args)


@cache
def _adopted(source: Callable[..., None], kinds: tuple[Any, ...]) -> Kernel:
    return Kernel(source, types.void(*kinds))


def _type_of(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return types.UniTuple(types.int64, len(arg))
    if isinstance(arg, (int, float)):
        return types.int64 if isinstance(arg, int) else types.float64
    return types.Array(scalar_type(arg.dtype), arg.ndim, "C")


def three(size: Any) -> tuple[int, int, int]:
    """Return a grid or a block as three numbers."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]


def scalar_type(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a dtype, for shared arrays and for rounding a number to the dtype."""
    return from_dtype(dtype)


def array_type(dtype: np.dtype[Any], dims: int) -> Any:
    """Return numba's type of an array with any strides."""
    return types.Array(scalar_type(dtype), dims, "A")


def why_too_large(
    tile: tuple[int, int] | None, needed: int, limit: int | None = None
) -> str | None:
    """Return why a block of a tile cannot have ``needed`` bytes of shared memory, or None if it can.

    ``limit`` is the maximum per block, that without a request when None.
    """
    limit = shared_memory_bytes() if limit is None else limit
    if needed <= limit:
        return None
    return f"tile {tile} needs {needed:,} bytes of shared memory, a block has {limit:,}"
