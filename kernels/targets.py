"""The one file that imports numba.cuda: whose package that is, and what the machine can run.

Three packages may own the name: numba's own deprecated target, ``numba-cuda``, and its successor.
Everything else in the project says ``from kernels.targets import cuda``, so a change of owner is a
change of one line.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np

# numba-cuda 0.30 reads np.row_stack at import; NumPy 2.5 removed it in favour of np.vstack.
if not hasattr(np, "row_stack"):
    # ruff's own fix for NPY201 turns this line into np.vstack = np.vstack, which does nothing.
    np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201

import numba.cuda

# Small grids are what students launch; the warning would bury their own output.  Setting the
# variable is not enough: numba reads it when it is imported, which may have been earlier.
if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:
    numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]

#: ``numba.cuda``, whoever owns it.
cuda: Any = numba.cuda

#: True when kernels run as Python threads on the host (``NUMBA_ENABLE_CUDASIM=1``).
IS_SIMULATOR: bool = bool(numba.config.ENABLE_CUDASIM)  # type: ignore[attr-defined]


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
