"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache, cached_property, lru_cache
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
from kernels.cuda.pool import Block, Pool

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

#: The CUDA driver of numba-cuda; None for the other owners and in the simulator.
driver: Any = None
if "numba_cuda" in str(cuda.__file__) and not IS_SIMULATOR:
    with suppress(ImportError):
        from cuda.bindings import driver

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


def is_device_array(array: Any) -> bool:
    """Tell whether an array is one of numba's on the device, or the simulator's stand-in for one."""
    return bool(getattr(array, "__cuda_ndarray__", False))


@cache
def pool() -> Pool | None:
    """Return what device memory comes from, or None where numba's memory manager stays in charge.

    That is so where the user has chosen one (``NUMBA_CUDA_MEMORY_MANAGER``, as RMM's), and where the
    device or the owner of numba.cuda has no stream-ordered allocator.

    Raises:
        RuntimeError: If there is no device; it says what to do.
    """
    if (reason := why_no_cuda()) is not None:
        raise RuntimeError(reason)
    if IS_SIMULATOR or driver is None:
        return None
    if type(cuda.current_context().memory_manager).__name__ != "NumbaCUDAMemoryManager":
        return None
    found = Pool(driver, cuda.current_context)
    return found if found.prepare() else None


_MemoryPointer: Any = getattr(cuda, "MemoryPointer", object)


class _Pooled(_MemoryPointer):
    """Memory of the pool, as numba's arrays hold it; it goes back when the last of them goes."""

    def __init__(self, source: Pool, block: Block, size: int):
        super().__init__(None, block[0], size)  # numba reads no context of a pointer
        self._source = source
        self._block = block

    def __del__(self) -> None:
        self._source.free(self._block)

    @cached_property
    def device_ctypes_pointer(self) -> Any:
        """The address, which numba asks for at each launch."""
        return super().device_ctypes_pointer

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return a part, from one byte to another, which keeps the whole."""
        return _Part(self, super().view(start, stop))


class _Part(_MemoryPointer):
    """A part of the pool's memory: what numba's views are made of."""

    def __init__(self, whole: Any, part: Any):
        super().__init__(None, part.device_pointer, part.size)
        self._whole = whole

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return a part of the part, from one byte to another."""
        return _Part(self._whole, super().view(start, stop))


@lru_cache(maxsize=4096)
def _array_state(shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the attributes that numba's arrays of one shape, strides and dtype share.

    Its constructor works them out anew for each array, which takes longer than a launch.
    """
    array = cuda.cudadrv.devicearray.DeviceNDArray(shape, steps, dtype, gpu_data=_ANY_MEMORY)
    array._numba_type_  # noqa: B018 - kept from now on; each launch asks for it
    return vars(array)


_ANY_MEMORY = object()


def _device_array(
    shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any], memory: Any, stream: Any
) -> Any:
    """Return numba's array on some memory, ``steps`` in bytes."""
    kind = cuda.cudadrv.devicearray.DeviceNDArray
    if 0 in shape or driver is None:  # of no elements: numba gives it a null pointer
        return kind(shape, steps, dtype, stream, memory)
    array = object.__new__(kind)
    vars(array).update(_array_state(shape, steps, dtype), gpu_data=memory, stream=stream)
    return array


def empty_device(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised, contiguous device array.

    Raises:
        MemoryError: If the device has too little memory left.
    """
    source = pool()
    if source is None:
        with explained(f"allocating an array of shape {shape}"):
            return cuda.device_array(shape, dtype)
    size, steps = dtype.itemsize, []
    for length in reversed(shape):
        steps.append(size)
        size *= length
    memory = _Pooled(source, source.allocate(size), size) if size else None
    return _device_array(tuple(shape), tuple(reversed(steps)), dtype, memory, 0)


def to_device(array: np.ndarray[Any, Any]) -> Any:
    """Return a contiguous copy of a NumPy array on the device.

    Raises:
        MemoryError: If the device has too little memory left.
        RuntimeError: If there is no device; it says what to do.
    """
    array = np.asarray(array, order="C")
    with explained("copying an array to the device"):
        if pool() is None:
            return cuda.to_device(array)
        out = empty_device(array.shape, array.dtype)
        out.copy_to_device(array)
        return out


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a device array on the host, once the kernels launched before have run.

    Raises:
        RuntimeError: If one of them failed; it names those launched last.
    """
    with explained("copying an array to the host"):
        return array.copy_to_host()


def element_strides(array: Any) -> tuple[int, ...]:
    """Return the strides of an array in elements, where NumPy and numba count bytes."""
    size = array.dtype.itemsize
    return tuple(step // size for step in array.strides)


def device_view(
    array: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> Any:
    """See the memory of a device array through another shape and strides; nothing is copied.

    Args:
        array: A device array, whose memory the view keeps alive.
        shape: Any number of dimensions; the caller answers for staying inside.
        strides: In elements; 0 repeats.
        offset: Where the view begins, in elements from the array's first.
    """
    size = array.dtype.itemsize
    steps = tuple(step * size for step in strides)
    if IS_SIMULATOR:
        start = np.lib.stride_tricks.as_strided(array._ary, (offset + 1,), (size,))[offset:]
        return type(array)(np.lib.stride_tricks.as_strided(start, shape, steps))
    memory = array.gpu_data.view(offset * size) if offset else array.gpu_data
    return _device_array(tuple(shape), steps, array.dtype, memory, array.stream)


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


def device_pointer(array: Any) -> int:
    """Return the address of the first element of a device array; 0 in the simulator."""
    return 0 if IS_SIMULATOR else int(array.device_ctypes_pointer.value or 0)


def compile_ptx(kernel: Any, signature: Any, cc: tuple[int, int] = (8, 0)) -> str:
    """Compile a kernel to PTX; this needs NVVM and no GPU.

    Args:
        kernel: A plain function, or what ``cuda.jit`` made of one.
        signature: Argument types, such as ``numba.void(numba.float32[::1])``.
        cc: Compute capability to compile for.
    """
    function = getattr(kernel, "py_func", kernel)
    ptx, _ = cuda.compile(function, signature, device=False, abi="numba", cc=cc, output="ptx")
    return ptx


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
