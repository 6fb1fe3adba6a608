"""Detect when numba itself uses the device, which our launches and copies bypass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernels.runtime.targets import cuda

#: Functions of the driver by which numba copies, allocates and waits.
_NUMBAS = (
    "cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemsetD8", "cuMemsetD8Async", "cuCtxSynchronize",
    "cuStreamSynchronize", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent",
)  # fmt: skip


@contextmanager
def watching_numba(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call a function before numba itself launches a kernel, copies, allocates or waits.

    Launches and copies of this library are not affected, because they call the driver directly.

    Args:
        refuse: A function of a description of what numba is about to do; it may raise an error.
    """
    of_kernels, of_driver = cuda.dispatcher._Kernel, cuda.cudadrv.driver.driver

    def watched(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            refuse(what)
            return function(*args, **options)

        return call

    before = {name: getattr(of_driver, name) for name in _NUMBAS}
    launch = of_kernels.launch
    of_kernels.launch = watched(launch, "launches a kernel by numba (cuda.jit)")
    for name, function in before.items():
        setattr(of_driver, name, watched(function, f"has numba copy, allocate or wait ({name})"))
    try:
        yield
    finally:
        of_kernels.launch = launch
        for name, function in before.items():
            setattr(of_driver, name, function)
