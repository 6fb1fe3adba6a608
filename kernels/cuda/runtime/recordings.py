"""Record what a call does on the device, to repeat it (``repeated``) or to make a CUDA graph (``graphs``).

A recorded call runs like any other (``recorder``).  Its launches are recorded in order, with their packed
arguments and the origin of each address among them: an operand, memory that the call allocated, or other
memory.

What each call brings anew is recorded with a way to obtain it again: copies of inputs, drawn numbers,
numbers of an optimiser, results that the host computes from inputs, and work between launches.  Only graphs
have it; a call to repeat has only operands and a dropout seed, and anything else *spoils* its recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from kernels.runtime.cuda_errors import CaptureError


class Seed(int):
    """The dropout seed of a call to repeat, which is the one number that later calls replace."""


class Renewed(tuple[Any, ...]):
    """Numbers of a launch that the host computes for each call, by the function ``again``."""

    again: Callable[[], tuple[Any, ...]]

    def __new__(cls, again: Callable[[], tuple[Any, ...]]) -> Renewed:
        """Return the current numbers."""
        self = super().__new__(cls, again())
        self.again = again
        return self


class Origin(NamedTuple):
    """The origin of an address.

    Attributes:
        number: Index of the memory among the operands and allocations of the call.
        offset: Bytes from the start of this memory.
        remake: Returns the tensor map of an address, and where it is, as the kernel receives it instead; or
            None.
    """

    number: int
    offset: int
    remake: Callable[[int], tuple[Any, int]] | None = None


class Launch(NamedTuple):
    """A recorded launch.

    Attributes:
        launcher: The launcher of the kernel.
        sizes: The driver's arguments after the kernel: three of the grid, three of the block, and so on.
        buffer: A copy of the packed arguments.
        addresses: The words that hold addresses of the call's memory, each with its origin.
        numbers: The words of numbers that later calls replace, each with its :class:`Seed` or the
            :class:`Renewed` numbers that begin there.
    """

    launcher: Any
    sizes: tuple[Any, ...]
    buffer: Any
    addresses: list[tuple[int, Origin]]
    numbers: list[tuple[int, Any]]


class Recording:
    """The work of one call on the device; see ``recorder.recorded_by``.

    Args:
        source: Provides the memory of the call: the pool, or for a graph an ``Arena``.
        inputs: For a graph, host arrays whose contents change with each call, in the same memory.
        before: For a graph, the recording of the call before, in the same memory; None if there is none.

    Attributes:
        steps: The launches in order, and functions that do work between them.
        sizes: Bytes of each operand and allocation.
        kept: Other memory that the launches read or write, which must be kept alive.
        is_spoilt: Whether the call did what can only be part of a graph, or of nothing.
        draws: Drawn numbers, each with the function that draws the next one.
        live: Host arrays that hold inputs, or results computed from them.
        computations: Functions that compute such results again, in order.
        uploads: Copies of such arrays to the device: the array, and the one on the device.
        actions: Other work of the host in each replay, before the first launch.
        guards: Functions that tell whether the memory of the launches is still at the same addresses.
        memo: Objects that are made once per call, by key.
    """

    def __init__(
        self,
        source: Any,
        inputs: Iterable[np.ndarray[Any, Any]] | None = None,
        before: Recording | None = None,
    ):
        self.source, self.before, self.is_of_graph = source, before, inputs is not None
        self.steps: list[Launch | Callable[[], None]] = []
        self.sizes: list[int] = []
        self.kept: dict[int, Any] = {}
        self.is_spoilt = False
        self.draws: dict[int, Callable[[], int]] = {}
        self.live = [*(inputs or ())]
        self.computations: list[Callable[[], None]] = []
        self.uploads: list[tuple[np.ndarray[Any, Any], Any]] = []
        self.actions: list[Callable[[], None]] = []
        self.guards: list[Callable[[], bool]] = []
        self.memo: dict[Any, Any] = {}
        self._maps: dict[int, tuple[Any, Origin]] = {}

    @property
    def launches(self) -> list[Launch]:
        """The launches in order."""
        return [step for step in self.steps if isinstance(step, Launch)]

    def took(self, memory: Any, size: int) -> None:
        """Record the memory of an operand or an allocation."""
        memory.place = self.sizes, len(self.sizes)
        self.sizes.append(size)

    def origin(self, array: Any, reader: str = "a kernel") -> Origin | None:
        """Return the origin of the address of an array; None for other memory, which is kept.

        Raises:
            CaptureError: If ``reader`` reads memory of an earlier recorded call, which is reused.
        """
        if (known := self._maps.get(id(array))) is not None:
            return known[1]
        memory: Any = getattr(array, "gpu_data", None)
        if memory is None:  # not an array
            return None
        memory = getattr(memory, "whole", memory)
        call, number = getattr(memory, "place", (None, 0))
        if call is self.sizes:
            start, address = (int(x.device_ctypes_pointer.value or 0) for x in (memory, array))
            return Origin(number, address - start)
        if self.is_of_graph and getattr(memory, "source", None) is self.source:
            raise CaptureError(
                f"{reader} reads what an earlier call of the function left behind (of shape "
                f"{array.shape}), and a graph computes every call in the same memory; drop gradients at "
                "the beginning of the function (zero_grad), write to what lasts in place as "
                "minitorch.AdamW does, and pass what it needs of a call before as an input"
            )
        self.kept[id(memory)] = memory
        return None

    def mapped(self, found: Any, array: Any, remake: Callable[[int], tuple[Any, int]]) -> None:
        """Record the tensor map ``found`` of an array; see :class:`Origin` for ``remake``."""
        if (origin := self.origin(array)) is not None:
            self._maps[id(found)] = found, origin._replace(remake=remake)

    def launched(
        self, launcher: Any, sizes: Any, buffer: Any, parts: Iterable[tuple[int, Any]]
    ) -> None:
        """Record a launch, whose arrays and numbers are ``parts``, each with its word."""
        addresses, numbers = [], []
        for word, part in parts:
            if isinstance(part, (Seed, Renewed)):
                numbers.append((word, part))
                self.is_spoilt |= isinstance(part, Renewed)
            elif (origin := self.origin(part, f"the kernel {launcher.name}")) is not None:
                addresses.append((word, origin))
        self.steps.append(Launch(launcher, sizes, buffer, addresses, numbers))

    def uploaded(
        self, array: np.ndarray[Any, Any], copy: Callable[[np.ndarray[Any, Any], Any], Any]
    ) -> Any:
        """Copy an array to the device by ``copy(array, target)``, and record it if replays repeat it.

        Without a target, ``copy`` makes new memory, which is not the call's.

        Raises:
            CaptureError: If the array is copied in each call, but is not an input.
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
