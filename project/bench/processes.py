"""Other processes: commands with a limit, functions in several side by side, and the ranks of MPI."""

from __future__ import annotations

import multiprocessing
import os
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


def child_command(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command that calls a function with literals; words after it are ``sys.argv[1:]``."""
    module, name = function.__module__, function.__name__
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from {module} import {name}; {name}(*{args!r})"
    )
    return [sys.executable, "-c", code]


def run_for(
    command: list[str], seconds: float, folder: Path = ROOT, **environment: str
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
