"""CUDA graphs from two recorded calls: one launch for all launches of a call.

Work between launches, such as sending a tensor to another device, splits them into several graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.cuda.runtime.arrays import device_pointer
from kernels.cuda.runtime.memory_pool import Pool
from kernels.cuda.runtime.recorder import Launch, Recording
from kernels.runtime.cuda_errors import LAUNCHED, CaptureError, explain_code
from kernels.runtime.targets import cuda, driver

#: The words of a launch that hold drawn numbers, each with the index of the number.
Drawn = list[tuple[int, int]]


class Chain:
    """A graph of kernels, one after the other.

    Args:
        launches: The launches.
        drawn: For each launch, its drawn numbers.
    """

    _graph: Any = None
    _exec: Any = None

    def __init__(self, launches: Sequence[Launch], drawn: Sequence[Drawn]):
        self._driver, self._stream = driver, driver.CUstream(0)
        self._graph = _call(driver.cuGraphCreate, 0)
        self._changing: list[tuple[Launch, Drawn, Any, Any]] = []
        last: list[Any] = []
        for one, words in zip(launches, drawn, strict=True):
            params = _params(one)
            last = [_call(driver.cuGraphAddKernelNode, self._graph, last, len(last), params)]
            if words or one.numbers:
                self._changing.append((one, words, last[0], params))
        self._exec = _call(driver.cuGraphInstantiate, self._graph, 0)
        _call(driver.cuGraphUpload, self._exec, self._stream)

    def change(self, numbers: Sequence[int]) -> None:
        """Change the arguments that each replay brings anew, of which ``numbers`` have been drawn."""
        for one, words, node, params in self._changing:
            for word, place in words:
                one.buffer.words[word] = numbers[place]
            for word, renewed in one.numbers:
                one.launcher.write(one.buffer, word, renewed.again())
            _call(driver.cuGraphExecKernelNodeSetParams, self._exec, node, params)

    def launch(self) -> None:
        """Launch the kernels."""
        _call(driver.cuGraphLaunch, self._exec, self._stream)

    def __del__(self) -> None:
        if self._exec is not None:  # what runs now runs to its end
            self._driver.cuGraphExecDestroy(self._exec)
        if self._graph is not None:
            self._driver.cuGraphDestroy(self._graph)


def changes(first: Recording, second: Recording) -> list[Drawn]:
    """Return, for each launch, the numbers that each call draws.

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
    places = [[place for place, _ in call.messages] for call in (first, second)]
    if places[0] != places[1]:
        raise CaptureError(
            f"two calls of the function sent {len(places[0])} and {len(places[1])} messages to other "
            "devices, or the same ones between other kernels; a graph needs calls that do the same"
        )
    drawn = {pair: i for i, pair in enumerate(zip(first.draws, second.draws, strict=True))}
    calls = zip(first.launches, second.launches, strict=True)
    return [_changes(one, other, drawn) for one, other in calls]


def _changes(one: Launch, other: Launch, drawn: dict[tuple[int, int], int]) -> Drawn:
    name = one.launcher.name
    if one.sizes[:6] != other.sizes[:6]:
        (grid, block), (own, own_block) = ((x.sizes[:3], x.sizes[3:6]) for x in (one, other))
        raise CaptureError(
            f"the kernel {name} ran on {grid} blocks of {block} threads, in the next call on {own} of "
            f"{own_block}; shapes must be the same in every call"
        )
    renewed = {word + i for word, numbers in other.numbers for i in range(len(numbers))}
    found: Drawn = []
    words = (x.buffer.slots.view(np.uint64) for x in (one, other))
    for word in np.flatnonzero(np.not_equal(*words)).tolist():
        pair = one.buffer.words[word], other.buffer.words[word]
        if pair in drawn:
            found.append((word, drawn[pair]))
        elif word not in renewed:
            was, is_now = (one.launcher.shown(word, bits) for bits in pair)
            raise CaptureError(
                f"the kernel {name} was given {was} in one call and {is_now} in the next: Python "
                "brought it anew, and a graph would keep it for ever; pass what changes as an input, a "
                "NumPy array or a tensor"
            )
    return found


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
        drawn, launches = changes(first, second), second.launches
        cuda.current_context()
        self._recording, self._pool = second, pool
        self._uploads = [(device_pointer(target), source) for source, target in second.uploads]
        #: Functions in order, each of which launches a graph or does the work between two graphs.
        self._acts: list[Callable[[], None]] = []
        self._chains: list[Chain] = []
        start = 0
        for end, act in [*second.messages, (len(launches), None)]:
            if end > start:
                self._chains.append(Chain(launches[start:end], drawn[start:end]))
                self._acts.append(self._chains[-1].launch)
            if act is not None:
                self._acts.append(act)
            start = end

    @property
    def size(self) -> int:
        """Number of kernels of a call."""
        return len(self._recording.launches)

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
        numbers = [again() for again in recording.draws.values()]
        for chain in self._chains:
            chain.change(numbers)
        # Last, for a large one waits until the device comes to it.
        for address, source in self._uploads:
            self._pool.upload(address, source)
        for act in self._acts:
            act()
        LAUNCHED.append("a captured graph")


def _params(launch: Launch) -> Any:
    """Return the driver's parameters of a node."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.kern = driver.CUkernel(int(launch.launcher.function()))  # as numba loads it
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.sizes[:3]
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.sizes[3:6]
    params.sharedMemBytes = launch.launcher.shared_bytes
    params.kernelParams = launch.buffer.address
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
