"""Record the launches of a call for display."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Launched(NamedTuple):
    """A kernel launch on a GPU, as ``kernels.plan`` shows it."""

    kernel: str  #: The name of the kernel.
    grid: tuple[int, int, int]  #: Number of blocks, in three dimensions.
    block: tuple[int, int, int]  #: Number of threads, in three dimensions.
    shared_bytes: int  #: Dynamic shared memory of a block, bytes.
    registers: int | None  #: Registers per thread; None on the emulated GPU.

    def __str__(self) -> str:
        """Return the launch as one line."""
        return (
            f"{self.kernel}: grid {self.grid}, block {self.block}, {self.shared_bytes:,} bytes of shared "
            f"memory, {'unknown' if self.registers is None else self.registers} registers a thread"
        )


class Loop(NamedTuple):
    """A compiled loop on the CPU, as ``kernels.plan`` shows it."""

    items: int  #: Number of work items, each of which runs on one thread.
    threads: int  #: Number of threads.

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
