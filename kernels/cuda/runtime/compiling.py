"""Compile kernels for a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.runtime.disk_cache import keep_on_disk
from kernels.runtime.jit import fingerprint
from kernels.runtime.numba_patches import version_of
from kernels.runtime.targets import (
    CHECKED,
    EMULATED,
    cuda,
    driver,
    dynamic_shared_memory_bytes,
    shared_memory_bytes,
)
from kernels.runtime.types import types


def handle_of(kernel: Any) -> int:
    """Return the driver's handle of a kernel that ``cuda.jit`` has compiled for one signature."""
    (overload,) = kernel.overloads.values()
    return int(overload._codelibrary.get_cufunc().handle)


def allow_shared_memory(kernel: Any, size: int) -> None:
    """Allow a compiled kernel ``size`` bytes of dynamic shared memory; up to 48 KB are always allowed."""
    if driver is None or size <= shared_memory_bytes():
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(cuda.get_current_device().id)
    (error,) = driver.cuKernelSetAttribute(
        attribute, size, driver.CUkernel(handle_of(kernel)), device
    )
    if int(error):
        limit = dynamic_shared_memory_bytes()
        raise RuntimeError(
            f"the device refused {size:,} bytes of shared memory ({error}); a block may have {limit:,} "
            "here, so take a smaller tile, or another rung"
        )


def wrong_array(expected: tuple[Any, int], given: tuple[Any, int]) -> TypeError:
    """Return the error of an array whose dtype and number of dimensions a kernel does not take."""
    return TypeError(
        f"the kernel takes {expected[0]} of {expected[1]} dimensions, got {given[0]} of {given[1]}; "
        "convert the array"
    )


def check_arrays(kinds: Any, args: Any) -> None:
    """Raise :func:`wrong_array` as a compiled kernel would: the emulated GPU runs it with any array."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, types.Array):
            expected, given = (np.dtype(str(kind.dtype)), kind.ndim), (arg.dtype, len(arg.shape))
            if given != expected:
                raise wrong_array(expected, given)
        elif isinstance(kind, types.BaseTuple):
            check_arrays(kind.types, arg)  # type: ignore[attr-defined]


def compile_kernel(
    function: Callable[..., None], signature: Any, launch_bounds: tuple[int, int] | None
) -> Any:
    """Compile a kernel for the current device and one signature, or load it from the cache on disk.

    The key of an entry covers all code of the kernel; see :func:`kernels.runtime.jit.fingerprint`.
    The launch bounds are threads of a block, and blocks of a multiprocessor; or None.
    """
    if EMULATED:
        return cuda.jit(checks=CHECKED)(function)
    dispatcher = cuda.jit(launch_bounds=launch_bounds)(function)
    stamp = f"{fingerprint(dispatcher, *signature.args)} {version_of('numba-cuda')}"
    # Numba's own key is a pickle of what the function closes over, and misses what it names.
    keep_on_disk(dispatcher, lambda kinds, codegen: (kinds, codegen.magic_tuple(), stamp))
    dispatcher.compile(tuple(signature.args))
    dispatcher.disable_compile()
    return dispatcher
