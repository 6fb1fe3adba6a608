"""Record the work of a function on the device while it runs, for a CUDA graph.

A recorded call runs like any other, and its launches are recorded.  Values that later calls bring from the
host are recorded with a way to obtain them again: copies of inputs, random numbers (:func:`drawn`), numbers
of an optimiser (:class:`Renewed`), results that the host computes from inputs (:func:`computed`), and work
between launches (:func:`between_launches`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.runtime.arena import Arena, Stretch
from kernels.cuda.runtime.recipe import spoil, unwritten
from kernels.runtime.cuda_errors import CaptureError


class Renewed(tuple[Any, ...]):
    """Numbers of a launch that the host computes for each call.

    Args:
        again: A function that returns them, now and for each replay.
    """

    again: Callable[[], tuple[Any, ...]]

    def __new__(cls, again: Callable[[], tuple[Any, ...]]) -> Renewed:
        """Return the current numbers."""
        self = super().__new__(cls, again())
        self.again = again
        return self


class Launch(NamedTuple):
    """A recorded launch.

    Attributes:
        launcher: The launcher of the kernel.
        grid: Blocks.
        block: Threads.
        words: Its packed arguments, (slots,) uint64.
        renewed: Arguments that each call computes, each with its first slot.
    """

    launcher: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    words: np.ndarray[Any, Any]
    renewed: tuple[tuple[int, Renewed], ...] = ()


class Upload(NamedTuple):
    """A copy of an input to the device: the array on the host and the array on the device."""

    source: np.ndarray[Any, Any]
    target: Any


class Recording:
    """The recorded work of one call on the device.

    Args:
        arena: The arena for its allocations.
        inputs: Host arrays whose contents change with each call, in the same memory.
        stretch: The memory in the arena; None for the first call, which determines the needed size.
        before: The recording of the call before, in the same stretch; None if there is none.

    Attributes:
        launches: The launches in order.
        draws: Drawn numbers, with the functions that draw the next ones.
        uploads: Copies of inputs, and of results computed from them.
        computations: Computations of the host from inputs, in order, each with the memory of its result.
        actions: Other work on the host in each replay, before the first launch.
        between: Work between launches, with the number of launches before it.
        guards: Functions that tell whether the memory of the launches is still at the same addresses.
        kept: Memory outside of the arena that the launches read or write; a graph keeps it alive.
        on_host: The first work on the host that a graph cannot contain, or None.
        memo: Objects that are made once per call, by key.
        needed: Number of bytes of the arena that the call needs, known once it has ended.
    """

    def __init__(
        self,
        arena: Arena,
        inputs: Sequence[np.ndarray[Any, Any]],
        stretch: Stretch | None = None,
        before: Recording | None = None,
    ):
        self.arena, self.stretch, self.before, self.needed = arena, stretch, before, 0
        self.launches: list[Launch] = []
        self.draws: list[tuple[int, Callable[[], int]]] = []
        self.uploads: list[Upload] = []
        self.computations: list[Callable[[], None]] = []
        self.actions: list[Callable[[], None]] = []
        self.between: list[tuple[int, Callable[[], None]]] = []
        self.guards: list[Callable[[], bool]] = []
        self.kept: dict[int, Any] = {}
        self.on_host: CaptureError | None = None
        self.memo: dict[Any, Any] = {}
        self._live = [*inputs]
        self._drawn: set[int] = set()

    def __enter__(self) -> Recording:
        assert _thread.recording is None, "a recorded call records no other"
        self.arena.begin(self.stretch)
        _thread.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.recording = None
        self.needed = self.arena.end()

    def check_host(self) -> None:
        """Raise the error for work on the host that a graph cannot contain, if there are launches."""
        if self.launches and self.on_host is not None:
            raise self.on_host

    def launched(self, launch: Launch, args: Any) -> None:
        """Record a launch, and the arrays among its arguments."""
        for arg in _flat(args):
            self.touched(arg, f"the kernel {launch.launcher.name}")
        self.launches.append(launch)

    def touched(self, array: Any, reader: str = "a kernel") -> None:
        """Record that a launch reads or writes an array; other objects are ignored.

        Args:
            array: An array on the device.
            reader: Name of the reader for error messages.

        Raises:
            CaptureError: If it belongs to an earlier recorded call, whose memory is reused.
        """
        memory = getattr(array, "gpu_data", None)
        memory = getattr(memory, "whole", memory)
        if memory is None:
            return
        if not self.arena.owns(memory):
            self.kept[id(memory)] = memory
        elif not self.arena.is_current(memory):
            raise CaptureError(
                f"{reader} reads what an earlier call of the function left behind (of shape "
                f"{array.shape}), and a graph computes every call in the same memory; drop gradients at "
                "the beginning of the function (zero_grad), write to what lasts in place as "
                "minitorch.AdamW does, and pass what it needs of a call before as an input"
            )

    def drew(self, number: int, again: Callable[[], int]) -> None:
        """Record a drawn number; recomputation draws the same number again."""
        if number not in self._drawn:
            self._drawn.add(number)
            self.draws.append((number, again))

    def computed(
        self, result: np.ndarray[Any, Any], compute: Callable[[], Any], sources: Sequence[Any]
    ) -> None:
        """Record a result of the host, if it is computed from an input."""
        if any(map(self.is_live, sources)):
            self._live.append(result)
            self.computations.append(lambda: np.copyto(result, compute()))

    def uploaded(
        self, array: np.ndarray[Any, Any], copy: Callable[[np.ndarray[Any, Any], Any], Any]
    ) -> Any:
        """Copy an array to the device, and record the copy if a replay has to repeat it.

        Args:
            array: A contiguous array on the host.
            copy: ``(array, target)``, which copies (to memory outside of the arena if the target is None)
                and returns the array on the device.

        Raises:
            CaptureError: If the array is copied in each call, but is not an input.
        """
        place, before = len(self.uploads), self.before
        if not self.is_live(array):
            if before is not None:
                raise CaptureError(
                    f"the function copies an array of shape {array.shape} ({array.dtype}) to the device in "
                    "each call, and it is none of its inputs: a graph would keep these numbers for ever; "
                    "pass it to the function as an argument, or put it on the device before"
                )
            return copy(array, None)  # somebody keeps it: there is no second copy, or it is refused
        target = None if before is None else before.target(place, array)
        self.uploads.append(Upload(array, copy(array, target)))
        return self.uploads[-1].target

    def target(self, place: int, array: np.ndarray[Any, Any]) -> Any:
        """Return where the copy of a place went."""
        found = self.uploads[place].target if place < len(self.uploads) else None
        if found is None or (found.shape, found.dtype) != (array.shape, array.dtype):
            raise CaptureError(
                f"the function copied an array of shape {array.shape} that a call before did not copy; "
                "shapes must be the same in every call"
            )
        return found

    def is_live(self, array: Any) -> bool:
        """Tell whether an array holds an input, or a result computed from one."""
        return isinstance(array, np.ndarray) and any(
            np.may_share_memory(array, known) for known in self._live
        )


class _Thread(threading.local):
    """The current recording of a thread, or None."""

    recording: Recording | None = None


_thread = _Thread()


def active() -> Recording | None:
    """Return the current recording of this thread, or None."""
    return _thread.recording


@contextmanager
def aside() -> Iterator[None]:
    """Do not record the work of this thread in a ``with`` block, neither for a graph nor for a recipe.

    This is for work that only the first call of a kind does, and whose results are cached.
    """
    recording, _thread.recording = _thread.recording, None
    try:
        with unwritten():
            yield
    finally:
        _thread.recording = recording


def drawn(again: Callable[[], int]) -> int:
    """Return a number that differs in every call.

    Args:
        again: Draws the number, and the next numbers for replays.
    """
    number = again()
    spoil()
    if (recording := _thread.recording) is not None:
        recording.drew(number, again)
    return number


def between_launches(act: Callable[[], None], *arrays: Any) -> None:
    """Do work now that each replay repeats at the same place among the launches.

    Args:
        act: A function that enqueues work other than our kernels, such as a message to another device.
        *arrays: Arrays on the device that it reads or writes.
    """
    act()
    spoil()
    if (recording := _thread.recording) is not None:
        for array in arrays:
            recording.touched(array, "a message to another device")
        recording.between.append((len(recording.launches), act))


def computed(compute: Callable[[], Any], *sources: Any) -> Any:
    """Return an array that the host computes from other arrays; a replay computes it again.

    Args:
        compute: A function that returns a new array each time, always of the same shape.
        *sources: The arrays from which it is computed.
    """
    result = compute()
    if (recording := _thread.recording) is not None:
        recording.computed(result, compute, sources)
    return result


def refuse(what: str, remedy: str, on_host: bool = False) -> None:
    """Raise an error if this thread records.

    Args:
        what: What the function does, such as "reads numbers of the device".
        remedy: What to do instead.
        on_host: Whether this happens on the host, which is allowed in a function without launches; then
            :meth:`Recording.check_host` raises the error.

    Raises:
        CaptureError: If this thread records.
    """
    if (recording := _thread.recording) is not None:
        error = CaptureError(f"the function {what}, which a CUDA graph cannot hold; {remedy}")
        if not on_host:
            raise error
        recording.on_host = recording.on_host or error


def _flat(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _flat(arg)
        else:
            yield arg
