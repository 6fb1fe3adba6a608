"""Record one block of a kernel of module 3 on the emulated GPU, in a process of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from common.child import in_child

from kernels.cuda.emulator.device import DEVICE
from kernels.runtime.targets import cuda
from minitorch import cuda_ops, operators

#: Threads of the block that sums; rows and columns of the tile that multiplies.
THREADS, SIDE = 8, 4
#: Seconds that a recording may take.
LIMIT = 60


class Moment(NamedTuple):
    """The moment at which a thread reaches a barrier, or ends. No other has run since the last one."""

    thread: int  # its number in the block
    line: int | None  # of the barrier, from 1 in the file; None at the end
    passed: int  # barriers that the block has passed
    variables: dict[str, float]  # the thread's numbers
    shared: dict[str, Any]  # each shared array as it is now


class Recording(NamedTuple):
    """A block from beginning to end, or to the error that ended it."""

    source: str
    first: int  # the line of the file at which the source begins
    places: list[tuple[int, ...]]  # of the threads
    moments: list[Moment]
    error: str


def _sum(n: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the kernel, the block and the arguments of a sum of n elements."""
    a, out = cuda.to_device(np.arange(1.0, n + 1)), cuda.device_array(1)
    args = out, (1,), (1,), 1, a, (n,), (1,), 0, 0.0
    return cuda_ops.tensor_reduce(operators.add), THREADS, args


def _product(n: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the kernel, the block and the arguments of a product of a tile, along n elements."""
    cuda_ops.THREADS_PER_BLOCK = SIDE  # 1,024 threads would be too many to look at
    numbers = np.random.default_rng(0).integers(-3, 4, (2, SIDE * n)).astype(float)
    a, b, out = *map(cuda.to_device, numbers), cuda.device_array(SIDE * SIDE)
    shapes = [((1, *shape), (shape[0] * shape[1], shape[1], 1)) for shape in ((SIDE, n), (n, SIDE))]
    whole = (1, SIDE, SIDE), (SIDE * SIDE, SIDE, 1)
    args = out, *whole, SIDE * SIDE, a, *shapes[0], b, *shapes[1]
    return cuda_ops.tensor_matrix_multiply, (SIDE, SIDE), args


KERNELS: dict[str, Callable[[int], tuple[Any, Any, tuple[Any, ...]]]] = {
    "sum (task 3.3)": _sum,
    "matrix product (task 3.4)": _product,
}


def record(name: str, n: int, without: int | None = None) -> Recording:
    """Record a kernel of KERNELS on n elements; the barrier of one line may be left out."""
    return in_child(recorded, name, n, without, emulated=True, seconds=LIMIT)


def recorded(name: str, n: int, without: int | None) -> Recording:
    """Record a kernel in this process, which must have the emulated GPU."""
    kernel, block, args = KERNELS[name](n)
    lines, first = inspect.getsourcelines(kernel.py_func)
    moments: list[Moment] = []

    def reached(frame: FrameType | None) -> bool:
        line, variables = frame and frame.f_lineno, frame.f_locals if frame else {}
        if line is not None and line == without:
            return True
        numbers = {
            key: float(value) for key, value in variables.items()
            if isinstance(value, (int, float, np.number))
        }  # fmt: skip
        state = DEVICE.block
        shared = {array.name: array.array.copy() for array in state.static.values()}
        moments.append(Moment(state.turns.now, line, state.everyone.rounds, numbers, shared))
        return False

    DEVICE.on_barrier = reached
    try:
        kernel[1, block](*args)
        error = ""
    except Exception as problem:  # the student's own
        error = str(problem)
    finally:
        DEVICE.on_barrier = None
    threads = DEVICE.block.threads if moments else 0
    places = [tuple(DEVICE.place_of(i)) for i in range(threads)]
    return Recording("".join(lines), first, places, moments, error)
