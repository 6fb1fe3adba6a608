"""The threads of a block: greenlets that run one at a time, in an order that is drawn.

Whatever a GPU may do in any order is drawn from MINITORCH_SCHEDULE and the block's index: the thread that
runs next, and whether a copy engine reads what it was given at once or at the last moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

#: The folder of the emulated GPU, whose lines no message names.
OWN = __file__.rpartition("schedule.py")[0]
#: Threads of a warp and of a warpgroup.
WARP, GROUP = 32, 128
#: The orders of threads are drawn from it; with the same number they are the same.
_SCHEDULE = os.environ.get("MINITORCH_SCHEDULE", "0")
#: Threads that run last.
_late: set[int] = set()
#: The probability that a warp, and that a warpgroup, runs late.
LATE = 0.25
#: The probability that a late thread runs next while others could; with 0, only when no other can.
STILL = (0.0, 0.05)
#: The probability that a copy arrives before the next turn; with 0, it arrives when all threads wait.
COMING = (0.0, 0.01, 0.3)


@contextmanager
def held_back(*threads: int) -> Iterator[None]:
    """Let threads of each block run only when no other can; no result may depend on it."""
    _late.update(threads)
    try:
        yield
    finally:
        _late.clear()


class Deadlock(RuntimeError):
    """Threads wait for others, which wait too or have ended."""


class Turns:
    """The turns of a block's threads: each runs until it waits for others.

    Args:
        count: Number of threads.
        index: Index of the block.
        begin: Called with the number of the thread whose turn begins.

    Attributes:
        now: The number of the running thread.
        copies: Functions that do what the copy engine has still to do.
        drawn: Returns another number from 0 to 1 each time.
        waiting: The lines at which threads wait, once no thread can run.
    """

    def __init__(self, count: int, index: tuple[int, ...], begin: Callable[[int], None]):
        self.now, self._count, self._begin = 0, count, begin
        self.copies: list[Callable[[], None]] = []
        self.waiting: dict[int, tuple[str, int]] = {}
        draw = Random(f"{_SCHEDULE} {index}")
        self.drawn = draw.random
        self._copies_come = draw.choice(COMING)
        self._late_come = 0.0 if _late else draw.choice(STILL)
        late = set(_late)
        for size in () if late else (WARP, GROUP):
            for first in range(0, count, size):
                late.update(range(first, first + size) if draw.random() < LATE else ())
        # The threads that may run; among the late ones, those that may.
        self._ready: tuple[list[int], list[int]] = [], []
        self._ready_of = [self._ready[i in late] for i in range(count)]
        self.wake(range(count))
        self._hub = getcurrent()

    def take(self, thread: Callable[[], None], meets: bool) -> None:
        """Run a function in each thread.

        Args:
            thread: The function.
            meets: Whether threads wait for each other; otherwise they are plain calls.

        Raises:
            Deadlock: If the threads that have not ended wait for each other.
        """
        if not meets:
            for number in iter(self._next, None):
                self.now = number
                self._begin(number)
                thread()
            return
        running = [greenlet(thread) for _ in range(self._count)]
        for one in running:
            one.gr_context = copy_context()  # how NumPy warns
        begin, next_ = self._begin, self._next
        try:
            for number in iter(next_, None):
                self.now = number
                begin(number)
                running[number].switch()
            self.waiting = {i: _line_of(one) for i, one in enumerate(running) if not one.dead}
            if self.waiting:
                raise Deadlock
        finally:
            for one in running:
                one.throw()  # ends it where it waits

    def _next(self) -> int | None:
        soon, late = self._ready
        while self.copies and (not (soon or late) or self.drawn() < self._copies_come):
            self.copies.pop(int(self.drawn() * len(self.copies)))()
        ready = late if late and (not soon or self.drawn() < self._late_come) else soon
        if not ready:
            return None
        place = int(self.drawn() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def wake(self, numbers: Iterable[int]) -> None:
        """Let threads continue when their turn comes."""
        for number in numbers:
            self._ready_of[number].append(number)

    def wait(self) -> None:
        """Stop the running thread until it is woken and its turn comes."""
        self._hub.switch()


def _line_of(thread: Any) -> tuple[str, int]:
    """Return the line of the kernel at which a thread waits."""
    frame = thread.gr_frame
    while frame.f_code.co_filename.startswith(OWN) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Meeting:
    """Threads that wait for each other, pass in a value each, and receive a result each.

    Args:
        first: The number of the first thread that may take part.
        size: How many may.
        count: How many do.
        turns: The turns of the block.

    Attributes:
        rounds: How often all have met.
    """

    def __init__(self, first: int, size: int, count: int, turns: Turns):
        self.values: list[Any] = [None] * size
        self.results: list[Any] = []
        self.arrived: list[int] = []
        self.turns, self.first, self.count, self.rounds = turns, first, count, 0

    def hold(self, value: Any, act: Callable[[list[Any]], list[Any]] | None = None) -> Any:
        """Return this thread's result of ``act`` on the values of all."""
        turns = self.turns
        index = turns.now - self.first
        self.values[index] = value
        self.arrived.append(turns.now)
        if len(self.arrived) == self.count:
            self.results = act(self.values) if act else self.values
            self.rounds += 1
            turns.wake(self.arrived)  # the last to arrive need not be the first to continue
            self.arrived = []
        turns.wait()
        return self.results[index]
