"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

# numba-cuda 0.30 reads np.row_stack at import; NumPy 2.5 removed it in favour of np.vstack.
if not hasattr(np, "row_stack"):
    # ruff's own fix for NPY201 turns this line into np.vstack = np.vstack, which does nothing.
    np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201

import numba.core.cgutils
import numba.cuda
import numba.extending

# Small grids are what students launch; the warning would bury their own output.  Setting the
# variable is not enough: numba reads it when it is imported, which may have been earlier.
if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:
    numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]

# What intrinsics are made with: numba-cuda brings its own, numba's deprecated target shares the CPU's.
cgutils: Any = getattr(numba.cuda, "cgutils", numba.core.cgutils)
intrinsic: Any = getattr(numba.cuda, "extending", numba.extending).intrinsic

driver: Any = None
with suppress(ImportError):  # comes with numba-cuda
    from cuda.bindings import driver

#: ``numba.cuda``, whoever owns it.
cuda: Any = numba.cuda

#: True when kernels run as Python threads on the host (``NUMBA_ENABLE_CUDASIM=1``).
IS_SIMULATOR: bool = bool(numba.config.ENABLE_CUDASIM)  # type: ignore[attr-defined]

#: NVIDIA's functions of numbers; the simulator has none.
libdevice: Any = None if IS_SIMULATOR else import_module("numba.cuda.libdevice")


def why_no_cuda() -> str | None:
    """Return why CUDA kernels cannot run here and what to do, or None when they can."""
    if IS_SIMULATOR:
        return None
    try:
        available = cuda.is_available()
    except Exception as error:
        return f"the CUDA driver failed ({error}); check `nvidia-smi`"
    if available:
        return None
    return (
        "no CUDA device was found; use the fast backend, or set NUMBA_ENABLE_CUDASIM=1 before "
        "starting Python to run the kernels in numba's simulator"
    )


def is_device_array(array: Any) -> bool:
    """Tell whether an array is one of numba's on the device, or the simulator's stand-in for one."""
    return bool(getattr(array, "__cuda_ndarray__", False))


def as_device_array(array: Any) -> Any:
    """Return a device array of CuPy, PyTorch or another library as numba's, without a copy.

    What does not lie on the device is returned as it is.
    """
    if is_device_array(array) or not hasattr(array, "__cuda_array_interface__"):
        return array
    return cuda.as_cuda_array(array)


def empty_device(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised, contiguous device array."""
    return cuda.device_array(shape, dtype)


def element_strides(array: Any) -> tuple[int, ...]:
    """Return the strides of an array in elements, where NumPy and numba count bytes."""
    return tuple(step // array.dtype.itemsize for step in array.strides)


def device_view(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """See the memory of a device array through another shape and strides; nothing is copied.

    Args:
        array: A device array; the view begins at its first element and keeps its memory alive.
        shape: Any number of dimensions; the caller answers for staying inside.
        strides: In elements; 0 repeats.
    """
    steps = tuple(step * array.dtype.itemsize for step in strides)
    if IS_SIMULATOR:
        return type(array)(np.lib.stride_tricks.as_strided(array._ary, shape, steps))
    return type(array)(shape, steps, array.dtype, array.stream, array.gpu_data)


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
    return 0 if IS_SIMULATOR else int(array.__cuda_array_interface__["data"][0])


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
