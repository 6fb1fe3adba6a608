"""CUDA graphs from two recorded calls: one launch for all launches of a call.

Work between launches, such as sending a tensor to another device, splits them into several graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby, zip_longest
from typing import Any

import numpy as np

from kernels.cuda.runtime.arrays import device_pointer, empty_device, pool
from kernels.cuda.runtime.recorder import Launch, Location, Message, Recording, Renewed
from kernels.runtime.cuda_errors import LAUNCHED, CaptureError
from kernels.runtime.targets import cuda, driver


class Chain:
    """A graph of kernels, one after the other."""

    _graph: Any = None
    _exec: Any = None

    def __init__(self, launches: Sequence[Launch]):
        self._driver, self._stream = driver, driver.CUstream(0)
        self._call = call = partial(pool().call, doing="a captured graph")
        self._graph = call(driver.cuGraphCreate, 0)
        self._changing: list[tuple[Launch, Any, Any]] = []
        last: list[Any] = []
        for one in launches:
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.kern = driver.CUkernel(int(one.launcher.function()))  # as numba loads it
            params.gridDimX, params.gridDimY, params.gridDimZ = one.sizes[:3]
            params.blockDimX, params.blockDimY, params.blockDimZ = one.sizes[3:6]
            params.sharedMemBytes = one.launcher.shared_bytes
            params.kernelParams = one.buffer.address
            last = [call(driver.cuGraphAddKernelNode, self._graph, last, len(last), params)]
            if one.numbers:
                self._changing.append((one, last[0], params))
        self._exec = call(driver.cuGraphInstantiate, self._graph, 0)
        call(driver.cuGraphUpload, self._exec, self._stream)

    def change(self, drawn: Sequence[int]) -> None:
        """Write the numbers that each replay brings anew, of which some are ``drawn``."""
        for one, node, params in self._changing:
            for word, number in one.numbers:
                if isinstance(number, Renewed):
                    one.launcher.write(one.buffer, word, number.renew())
                else:
                    one.buffer.words[word] = drawn[number]
            self._call(driver.cuGraphExecKernelNodeSetParams, self._exec, node, params)

    def launch(self) -> None:
        """Launch the kernels."""
        self._call(driver.cuGraphLaunch, self._exec, self._stream)

    def __del__(self) -> None:
        if self._exec is not None:  # what runs now runs to its end
            self._driver.cuGraphExecDestroy(self._exec)
        if self._graph is not None:
            self._driver.cuGraphDestroy(self._graph)


def mark_drawn(first: Recording, second: Recording) -> None:
    """Add the words of drawn numbers to the launches of the second call, each with the number's index.

    If two calls, one after the other, differ in anything else, a CaptureError is raised: a graph
    could not repeat it.
    """
    done = [
        [*map(_shown, call.steps), f"the end, after {len(call.draws)} drawn numbers"]
        for call in (first, second)
    ]
    if done[0] != done[1]:
        was, is_now = next((x, y) for x, y in zip_longest(*done) if x != y)
        raise CaptureError(
            f"two calls of the function launched {len(first.launches)} and {len(second.launches)} kernels, "
            f"and where one did {was}, the next did {is_now}; a graph needs calls that do the same: shapes "
            "that do not change, and no decision that depends on the step"
        )
    drawn = {pair: place for place, pair in enumerate(zip(first.draws, second.draws, strict=True))}
    for one, other in zip(first.launches, second.launches, strict=True):
        renewed = {word + i for word, numbers in other.numbers for i in range(len(numbers))}
        for word, pair in enumerate(zip(_words(one), _words(other), strict=True)):
            if pair[0] == pair[1]:
                continue
            if pair in drawn:
                other.numbers.append((word, drawn[pair]))
            elif word not in renewed:
                was, is_now = (x.launcher.shown(word, x.buffer.words[word]) for x in (one, other))
                raise CaptureError(
                    f"the kernel {one.launcher.name} was given {was} in one call and {is_now} in the next: "
                    "Python brought it anew, and a graph would keep it for ever; pass what changes as an "
                    "input, a NumPy array or a tensor"
                )


def _shown(step: Launch | Message) -> Any:
    if isinstance(step, Message):
        return "a message to another device"
    return f"{step.launcher.name} on {step.sizes[:3]} blocks of {step.sizes[3:6]} threads"


def _words(launch: Launch) -> list[Any]:
    """Return the words of a launch; for an address of the call's memory, its origin."""
    words: list[Any] = [*launch.buffer.words]
    for word, origin in launch.addresses:
        words[word] = origin.locations
    return words


class Graph:
    """The launches of a function, recorded in two calls, one after the other, to be replayed.

    ``kept`` are the allocations that others read, by number; a replay writes the same memory. All
    others are in ``scratch``, which may be that of an earlier graph.

    Raises:
        CaptureError: If the calls differ in more than a replay can change.
        MemoryError: If the device has too little memory left.
    """

    def __init__(
        self, first: Recording, second: Recording, kept: dict[int, Any], scratch: Any = None
    ):
        mark_drawn(first, second)
        cuda.current_context()
        self._recording, self._pool, self.size = second, pool(), len(second.launches)
        offsets, size = second.layout(kept)
        if scratch is None or scratch.nbytes < size:
            self._pool.trim()  # the recorded calls have left their memory
            scratch = empty_device((max(size, 1),), np.dtype(np.uint8))
        self.kept, self.scratch, base = kept, scratch, device_pointer(scratch)
        starts = {number: base + offset for number, offset in offsets.items()}
        starts |= {n: memory.device_ctypes_pointer.value for n, memory in kept.items()}

        def at(locations: Sequence[Location]) -> list[int]:
            return [x if number is None else starts[number] + x for number, x in locations]

        self._made = list[Any]()  # kept alive
        for one in second.launches:
            for word, (locations, remake) in one.addresses:
                address, *own = at(locations)
                if remake is not None:
                    made, address = remake(address, *own)
                    self._made.append(made)
                one.buffer.words[word] = address
        self._uploads = [(device_pointer(target), source) for source, target in second.uploads]
        self._chains: list[Chain] = []
        #: Functions in order, each of which launches a graph or does the work between two graphs.
        self._acts: list[Any] = []
        for is_launch, steps in groupby(second.steps, lambda step: isinstance(step, Launch)):
            own: list[Any] = [*steps]
            if is_launch:
                self._chains.append(Chain(own))
                self._acts.append(self._chains[-1].launch)
            else:
                self._acts += [partial(one.act, *at(one.locations)) for one in own]

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
        drawn = [draw() for draw in recording.draws.values()]
        for chain in self._chains:
            chain.change(drawn)
        # Last, for a large one waits until the device comes to it.
        for address, source in self._uploads:
            self._pool.upload(address, source)
        for act in self._acts:
            act()
        LAUNCHED.append("a captured graph")
