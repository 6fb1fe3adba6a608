"""Runs the tests and the probes of one task in a process of its own; no submission is trusted here.

The job comes as JSON by standard input, and what happens goes line by line to standard output. With the
number of a socket, the process waits there for jobs, see ``warm``. What it reports is the word of the
submission: the grader believes only the values of probes, which it compares itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from course.confine import guard, inside, landlock, seccomp
from course.probing import values_of
from course.warm import wait_for_job

try:
    import resource
except ImportError:  # Windows
    resource = None

GIB = 1 << 30
END_WITH_PARENT = 1  # of prctl

# -- limits --------------------------------------------------------------------------------------


def end_with_the_grader() -> None:
    """Let the kernel end this process when the thread that has started it ends, if it can."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def limit(memory_mb: int, seconds: int, gpu: bool) -> None:
    """Limit memory, processor time and the size of files; for good."""
    if resource is None:
        return
    wanted = {
        # A GPU's driver reserves more addresses than there is memory.
        "RLIMIT_DATA" if gpu else "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_CPU": (seconds + 10) * (os.cpu_count() or 1),
        "RLIMIT_FSIZE": GIB // 4,
        "RLIMIT_CORE": 0,
    }
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with suppress(ValueError, OSError):  # macOS knows RLIMIT_AS and refuses it
                resource.setrlimit(kind, (value, value))


# -- what happened -------------------------------------------------------------------------------


class Recorder:
    """Writes what the tests do to a file, as it happens.

    Args:
        write: Writes one record.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None]):
        self.write = write

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that could not be imported."""
        if report.failed:
            self.write({"broken": report.nodeid, "message": _first_error(str(report.longrepr))})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the beginning of a test."""
        self.write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the result of a phase of a test."""
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr or "")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self.write({
            "id": report.nodeid, "when": report.when, "outcome": outcome,
            "message": text.strip()[:2000],
        })  # fmt: skip


def _first_error(text: str) -> str:
    """Return where a file could not be imported, and why, of pytest's report on it."""
    errors = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s", line)]
    why = (errors or text.strip().splitlines() or ["?"])[-1]
    syntax = re.findall(r'File "(.+)", line (\d+)', "\n".join(errors))
    places = syntax or re.findall(r"^(\S+\.py):(\d+): in ", text, re.MULTILINE)
    # The package says what to do about an import that fails, which is not where it failed.
    places = [place for place in places if not place[0].endswith("entrance.py")]
    if not places:
        return why
    file, line = places[-1]
    code = f"; the line is {errors[-3]!r}" if syntax and len(errors) > 2 else ""
    return f"{os.path.relpath(file).replace(os.sep, '/')}, line {line}: {why}{code}"


def collect(job: dict[str, Any]) -> dict[str, Any]:
    """Return the tests of the course with their marks, and why no GPU can be used (or None)."""
    found: dict[str, list[str]] = {}

    class Marks:
        def pytest_collection_finish(self, session: Any) -> None:
            for item in session.items:
                found[item.nodeid] = sorted({mark.name for mark in item.iter_markers()})

    arguments = ["--collect-only", "-q", *job["arguments"]]
    code = pytest.main(arguments, plugins=[Marks()])
    targets = sys.modules.get("kernels.runtime.targets")
    return {"tests": found, "code": int(code), "no_gpu": targets and targets.why_no_cuda()}


def hide_the_course() -> None:
    """Find no module of the course, which may be installed from its folder (``pip install -e``)."""
    course = os.path.realpath(Path(__file__).parents[2])
    inner = os.path.realpath(sys.prefix)  # an environment inside its folder
    sys.path[:] = [
        path
        for path in sys.path
        if not inside(os.path.realpath(path), course) or inside(os.path.realpath(path), inner)
    ]
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable__")
    ]


def main() -> None:
    """Do the job."""
    hide_the_course()
    handles: list[int] = []
    if len(sys.argv) > 1:
        for name in sys.argv[2:]:
            import_module(name)
        handles = wait_for_job(socket.socket(fileno=int(sys.argv[1])))
    job = json.loads(sys.stdin.read())
    os.environ.clear()
    os.environ.update(job["environment"])
    if "numba" in sys.modules:
        sys.modules["numba.core.config"].reload_config()
    # Whoever prints writes elsewhere.
    with os.fdopen(os.dup(1), "a", encoding="utf-8", buffering=1) as file:
        os.dup2(2, 1)

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")

        tree, writable, shown = job["tree"], job["writable"], job["shown"]
        os.chdir(tree)
        sys.path.insert(0, tree)
        if job["trusted"]:
            write(collect(job))
        else:
            end_with_the_grader()
            limit(job["memory_mb"], job["seconds"], job["gpu"])
            landlock(writable, shown, job["gpu"])
            (number,) = handles or [job["channel"]]
            with socket.socket(fileno=number) if number else nullcontext() as channel:
                seccomp(channel, job["gpu"])
            sys.addaudithook(guard(writable, shown, lambda text: write({"refused": text})))
            write({"finished": int(pytest.main(job["arguments"], plugins=[Recorder(write)]))})
        for task, seed in job["seeds"].items():
            write({"task": task, "values": values_of(task, seed)})


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
