"""The doctor's probes: each tests one library in a child process, which may fail, crash or hang.

A probe returns a dictionary of plain values.  :func:`ask` starts a child for one; in the child this file
runs as a script, so nothing of the package is imported but what the probe itself tries.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

#: Marks the answer among other output of a library.
MARK = "minitorch-doctor:"
#: Makes the child import the same modules, from the same paths, as the parent process.
_BEGIN = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.argv[:2] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
)


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
    return {"error": f"{_ending(done.returncode)}{': ' if said else ''}{said[-1] if said else ''}"}


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"the process crashed ({signal.Signals(-code).name})"
        except ValueError:
            return f"the process crashed (signal {-code})"
    return f"the process ended with code {code} and no answer"


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


def cuda() -> dict[str, Any]:
    """Import ``numba.cuda``, from whichever package, and compile an empty kernel; this needs no GPU."""
    numba = import_module("numba")
    module = _numba_cuda()
    found: dict[str, Any] = {"file": _file(module), "simulator": bool(numba.config.ENABLE_CUDASIM)}
    if not found["simulator"]:
        try:
            ptx, _ = module.compile(_nothing, numba.void(), device=False, abi="numba", cc=(8, 0), output="ptx")  # fmt: skip  # noqa: E501
        except Exception as error:
            found["ptx_error"] = _line(error)
        else:
            for key, pattern in (("ptx", r"\.version (\S+)"), ("toolkit", r"release ([\d.]+)")):
                match = re.search(pattern, ptx)
                found[key] = match and match.group(1)
    return found


def launch() -> dict[str, Any]:
    """Run a kernel on the GPU."""
    numpy, module = import_module("numpy"), _numba_cuda()
    numbers = module.to_device(numpy.zeros(32, numpy.float32))

    def count(out: Any) -> None:
        place = module.grid(1)
        out[place] = place

    module.jit(count)[1, 32](numbers)
    right = bool((numbers.copy_to_host() == numpy.arange(32)).all())
    return {} if right else {"error": "a kernel that numbers its threads gave wrong numbers"}


#: Numbers of CUDA's device attributes.
_ATTRIBUTES = {"major": 75, "minor": 76, "shared": 8, "shared_optin": 97}


def driver() -> dict[str, Any]:
    """Query the CUDA driver for its version and the devices, without numba."""
    library, missing = None, []
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            missing.append(str(error))
    if library is None:
        return {"driver": None, "reason": missing[0], "devices": []}
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    found: dict[str, Any] = {
        "driver": f"{number.value // 1000}.{number.value % 1000 // 10}",
        "devices": [],
        "release": _release(),
    }
    status = library.cuInit(0)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        return {**found, "reason": (text.value or b"an unknown error").decode()}
    library.cuDeviceGetCount(ctypes.byref(number))
    for ordinal in range(number.value):
        device, value, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
        library.cuDeviceGet(ctypes.byref(device), ordinal)
        library.cuDeviceGetName(text, len(text), device)
        facts: dict[str, Any] = {"name": text.value.decode(errors="replace")}
        for name, attribute in _ATTRIBUTES.items():
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            facts[name] = value.value
        found["devices"].append(facts)
    return found


def _release() -> str | None:
    """Return NVIDIA's version number of the driver, such as 580.65.06."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.decode(errors="replace").split()
    return lines[0] if lines else None


def blas() -> dict[str, Any]:
    """Load the BLAS libraries: SciPy's, which numba calls, and NumPy's."""
    import_module("numba.np.linalg").ensure_blas()
    controller = import_module("threadpoolctl").ThreadpoolController()
    keys = ("internal_api", "version", "filepath", "num_threads")
    libraries = controller.select(user_api="blas").info()
    return {"libraries": [{key: each.get(key) for key in keys} for each in libraries]}


def layer(name: str) -> dict[str, Any]:
    """Load one of numba's threading layers."""
    modules = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
    import_module(f"numba.np.ufunc.{modules[name]}")
    return {}


def parallel() -> dict[str, Any]:
    """Run a parallel loop on numba's default threading layer."""
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
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """Return the file and line from which an error came."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    place, trace = "", error.__traceback__
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    return place


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (package, cuda, launch, driver, blas, layer, parallel, library)
}


def main(name: str, *arguments: str) -> None:
    """dict[str, Any] the asking process; whatever is raised is an answer too."""
    try:
        answer = PROBES[name](*arguments)
    except BaseException as error:  # importing a library may raise any exception
        cause = error.__cause__ or error  # of ours, the dependency's own
        answer = {"error": _line(cause), "kind": type(cause).__name__, "place": _place(cause)}
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
