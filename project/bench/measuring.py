"""How everything is measured: time in interleaved rounds, and peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numba
import numpy as np

from kernels.cuda.runtime.arrays import pool
from kernels.runtime.targets import EventTimer, cuda

Step = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
#: Seconds of a reading at least: a shorter step runs several times in a row within a round.
SHORTEST = 0.002


class Unavailable(Exception):
    """A contestant cannot do a case, which is no failure; the text says why."""


def seconds(
    step: Step, device: str, repeats: int = 1, hold: Callable[[int], Any] | None = None
) -> float:
    """Return the time of one run of a step, until its result is there.

    On a GPU it is the time between two events on the stream, in which the device may wait for the host.
    """
    if device == "cuda":
        with EventTimer(hold and partial(hold, repeats)) as timer:
            for _ in range(repeats):
                step()
        return timer.seconds / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def timing_note(device: str) -> str:
    """Return in words what :func:`interleaved` does, for the records."""
    clock = "CUDA events on the stream" if device == "cuda" else "the clock of the host"
    return (
        "medians (with quartiles) of interleaved rounds, in which every contestant has its turn; "
        f"read from {clock}; a run before them, which compiles and warms up, is not counted"
    )


def interleaved(
    steps: Mapping[Name, Step], device: str, budget: float, *, least: int = 3, most: int = 50,
    at_most_seconds: float = math.inf, warm_up: bool = True, after: Mapping[Name, Step] | None = None,
    shortest: float = SHORTEST, hold: Callable[[int], Any] | None = None, clock: Any = seconds,
) -> dict[Name, list[float]]:  # fmt: skip
    """Return the seconds of each step in every round; every other round runs the steps backwards.

    A disturbance of the machine thus disturbs all steps alike, and the ratio of two steps within a round
    is fair.

    Args:
        steps: By name.
        device: "cpu" or "cuda".
        budget: Seconds to spend, the warm-up not counted.
        least: Rounds even if they take longer than that.
        most: Rounds at most.
        at_most_seconds: After which no other round begins.
        warm_up: Run each step before, to compile.  Without, each step runs once a round.
        after: By name: what follows a step and is not timed.  Steps then keep their order in every round.
        shortest: Seconds of a reading at least.
        hold: As for :func:`seconds`.
        clock: Called like :func:`seconds`.

    Returns:
        By name, a number for each round.
    """
    repeats, following = dict.fromkeys(steps, 1), after or {}

    def nothing() -> None:
        pass

    if warm_up:
        for name, step in steps.items():
            step()
            once = clock(step, device, 1, hold)
            repeats[name] = max(1, min(int(shortest / max(once, 1e-9)), 100))
            following.get(name, nothing)()
    times: dict[Name, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for done in range(most):
        spent = time.perf_counter() - start
        if (done >= least and spent >= budget) or (done and spent >= at_most_seconds):
            break
        for name in [*steps][:: -1 if done % 2 and not following else 1]:
            times[name].append(clock(steps[name], device, repeats[name], hold))
            following.get(name, nothing)()
    return times


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median, the quartiles ``low`` and ``high``, and the number of ``rounds``."""
    low, high = np.quantile(values, [0.25, 0.75])
    return {
        "median": scale * median(values), "low": scale * float(low), "high": scale * float(high),
        "rounds": len(values),
    }  # fmt: skip


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Return the spread of the ratios of two steps within the rounds."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def slowest(group: Any, step: Step, device: str, repeats: int = 1) -> float:
    """Return the time of a step on the slowest rank of a group; all of them take it."""
    group.barrier()
    found = np.array([seconds(step, device, repeats)])
    group.all_reduce(found, "max").wait()
    return float(found[0])


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        cuda.synchronize()


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 where it is not known."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    # Not getrusage: its peak is inherited from the parent process.
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class HostMemory:
    """The resident memory of this process, watched as :class:`TorchMemory` watches PyTorch's."""

    peak = staticmethod(peak_memory)

    def reset_peak(self) -> int:
        """Let the peak begin anew, where the system can; return what it is then."""
        # glibc keeps freed memory for later allocations, which would then not be counted.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return peak_memory()


class TorchMemory:
    """PyTorch's memory on the device, watched as :class:`kernels.cuda.runtime.memory_pool.Pool` is."""

    def __init__(self) -> None:
        self.cuda: Any = load_torch().cuda

    def reset_peak(self) -> int:
        """Let the peak begin anew; return what is in use."""
        self.cuda.reset_peak_memory_stats()
        return self.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes in use since then."""
        return self.cuda.max_memory_allocated()


class Peak:
    """By how many bytes work raises a peak: of this process, or of a GPU's pool, ours or PyTorch's."""

    def __init__(self, device: str, of_torch: bool = False):
        own = HostMemory if device == "cpu" else TorchMemory if of_torch else pool
        memory: Any = own()
        self.is_known = peak_memory() > 0 if device == "cpu" else memory is not None
        self.memory, self.before = HostMemory() if memory is None else memory, 0

    def begin(self) -> None:
        """Begin to measure."""
        self.before = self.memory.reset_peak()

    def bytes(self) -> int:
        """Return the bytes since then."""
        return self.memory.peak() - self.before


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, ours or PyTorch's, means that memory has run out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def why_failed(error: BaseException) -> str:
    """Return in one line why a case or a contestant could not run."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "out of memory" if out_of_memory(error) else lines[0][:160]


def ready(
    make: Mapping[Name, Callable[[], Any]], *refused: type[Exception]
) -> tuple[dict[Name, Any], dict[Name, str]]:
    """Return what could be made, and why others could not: too little memory, or some other errors."""
    found, why_not = dict[Name, Any](), dict[Name, str]()
    for name, one in make.items():
        try:
            found[name] = one()
        except Exception as error:  # noqa: PERF203 (the next one may run)
            if not out_of_memory(error) and not isinstance(error, (Unavailable, *refused)):
                raise
            why_not[name] = why_failed(error)
    return found, why_not


def load_torch() -> Any:
    """Return PyTorch, or None where it is not installed."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return None
    return torch


def prepare(torch: Any, device: str) -> None:
    """Give PyTorch our number of threads and products in float32, and import FlexAttention if it has it."""
    torch.manual_seed(0)
    torch.set_num_threads(numba.get_num_threads())
    torch.set_float32_matmul_precision("highest")
    # Why a backend cannot run a case stands in the table.
    warnings.filterwarnings("ignore", category=UserWarning, module="bench")
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    with contextlib.suppress(ImportError):
        import torch.nn.attention.flex_attention  # type: ignore[import-not-found]
