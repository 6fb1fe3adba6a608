"""Runs the tests of one task in a process of its own, for the grader; no submission is trusted here.

The job comes as JSON by standard input. What happens is written line by line to a file that is opened
before anything of the submission is imported, and that it is told nothing of. Before that, too, the
process gives up what a submission has no use for: memory beyond a limit, files outside its folders,
other processes, the network. On Linux the kernel sees to it (Landlock, seccomp); elsewhere a hook of
Python's does, which stops accidents and no determined attack.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

try:
    import resource
except ImportError:  # Windows
    resource = None

GIB = 1 << 30

# -- limits --------------------------------------------------------------------------------------


def limit(memory_mb: int, seconds: int) -> None:
    """Limit memory, processor time and the size of files; for good."""
    if resource is None:
        return
    wanted = {
        "RLIMIT_AS": memory_mb << 20,
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


def free_stacks() -> None:
    """Let each thread that starts join some that have ended: from Python 3.13 on they keep their stacks.

    The simulator joins none, and an exception of a kernel keeps all threads of its block, up to 1024.
    """
    started: deque[weakref.ref[threading.Thread]] = deque()
    start, lock = threading.Thread.start, threading.Lock()

    def start_and_join(self: threading.Thread) -> None:
        start(self)
        with lock:
            for _ in range(len(started)):
                known = started.popleft()
                other = known()
                if other is None:
                    continue
                if other.is_alive():  # its turn comes again
                    started.append(known)
                    break
                other.join()
            started.append(weakref.ref(self))

    threading.Thread.start = start_and_join


# Landlock: its system calls have these numbers on every processor.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVILEGES = 38  # of prctl
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
#: Rights to change files, by the version of Landlock that brought them.
CHANGES = {1: 0x1FF0 | WRITE_FILE, 2: 1 << 13, 3: 1 << 14}
NETWORK, SCOPES = 0b11, 0b11  # TCP; abstract sockets and signals to others


def landlock_version() -> int:
    """Return which version of Landlock the kernel has; 0 for none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1), 0)


def landlock(writable: list[str], devices: bool) -> bool:
    """Ask the kernel to allow this process changes in some folders only; for good.

    Args:
        writable: The folders.
        devices: Allow to write to devices, as a GPU's driver does.

    Returns:
        False where the kernel cannot.
    """
    version = landlock_version()
    if version < 1:
        return False
    libc = ctypes.CDLL(None)
    changes = sum(right for since, right in CHANGES.items() if since <= version)
    attributes = struct.pack(
        "=QQQ",
        changes | (0 if devices else EXECUTE),
        NETWORK if version >= 4 else 0,
        SCOPES if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(CREATE_RULESET, attributes[:size], size, 0)
    if rules < 0:
        return False
    allowed = [(path, changes) for path in writable] + [("/dev/null", WRITE_FILE)]
    allowed += [("/dev", changes)] if devices else []
    try:
        for path, rights in allowed:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0) != 0:
                return False
            os.close(handle)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return libc.syscall(RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


class Calls(NamedTuple):
    """Numbers of a processor's system calls, and how seccomp names the processor."""

    processor: int
    socket: int
    clone: int
    forks: tuple[int, ...] = ()


CALLS = {
    "x86_64": Calls(0xC000003E, 41, 56, (57, 58)),
    "aarch64": Calls(0xC00000B7, 198, 220),
}
IO_URING, CLONE3 = 425, 435  # the same on both
CLONE_THREAD = 0x10000
SET_SECCOMP, BY_FILTER = 22, 2  # of prctl
#: Instructions of the kernel's filter machine, and the answers that it gives.
LOAD, IF_EQUAL, IF_AT_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
#: Where the filter finds the number of a call, the processor, and the first argument.
NUMBER, PROCESSOR, FIRST = 0, 4, 16


def seccomp() -> bool:
    """Ask the kernel to refuse this process new processes and sockets of any kind; for good.

    Threads are allowed: the C library makes them by ``clone`` where there is no ``clone3``.

    Returns:
        False where the kernel cannot.
    """
    calls = CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or calls is None:
        return False
    no, unknown = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    answers = {
        **dict.fromkeys((calls.socket, *calls.forks), no),
        IO_URING: unknown,
        CLONE3: unknown,
    }
    steps = [
        # An instruction, how many to skip if it holds and if not, and its operand.
        (LOAD, 0, 0, PROCESSOR), (IF_EQUAL, 1, 0, calls.processor), (RETURN, 0, 0, no),
        (LOAD, 0, 0, NUMBER), (IF_AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, no),  # second numbers
        *(step for call, answer in answers.items()
          for step in ((IF_EQUAL, 0, 1, call), (RETURN, 0, 0, answer))),
        (IF_EQUAL, 0, 3, calls.clone),
        (LOAD, 0, 0, FIRST), (IF_SET, 1, 0, CLONE_THREAD), (RETURN, 0, 0, no),
        (RETURN, 0, 0, ALLOW),
    ]  # fmt: skip
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(steps), ctypes.addressof(memory))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    prctl(NO_NEW_PRIVILEGES, 1, None, 0, 0)
    return prctl(SET_SECCOMP, BY_FILTER, program, 0, 0) == 0


PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
            "os.forkpty", "os.startfile", "pty.spawn")  # fmt: skip
CHANGED = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
           "os.truncate", "os.chmod", "os.chown", "os.utime")  # fmt: skip
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(
    writable: list[str], hidden: str, shown: list[str]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses changes outside of some folders, with a clear text.

    Args:
        writable: Where changes are allowed.
        hidden: A folder whose files may not be read: the course has the solutions.
        shown: What may be read in it all the same.
    """
    realpath, inside = os.path.realpath, _inside

    def refuse_write(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            real = realpath(os.fsdecode(path))
            if real != os.devnull and not any(inside(real, folder) for folder in writable):
                raise PermissionError(f"a submission may not change {real}, outside of its folders")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int):
                return
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & WRITE_FLAGS:
                refuse_write(path)
            elif isinstance(path, (str, bytes)):
                real = realpath(os.fsdecode(path))
                if inside(real, hidden) and not any(inside(real, folder) for folder in shown):
                    raise PermissionError(f"a submission may not read {real}, of the course")
        elif event in CHANGED:
            relative = any(
                isinstance(arg, int) and arg > 2 for arg in args[1:]
            )  # to a folder's handle
            for path in args[:2]:
                if not relative:
                    refuse_write(path)
        elif event in PROGRAMS:
            raise PermissionError(f"a submission may not start programs ({event})")

    return hook


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


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

    def pytest_collection_finish(self, session: Any) -> None:
        """Record what will run, with its marks."""
        self.write({"collected": _marks(session)})

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
            "message": text.strip()[:2000], "notes": dict(report.user_properties),
        })  # fmt: skip


def _marks(session: Any) -> dict[str, list[str]]:
    return {item.nodeid: sorted({m.name for m in item.iter_markers()}) for item in session.items}


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
            found.update(_marks(session))

    arguments = ["--collect-only", "-q", *job["arguments"]]
    code = pytest.main(arguments, plugins=[Marks()])
    targets = sys.modules.get("kernels.runtime.targets")
    return {"tests": found, "code": int(code), "no_gpu": targets and targets.why_no_cuda()}


def main() -> None:
    """Do the job."""
    job = json.loads(sys.stdin.read())
    with open(job["report"], "a", encoding="utf-8", buffering=1) as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")

        tree = job["tree"]
        os.chdir(tree)
        sys.path.insert(0, tree)
        if job["trusted"]:
            write(collect(job))
            return
        limit(job["memory_mb"], job["seconds"])
        # The simulator starts a thread for each of a block, up to 1024: with 8 MB of stack for each,
        # as Linux gives, there would be no memory left.
        threading.stack_size(1 << 20)
        free_stacks()
        writable = job["writable"]
        # An environment inside the course's folder may be read.
        shown = [tree, *writable, *{os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)}]
        shown = [folder for folder in shown if not _inside(job["hidden"], folder)]
        confined = landlock(writable, job["gpu"])
        if not job["gpu"]:  # whose driver may start programs, and ask others of its own
            confined = seccomp() and confined
        write({"confined": "kernel" if confined else "hook"})
        sys.addaudithook(guard(writable, job["hidden"], shown))
        code = pytest.main(job["arguments"], plugins=[Recorder(write)])
        write({"finished": int(code)})


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    assert Path(__file__).is_absolute()
    main()
