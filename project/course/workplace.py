"""Where a submission is graded: a folder of its own, a tree made for it, and a process that is watched."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from course.confine import HAS_FILTERS, has_bubblewrap, in_namespaces, readable, refused_calls
from course.markers import PACKAGES, ROOT
from course.warm import CHILD, Warm

#: Of what was refused: so many operations are named, in so many characters.
MOST_REFUSED, LONGEST_WORDS = 20, 200


#: Bytes that all files of a submission may have together, and the seconds between two looks at them.
MOST_WRITTEN, LOOK_EVERY = 2 << 30, 0.5


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        code: Its exit code; negative: the signal.
        late: Time was up.
        full: It had written more than MOST_WRITTEN.
        refused: What it may not do and has tried.
    """

    code: int
    late: bool
    full: bool = False
    refused: tuple[str, ...] = ()


#: Processes that run in any place; what one of them leaves behind is ended, and another is not.
RUNNING: set[int] = set()
#: Those that wait for a job.
IDLE: list[Warm] = []
LOCK = threading.Lock()


class Workplace:
    """A folder for gradings, one after the other, with what a submission may write to and what not.

    Args:
        folder: An empty one, or one that is not there yet.
        gpu: CUDA tasks run on the GPU.
    """

    def __init__(self, folder: Path, gpu: bool):
        self.gpu = gpu
        self.closed = False
        self.process: subprocess.Popen[bytes] | Warm | None = None
        self.tree, self.private = folder / "tree", folder / "private"
        self.solved = self.private / "tree"
        self.writable = {name: folder / name for name in ("home", "tmp", "numba")}
        for path in (self.tree, self.private, *self.writable.values()):
            path.mkdir(parents=True)

    def environment(self, emulated: bool, trusted: bool = False) -> dict[str, str]:
        """Return the environment of a run: little of ours, and every folder inside this one.

        Whether code is right shows without LLVM's optimisation too, and compiling is most of the time
        that tests take.
        """
        kept = (
            "PATH",
            "LANG",
            "SYSTEMROOT",
            "LD_LIBRARY_PATH",
            "CUDA_HOME",
            "CUDA_VISIBLE_DEVICES",
        )
        kept = (*kept, "MINITORCH_EXAMPLES", "NUMBA_NUM_THREADS")
        # What the course's solutions are compiled to is for no submission to read.
        cache = self.private if trusted else self.writable["numba"]
        home, tmp = str(self.writable["home"]), str(self.writable["tmp"])
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "CI": "1",  # property tests draw the same examples each time
            # Else each core brings eight of glibc's arenas, of 64 MB of the child's addresses each.
            "MALLOC_ARENA_MAX": "2",
            "MINITORCH_SHRINK": "0",  # the first that fails will do
            "HOME": home, "USERPROFILE": home, "TMPDIR": tmp, "TEMP": tmp, "TMP": tmp,
            "HYPOTHESIS_STORAGE_DIRECTORY": tmp,
            "NUMBA_CACHE_DIR": str(cache),
            "NUMBA_DISABLE_JIT": str(int(trusted and not self.gpu)),  # for a few small arrays
            "NUMBA_OPT": "0",
            "MINITORCH_EMULATE": "check" if emulated else "0",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def run(self, job: dict[str, Any], emulated: bool, seconds: float) -> tuple[list[Any], Ending]:
        """Run the child and return its records and its end."""
        trusted = job["trusted"]
        command = [sys.executable, "-I", "-B", str(CHILD)]
        writable = [str(path) for path in self.writable.values()]
        shown = [str(CHILD.parent), *readable(job["tree"], solutions(), self.gpu)]
        forks = sys.platform.startswith("linux") and not trusted and not self.gpu
        if forks and has_bubblewrap():
            command, forks = in_namespaces(command, writable, shown), False
        listens = HAS_FILTERS and not trusted
        ours, theirs = socket.socketpair() if listens else (None, None)
        handles = [theirs.fileno()] if theirs else []
        whole = {
            "gpu": self.gpu,
            "writable": writable,
            "shown": shown,
            "channel": sum(handles),
            "environment": self.environment(emulated, trusted),
            **job,
        }
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as report,
            tempfile.TemporaryFile() as output,
        ):
            given.write(json.dumps(whole).encode())
            given.seek(0)
            files = [given, report, output]
            with LOCK:
                if self.closed:
                    raise RuntimeError("a workplace that is closed runs nothing")
                before = _adopted()
                if forks:
                    process = self._warm(Path(job["tree"]))
                    process.start([*(file.fileno() for file in files), *handles])
                else:
                    process = subprocess.Popen(
                        command, stdin=given, stdout=report, stderr=output, pass_fds=handles,
                        env=whole["environment"], start_new_session=True,
                    )  # fmt: skip
                self.process = process
                RUNNING.add(process.pid)
            refused: dict[str, None] = {}
            ended = threading.Event()
            watcher = threading.Thread(target=lambda: refused.update(_refused(ours, ended)))
            try:
                if theirs:
                    theirs.close()
                    watcher.start()
                late, full = self._watch(process, seconds)
            finally:
                is_idle = isinstance(process, Warm) and process.returncode is not None
                if not is_idle:
                    _end(process)
                with LOCK:
                    self.process = None
                    if isinstance(process, Warm) and is_idle and process.packages:
                        IDLE.append(process)
                    else:
                        RUNNING.discard(process.pid)
                    # One that is ended may leave us those that it has started.
                    while orphans := _adopted() - before - RUNNING:
                        for orphan in orphans:
                            os.kill(orphan, signal.SIGKILL)
                            os.waitpid(orphan, 0)
                ended.set()
                if theirs:
                    watcher.join()
            report.seek(0)
            records = list(_records(report.read()))
        if full:
            for path in self.writable.values():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
        words = [r["refused"][:LONGEST_WORDS] for r in records if isinstance(r.get("refused"), str)]
        named = list(dict.fromkeys([*refused, *words]))[:MOST_REFUSED]
        return records, Ending(process.returncode or 0, late, full, tuple(named))

    def _warm(self, tree: Path) -> Warm:
        """Return a process that waits for a job and has imported what the tests of a tree need."""
        has_numba = (tree / "minitorch" / "fast_ops.py").exists()
        packages = ("numpy", "pytest", "hypothesis", *["numba"] * has_numba)
        found = [process for process in IDLE if process.packages == packages]
        if found:
            IDLE.remove(found[0])
        return found[0] if found else Warm(packages, self.environment(False))

    def _watch(self, process: subprocess.Popen[bytes] | Warm, seconds: float) -> tuple[bool, bool]:
        """Wait for the end of a process; return whether time or room was up first."""
        stop = time.monotonic() + seconds
        while (left := stop - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(left, LOOK_EVERY))
                return False, False
            if _bytes_in(self.writable.values()) > MOST_WRITTEN:
                return False, True
        return True, False

    def close(self) -> None:
        """End what runs here, and start nothing more."""
        with LOCK:
            self.closed = True
            if self.process is not None:
                _kill(self.process)


def _end(process: subprocess.Popen[bytes] | Warm) -> None:
    """End a process and whatever it has started, and wait for it."""
    _kill(process)
    process.wait()


def _kill(process: subprocess.Popen[bytes] | Warm) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
    elif isinstance(process, subprocess.Popen):
        process.kill()


def _bytes_in(folders: Iterable[Path]) -> int:
    """Return how many bytes of the disk the files in some folders take."""
    total = 0
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # it has gone since
                    status = os.lstat(os.path.join(place, name))
                    total += getattr(status, "st_blocks", status.st_size // 512) * 512
    return total


SUBREAPER = 36  # of prctl


def _adopted() -> set[int]:
    """Return the children of this process; on Linux these are all that a child may have left behind.

    A process that has left its group outlives the end of the group, and then becomes ours.
    """
    if not sys.platform.startswith("linux"):
        return set()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):  # none where the kernel keeps no list
        with suppress(OSError):  # a thread that has ended since
            found |= {int(child) for child in path.read_text().split()}
    return found


def _refused(channel: Any, ended: threading.Event) -> dict[str, None]:
    """Refuse what a child asks for until it ends; return the names of the system calls."""
    with channel:
        return dict.fromkeys(refused_calls(channel, ended))


def solutions() -> list[str]:
    """Return the folders that have solutions: the course's, and copies that are installed."""
    installed = [Path(path) / name for path in sys.path for name in PACKAGES]
    return [str(ROOT), *(str(path) for path in installed if path.is_dir())]


def _records(report: bytes) -> Iterator[dict[str, Any]]:
    for line in report.decode("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a process that was ended, or nonsense
        if isinstance(record, dict):
            yield record
