"""Start programs on several ranks with ``mpiexec``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 300
#: That of the MPI library in the environment of this Python, or any other.
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")

needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or MPIEXEC is None, reason="needs mpi4py and mpiexec"
)


def python(size: int, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments on so many ranks of one thread each; 0 starts it without mpiexec.

    Args:
        size: Number of ranks.
        args: Of Python.
        variables: Of the environment.
    """
    start = [str(MPIEXEC), "-n", str(size)] if size else []
    one_thread = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **one_thread, **variables}
    return subprocess.run(
        [*start, sys.executable, *args],
        cwd=ROOT,
        env=env,
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )


def run_check(size: int, module: str, check: str, **variables: str) -> None:
    """Run one check of a module of ``tests.minitorch.distributed`` on several ranks; see :func:`python`."""
    done = python(size, "-m", f"tests.minitorch.distributed.{module}", check, **variables)
    assert done.returncode == 0, f"{check} on {size} ranks:\n{done.stdout}\n{done.stderr}"
