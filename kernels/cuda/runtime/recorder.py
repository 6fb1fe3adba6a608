"""What one call of a function asks of the device, written down while it runs: what a graph is made of.

A recorded call runs as any other; what it launches is noted beside.  What a later call would bring anew
from the host is noted with the way to get it again: what is copied from its inputs, numbers drawn at random
(:func:`drawn`), numbers of an optimiser (:class:`Renewed`), what the host computes from the inputs
(:func:`computed`), and what goes on between launches (:func:`between_launches`).
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
    """Numbers of a launch that the host computes anew for each call.

    Args:
        again: Returns them, now and for each replay.
    """

    again: Callable[[], tuple[Any, ...]]

    def __new__(cls, again: Callable[[], tuple[Any, ...]]) -> Renewed:
        """Return the numbers of now."""
        self = super().__new__(cls, again())
        self.again = again
        return self


class Launch(NamedTuple):
    """A launch as it was made.

    Attributes:
        launcher: Of the kernel.
        grid: Blocks.
        block: Threads.
        words: What its arguments were, packed: (slots,) uint64.
        renewed: Arguments that are computed anew, each with its first slot.
    """

    launcher: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    words: np.ndarray[Any, Any]
    renewed: tuple[tuple[int, Renewed], ...] = ()


class Upload(NamedTuple):
    """A copy to the device of what a call brings: the array on the host, and on the device."""

    source: np.ndarray[Any, Any]
    target: Any


class Recording:
    """All that one call asks of the device.

    Args:
        arena: What it allocates lies there.
        inputs: Arrays on the host that each call brings other numbers in, in the same memory.
        stretch: Where in the arena; None for the first call, which shows how much the others need.
        before: The recording of the call before, in the same stretch; None if there is none.

    Attributes:
        launches: In order.
        draws: Numbers that were drawn, and the functions that draw the next.
        uploads: Copies of inputs, and of what was computed from them.
        computations: What the host computes from inputs, in order, each into the memory of the first time.
        actions: What else is to be done on the host in each replay, before the first launch.
        between: Work between launches, with the number of launches before it.
        guards: Tell whether what the launches read and write is still where it was.
        kept: Memory outside of the arena that the launches read or write; a graph keeps it alive.
        on_host: What a graph cannot hold of what was done on the host, the first of it.
        memo: Objects that are made once per call, by key.
        needed: Bytes of the arena that the call needs, once it has ended.
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
        """Raise what was refused of the work on the host, beside which there are launches."""
        if self.launches and self.on_host is not None:
            raise self.on_host

    def launched(self, launch: Launch, args: Any) -> None:
        """Note a launch, and the arrays among its arguments."""
        for arg in _flat(args):
            self.touched(arg, f"the kernel {launch.launcher.name}")
        self.launches.append(launch)

    def touched(self, array: Any, reader: str = "a kernel") -> None:
        """Note that a launch reads or writes an array; what is no array is passed over.

        Args:
            array: On the device.
            reader: For the error text.

        Raises:
            CaptureError: If it is of an earlier recorded call, whose memory is used again.
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
        """Note a number that was drawn; one that is drawn a second time (recomputing) is the same one."""
        if number not in self._drawn:
            self._drawn.add(number)
            self.draws.append((number, again))

    def computed(
        self, result: np.ndarray[Any, Any], compute: Callable[[], Any], sources: Sequence[Any]
    ) -> None:
        """Note what the host computed, if it comes from an input."""
        if any(map(self.is_live, sources)):
            self._live.append(result)
            self.computations.append(lambda: np.copyto(result, compute()))

    def uploaded(
        self, array: np.ndarray[Any, Any], copy: Callable[[np.ndarray[Any, Any], Any], Any]
    ) -> Any:
        """Copy an array to the device, and note it if a replay has to copy its memory again.

        Args:
            array: On the host, contiguous.
            copy: ``(array, target)`` copies, to memory outside of the arena where the target is None, and
                returns the array on the device.

        Raises:
            CaptureError: If it is copied in each call, and no input.
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
        """Tell whether an array holds numbers of an input, or what was computed from one."""
        return isinstance(array, np.ndarray) and any(
            np.may_share_memory(array, known) for known in self._live
        )


class _Thread(threading.local):
    """What a thread records now, or None."""

    recording: Recording | None = None


_thread = _Thread()


def active() -> Recording | None:
    """Return what this thread records now, or None."""
    return _thread.recording


@contextmanager
def aside() -> Iterator[None]:
    """Leave what this thread does in a ``with`` block out of what it records, for a graph and for a recipe.

    For work that only the first call of a kind does, and whose results are kept.
    """
    recording, _thread.recording = _thread.recording, None
    try:
        with unwritten():
            yield
    finally:
        _thread.recording = recording


def drawn(again: Callable[[], int]) -> int:
    """Return a number that is another in every call.

    Args:
        again: Draws it; and the next ones, for replays of the launches that it goes into.
    """
    number = again()
    spoil()
    if (recording := _thread.recording) is not None:
        recording.drew(number, again)
    return number


def between_launches(act: Callable[[], None], *arrays: Any) -> None:
    """Do something now that each replay does again, at the same place among the launches.

    Args:
        act: Puts work on the device that no kernel of ours does, such as a message to another device.
        *arrays: On the device, which it reads or writes.
    """
    act()
    spoil()
    if (recording := _thread.recording) is not None:
        for array in arrays:
            recording.touched(array, "a message to another device")
        recording.between.append((len(recording.launches), act))


def computed(compute: Callable[[], Any], *sources: Any) -> Any:
    """Return an array that the host computes from others; a replay computes it again from its inputs.

    Args:
        compute: Returns it, a new one each time, and always of the same shape.
        *sources: What it is computed from.
    """
    result = compute()
    if (recording := _thread.recording) is not None:
        recording.computed(result, compute, sources)
    return result


def refuse(what: str, remedy: str, on_host: bool = False) -> None:
    """Raise an error if this thread records.

    Args:
        what: The function does: "reads numbers of the device".
        remedy: What to do instead.
        on_host: It does so on the host, which is no fault of a function that launches nothing at all: the
            error is raised by :meth:`Recording.check_host`.

    Raises:
        CaptureError: If so.
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
