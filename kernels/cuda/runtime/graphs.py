"""A CUDA graph of two recorded calls: one launch for all that a call asks of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.runtime.arrays import device_pointer
from kernels.cuda.runtime.launcher import Buffer
from kernels.cuda.runtime.memory_pool import Pool
from kernels.cuda.runtime.recorder import Launch, Recording, Renewed
from kernels.runtime.cuda_errors import LAUNCHED, CaptureError, explain_code
from kernels.runtime.targets import cuda, driver


class Node(NamedTuple):
    """A kernel of a graph some of whose numbers are others in each replay.

    Attributes:
        handle: The driver's.
        params: What it runs with, for the driver; its arguments lie in ``buffer``.
        buffer: The arguments.
        drawn: Slots, and which of the numbers that are drawn goes there.
        renewed: What writes an argument, and what computes it.
    """

    handle: Any
    params: Any
    buffer: Buffer
    drawn: tuple[tuple[int, int], ...]
    renewed: list[tuple[Callable[..., None], Renewed]]


def changes(first: Recording, second: Recording) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each launch, the slots of numbers that are drawn anew for each call, and which those are.

    Args:
        first: A call.
        second: The next one, with other numbers drawn.

    Raises:
        CaptureError: If the two differ in anything else: a graph would do for ever what one of them did.
    """
    names = [[one.launcher.name for one in call.launches] for call in (first, second)]
    if names[0] != names[1] or len(first.draws) != len(second.draws):
        at = next((i for i, (x, y) in enumerate(zip(*names, strict=False)) if x != y), None)
        ends = (
            "one launched more" if at is None else f"{names[0][at]} stood where {names[1][at]} did"
        )
        raise CaptureError(
            f"two calls of the function launched {len(names[0])} and {len(names[1])} kernels and drew "
            f"{len(first.draws)} and {len(second.draws)} seeds ({ends}); a graph needs calls that do the "
            "same: shapes that do not change, and no decision that depends on the step"
        )
    drawn = {
        (one[0], other[0]): place
        for place, (one, other) in enumerate(zip(first.draws, second.draws, strict=True))
    }
    calls = zip(first.launches, second.launches, strict=True)
    return [_changes(one, other, drawn) for one, other in calls]


def _changes(
    one: Launch, other: Launch, drawn: dict[tuple[int, int], int]
) -> tuple[tuple[int, int], ...]:
    name = one.launcher.name
    if (one.grid, one.block) != (other.grid, other.block):
        raise CaptureError(
            f"the kernel {name} ran on {one.grid} blocks of {one.block} threads, in the next call on "
            f"{other.grid} of {other.block}; shapes must be the same in every call"
        )
    renewed = {
        slot for first, numbers in other.renewed for slot in range(first, first + len(numbers))
    }
    found = []
    for slot in np.flatnonzero(one.words != other.words).tolist():
        pair = int(one.words[slot]), int(other.words[slot])
        if pair in drawn:
            found.append((slot, drawn[pair]))
        elif slot not in renewed:
            was, is_now = (one.launcher.shown(slot, word) for word in pair)
            raise CaptureError(
                f"the kernel {name} was given {was} in one call and {is_now} in the next: Python "
                "brought it anew, and a graph would keep it for ever; pass what changes as an input, a "
                "NumPy array or a tensor"
            )
    return tuple(found)


class Graph:
    """What a function asked of the device in two calls, to be replayed.

    Args:
        first: A recorded call.
        second: The next one.
        pool: Copies to the device.

    Raises:
        CaptureError: If the calls differ in more than a replay brings anew.
    """

    _exec: Any = None

    def __init__(self, first: Recording, second: Recording, pool: Pool):
        drawn = changes(first, second)
        self._recording, self._pool = second, pool
        self._kept = {**first.kept, **second.kept}
        self._uploads = [
            (device_pointer(upload.target), upload.source) for upload in second.uploads
        ]
        self._nodes: list[Node] = []
        self._driver, self._stream = driver, driver.CUstream(0)
        cuda.current_context()
        self._graph = _call(driver.cuGraphCreate, 0)
        last: list[Any] = []
        for launch, places in zip(second.launches, drawn, strict=True):
            buffer = Buffer(launch.words.nbytes)
            buffer.slots[:] = launch.words.view(np.uint8)
            params = _params(launch, buffer)
            handle = _call(driver.cuGraphAddKernelNode, self._graph, last, len(last), params)
            last = [handle]
            renewed = [(launch.launcher.packer(first), own) for first, own in launch.renewed]
            if places or renewed:
                self._nodes.append(Node(handle, params, buffer, places, renewed))
        self._exec = _call(driver.cuGraphInstantiate, self._graph, 0)
        _call(driver.cuGraphUpload, self._exec, self._stream)

    @property
    def size(self) -> int:
        """Kernels of a call."""
        return len(self._recording.launches)

    @property
    def memory(self) -> int:
        """Bytes that the graph keeps for what a call computes."""
        return self._recording.arena.bytes

    def is_valid(self) -> bool:
        """Tell whether what the graph reads and writes is still where it was."""
        return all(guard() for guard in self._recording.guards)

    def replay(self) -> None:
        """Do again what the function did, with the inputs as their memory on the host holds them.

        Raises:
            RuntimeError: If the driver fails, or a kernel has failed before.
        """
        recording = self._recording
        for compute in recording.computations:
            compute()  # it may refuse an input; nothing has happened then
        for act in recording.actions:
            act()
        numbers = [again() for _, again in recording.draws]
        for node in self._nodes:
            for slot, place in node.drawn:
                node.buffer.words[slot] = numbers[place]
            for pack, renewed in node.renewed:
                pack(node.buffer.slots, *renewed.again())
            _call(driver.cuGraphExecKernelNodeSetParams, self._exec, node.handle, node.params)
        # Last, for a large one waits until the device comes to it.
        for address, source in self._uploads:
            self._pool.upload(address, source)
        _call(driver.cuGraphLaunch, self._exec, self._stream)
        LAUNCHED.append("a captured graph")

    def __del__(self) -> None:
        if self._exec is not None:  # what runs now runs to its end
            self._driver.cuGraphExecDestroy(self._exec)
            self._driver.cuGraphDestroy(self._graph)


def _params(launch: Launch, buffer: Buffer) -> Any:
    """Return what a node runs with, as the driver takes it."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.kern = driver.CUkernel(int(launch.launcher.function()))  # as numba loads it
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.launcher.shared_bytes
    params.kernelParams = buffer.address
    return params


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the driver and return its answer, or raise what went wrong."""
    error, *answer = function(*args)
    if error.name == "CUDA_ERROR_INVALID_CONTEXT":
        cuda.current_context()  # made current on this thread, which had none
        error, *answer = function(*args)
    if error.name != "CUDA_SUCCESS":
        raise explain_code(error.name, "a captured graph")
    return answer[0] if answer else None
