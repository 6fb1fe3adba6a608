"""Explanations of CUDA errors, with what to do about them."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

#: The most recently launched kernels, the latest at the end.  Launches are asynchronous, so an error is
#: reported by a later call; its cause is among these.
LAUNCHED: deque[str] = deque(maxlen=8)  # beyond module 4


class CaptureError(RuntimeError):  # beyond module 4
    """A function does something that a CUDA graph cannot contain."""


#: If this variable is 1, every launch waits for its kernel, so that an error names it.
BLOCKING_VARIABLE = "MINITORCH_CUDA_SYNC"

#: CUDA's name for a failure of a running kernel → its cause.
KERNEL_FAULTS = {  # beyond module 4
    "CUDA_ERROR_ILLEGAL_ADDRESS": "read or wrote outside its memory",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "read or wrote at an address that its access does not divide",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "used an address of another kind of memory",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "ran into an instruction that the device does not have",
    "CUDA_ERROR_INVALID_PC": "jumped outside its code",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "ran out of stack",
    "CUDA_ERROR_ASSERT": "failed an assertion",
    "CUDA_ERROR_LAUNCH_FAILED": "failed on the device",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "ran longer than the display driver allows",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "left tensor memory allocated",
}

#: CUDA's name for any other error → its meaning and what to do.
MEANINGS = {
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the CUDA toolkit that compiles "
    'the kernels; update the driver, or install the toolkit of its version with pip install "numba-'
    'cuda[cu12]" (the first line of nvidia-smi shows the version)',
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another device than this one; "
    "remove numba's cache (the folder NUMBA_CACHE_DIR, or __pycache__) and run again",
    "CUDA_ERROR_INVALID_PTX": "the driver cannot read the compiled kernel; update the driver",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "a block needs more registers or shared memory than the "
    "device has; use a smaller tile or fewer threads",
    "CUDA_ERROR_NO_DEVICE": "no CUDA device can be seen; check nvidia-smi, and that "
    "CUDA_VISIBLE_DEVICES does not hide it",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the device to itself; end that process or "
    "wait for it (nvidia-smi shows it)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and its kernel module have different "
    "versions; restart the machine, or install one driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the system is not ready for CUDA; start NVIDIA's services (on a "
    "machine with NVSwitch, the fabric manager)",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the CUDA compatibility library does not support "
    "this device; update the driver",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the memory of the device is damaged; restart the process, and "
    "have the device replaced if it happens again",
    "CUDA_ERROR_NOT_INITIALIZED": "this process was forked after CUDA had begun; start workers with "
    'multiprocessing.get_context("spawn")',
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the CUDA context was destroyed, by cuda.close() or a reset; "
    "restart the process",
}

#: What to do if the compiler is missing.
NO_COMPILER = (
    'NVVM, the compiler of CUDA kernels, was not found; pip install "numba-cuda[cu13]" ([cu12] for '
    "a driver of CUDA 12)"
)


def out_of_memory(requested: int, free: int, total: int) -> MemoryError:  # beyond module 5
    """Return the error for an allocation that failed; all arguments in bytes."""
    return _out_of_memory(
        f"{_size(requested)} were asked for, {_size(free)} of {_size(total)} are free"
    )


def _out_of_memory(what: str) -> MemoryError:  # beyond module 4
    return MemoryError(
        f"out of device memory: {what}; use a smaller batch or shorter sequences, drop tensors that "
        "are no longer needed, or end other processes on the device (nvidia-smi lists them)"
    )


def explain(  # beyond module 4
    error: BaseException, doing: str, *, is_culprit: bool = False
) -> Exception | None:
    """Convert an error of numba or CUDA to one that explains it and says what to do; None if it is unknown.

    ``doing`` is the failed operation, as the subject of a sentence: "the kernel flash2".
    ``is_culprit`` tells whether that kernel failed, rather than an earlier one.
    """
    if type(error).__module__.split(".")[0] not in ("numba", "numba_cuda", "cuda"):
        return None
    text = str(error)
    if type(error).__name__ in ("NvvmSupportError", "DynamicLibNotFoundError"):
        return RuntimeError(f"{doing} failed: {NO_COMPILER}")
    code = code_in(text)
    if code is not None:
        return explain_code(code, doing, is_culprit=is_culprit)
    if type(error).__name__ == "CudaSupportError":
        return RuntimeError(f"{doing} failed: {first_line(text)}; check nvidia-smi")
    return None


def explain_code(  # beyond module 4
    code: str, doing: str, *, is_culprit: bool = False
) -> Exception:
    """Return the error for a CUDA error name; see :func:`explain`."""
    if code == "CUDA_ERROR_OUT_OF_MEMORY":
        return _out_of_memory(f"{doing} needs more than is free")
    if code not in KERNEL_FAULTS:
        return RuntimeError(
            f"{doing} failed: {MEANINGS.get(code, 'the driver refused it')} ({code})"
        )
    fault = KERNEL_FAULTS[code]
    after = "the CUDA context of this process is lost, restart it"
    if is_culprit:
        return RuntimeError(f"{doing} failed: it {fault} ({code}); {after}")
    names = ", ".join(LAUNCHED) or "none of this library"
    return RuntimeError(
        f"{doing} failed: a kernel launched earlier {fault} ({code}); {after}. Launched last: "
        f"{names}; set {BLOCKING_VARIABLE}=1 and run again to learn which one it is"
    )


def code_in(text: str) -> str | None:
    """Return the CUDA error name that a text contains, or None."""
    named = re.search(r"CUDA_ERROR_\w+", text)
    return None if named is None else named.group()


def first_line(text: str) -> str:
    """Return the first non-empty line of a text, without its full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else "no reason given"


def _size(count: int) -> str:  # beyond module 5
    """Return a number of bytes in readable form."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


class explained:  # beyond module 4
    """Convert exceptions of numba and CUDA inside the ``with`` to errors that say what to do."""

    __slots__ = ("doing",)

    def __init__(self, doing: str):
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and (known := explain(error, self.doing)) is not None:
            raise known from None
