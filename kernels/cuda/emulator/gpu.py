"""Launch a kernel on the emulated GPU.

It does not forgive: memory begins as garbage, copies under way leave garbage where they will arrive, and
whatever a GPU may do in any order is drawn; see ``schedule``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import index
from threading import RLock
from types import TracebackType
from typing import Any

import numpy as np

from .checked_arrays import source_of
from .checks import Checks
from .device import DEVICE, Index, places
from .schedule import OWN, Deadlock, Turns
from .translation import Translation, translated

#: One launch at a time, whichever thread of the host asks.
_LOCK = RLock()


def leaves(record: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what a tuple contains, and what tuples in it contain."""
    for entry in record:
        yield from leaves(entry) if isinstance(entry, tuple) else (entry,)


def _on_host(arg: Any) -> Any:
    """Return an argument with NumPy's arrays in place of the device's."""
    if isinstance(arg, tuple):
        own = map(_on_host, arg)
        return getattr(arg, "_make", tuple)(own)
    return getattr(arg, "_ary", arg)


def three(size: Any) -> Index:
    """Return a grid or a block in three dimensions."""
    sizes = size if isinstance(size, (tuple, list)) else (size,)
    try:
        return Index(*(*map(index, sizes), 1, 1)[:3])
    except TypeError:
        raise TypeError(
            f"the sizes of a grid and of a block must be integers, got {size}; divide by //, rounding up: "
            "(n + threads - 1) // threads"
        ) from None


def run(
    source: Callable[..., None], grid: Any, block: Any, shared_bytes: int, args: tuple[Any, ...],
    checks: bool = False,
) -> None:  # fmt: skip
    """Run a kernel, block after block.

    Args:
        source: The kernel, a plain function.
        grid: Number of blocks, along up to three dimensions.
        block: Number of threads.
        shared_bytes: Dynamic shared memory.
        args: Its arguments: arrays, numbers, and tuples of them.
        checks: Whether to look for races and for shared memory that is read too early; not in a kernel of
            tensor cores, whose instructions find such errors themselves.
    """
    grid, block = three(grid), three(block)
    _check_sizes(grid, block)
    own = tuple(map(_on_host, args))
    with _LOCK:
        kernel = translated(source)
        engines = _engines(own) if kernel.has_instructions else None
        DEVICE.checks = Checks(DEVICE) if checks and not engines else None
        if DEVICE.checks:
            names = inspect.signature(source).parameters
            own = tuple(map(DEVICE.checks.argument, names, own))
        try:
            with np.errstate(all="ignore"):
                for place in DEVICE.order(places(grid)):
                    state = DEVICE.begin_block(place, grid, block, shared_bytes)
                    if engines:
                        engines.begin_block(state)
                    _run_block(kernel, own, engines)
            if DEVICE.checks:
                DEVICE.checks.end_launch(source.__name__, args, own)
        finally:
            DEVICE.checks = None


def _run_block(kernel: Translation, args: tuple[Any, ...], engines: Any) -> None:
    function, turns, checks = kernel.kernel, DEVICE.block.turns, DEVICE.checks

    def thread() -> None:
        if function(*args) is not None:
            raise TypeError(_returned(function))
        if DEVICE.on_barrier:
            DEVICE.on_barrier(None)
        if engines:
            engines.check_ended()

    try:
        turns.take(thread, kernel.meets)
    except Deadlock:
        raise Deadlock(_deadlock(turns)) from None
    except Exception as error:
        if checks:
            checks.end_block()
        raise _with_place(error, function.__name__) from error
    if checks:
        checks.end_block()


def _engines(args: tuple[Any, ...]) -> Any:
    """Return the engines of tensor cores and copies, with the global memory of a launch."""
    memory = []
    for array in leaves(args):
        if isinstance(array, np.ndarray):
            while isinstance(array.base, np.ndarray):
                array = array.base
            memory.append(array.ravel(order="K").view(np.uint8))
    engines = import_module("kernels.cuda.emulator.tensor_cores.engines").ENGINES
    engines.memory = memory
    return engines


def _check_sizes(grid: Index, block: Index) -> None:
    threads = block.x * block.y * block.z
    if min(*grid, *block) < 1 or threads > 1024 or block.z > 64:
        raise ValueError(
            f"a launch of a grid of {tuple(grid)} blocks of {tuple(block)} threads: each size must be at "
            f"least 1, and a block has at most 1024 threads, got {threads}"
        )


def _with_place(error: Exception, kernel: str) -> Exception:
    """Return the error of a thread with its place: the thread, the block and the line."""
    place = (
        f"thread {tuple(DEVICE.threadIdx)} of block {tuple(DEVICE.blockIdx)} of the kernel {kernel}"
    )
    line = _line(error.__traceback__)
    text = f"{error} ({place}{', ' + source_of(line) if line else ''})"
    try:
        found = type(error)(text)
    except TypeError:  # an error with other arguments
        return RuntimeError(f"{type(error).__name__}: {text}")
    return found


def _returned(function: Any) -> str:
    """Return the message for a kernel that returns a value."""
    lines, first = inspect.getsourcelines(function)
    at = next((i for i, text in enumerate(lines) if re.search(r"\breturn [^#]", text)), 0)
    line = source_of((function.__code__.co_filename, first + at))
    return f"a kernel returns nothing, and {line} returns a value; write it to an array"


def _line(trace: TracebackType | None) -> tuple[str, int] | None:
    """Return the last line of an error that is not the emulated GPU's own."""
    found = None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(OWN):
            found = name, trace.tb_lineno
        trace = trace.tb_next
    return found


def _deadlock(turns: Turns) -> str:
    """Return which threads wait where, which have ended, and what to do."""
    lines: dict[tuple[str, int], list[int]] = {}
    for number, line in turns.waiting.items():
        lines.setdefault(line, []).append(number)

    def named(numbers: list[int]) -> str:
        more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
        return f"thread {tuple(DEVICE.place_of(numbers[0]))}{more}"

    parts = [f"{named(numbers)} in {source_of(line)}" for line, numbers in [*lines.items()][:3]]
    if ended := sorted(set(range(DEVICE.block.threads)) - set(turns.waiting)):
        parts.append(f"and {named(ended)} {'have' if ended[1:] else 'has'} ended")
    text, sources = "others, which wait too or have ended", [*map(source_of, lines)]
    advice = ""
    if any(re.search(r"_sync\(|syncwarp\(", source) for source in sources):
        text = "others of their warp"
        advice = (
            "; move the shuffle, vote or syncwarp out of the branch, or let the mask name no other"
        )
    elif all("syncthreads" in source for source in sources):
        text = "all others at a barrier"
        advice = "; move the barrier out of the branch or loop, and let no thread return before it"
    return f"threads of block {tuple(DEVICE.blockIdx)} wait for {text}: {', '.join(parts)}{advice}"
