"""CUDA graphs from two recorded calls: one launch for all launches of a call.

Work between launches, such as sending a tensor to another device, splits them into several graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.runtime.arrays import device_pointer
from kernels.cuda.runtime.launcher import Buffer
from kernels.cuda.runtime.memory_pool import Pool
from kernels.cuda.runtime.recorder import Launch, Recording, Renewed
from kernels.runtime.cuda_errors import LAUNCHED, CaptureError, explain_code
from kernels.runtime.targets import cuda, driver


class Chain:
    """A graph of kernels, one after the other."""

    _graph: Any = None
    _exec: Any = None

    def __init__(self) -> None:
        self._driver, self._last = driver, list[Any]()
        self._graph = _call(driver.cuGraphCreate, 0)

    def add(self, params: Any) -> Any:
        """Add a kernel; return its node."""
        node = _call(driver.cuGraphAddKernelNode, self._graph, self._last, len(self._last), params)
        self._last = [node]
        return node

    def finish(self, stream: Any) -> None:
        """Instantiate the graph for launches; no kernel can be added after that."""
        self._exec = _call(driver.cuGraphInstantiate, self._graph, 0)
        _call(driver.cuGraphUpload, self._exec, stream)

    def change(self, node: Any, params: Any) -> None:
        """Change the arguments of a kernel for later launches."""
        _call(driver.cuGraphExecKernelNodeSetParams, self._exec, node, params)

    def launch(self, stream: Any) -> None:
        """Launch the kernels."""
        _call(driver.cuGraphLaunch, self._exec, stream)

    def __del__(self) -> None:
        if self._exec is not None:  # what runs now runs to its end
            self._driver.cuGraphExecDestroy(self._exec)
        if self._graph is not None:
            self._driver.cuGraphDestroy(self._graph)


class Node(NamedTuple):
    """A kernel of a graph with arguments that change in each replay.

    Attributes:
        chain: The chain that it belongs to.
        handle: The driver's handle.
        params: The driver's parameters of the kernel; its arguments are in ``buffer``.
        buffer: The arguments.
        drawn: Slots, each with the index of its drawn number.
        renewed: Pairs of a function that writes an argument and a function that computes it.
    """

    chain: Chain
    handle: Any
    params: Any
    buffer: Buffer
    drawn: tuple[tuple[int, int], ...]
    renewed: list[tuple[Callable[..., None], Renewed]]


def changes(first: Recording, second: Recording) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each launch, the slots of numbers that each call draws, with the index of the number.

    Args:
        first: A recorded call.
        second: The next call, with newly drawn numbers.

    Raises:
        CaptureError: If the two differ in anything else, which a graph could not repeat.
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
    places = [[place for place, _ in call.between] for call in (first, second)]
    if places[0] != places[1]:
        raise CaptureError(
            f"two calls of the function sent {len(places[0])} and {len(places[1])} messages to other "
            "devices, or the same ones between other kernels; a graph needs calls that do the same"
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
    """The launches of a function, recorded in two calls, to be replayed.

    Args:
        first: A recorded call.
        second: The next recorded call.
        pool: The pool, which copies to the device.

    Raises:
        CaptureError: If the calls differ in more than a replay can change.
    """

    def __init__(self, first: Recording, second: Recording, pool: Pool):
        drawn = changes(first, second)
        self._recording, self._pool = second, pool
        self._kept = {**first.kept, **second.kept}
        self._uploads = [
            (device_pointer(upload.target), upload.source) for upload in second.uploads
        ]
        self._nodes: list[Node] = []
        self._stream = driver.CUstream(0)
        cuda.current_context()
        #: Functions in order, each of which launches a graph or does the work between two graphs.
        self._acts: list[Callable[[], None]] = []
        between, start = [*second.between, (len(drawn), None)], 0
        for end, act in between:
            if end > start:
                self._add(second.launches[start:end], drawn[start:end])
            if act is not None:
                self._acts.append(act)
            start = end

    def _add(
        self, launches: Sequence[Launch], drawn: Sequence[tuple[tuple[int, int], ...]]
    ) -> None:
        """Add a graph of launches with no other work between them."""
        chain = Chain()
        for launch, places in zip(launches, drawn, strict=True):
            buffer = Buffer(launch.words.nbytes)
            buffer.slots[:] = launch.words.view(np.uint8)
            params = _params(launch, buffer)
            handle = chain.add(params)
            renewed = [(launch.launcher.packer(first), own) for first, own in launch.renewed]
            if places or renewed:
                self._nodes.append(Node(chain, handle, params, buffer, places, renewed))
        chain.finish(self._stream)
        self._acts.append(partial(chain.launch, self._stream))

    @property
    def size(self) -> int:
        """Number of kernels of a call."""
        return len(self._recording.launches)

    @property
    def stretch(self) -> Any:
        """The memory in which a call is computed, which the graph keeps alive."""
        return self._recording.stretch

    def is_valid(self) -> bool:
        """Tell whether all memory that the graph reads and writes is still at the same addresses."""
        return all(guard() for guard in self._recording.guards)

    def replay(self) -> None:
        """Repeat the call with the current contents of the inputs in host memory.

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
            node.chain.change(node.handle, node.params)
        # Last, for a large one waits until the device comes to it.
        for address, source in self._uploads:
            self._pool.upload(address, source)
        for act in self._acts:
            act()
        LAUNCHED.append("a captured graph")


def _params(launch: Launch, buffer: Buffer) -> Any:
    """Return the driver's parameters of a node."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.kern = driver.CUkernel(int(launch.launcher.function()))  # as numba loads it
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.launcher.shared_bytes
    params.kernelParams = buffer.address
    return params


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the driver and return its result, or raise its error."""
    error, *answer = function(*args)
    if error.name == "CUDA_ERROR_INVALID_CONTEXT":
        cuda.current_context()  # made current on this thread, which had none
        error, *answer = function(*args)
    if error.name != "CUDA_SUCCESS":
        raise explain_code(error.name, "a captured graph")
    return answer[0] if answer else None
