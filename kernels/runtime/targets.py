"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.runtime.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
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

from kernels.runtime.cuda_errors import (
    BLOCKING_VARIABLE,
    LAUNCHED,
    MEANINGS,
    NO_COMPILER,
    code_in,
    explain,
    first_line,
)
from kernels.runtime.cuda_errors import explained as explained

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
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
        from cuda.bindings import nvjitlink as nvjitlink  # pyright: ignore[reportMissingImports]

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
def has_several_devices() -> bool:
    """Tell whether this process sees more than one CUDA device."""
    return not IS_SIMULATOR and why_no_cuda() is None and len(cuda.gpus) > 1


def current_device() -> int:
    """Return the number of the device that this thread launches on: what is kept is kept for each.

    Where there is one, nobody is asked; a launch finds out how many there are only once.
    """
    if not has_several_devices():
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
