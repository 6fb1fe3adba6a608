"""Functions in a fresh process: it has a peak of memory of its own, or runs in the emulated GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

CODE = (
    "import importlib, os, pickle, sys; sys.path[:0] = pickle.load(sys.stdin.buffer); "
    "out = os.fdopen(os.dup(1), 'wb'); os.dup2(2, 1); "  # what it prints is no result
    "module, name, args = pickle.load(sys.stdin.buffer); "
    "result = getattr(importlib.import_module(module), name)(*args); "
    "out.write(pickle.dumps(result)); out.close()"
)


def in_child(
    function: Callable[..., Any],
    *args: Any,
    emulated: bool = False,
    seconds: float | None = None,
    **environment: str,
) -> Any:
    """Call a function of a module in a fresh process and return its result.

    Args:
        function: At the top level of its module.
        args: Pickled, as the result is.
        emulated: Run CUDA kernels on the emulated GPU there, which is chosen before numba is imported.
        seconds: That it may take.
        environment: Variables of its environment.

    Raises:
        RuntimeError: If it fails; the last line that it wrote says why.
    """
    if emulated:
        environment["MINITORCH_EMULATE"] = "1"
    name, own = f"{function.__name__} of {function.__module__}", os.environ | environment
    given = pickle.dumps(sys.path)
    given += pickle.dumps((function.__module__, function.__name__, args))
    command = [sys.executable, "-c", CODE]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, env=own, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} has not ended after {seconds} s; take a smaller size") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"{name} failed in its process (exit code {done.returncode}): {lines[-1]}"
        )
    return pickle.loads(done.stdout)
