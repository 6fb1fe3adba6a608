"""Record what a call does on the device, to repeat it (``repeated``) or to make a CUDA graph (``graphs``).

A recorded call runs like any other.  Its launches are recorded in order, with their packed arguments and
the origin of each address among them: an operand, memory that the call allocated, or other memory.

What differs from call to call is recorded with a function that obtains it again: copies of inputs, drawn
numbers, numbers of an optimiser, results that the host computes from inputs, and work between launches.
Only graphs have it.  A call to repeat has only operands and a dropout seed; anything else *spoils* its
recording.
"""

from __future__ import annotations

import threading
from bisect import insort  # beyond module 5
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager  # beyond module 5
from typing import Any, NamedTuple
from weakref import ref  # beyond module 5

import numpy as np  # beyond module 5

from kernels.common.geometry import PLAIN  # beyond module 5
from kernels.runtime.cuda_errors import CaptureError  # beyond module 5

#: Alignment of allocations that share one memory, bytes.
ALIGNMENT = 512
#: The number of an operand or allocation of the call, and bytes from its start; or None and an address.
Location = tuple[int | None, int]


class Seed(int):  # beyond module 5
    """The dropout seed of a call to repeat, which is the one number that later calls replace."""


class Renewed(tuple[Any, ...]):  # beyond module 5
    """Numbers of a launch that the host computes for each call, by the function ``renew``."""

    renew: Callable[[], tuple[Any, ...]]

    def __new__(cls, renew: Callable[[], tuple[Any, ...]]) -> Renewed:
        """Return the current numbers."""
        self = super().__new__(cls, renew())
        self.renew = renew
        return self


class Origin(NamedTuple):  # beyond module 5
    """The array or allocation to which an address in a recorded launch points."""

    #: Where it points; for memory that holds addresses, all places to which these point.
    locations: tuple[Location, ...]
    #: Returns such memory for other addresses, and its own address; None for an operand or allocation.
    remake: Callable[..., tuple[Any, int]] | None = None


class Launch(NamedTuple):  # beyond module 5
    """A kernel launch of a launch recording."""

    launcher: Any  #: The launcher of the kernel.
    #: The driver's arguments after the kernel: three of the grid, three of the block, and so on.
    sizes: tuple[Any, ...]
    buffer: Any  #: A copy of the packed arguments.
    #: The words that hold addresses of the call's memory, each with its origin.
    addresses: list[tuple[int, Origin]]
    #: The words of numbers that later calls replace, each with its :class:`Seed` or the
    #: :class:`Renewed` numbers that begin there.
    numbers: list[tuple[int, Any]]


class Message(NamedTuple):  # beyond module 5
    """Work of the host between recorded launches: a function, and the arrays whose addresses it takes."""

    act: Callable[..., None]
    locations: list[Location]


class Recording:  # beyond module 5
    """The work of one call on the device; see :func:`recorded_by`.

    For a graph, ``inputs`` are host arrays whose contents change with each call, in the same memory,
    and ``before`` is the recording of the call before, if there is one.
    """

    def __init__(
        self,
        inputs: Iterable[np.ndarray[Any, Any]] | None = None,
        before: Recording | None = None,
    ):
        self.before, self.is_of_graph = before, inputs is not None
        #: The launches in order, and the messages between them.
        self.steps: list[Launch | Message] = []
        self.sizes: list[int] = []  #: Bytes of each operand and allocation.
        self.kept: dict[int, Any] = {}  #: Other memory of the launches, which must be kept alive.
        #: Whether the call did what can only be part of a graph, or of nothing.
        self.is_spoilt = False
        #: Drawn numbers, each with the function that draws the next one.
        self.draws: dict[int, Callable[[], int]] = {}
        #: Host arrays that hold inputs, or results computed from them.
        self.live = [*(inputs or ())]
        #: Functions that compute such results again, in order.
        self.computations: list[Callable[[], None]] = []
        #: Copies of such arrays to the device: the array, and the one on the device.
        self.uploads: list[tuple[np.ndarray[Any, Any], Any]] = []
        #: Other work of the host in each replay, before the first launch.
        self.actions: list[Callable[[], None]] = []
        #: Functions that tell whether the memory of the launches is still at the same addresses.
        self.guards: list[Callable[[], bool]] = []
        self.memo: dict[Any, Any] = {}  #: Objects that are made once per call, by key.
        self._maps: dict[int, tuple[Any, Origin]] = {}
        #: The operands and allocations, and the order in which n was allocated (n) and freed (~n).
        self._memories, self._events = list[Any](), list[int]()

    @property
    def launches(self) -> list[Launch]:
        """The launches in order."""
        return [step for step in self.steps if isinstance(step, Launch)]

    def allocated(self, memory: Any, size: int) -> None:
        """Record the memory of an operand or an allocation."""
        number, events = len(self.sizes), self._events
        memory.allocation = self.sizes, number
        self.sizes.append(size)
        self._memories.append(ref(memory, lambda _: events.append(~number)))
        events.append(number)

    def held(self) -> dict[int, Any]:
        """Return the operands and allocations that are still referenced, by number."""
        found = {number: memory() for number, memory in enumerate(self._memories)}
        return {number: memory for number, memory in found.items() if memory is not None}

    def layout(self, elsewhere: Container[int]) -> tuple[dict[int, int], int]:
        """Lay out allocations, but those with a number in ``elsewhere``, in one memory.

        Launches run in order, so that two allocations may share a place unless both were in use
        at a time. Returns the offset of each by its number, and the bytes of the memory.
        """
        offsets, used, extent = dict[int, int](), list[tuple[int, int, int]](), 0
        for number in [*self._events]:
            if number < 0:
                used = [one for one in used if one[2] != ~number]
            elif number not in elsewhere:
                room, start = PLAIN.ceil_div(self.sizes[number], ALIGNMENT) * ALIGNMENT, 0
                for begin, end, _ in used:
                    if begin - start >= room:
                        break
                    start = end
                insort(used, (start, start + room, number))
                offsets[number], extent = start, max(extent, start + room)
        return offsets, extent

    def locate(self, array: Any, reader: str = "a kernel") -> Location | None:
        """Return where an array begins, if it is one; memory that is not the call's is kept.

        A ``reader`` of memory of the recorded call before, which is reused, raises a
        CaptureError.
        """
        memory: Any = getattr(array, "gpu_data", None)
        if memory is None:
            return None
        address = array.device_ctypes_pointer.value or 0
        memory = getattr(memory, "whole", memory)
        call, number = getattr(memory, "allocation", (None, 0))
        if call is self.sizes:
            return number, address - (memory.device_ctypes_pointer.value or 0)
        if self.before is not None and call is self.before.sizes:
            raise CaptureError(
                f"{reader} reads what an earlier call of the function left behind (of shape "
                f"{array.shape}), and a graph computes every call in the same memory; drop gradients at "
                "the beginning of the function (zero_grad), write to what lasts in place as "
                "minitorch.AdamW does, and pass what it needs of a call before as an input"
            )
        self.kept[id(memory)] = memory
        return None, address

    def mapped(
        self, made: Any, arrays: Sequence[Any], remake: Callable[..., tuple[Any, int]]
    ) -> None:
        """Record memory ``made`` that holds addresses of arrays; see :class:`Origin` for ``remake``."""
        found = [self.locate(array) for array in arrays]
        locations = tuple(location for location in found if location is not None)
        self.is_spoilt |= 0 < len(locations) < len(found)  # the memory needs all addresses
        if any(number is not None for number, _ in locations):
            self._maps[id(made)] = made, Origin(locations, remake)
            self.is_spoilt |= any(number is None for number, _ in locations)

    def launched(
        self, launcher: Any, sizes: Any, buffer: Any, parts: Iterable[tuple[int, Any]]
    ) -> None:
        """Record a launch, whose arrays and numbers are ``parts``, each with its word."""
        addresses, numbers = [], []
        for word, part in parts:
            if isinstance(part, (Seed, Renewed)):
                numbers.append((word, part))
                self.is_spoilt |= isinstance(part, Renewed)
            elif (known := self._maps.get(id(part))) is not None:
                addresses.append((word, known[1]))
            else:
                location = self.locate(part, f"the kernel {launcher.name}")
                if location is not None and location[0] is not None:
                    addresses.append((word, Origin((location,))))
        self.steps.append(Launch(launcher, sizes, buffer, addresses, numbers))

    def uploaded(
        self, array: np.ndarray[Any, Any], copy: Callable[[np.ndarray[Any, Any], Any], Any]
    ) -> Any:
        """Copy an array to the device by ``copy(array, target)``, and record it if replays repeat it.

        Without a target, ``copy`` makes new memory, which is not the call's.  An array that is
        copied in each call, but is not an input, raises a CaptureError.
        """
        before = self.before
        if self.is_live(array):
            known = [] if before is None else before.uploads[len(self.uploads) :]
            target = known[0][1] if known else None
            if target is not None and (target.shape, target.dtype) != (array.shape, array.dtype):
                target = None  # the two calls differ, as their launches will show
            self.uploads.append((array, copy(array, target)))
            return self.uploads[-1][1]
        if before is None:
            return copy(array, None)  # somebody keeps it: there is no second copy, or it is refused
        raise CaptureError(
            f"the function copies an array of shape {array.shape} ({array.dtype}) to the device in each "
            "call, and it is none of its inputs: a graph would keep these numbers for ever; pass it to the "
            "function as an argument, or put it on the device before"
        )

    def is_live(self, array: Any) -> bool:
        """Tell whether an array holds an input, or a result computed from one."""
        return isinstance(array, np.ndarray) and any(
            np.may_share_memory(array, known) for known in self.live
        )


class _Thread(threading.local):
    recording: Any = None


thread = _Thread()


def active() -> Any:
    """Return the :class:`Recording` of the call that this thread makes, or None."""
    return thread.recording


@contextmanager  # beyond module 5
def recorded_by(recording: Recording | None) -> Iterator[None]:  # beyond module 5
    """Record the work of this thread, or with None leave it out, as what is done once and then kept."""
    before, thread.recording = thread.recording, recording
    try:
        yield
    finally:
        thread.recording = before


def drawn(draw: Callable[[], int]) -> int:
    """Return a number that differs in every call, from the function that draws each of them."""
    number = draw()
    if (recording := thread.recording) is not None:  # beyond module 5
        recording.is_spoilt = True
        recording.draws.setdefault(number, draw)  # recomputation draws the same number again
    return number


def between_launches(act: Callable[..., None], *arrays: Any) -> None:  # beyond module 5
    """Do work now, such as a message to another device, that each replay repeats between the same launches.

    ``act`` enqueues work other than our kernels; it takes the addresses of the arrays, which it reads
    or writes.
    """
    act(*[array.device_ctypes_pointer.value or 0 for array in arrays])
    if (recording := thread.recording) is not None:
        recording.is_spoilt = True
        locations = [recording.locate(array, "a message to another device") for array in arrays]
        recording.steps.append(Message(act, locations))


def computed(compute: Callable[[], Any], *sources: Any) -> Any:
    """Return an array that the host computes from ``sources``; a replay computes it again.

    The function ``compute`` returns a new array each time, always of the same shape.
    """
    result = compute()
    recording = thread.recording
    if recording is not None and any(map(recording.is_live, sources)):  # beyond module 5
        recording.live.append(result)
        recording.computations.append(lambda: np.copyto(result, compute()))
    return result


def refuse(what: str, remedy: str, on_host: bool = False) -> None:
    """Raise a CaptureError if this thread records a call for a graph, which says what to do instead.

    What happens ``on_host`` is allowed in a function without launches, and so refused only in the
    last of the recorded calls.
    """
    if (recording := thread.recording) is not None:  # beyond module 5
        recording.is_spoilt = True
        if recording.is_of_graph and not (on_host and recording.before is None):
            raise CaptureError(f"the function {what}, which a CUDA graph cannot hold; {remedy}")
