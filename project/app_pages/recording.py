"""Record a CUDA kernel of attention as it runs on the emulated GPU, barrier by barrier.

At each barrier all threads of a block have arrived and none goes on: the moment to look at shared memory,
at every thread's registers, and at what has travelled so far.  Nothing here knows the algorithm; what is
recorded is what the kernels of ``kernels/cuda`` do.

The emulated GPU is chosen before numba is imported, so a recording is made by a process of its own, which
:func:`record` starts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common.child import in_child

import kernels
from kernels import launch
from kernels.cuda.attention import split_keys
from kernels.cuda.emulator.device import DEVICE
from kernels.cuda.matmul import cuda_cores
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import Kernel, three
from kernels.metering.io_meter import Counted, IOMeter
from kernels.problem.operands import make_operands
from kernels.sparsity.block_mask import BlockMask
from kernels.traffic.formulas import Traffic

Array = npt.NDArray[Any]
#: By the names of the app: the options of the call.
MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda seq: {},
    "causal": lambda seq: {"is_causal": True},
    "window of 5": lambda seq: {"window_size": (2, 2)},
    "blocks of 16": lambda seq: {"block_mask": BlockMask.butterfly(seq, seq, 16)},
}
#: Seconds that a recording may take.
LIMIT = 120


class RunSettings(NamedTuple):
    """One call of one head, seq x head_dim for each of q, k, v."""

    rung: str  # naive, flash1 or flash2
    seq: int  # rows and columns
    head_dim: int  # of q, k and v
    block_q: int  # query rows a tile
    block_k: int  # key columns a tile
    mask: str = "none"  # one of MASKS
    seed: int = 0  # of the operands


@dataclass(frozen=True)
class Step:
    """The moment at which every thread of one block has reached a barrier, or its end."""

    kernel: str  # that runs
    block: tuple[int, int, int]  # its place in the grid
    #: Of the barrier, in the source of the kernel, from 0; None at the end of the block.
    line: int | None
    comment: str  # the barrier's own comment: why it is there
    numbers: dict[str, Any]  # local variables that are the same for all threads
    shared: dict[str, Array]  # shared arrays, by the name of the kernel's variable
    registers: dict[str, Array]  # variables of which each thread has its own, (threads, …)
    #: Global arrays that kernels have written to, as they are now.
    written: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, Traffic] = field(default_factory=dict)  # what has travelled so far, by array


@dataclass
class Recording:
    """One call from beginning to end."""

    settings: RunSettings  # of the call
    q: Array  # (seq, head_dim)
    k: Array  # (seq, head_dim)
    v: Array  # (seq, head_dim)
    out: Array  # (seq, head_dim), the result
    lse: Array  # (seq,)
    lower: int  # row ``i`` sees columns from i + lower …
    upper: int  # … to i + upper
    sources: dict[str, str] = field(default_factory=dict)  # the source of each kernel, by name
    steps: list[Step] = field(default_factory=list)  # in order


class Recorder(IOMeter):
    """A meter that also takes down what the threads of a block hold at each barrier."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}
        self.steps: list[Step] = []
        self._frames: dict[int, FrameType | None] = {}
        self._globals: dict[int, Counted] = {}
        self._moments: list[tuple[dict[int, Array], dict[int, Traffic]]] = []

    def launch(self, kernel: Kernel, size: Any, args: tuple[Any, ...]) -> None:
        """Launch a kernel whose threads report at barriers."""
        self.sources[kernel.name] = inspect.getsource(kernel.source)
        threads = math.prod(three(size[1]))

        def reached(frame: FrameType | None) -> None:
            # A barrier within a helper has no picture.
            if frame is None or frame.f_code is kernel.source.__code__:
                self._arrive(kernel, threads, frame)

        DEVICE.on_barrier = reached
        try:
            super().launch(kernel, size, args)
        finally:
            DEVICE.on_barrier = None

    def _counted(self, name: str, arg: Any, touched: list[Any]) -> Any:
        """Return an argument that counts, and keep each array, to look at those that are written."""
        found = super()._counted(name, arg, touched)
        if isinstance(found, Counted):
            # A product sees a matrix as a vector: the view of most dimensions is kept.
            known = self._globals.get(number := self._number(found.array))
            if known is None or known.array.ndim < found.array.ndim:
                self._globals[number] = found
        return found

    def _arrive(self, kernel: Kernel, threads: int, frame: FrameType | None) -> None:
        self._frames[DEVICE.block.turns.now] = frame
        if len(self._frames) == threads:  # the last one looks; the others wait
            frames = [self._frames[number] for number in sorted(self._frames)]
            self._frames.clear()
            self.steps.append(self._step(kernel, tuple(DEVICE.blockIdx), frames))
            self._moments.append(self._moment())

    def _step(self, kernel: Kernel, block: Any, frames: list[FrameType | None]) -> Step:
        line, comment = None, "the end of the block: its results are in global memory"
        numbers: dict[str, Any] = {}
        shared: dict[str, Array] = {}
        registers: dict[str, Array] = {}
        scopes = [frame.f_locals for frame in frames if frame is not None]
        if scopes:
            frame: Any = frames[0]
            line = frame.f_lineno - kernel.source.__code__.co_firstlineno
            text = self.sources[kernel.name].splitlines()[line]
            comment = text.partition("#")[2].strip()
        for name in scopes[0] if scopes else ():
            values = [scope.get(name) for scope in scopes]
            first = values[0]
            if isinstance(first, np.ndarray):
                if all(value is first for value in values) or _same_memory(values):
                    shared[name] = first.copy()
                else:
                    registers[name] = np.stack(values)  # type: ignore[arg-type]
            elif isinstance(first, (int, float, np.number)):
                if all(value == first for value in values):
                    numbers[name] = first.item() if isinstance(first, np.number) else first
                else:
                    registers[name] = np.array(values, np.float64)
        return Step(kernel.name, block, line, comment, numbers, shared, registers)

    def _moment(self) -> tuple[dict[int, Array], dict[int, Traffic]]:
        """Return the global arrays that have been written to, and what has travelled so far."""
        written = {
            number: seen.array.copy() for number, seen in self._globals.items() if seen.writes.any()
        }
        return written, {key: ledger.traffic for key, ledger in self._ledgers.items()}

    def _number(self, array: Any) -> int:
        """Return the number of the allocation that contains an array."""
        return id(self._ledger(getattr(array, "_ary", array)).owner)

    def named_steps(self, **arrays: Any) -> list[Step]:
        """Return the steps, with the global arrays under their names; see ``IOMeter.counts``."""
        names, steps = {key: ledger.name for key, ledger in self._ledgers.items()}, list[Step]()
        names |= {key: f"{name} copy" for key, name in names.items() if name in arrays}
        names |= {self._number(array): name for name, array in arrays.items()}
        for step, (written, counts) in zip(self.steps, self._moments, strict=True):
            contents = {names[number]: array for number, array in written.items()}
            moved = {names[number]: traffic for number, traffic in counts.items() if traffic.moved}
            steps.append(replace(step, written=contents, counts=moved))
        return steps


def _same_memory(values: list[Any]) -> bool:
    """Tell whether arrays are views of one memory: dynamic shared memory is a new view each time."""
    places = {value.__array_interface__["data"][0] for value in values if value.size}
    return len(places) == 1 and len(values) > 1


def run(settings: RunSettings) -> Recording:
    """Record one call; this process must have the emulated GPU."""
    rng = np.random.default_rng(settings.seed)
    shape = (1, settings.seq, settings.head_dim)
    q, k, v = (to_device(rng.standard_normal(shape).astype(np.float32)) for _ in range(3))
    options = MASKS[settings.mask](settings.seq)
    problem = kernels.make_problem(q, k, v, rung=settings.rung, **options)
    operands = make_operands(launch.CUDA.memory, problem, q, k, v)
    if settings.rung == "flash2":
        DEVICE.order = reversed  # its last block has the first rows
    with Recorder() as recorder:
        tile = settings.block_q, settings.block_k
        out, lse, _ = launch.forward(launch.CUDA, problem, operands, tile)
    # The operands first: other memory has no names.
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    host: dict[str, Any] = {name: to_host(array)[0] for name, array in arrays.items()}
    steps = recorder.named_steps(**arrays)
    return Recording(
        settings, **host, lower=problem.lower, upper=problem.upper, sources=recorder.sources,
        steps=steps,
    )  # fmt: skip


def record(*settings: RunSettings) -> list[Recording]:
    """Record calls, in a process of its own; a rung that a student has not written yet is left out."""
    return in_child(recorded, settings, emulated=True, seconds=LIMIT)


def recorded(every: tuple[RunSettings, ...]) -> list[Recording]:
    """Record calls in this process, which must have the emulated GPU."""
    # One head of a large call: on a busy device no sum is divided among blocks.
    cuda_cores.SIZES = replace(cuda_cores.SIZES, product_blocks=0)
    split_keys.SIZES = replace(split_keys.SIZES, split_blocks=0)
    found = []
    for settings in every:
        with suppress(NotImplementedError):
            found.append(run(settings))
    return found
