"""The only file that imports numba.cuda: which package provides it, and what the machine can run.

Three packages may provide it: numba's own deprecated target, ``numba-cuda``, and its successor; or the
emulated GPU, ``kernels.cuda.emulator``, where the environment variable MINITORCH_EMULATE chooses it or the
machine has no CUDA driver.  The rest of the project uses ``from kernels.runtime.targets import cuda``, so
that a change of package is one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from ctypes import CDLL
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numba.core.cgutils
import numba.extending

from kernels.runtime.cuda_errors import (
    BLOCKING_VARIABLE,
    LAUNCHED,  # beyond module 4
    MEANINGS,
    NO_COMPILER,
    code_in,
    explain,  # beyond module 4
    first_line,
)
from kernels.runtime.cuda_errors import explained as explained  # beyond module 4
from kernels.runtime.numba_patches import provide_row_stack

# Students launch small grids, and the warning would bury their own output.  Setting the variable is
# not enough, because numba reads it when it is imported, which may have been earlier.
if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:
    numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def _has_driver() -> bool:
    """Tell whether a CUDA driver is installed; it is not started."""
    if os.environ.get("NUMBA_CUDA_DRIVER"):
        return True
    for name in ("nvcuda.dll",) if os.name == "nt" else ("libcuda.so.1", "libcuda.so"):
        with suppress(OSError):
            return bool(CDLL(name))
    return False


_CHOICE = os.environ.get("MINITORCH_EMULATE", "")
if not re.fullmatch(r"|0|1|check|\d+\.\d", _CHOICE):
    raise ValueError(
        f"MINITORCH_EMULATE must be 0, 1, check or a compute capability such as 9.0, got {_CHOICE!r}"
    )
_IS_ASKED = _is_set("MINITORCH_EMULATE") or bool(numba.config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
#: True when kernels run on the emulated GPU, in Python on the host: with ``MINITORCH_EMULATE=1``, with
#: ``NUMBA_ENABLE_CUDASIM=1``, by which published course code asks for numba's simulator, and without a CUDA
#: driver unless ``MINITORCH_EMULATE=0`` forbids it.
EMULATED: bool = _IS_ASKED or (not _CHOICE and not _has_driver())
#: The name of the place, by which tables of sizes are chosen.
TARGET = "emulated" if EMULATED else "gpu"
#: Whether the emulated GPU checks every access of the library's kernels, too (``MINITORCH_EMULATE=check``).
CHECKED: bool = _CHOICE == "check"
if _IS_ASKED:
    import_module("kernels.cuda.emulator.api").install()
elif not EMULATED:
    provide_row_stack()


class CourseThreads(NamedTuple):
    """Threads per block of the course's kernels: ``map`` in map and zip, at most ``reduce`` in reduce."""

    reduce: int
    map: int


COURSE_THREADS = CourseThreads(32, 8) if EMULATED else CourseThreads(256, 256)
#: ``numba.cuda``, from whichever package; the emulated GPU's names in its place.  Only where someone asked
#: for it are they those of ``numba.cuda`` for other libraries, too.
cuda: Any = import_module("kernels.cuda.emulator.api" if EMULATED else "numba.cuda")

# The decorator of intrinsics: numba-cuda has its own, numba's deprecated target shares the CPU's.
cgutils: Any = getattr(cuda, "cgutils", numba.core.cgutils)
intrinsic: Any = getattr(cuda, "extending", numba.extending).intrinsic

#: The CUDA driver of numba-cuda, and its linker; None for the other packages and the emulated GPU.
driver: Any = None
nvjitlink: Any = None
if "numba_cuda" in str(cuda.__file__):
    with suppress(ImportError):
        from cuda.bindings import driver  # pyright: ignore
        from cuda.bindings import nvjitlink as nvjitlink  # pyright: ignore

#: The functions that encode tensor maps: the driver's, or those of the emulated GPU.
tensor_maps: Any = driver or getattr(cuda, "tensor_maps", None)  # beyond module 4

#: The type of numba's arrays on the device.
DeviceArray: Any = cuda.cudadrv.devicearray.DeviceNDArray  # beyond module 4

#: NVIDIA's libdevice functions.
libdevice: Any = cuda.libdevice if EMULATED else import_module("numba.cuda.libdevice")

#: Whether each launch waits for its kernel, so that an error names it.
BLOCKING: bool = any(map(_is_set, (BLOCKING_VARIABLE, "CUDA_LAUNCH_BLOCKING")))


class launching:  # beyond module 4
    """Name the kernel that is launched inside the ``with`` in errors of its launch and execution."""

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


class EventTimer:  # beyond module 5
    """Measure the device time of the work inside the ``with``, by two events on the default stream.

    ::

        with EventTimer() as timer:
            kernels.flash_attention_forward(q, k, v)
        timer.seconds

    The device is idle at the first event, and has finished all work at the second.  The function
    ``hold`` is called between the wait for the device and the first event.  It may occupy the device
    while the host launches, so that only the device's own time is measured.

    Source: CUDA Runtime API, event management; their resolution is about half a microsecond.
    """

    def __init__(self, hold: Callable[[], Any] | None = None) -> None:
        self.seconds = 0.0
        self._hold = hold
        self._start, self._stop = cuda.event(), cuda.event()

    def __enter__(self) -> EventTimer:
        cuda.synchronize()
        if self._hold is not None:
            self._hold()
        self._start.record()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.record()
        self._stop.synchronize()
        self.seconds = 1e-3 * float(self._start.elapsed_time(self._stop))


def why_no_cuda() -> str | None:
    """Return why CUDA kernels cannot run here and what to do, or None when they can."""
    return _why_no_cuda()


@cache
def _why_no_cuda() -> str | None:
    otherwise = (
        "otherwise use the fast backend, or set MINITORCH_EMULATE=1 before starting Python to run the "
        "kernels on an emulated GPU"
    )
    try:
        if cuda.is_available():
            return None
        reason = cuda.cuda_error()
    except Exception as error:
        reason = str(error)
    if reason is None:  # the driver works, so the compiler is missing
        return f"{NO_COMPILER}; {otherwise}"
    known = MEANINGS.get(code_in(reason) or "", f"{first_line(reason)}; check nvidia-smi")
    return f"no CUDA device can be used: {known}; {otherwise}"


def device_name() -> str:  # beyond module 4
    """Return the name of the device that kernels run on."""
    name: bytes | str = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else name


@cache  # beyond module 4
def has_several_devices() -> bool:  # beyond module 4
    """Tell whether this process has more than one CUDA device."""
    return why_no_cuda() is None and len(cuda.gpus) > 1


def current_device() -> int:  # beyond module 4
    """Return the number of the device on which this thread launches, the key of all cached data.

    The number of devices is determined once; with a single device the driver is not called.
    """
    if not has_several_devices():
        return 0
    if driver is not None:
        error, device = driver.cuCtxGetDevice()
        if error == driver.CUresult.CUDA_SUCCESS:
            return int(device)
    return int(cuda.current_context().device.id)  # makes one current on this thread


def on_device(number: int) -> Any:  # beyond module 4
    """Return a context manager that makes a CUDA device the current one of this thread."""
    return nullcontext() if number == current_device() else cuda.gpus[number]


def compute_capability() -> tuple[int, int]:  # beyond module 4
    """Return the compute capability of the current device."""
    return _compute_capability(current_device())


@cache  # beyond module 4
def _compute_capability(device: int) -> tuple[int, int]:  # beyond module 4
    major, minor = cuda.get_current_device().compute_capability
    return int(major), int(minor)


def shared_memory_bytes() -> int:  # beyond module 4
    """Return the size of static shared memory per block, in bytes."""
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK)


def dynamic_shared_memory_bytes() -> int:  # beyond module 4
    """Return the maximum size of dynamic shared memory per block, in bytes."""
    return _dynamic_shared_memory_bytes(current_device())


@cache  # beyond module 4
def _dynamic_shared_memory_bytes(device: int) -> int:  # beyond module 4
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
