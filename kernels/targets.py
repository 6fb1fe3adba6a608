"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

# numba-cuda 0.30 reads np.row_stack at import; NumPy 2.5 removed it in favour of np.vstack.
if not hasattr(np, "row_stack"):
    # ruff's own fix for NPY201 turns this line into np.vstack = np.vstack, which does nothing.
    np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201

import numba.core.cgutils
import numba.cuda
import numba.extending
import numba.np.numpy_support
from numba.core.types import Type

from kernels.cuda.errors import (
    BLOCKING_VARIABLE,
    LAUNCHED,
    MEANINGS,
    NO_COMPILER,
    code_in,
    explain,
    first_line,
)

# Small grids are what students launch; the warning would bury their own output.  Setting the
# variable is not enough: numba reads it when it is imported, which may have been earlier.
if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:
    numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]

# What intrinsics are made with: numba-cuda brings its own, numba's deprecated target shares the CPU's.
cgutils: Any = getattr(numba.cuda, "cgutils", numba.core.cgutils)
intrinsic: Any = getattr(numba.cuda, "extending", numba.extending).intrinsic

#: ``numba.cuda``, whoever owns it.
cuda: Any = numba.cuda

#: True when kernels run as Python threads on the host (``NUMBA_ENABLE_CUDASIM=1``).
IS_SIMULATOR: bool = bool(numba.config.ENABLE_CUDASIM)  # type: ignore[attr-defined]

#: The CUDA driver of numba-cuda, and its linker; None for the other owners and in the simulator.
driver: Any = None
nvjitlink: Any = None
if "numba_cuda" in str(cuda.__file__) and not IS_SIMULATOR:
    with suppress(ImportError):
        from cuda.bindings import driver, nvjitlink  # pyright: ignore[reportMissingImports]

#: NVIDIA's functions of numbers; the simulator has none.
libdevice: Any = None if IS_SIMULATOR else import_module("numba.cuda.libdevice")


def _shared_array_once(self: Any, shape: Any, dtype: Any) -> Any:
    """Return the simulator's shared array of one line of a kernel, the same to every thread.

    The simulator's own looks whether the array is there and then makes it, with no lock in between:
    two threads that arrive together get an array each.
    """
    if shape == 0:  # dynamic: there from the beginning
        return _shared_array(self, shape, dtype)
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    with _shared_lock:
        if place not in self._allocations:
            kind = numba.np.numpy_support.as_dtype(dtype) if isinstance(dtype, Type) else dtype
            self._allocations[place] = np.empty(shape, kind)
        return self._allocations[place]


_shared_lock = Lock()
if IS_SIMULATOR:
    _fake_shared: Any = import_module("numba.cuda.simulator.kernelapi").FakeCUDAShared
    _shared_array = _fake_shared.array
    _fake_shared.array = _shared_array_once

#: Whether each launch waits for its kernel, so that an error names it.
BLOCKING: bool = any(
    os.environ.get(name, "0") not in ("", "0")
    for name in (BLOCKING_VARIABLE, "CUDA_LAUNCH_BLOCKING")
)


class explained:
    """Turn what numba and CUDA raise inside the ``with`` into one sentence that says what to do.

    Args:
        doing: What fails if it does, as the subject of that sentence.
    """

    __slots__ = ("doing",)

    def __init__(self, doing: str):
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and (known := explain(error, self.doing)) is not None:
            raise known from None


class launching:
    """Name the kernel that is launched inside the ``with`` if it fails, then or when it runs.

    Args:
        kernel: Its name.
    """

    __slots__ = ("kernel",)

    def __init__(self, kernel: str):
        self.kernel = kernel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        ran = False
        if error is None:
            LAUNCHED.append(self.kernel)
            if not BLOCKING:
                return
            try:
                cuda.synchronize()
            except Exception as fault:
                error, ran = fault, True
        if error is not None:
            known = explain(error, f"the kernel {self.kernel}", is_culprit=ran)
            if known is not None:
                raise known from None


def why_no_cuda() -> str | None:
    """Return why CUDA kernels cannot run here and what to do, or None when they can."""
    return None if IS_SIMULATOR else _why_no_cuda()


@cache
def _why_no_cuda() -> str | None:
    otherwise = (
        "otherwise use the fast backend, or set NUMBA_ENABLE_CUDASIM=1 before starting Python to run "
        "the kernels in numba's simulator"
    )
    try:
        if cuda.is_available():
            return None
        reason = cuda.cuda_error()
    except Exception as error:
        reason = str(error)
    if reason is None:  # the driver is well, so it is the compiler that is missing
        return f"{NO_COMPILER}; {otherwise}"
    known = MEANINGS.get(code_in(reason) or "", f"{first_line(reason)}; check nvidia-smi")
    return f"no CUDA device can be used: {known}; {otherwise}"


def device_name() -> str:
    """Return the name of the device that kernels run on."""
    return "numba's simulator" if IS_SIMULATOR else _text(cuda.get_current_device().name)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


@cache
def shared_memory_bytes() -> int:
    """Return how much shared memory a block may have without asking the driver for more."""
    if IS_SIMULATOR:
        return 48 * 1024  # as every GPU has
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK)


@cache
def dynamic_shared_memory_bytes() -> int:
    """Return how much shared memory a block may have if a kernel asks for it."""
    if IS_SIMULATOR:
        return 96 * 1024  # no limit there; room for any tile a test takes
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def allow_shared_memory(kernel: Any, size: int) -> None:
    """Let a compiled kernel have ``size`` bytes of dynamic shared memory; 48 KB need no asking."""
    if IS_SIMULATOR or size <= shared_memory_bytes():
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(cuda.get_current_device().id)
    for overload in kernel.overloads.values():
        handle = driver.CUkernel(int(overload._codelibrary.get_cufunc().handle))
        (error,) = driver.cuKernelSetAttribute(attribute, size, handle, device)
        if int(error):
            raise RuntimeError(f"the device refused {size:,} bytes of shared memory: {error}")


def compile_ptx(
    kernel: Any,
    signature: Any,
    cc: tuple[int, int] = (8, 0),
    launch_bounds: tuple[int, int] | None = None,
) -> str:
    """Compile a kernel to PTX; this needs NVVM and no GPU.

    Args:
        kernel: A plain function, or what ``cuda.jit`` made of one.
        signature: Argument types, such as ``numba.void(numba.float32[::1])``.
        cc: Compute capability to compile for.
        launch_bounds: Threads of a block, and blocks that a multiprocessor shall hold at a time.
    """
    function = getattr(kernel, "py_func", kernel)
    bounds = {} if launch_bounds is None else {"launch_bounds": launch_bounds}
    ptx, _ = cuda.compile(
        function, signature, device=False, abi="numba", cc=cc, output="ptx", **bounds
    )
    return ptx


def ptx_resources(ptx: str, cc: tuple[int, int]) -> tuple[int, int]:
    """Return what machine code takes that ptxas makes of one kernel; this needs no GPU.

    Args:
        ptx: Of :func:`compile_ptx`.
        cc: Compute capability that it was compiled for.

    Returns:
        Registers a thread, and bytes a thread that did not fit there and went to local memory.

    Raises:
        RuntimeError: If ptxas refuses the PTX, or says something else than expected.
    """
    linker = nvjitlink.create(3, [f"-arch=sm_{cc[0]}{cc[1]}", "-verbose", "-Xptxas=-v"])
    try:
        code = ptx.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel.ptx")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise RuntimeError(f"ptxas refuses the kernel: {log.decode()} ({error})") from None
    finally:
        nvjitlink.destroy(linker)
    text = log.decode()
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores", text)
    if not registers or not spills:
        raise RuntimeError(f"ptxas says nothing of registers and spills: {text!r}")
    return max(map(int, registers)), sum(map(int, spills))


def why_no_ptx_resources() -> str | None:
    """Return why :func:`ptx_resources` cannot be asked here and what to do, or None when it can."""
    if (reason := why_no_ptx()) is not None:
        return reason
    try:
        missing = None if nvjitlink and nvjitlink.version() else "no cuda.bindings.nvjitlink"
    except Exception as error:  # the module is there, the library behind it is not
        missing = str(error)
    return missing and f'ptxas cannot be asked here ({missing}); pip install "numba-cuda[cu13]"'


@cache
def why_no_ptx() -> str | None:
    """Return why kernels cannot be compiled to PTX here and what to do, or None when they can."""
    if IS_SIMULATOR:
        return "the simulator compiles nothing; unset NUMBA_ENABLE_CUDASIM"
    # Numba's own deprecated target asks the driver for a device as soon as a kernel calls anything.
    helper = cuda.jit(device=True, inline="always")(_nothing)
    try:
        compile_ptx(lambda: helper(), numba.void())  # type: ignore[attr-defined]
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        return (
            f"numba cannot compile CUDA kernels here ({type(error).__name__}: {first_line}); "
            'pip install "numba-cuda[cu13]", which needs no GPU'
        )
    return None


def _nothing() -> None:
    pass
