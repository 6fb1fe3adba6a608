"""Functions in other processes: in fresh ones, in several side by side, and on the ranks of MPI."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.records import ROOT


def in_child(
    function: Callable[..., Any], *args: Any, simulator: bool = False, **environment: str
) -> Any:
    """Call a function of a module in a fresh process and return its result.

    A fresh process has a peak of memory of its own, and the simulator is chosen before numba is imported.

    Args:
        function: At the top level of its module.
        args: Pickled, as the result is.
        simulator: Run CUDA kernels in numba's simulator there.
        environment: Variables of its environment.

    Raises:
        RuntimeError: If it fails; the last line that it wrote says why.
    """
    file = Path(function.__code__.co_filename).resolve()
    code = (
        "import os, pickle, runpy, sys; sys.path[:0] = pickle.load(sys.stdin.buffer); "
        "out = os.fdopen(os.dup(1), 'wb'); os.dup2(2, 1); "  # what it prints is no result
        "file, name, args = pickle.load(sys.stdin.buffer); "
        "result = runpy.run_path(file)[name](*args); out.write(pickle.dumps(result)); out.close()"
    )
    if simulator:
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    given = pickle.dumps(sys.path)
    given += pickle.dumps((str(file), function.__name__, args))
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, env=os.environ | environment,
        check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"{function.__name__} of {file.name} failed in its process (exit code "
            f"{done.returncode}): {lines[-1]}"
        )
    return pickle.loads(done.stdout)


def child_command(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command that calls a function with literals; words after it are ``sys.argv[1:]``."""
    module, name = function.__module__, function.__name__
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from {module} import {name}; {name}(*{args!r})"
    )
    return [sys.executable, "-c", code]


def run_for(
    command: list[str], seconds: float, folder: Path = ROOT, **environment: Any
) -> tuple[int | None, str]:
    """Run a command in a folder for so long at most.

    Returns:
        Its exit code, None if its time was up, and what it has printed.
    """
    own: Any = {"cwd": folder, "env": os.environ | environment, "start_new_session": True}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **own)
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its own children, too
            code = None
        said.seek(0)
        return code, said.read()


def in_processes(function: Callable[..., Any], calls: list[tuple[Any, ...]], jobs: int) -> None:
    """Call a function of a module in several processes, to fill the caches of compiled kernels."""
    if jobs > 1 and calls:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            waiting = [pool.submit(function, *call) for call in calls]
            for one in tqdm(waiting, unit="kernel", desc="compile"):
                one.result()


def mpiexec() -> str:
    """Return the launcher of the MPI library in the environment of this Python, or any other."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec")
    if found is None:
        sys.exit("there is no mpiexec; pip install 'minitorch-flash[mpi]'")
    return found


def rank() -> int | None:
    """Return the rank of this process among those of ``mpiexec``, or None."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)
