"""Record the launches of a call for display."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Launched(NamedTuple):
    """A launch of a kernel on a GPU.

    Attributes:
        kernel: The name of the kernel.
        grid: Number of blocks, in three dimensions.
        block: Number of threads, in three dimensions.
        shared_bytes: Dynamic shared memory of a block, bytes.
        registers: Registers per thread; None in the simulator.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    registers: int | None

    def __str__(self) -> str:
        """Return the launch as one line."""
        return (
            f"{self.kernel}: grid {self.grid}, block {self.block}, {self.shared_bytes:,} bytes of shared "
            f"memory, {'unknown' if self.registers is None else self.registers} registers a thread"
        )


class Loop(NamedTuple):
    """A compiled loop on the CPU.

    Attributes:
        items: Number of work items, each of which runs on one thread.
        threads: Number of threads.
    """

    items: int
    threads: int

    def __str__(self) -> str:
        """Return the loop as one line."""
        return f"{self.items:,} work items on {self.threads} thread{'s' * (self.threads > 1)}"


class _Thread(threading.local):
    """The launches that this thread records, or None."""

    noted: list[Launched | Loop] | None = None


thread = _Thread()


@contextmanager
def launches_noted() -> Iterator[list[Launched | Loop]]:
    """Record the launches of this thread within a ``with`` block."""
    before, thread.noted = thread.noted, []
    try:
        yield thread.noted
    finally:
        thread.noted = before


def noted() -> list[Launched | Loop] | None:
    """Return the launches that this thread records, or None."""
    return thread.noted
