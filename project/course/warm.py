"""A process that has imported what gradings need and forks for each, as importing takes most time."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")


class Warm:
    """A process that waits for jobs, and does each in a child of its own.

    While a job runs, it has the methods and attributes of a ``subprocess.Popen`` that the grader uses.

    Args:
        packages: What it imports.
        environment: Of the process; each job brings its own too.
    """

    def __init__(self, packages: tuple[str, ...], environment: dict[str, str]):
        self.packages, self.returncode = packages, 0
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(CHILD), str(theirs.fileno()), *packages],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def start(self, handles: list[int]) -> None:
        """Start a job: its standard input, output and error, and further files."""
        self.returncode = None
        with suppress(OSError):  # it has ended, as wait will say
            socket.send_fds(self._control, [b"x"], handles)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of a job and return its exit code; negative: the signal.

        Raises:
            subprocess.TimeoutExpired: If it still runs.
        """
        if self.returncode is None:
            if not select.select([self._control], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(CHILD), timeout or 0.0)
            try:
                (self.returncode,) = struct.unpack("i", self._control.recv(4))
            except (OSError, struct.error):  # it has ended, and the job with it
                self.packages, self.returncode = (), self._process.wait()
        return self.returncode


def wait_for_job(control: socket.socket) -> list[int]:
    """Return in a new process for each job, with its standard input, output and error.

    Returns:
        The further files of the job.
    """
    while True:
        _, handles, *_ = socket.recv_fds(control, 1, 4)
        if not handles:  # the grader has ended
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            for target, handle in enumerate(handles[:3]):
                os.dup2(handle, target)
                os.close(handle)
            return handles[3:]
        for handle in handles:
            os.close(handle)
        control.sendall(struct.pack("i", _ending(pid, control)))


def _ending(pid: int, control: socket.socket) -> int:
    """Return the exit code of a child, which ends with the grader at the latest."""
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if select.select([control], [], [], 0.02)[0]:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(found[1])
