"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any, NamedTuple

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

from kernels.compiled import fingerprint
from kernels.cuda.errors import (
    BLOCKING_VARIABLE,
    LAUNCHED,
    MEANINGS,
    NO_COMPILER,
    code_in,
    explain,
    first_line,
)
from kernels.cuda.errors import explained as explained

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
#: The class of ``cuda.atomic`` in the simulator, for those who watch it; None elsewhere.
simulated_atomics: Any = None
if IS_SIMULATOR:
    _kernel_api = import_module("numba.cuda.simulator.kernelapi")
    simulated_atomics = _kernel_api.FakeCUDAAtomic
    _fake_shared: Any = _kernel_api.FakeCUDAShared
    _shared_array = _fake_shared.array
    _fake_shared.array = _shared_array_once

#: Whether each launch waits for its kernel, so that an error names it.
BLOCKING: bool = any(
    os.environ.get(name, "0") not in ("", "0")
    for name in (BLOCKING_VARIABLE, "CUDA_LAUNCH_BLOCKING")
)


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


class EventTimer:
    """Time what is asked of the device inside the ``with``, by two events on the default stream.

    ::

        with EventTimer() as timer:
            kernels.flash_attention_forward(q, k, v)
        timer.seconds

    The device is idle when the time begins, and has done everything when it ends.

    Args:
        hold: Called between the wait for the device and the first event: it may give the device something
            to do while the host launches, so that nothing but the device's own time is measured.

    Attributes:
        seconds: From the first event to the second, once the ``with`` is left.

    Source: CUDA Runtime API, event management; their resolution is about half a microsecond.
    """

    def __init__(self, hold: Callable[[], Any] | None = None) -> None:
        self.seconds = 0.0
        self._hold = hold
        self._start, self._stop = cuda.event(), cuda.event()
        self._began = 0.0

    def __enter__(self) -> EventTimer:
        cuda.synchronize()
        if self._hold is not None:
            self._hold()
        self._began = time.perf_counter()
        self._start.record()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.record()
        self._stop.synchronize()
        if (
            IS_SIMULATOR
        ):  # whose events know no time, and whose kernels have run when a launch returns
            self.seconds = time.perf_counter() - self._began
        else:
            self.seconds = 1e-3 * float(self._start.elapsed_time(self._stop))


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
def _has_several_devices() -> bool:
    return not IS_SIMULATOR and why_no_cuda() is None and len(cuda.gpus) > 1


def current_device() -> int:
    """Return the number of the device that this thread launches on: what is kept is kept for each.

    Where there is one, nobody is asked; a launch finds out how many there are only once.
    """
    if not _has_several_devices():
        return 0
    if driver is not None:
        error, device = driver.cuCtxGetDevice()
        if error == driver.CUresult.CUDA_SUCCESS:
            return int(device)
    return int(cuda.current_context().device.id)  # makes one current on this thread


def compute_capability() -> tuple[int, int]:
    """Return the version of what the current device can do; (0, 0) in the simulator, which has none."""
    return (0, 0) if IS_SIMULATOR else _compute_capability(current_device())


@cache
def _compute_capability(device: int) -> tuple[int, int]:
    major, minor = cuda.get_current_device().compute_capability
    return int(major), int(minor)


def shared_memory_bytes() -> int:
    """Return how much shared memory a block may have without asking the driver for more."""
    if IS_SIMULATOR:
        return 48 * 1024  # as every GPU has
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK)


def dynamic_shared_memory_bytes() -> int:
    """Return how much shared memory a block may have if a kernel asks for it."""
    if IS_SIMULATOR:
        return 96 * 1024  # no limit there; room for any tile a test takes
    return _dynamic_shared_memory_bytes(current_device())


@cache
def _dynamic_shared_memory_bytes(device: int) -> int:
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


def compile_kernel(
    function: Callable[..., None], signature: Any, launch_bounds: tuple[int, int] | None
) -> Any:
    """Compile a kernel for the current device and one signature, or take it from the cache on disk.

    An entry is found by all that the kernel is made of; see :func:`kernels.compiled.fingerprint`.

    Args:
        function: The kernel.
        signature: Of its arguments.
        launch_bounds: Threads of a block, and blocks of a multiprocessor; or None.
    """
    if IS_SIMULATOR:
        return cuda.jit(signature)(function)
    dispatcher = cuda.jit(launch_bounds=launch_bounds)(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # no folder for a cache is writable
        pass
    else:
        stamp = f"{fingerprint(dispatcher)} {_package_version()}"
        # Numba's own key is a pickle of what the function closes over, and misses what it names.
        dispatcher._cache._index_key = lambda kinds, codegen: (kinds, codegen.magic_tuple(), stamp)
    dispatcher.compile(tuple(signature.args))
    dispatcher.disable_compile()
    return dispatcher


def _package_version() -> str:
    """Return the version of numba-cuda; without it, numba's own, which its cache looks at already."""
    try:
        return version("numba-cuda")
    except PackageNotFoundError:
        return ""


def compile_ptx(
    kernel: Any,
    signature: Any,
    cc: tuple[Any, ...] = (8, 0),
    launch_bounds: tuple[int, int] | None = None,
) -> str:
    """Compile a kernel to PTX; this needs NVVM and no GPU.

    Args:
        kernel: A plain function, or what ``cuda.jit`` made of one.
        signature: Argument types, such as ``numba.void(numba.float32[::1])``.
        cc: Compute capability to compile for; (9, 0, "a") has the instructions of 9.0 alone.
        launch_bounds: Threads of a block, and blocks that a multiprocessor shall hold at a time.
    """
    return _compile(kernel, signature, cc, launch_bounds, "ptx")


def _compile(
    kernel: Any, signature: Any, cc: Any, launch_bounds: tuple[int, int] | None, output: str
) -> Any:
    function = getattr(kernel, "py_func", kernel)
    bounds = {} if launch_bounds is None else {"launch_bounds": launch_bounds}
    code, _ = cuda.compile(
        function, signature, device=False, abi="numba", cc=cc, output=output, **bounds
    )
    return code


class Resources(NamedTuple):
    """What the machine code of a kernel takes.

    Attributes:
        registers: A thread.
        spilled: Bytes a thread that did not fit there and went to local memory.
        local: Bytes of local memory a thread: what spilled, calls of functions, and arrays that are there.
        warnings: What ptxas says of the kernel's performance.
    """

    registers: int
    spilled: int
    local: int
    warnings: tuple[str, ...]


def ptx_resources(ptx: str, cc: tuple[Any, ...]) -> tuple[int, int]:
    """Return registers and spilled bytes of what ptxas makes of one kernel; this needs no GPU.

    Args:
        ptx: Of :func:`compile_ptx`.
        cc: Compute capability that it was compiled for.

    Raises:
        RuntimeError: If ptxas refuses the PTX, or says something else than expected.
    """
    return _link(ptx.encode(), nvjitlink.InputType.PTX, cc)[:2]


def launched_resources(
    kernel: Any,
    signature: Any,
    cc: tuple[Any, ...],
    launch_bounds: tuple[int, int] | None = None,
) -> Resources:
    """Return what a kernel takes when it is compiled as it is for a launch; this needs no GPU.

    That is by way of NVVM's intermediate code, the kernel being known to be the whole program: of PTX the
    linker makes a part of one, in which ``setmaxnreg`` is ignored.

    Args:
        kernel: As in :func:`compile_ptx`, and the others too.
        signature: Argument types.
        cc: Compute capability.
        launch_bounds: Threads of a block, and blocks a multiprocessor.

    Raises:
        RuntimeError: If ptxas refuses the kernel, or says something else than expected.
    """
    code = _compile(kernel, signature, cc, launch_bounds, "ltoir")
    return _link(code, nvjitlink.InputType.LTOIR, cc, "-lto")


def _link(code: bytes, kind: Any, cc: tuple[Any, ...], *options: str) -> Resources:
    options = (f"-arch=sm_{''.join(map(str, cc))}", "-verbose", "-Xptxas=-v", *options)
    linker = nvjitlink.create(len(options), list(options))
    try:
        nvjitlink.add_data(linker, kind, code, len(code), "kernel")
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
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", text)
    if not registers or not memory:
        raise RuntimeError(f"ptxas says nothing of registers and spills: {text!r}")
    warnings = tuple(re.findall(r"Potential Performance Loss: (.*)", text))
    local, spilled = (sum(map(int, each)) for each in zip(*memory, strict=True))
    return Resources(max(map(int, registers)), spilled, local, warnings)


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
