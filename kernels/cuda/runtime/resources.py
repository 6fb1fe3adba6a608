"""Compile kernels to PTX without a GPU, and return the resources of the machine code."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from kernels.runtime.cuda_errors import first_line
from kernels.runtime.targets import cuda, nvjitlink
from kernels.runtime.types import void


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
    """The resources of the machine code of a kernel."""

    registers: int  #: Registers per thread.
    spilled: int  #: Bytes per thread that did not fit in registers and are in local memory.
    local: int  #: Bytes of local memory per thread: spills, function calls, and local arrays.
    warnings: tuple[str, ...]  #: Messages of ptxas about the kernel's performance.


def ptx_resources(ptx: str, cc: tuple[Any, ...]) -> tuple[int, int]:
    """Return the registers and spilled bytes of one kernel compiled by ptxas from PTX for a capability.

    This needs no GPU.  PTX that ptxas rejects, or an unknown output of it, raises a RuntimeError.
    """
    return _link(ptx.encode(), nvjitlink.InputType.PTX, cc)[:2]


def launched_resources(
    kernel: Any,
    signature: Any,
    cc: tuple[Any, ...],
    launch_bounds: tuple[int, int] | None = None,
) -> Resources:
    """Return the resources of a kernel that is compiled as for a launch; see :func:`ptx_resources`.

    A launch compiles NVVM's intermediate code as a whole program.  From PTX the linker makes only a
    part of a program, in which ``setmaxnreg`` is ignored.
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
