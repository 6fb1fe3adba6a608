"""Compile kernels for a launch, or to PTX without a GPU, and return the resources of the machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from numba import void

from kernels.runtime.cuda_errors import first_line
from kernels.runtime.disk_cache import keep_on_disk
from kernels.runtime.jit import fingerprint
from kernels.runtime.targets import (
    IS_SIMULATOR,
    cuda,
    driver,
    dynamic_shared_memory_bytes,
    nvjitlink,
    shared_memory_bytes,
)


def allow_shared_memory(kernel: Any, size: int) -> None:
    """Allow a compiled kernel ``size`` bytes of dynamic shared memory; up to 48 KB are always allowed."""
    if IS_SIMULATOR or size <= shared_memory_bytes():
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(cuda.get_current_device().id)
    for overload in kernel.overloads.values():
        handle = driver.CUkernel(int(overload._codelibrary.get_cufunc().handle))
        (error,) = driver.cuKernelSetAttribute(attribute, size, handle, device)
        if int(error):
            limit = dynamic_shared_memory_bytes()
            raise RuntimeError(
                f"the device refused {size:,} bytes of shared memory ({error}); a block may have {limit:,} "
                "here, so take a smaller tile, or another rung"
            )


def compile_kernel(
    function: Callable[..., None], signature: Any, launch_bounds: tuple[int, int] | None
) -> Any:
    """Compile a kernel for the current device and one signature, or load it from the cache on disk.

    The key of an entry covers all code of the kernel; see :func:`kernels.runtime.jit.fingerprint`.

    Args:
        function: The kernel.
        signature: Types of its arguments.
        launch_bounds: Threads of a block, and blocks of a multiprocessor; or None.
    """
    if IS_SIMULATOR:
        return cuda.jit(signature)(function)
    dispatcher = cuda.jit(launch_bounds=launch_bounds)(function)
    stamp = f"{fingerprint(dispatcher, *signature.args)} {_package_version()}"
    # Numba's own key is a pickle of what the function closes over, and misses what it names.
    keep_on_disk(dispatcher, lambda kinds, codegen: (kinds, codegen.magic_tuple(), stamp))
    dispatcher.compile(tuple(signature.args))
    dispatcher.disable_compile()
    return dispatcher


def _package_version() -> str:
    """Return the version of numba-cuda, or that of numba, which its cache checks already."""
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
        kernel: A plain function, or a function compiled by ``cuda.jit``.
        signature: Argument types, such as ``numba.void(numba.float32[::1])``.
        cc: Compute capability to compile for; (9, 0, "a") has instructions that only 9.0 has.
        launch_bounds: Threads of a block, and blocks that should fit on a multiprocessor at a time.
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
    """The resources of the machine code of a kernel.

    Attributes:
        registers: Registers per thread.
        spilled: Bytes per thread that did not fit in registers and are in local memory.
        local: Bytes of local memory per thread: spills, function calls, and local arrays.
        warnings: Messages of ptxas about the kernel's performance.
    """

    registers: int
    spilled: int
    local: int
    warnings: tuple[str, ...]


def ptx_resources(ptx: str, cc: tuple[Any, ...]) -> tuple[int, int]:
    """Return the registers and spilled bytes of one kernel compiled by ptxas; this needs no GPU.

    Args:
        ptx: Result of :func:`compile_ptx`.
        cc: Compute capability that it was compiled for.

    Raises:
        RuntimeError: If ptxas rejects the PTX, or its output is not as expected.
    """
    return _link(ptx.encode(), nvjitlink.InputType.PTX, cc)[:2]


def launched_resources(
    kernel: Any,
    signature: Any,
    cc: tuple[Any, ...],
    launch_bounds: tuple[int, int] | None = None,
) -> Resources:
    """Return the resources of a kernel that is compiled as for a launch; this needs no GPU.

    A launch compiles NVVM's intermediate code as a whole program.  From PTX the linker makes only a part of
    a program, in which ``setmaxnreg`` is ignored.

    Args:
        kernel: See :func:`compile_ptx`, also for the other arguments.
        signature: Argument types.
        cc: Compute capability.
        launch_bounds: Threads of a block, and blocks per multiprocessor.

    Raises:
        RuntimeError: If ptxas rejects the kernel, or its output is not as expected.
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
    """Return why :func:`ptx_resources` cannot run here and what to do, or None when it can."""
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
        compile_ptx(lambda: helper(), void())
    except Exception as error:
        return (
            f"numba cannot compile CUDA kernels here ({type(error).__name__}: {first_line(str(error))}); "
            'pip install "numba-cuda[cu13]", which needs no GPU'
        )
    return None


def _nothing() -> None:
    pass
