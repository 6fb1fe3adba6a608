"""Waiting for other ranks: how long it takes, and which rank is named when it takes too long."""

from __future__ import annotations

import os
import platform
import time
from typing import Any, NoReturn

import numpy as np

#: Environment variable that sets how many seconds a rank waits for an operation, and the default.
TIMEOUT_VARIABLE, TIMEOUT = "MINITORCH_RANK_TIMEOUT", 300.0
#: Seconds between two checks of the clock and for roll calls, and the most that answering one may take.
LOOK, ANSWER = 0.5, 5.0
#: Tags of the messages of a roll call, and of a rank that ends its program.
CALL, LEFT = 0, 1


def timeout_of_environment() -> float:
    """Return the seconds that a rank waits for an operation.

    Raises:
        ValueError: If the environment variable is not a number above 0.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return seconds


class Waiting:
    """Waits for operations of MPI, measures how long, and gives up after a time.

    A rank that has waited too long calls the roll: it sends a message to every rank, and each rank that
    waits too answers.  A rank that does not answer computes, hangs or has ended, and is the one that the
    others wait for.  If all of them answer, the ranks have not called the same operations, and the rank
    that has begun the fewest is named.

    A rank that ends its program tells the others which operations it has begun.  A rank that waits for one
    that is not among them gives up at once.

    Args:
        communicator: An mpi4py communicator of all ranks; every rank passes it.
        timeout: Seconds after which a rank gives up.

    Attributes:
        processes: The process of each rank and its machine, in words.
        seconds: Time in which this rank has waited.
        under_way: Time in which at least one of its operations was under way, from its beginning to the end
            of the wait for it.
    """

    def __init__(self, communicator: Any, timeout: float):
        self._roll, self._timeout = communicator.Dup(), timeout
        self._answer = min(ANSWER, max(2.0 * LOOK, timeout))
        name = f"process {os.getpid()} on {platform.node()}"
        self.processes: list[str] = communicator.allgather(name)
        self.seconds = self.under_way = 0.0
        self._open = self._begun = 0
        self._since = 0.0
        # Operations begun, by name, of this rank and of those that have ended their programs.
        self._counts: dict[str, int] = {}
        self._left: dict[int, dict[str, int]] = {}

    def take_part(self, *names: str) -> None:
        """Note names of operations in which this rank takes part."""
        self._counts.update(dict.fromkeys(names, 0))

    def begin(self, name: str) -> tuple[str, int]:
        """Note that an operation begins; return its name and number.

        Args:
            name: A name that all ranks which take part in the operation have for it.
        """
        if self._open == 0:
            self._since = time.perf_counter()
        self._open += 1
        self._begun += 1
        self._counts[name] += 1
        return name, self._counts[name]

    def leave(self) -> None:
        """Tell all other ranks that the program of this one ends."""
        own = self._roll.Get_rank()
        for other in range(self._roll.Get_size()):
            if other != own:
                self._roll.isend((own, self._counts), other, LEFT)

    def until(self, request: Any, name: str, number: int) -> None:
        """Return when an operation is over; end all ranks if that takes too long, or cannot be.

        Args:
            request: The operation.
            name: Its name, as :meth:`begin` returned it.
            number: Its number.
        """
        start = time.perf_counter()
        if not request.Test():
            self._poll(request, start, name, number)
        now = time.perf_counter()
        self.seconds += now - start
        self._open -= 1
        if self._open == 0:
            self.under_way += now - self._since

    def _poll(self, request: Any, start: float, name: str, number: int) -> None:
        look = start + LOOK
        while not request.Test():
            if (now := time.perf_counter()) > look:
                while self._roll.iprobe(tag=LEFT):
                    rank, counts = self._roll.recv(tag=LEFT)
                    self._left[rank] = counts
                gone = [r for r, begun in self._left.items() if begun.get(name, number) < number]
                if gone or now - start > self._timeout or self._roll.Iprobe(tag=CALL):
                    self._give_up(now - start, gone)
                look = now + LOOK
            time.sleep(0)  # lets another rank run, where there are more ranks than cores

    def _give_up(self, waited: float, gone: list[int]) -> NoReturn:
        """Call the roll, and end all ranks."""
        rank, size = self._roll.Get_rank(), self._roll.Get_size()
        begun = np.full((size, 1), -1, np.int64)
        begun[rank] = self._begun
        others = [other for other in range(size) if other != rank and other not in self._left]
        answers = [self._roll.Irecv(begun[other], other, CALL) for other in others]
        answers += [self._roll.Isend(begun[rank], other, CALL) for other in others]
        deadline = time.perf_counter() + self._answer
        while time.perf_counter() < deadline and not all(x.Test() for x in answers):
            time.sleep(0.01)
        if int(np.flatnonzero(begun[:, 0] >= 0)[0]) != rank:
            time.sleep(self._answer)  # the first rank that waits speaks for all
        end(self._roll, f"waited {waited:.0f} s {self._reason(begun[:, 0], gone)}")

    def _reason(self, begun: Any, gone: list[int]) -> str:
        """Return a text that names the rank for which the others wait.

        Args:
            begun: Number of operations that each rank has begun, -1 where it has not answered, (size,).
            gone: Ranks that have ended before the operation.
        """
        silent = [*map(int, np.flatnonzero(begun < 0))]
        named = gone or silent or [int(begun.argmin())]
        who = ", ".join(f"rank {r} ({self.processes[r]})" for r in named[:3])
        if len(named) > 3:
            who += f" and {len(named) - 3} more"
        if gone:
            return (
                f"for {who}, whose program has ended before this operation; call the same operations "
                "on all ranks"
            )
        if silent:
            return (
                f"for {who}, which hangs, has ended or still computes; set {TIMEOUT_VARIABLE} to more "
                "seconds if a step takes so long"
            )
        return (
            f"while every rank waits for another: {who} has begun {begun.min()} operations, others up to "
            f"{begun.max()}; call the same operations on all ranks"
        )


def announce(rank: int, size: int, reason: str) -> None:
    """Print the line with which a rank ends all others."""
    # In one piece whatever others write, and not behind a progress bar.
    os.write(2, f"\nrank {rank} of {size}: {reason}\n".encode())


def end(communicator: Any, reason: str, status: int = 1) -> NoReturn:
    """End all processes that were launched together; print one line that names this rank."""
    announce(communicator.Get_rank(), communicator.Get_size(), reason)
    communicator.Abort(status)
    raise SystemExit(reason)  # not reached
