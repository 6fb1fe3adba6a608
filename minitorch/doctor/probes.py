"""The doctor's probes: each tests one library in a child process, which may fail, crash or hang.

A probe returns a dictionary of plain values.  :func:`ask` starts a child for one; in the child this file
runs as a script, so nothing of the package is imported but what the probe itself tries.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: Marks the answer among other output of a library.
MARK = "minitorch-doctor:"
#: Makes the child import the same modules, from the same paths, as the parent process.
_BEGIN = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.argv[:2] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def found_file(name: str) -> str | None:
    """Return the file that ``import name`` would run, without running it."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or []), None)


def ask(
    name: str, *arguments: str, seconds: float, path: list[str] | None = None
) -> dict[str, Any]:
    """Run one probe in a child process.

    Args:
        name: One of PROBES.
        arguments: Arguments of the probe.
        seconds: Time limit, in seconds.
        path: Module search path of the child; that of this process when None.

    Returns:
        The result of the probe, or ``{"error": …}`` with one line that describes the failure.
    """
    where = json.dumps(sys.path if path is None else path)
    command = [sys.executable, "-c", _BEGIN, where, __file__, name, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {seconds:g} seconds"}
    for line in reversed(done.stdout.decode(errors="replace").splitlines()):
        _, mark, answer = line.partition(MARK)
        if mark:
            return json.loads(answer)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return {"error": ": ".join([_ending(done.returncode), *said[-1:]])}


def _ending(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code} and no answer"
    try:
        return f"the process crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"the process crashed (signal {-code})"


# -- in the child -------------------------------------------------------------------------------


def package(name: str) -> dict[str, Any]:
    """Import a package."""
    module = import_module(name)
    return {"version": str(getattr(module, "__version__", "")), "file": _file(module)}


def _numba_cuda() -> Any:
    """Import ``numba.cuda`` as ``kernels/runtime/targets.py`` does; NumPy 2.5 lacks a name it reads."""
    numpy = import_module("numpy")
    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack  # type: ignore[attr-defined]
    return import_module("numba.cuda")


def _is_emulated() -> bool:
    """Tell whether ``kernels/runtime/targets.py`` puts the emulated GPU in the place of ``numba.cuda``."""
    names = ("MINITORCH_EMULATE", "NUMBA_ENABLE_CUDASIM")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def cuda() -> dict[str, Any]:
    """Import ``numba.cuda``, from whichever package, and compile an empty kernel; this needs no GPU."""
    numba, module = import_module("numba"), _numba_cuda()
    found: dict[str, Any] = {"file": _file(module), "emulated": _is_emulated()}
    if not found["emulated"]:
        try:
            module.compile(_nothing, numba.void(), device=False, abi="numba", cc=(8, 0), output="ptx")  # fmt: skip  # noqa: E501
        except Exception as error:
            found["compile_error"] = _line(error)
    return found


def launch() -> dict[str, Any]:
    """Run a kernel on the GPU, if there is one."""
    numpy, module = import_module("numpy"), _numba_cuda()
    if _is_emulated():
        return {"gpu": None}
    try:
        device = module.get_current_device()
    except Exception as error:
        return {"gpu": None, "reason": _line(error)}
    numbers = module.to_device(numpy.zeros(32, numpy.float32))

    def count(out: Any) -> None:
        place = module.grid(1)
        out[place] = place

    module.jit(count)[1, 32](numbers)
    if not (numbers.copy_to_host() == numpy.arange(32)).all():
        return {"error": "a kernel that numbers its threads gave wrong numbers"}
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    return {"gpu": f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}"}


def parallel() -> dict[str, Any]:
    """Load SciPy's BLAS for numba, and run a parallel loop on numba's default threading layer."""
    import_module("numba.np.linalg").ensure_blas()
    numba, numpy = import_module("numba"), import_module("numpy")
    numbers, indices = numpy.zeros(64), numba.prange

    def square(out: Any) -> None:
        for i in indices(out.size):
            out[i] = i * i

    square = numba.njit(parallel=True)(square)
    square(numbers)
    if not (numbers == numpy.arange(64.0) ** 2).all():
        return {"error": "a parallel loop gave wrong numbers"}
    return {"layer": numba.threading_layer(), "threads": numba.get_num_threads()}


def library() -> dict[str, Any]:
    """Import minitorch as a program does, and list its rungs and the folders it refuses for its cache."""
    start = time.perf_counter()
    module = import_module("minitorch")
    seconds = time.perf_counter() - start
    rungs = list(import_module("kernels.launch").RUNGS)
    refused = import_module("kernels.runtime.disk_cache").REFUSED
    return {"file": _file(module), "seconds": seconds, "rungs": rungs, "refused": refused}


def _nothing() -> None:
    pass


def _file(module: Any) -> str:
    return str(getattr(module, "__file__", None))


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _place(error: BaseException) -> str:
    """Return the file and line from which an error came."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    place, trace = "", error.__traceback__
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    return place


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe for probe in (package, cuda, launch, parallel, library)
}


def answer(name: str, *arguments: str) -> None:
    """Print what a probe returns, or what it raises, for the asking process."""
    try:
        found = PROBES[name](*arguments)
    except BaseException as error:  # importing a library may raise any exception
        cause = error.__cause__ or error  # of ours, the dependency's own
        found = {"error": _line(cause), "place": _place(cause)}
    sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")


if __name__ == "__main__":
    answer(*sys.argv[1:])
