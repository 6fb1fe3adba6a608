"""What the emulated GPU says of the mistakes that students make: threads, lines, arrays, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import float32

from kernels.cuda.emulator import api as cuda

SIZE = 8


def lost_update(out, a):
    out[0] += a[cuda.threadIdx.x]  # wrong


def no_barrier(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]  # other
    out[i] = tile[SIZE - 1 - i]  # wrong


def no_barrier_in_a_tree(out, a):
    partial = cuda.shared.array(SIZE, float32)
    i, half = cuda.threadIdx.x, SIZE // 2
    partial[i] = a[i]
    cuda.syncthreads()
    while half:
        if i < half:
            partial[i] += partial[i + half]  # wrong
        half //= 2
    out[i] = 0


def no_barrier_at_the_end_of_a_loop(out, a):
    tile = cuda.shared.array(SIZE, float32)
    i, total = cuda.threadIdx.x, 0.0
    for k in range(2):
        tile[i] = a[i] + k  # wrong
        cuda.syncthreads()
        total += tile[(i + 1) % SIZE]  # other
    out[i] = total


def barrier_in_a_branch(out, a):
    i = cuda.threadIdx.x
    if i < 3:
        cuda.syncthreads()  # wrong
    out[i] = a[i]


def return_before_a_barrier(out, a):
    i = cuda.threadIdx.x
    if i == 5:
        return
    cuda.syncthreads()  # wrong
    out[i] = a[i]


def no_guard(out, a):
    i = cuda.grid(1) + 1
    out[i] = a[i]  # wrong


def small_shared_array(out, a):
    half = cuda.shared.array(4, float32)
    half[cuda.threadIdx.x] = a[0]  # wrong


def exchanged_axes(out, a):
    tile, i = cuda.shared.array((2, 4), float32), cuda.threadIdx.x
    tile[i % 4, i // 4] = a[i]  # wrong


def half_written(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    if i < 4:
        tile[i] = a[i]  # other
    cuda.syncthreads()
    out[i] = tile[i]  # wrong


def accumulated_in_garbage(out, a):
    total, i = cuda.shared.array(1, float32), cuda.threadIdx.x
    if i == 0:
        total[0] += a[0]  # wrong
    out[i] = 0


def index_of_the_thread_alone(out, a):
    out[cuda.threadIdx.x] = a[cuda.threadIdx.x] + cuda.blockIdx.x  # wrong


def quotient_as_index(out, a):
    out[cuda.threadIdx.x / 2] = a[0]  # wrong


CASES: dict[Callable[..., None], tuple[int, str]] = {
    lost_update: (1, r"a race on out\[0\]: thread .* and thread .*cuda\.atomic\.add"),
    no_barrier: (
        1, r"a race on the shared array tile\[\d\]: .*{other}.*, with no barrier .*between the two lines",
    ),
    no_barrier_in_a_tree: (1, r"a race on the shared array partial\[\d\].*no barrier"),
    no_barrier_at_the_end_of_a_loop: (
        1, r"the shared array tile\[\d\]: .* reads it in {other}.* writes it .* end of the loop",
    ),
    barrier_in_a_branch: (1, r"there wait thread \(\d, 0, 0\) and 2 more .* thread \(3, 0, 0\) and 4 more"),
    return_before_a_barrier: (1, r"there wait .* and thread \(5, 0, 0\) has ended; every thread"),
    no_guard: (1, r"index \(8\) is out of bounds of the array a of shape \(8,\) \(thread \(7"),
    small_shared_array: (1, r"index \(\d\) is out of bounds of the array half of shape \(4,\)"),
    exchanged_axes: (1, r"out of bounds of the array tile of shape \(2, 4\)"),
    half_written: (
        1, r"reads the shared array tile\[\d\] in .*, which no thread has written; tile is written in "
        r"{other} .* elements \[0\] to \[3\] of it",
    ),
    accumulated_in_garbage: (1, r"reads the shared array total\[0\] in .* before .* writes it"),
    index_of_the_thread_alone: (2, r"a race on out\[\d\]: .* block \(0, .* block \(1, .*any order"),
    quotient_as_index: (1, r"the array out has integer indices, got \d\.\d; use //"),
}  # fmt: skip


def line_of(kernel: Callable[..., None], mark: str) -> str:
    """Return the name of the line of a kernel that has a comment."""
    lines, first = inspect.getsourcelines(kernel)
    return next(f"line {first + i}" for i, line in enumerate(lines) if line.endswith(f"# {mark}\n"))


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_a_wrong_kernel_is_told_its_mistake_and_its_line(kernel: Callable[..., None]) -> None:
    blocks, pattern = CASES[kernel]
    out, a = np.zeros(SIZE, np.float32), np.arange(1, SIZE + 1, dtype=np.float32)
    if "{other}" in pattern:
        pattern = pattern.replace("{other}", line_of(kernel, "other"))
    with pytest.raises((RuntimeError, IndexError, TypeError)) as error:
        cuda.jit(kernel)[blocks, SIZE](out, a)
    assert re.search(pattern, str(error.value), re.DOTALL), str(error.value)
    assert line_of(kernel, "wrong") in str(error.value)


def test_right_kernels_say_nothing() -> None:
    def reversed_twice(out: Any, a: Any) -> None:
        tile, i, value = cuda.shared.array(SIZE, float32), cuda.threadIdx.x, 0.0
        for _ in range(2):
            tile[i] = a[i]
            cuda.syncthreads()
            value = tile[SIZE - 1 - i]
            cuda.syncthreads()
        out[cuda.grid(1)] = value
        cuda.atomic.add(out, 2 * SIZE, a[i])

    out, a = np.zeros(2 * SIZE + 1, np.float32), np.arange(SIZE, dtype=np.float32)
    cuda.jit(reversed_twice)[2, SIZE](out, a)
    np.testing.assert_array_equal(out, [*a[::-1], *a[::-1], 2 * a.sum()])


def test_a_launch_that_a_gpu_refuses_is_refused() -> None:
    kernel = cuda.jit(no_guard)
    with pytest.raises(ValueError, match="at most 1024 threads, got 2048"):
        kernel[1, 2048](np.zeros(1), np.zeros(1))
    with pytest.raises(TypeError, match=r"must be integers, got 2\.5"):
        kernel[80 / 32, 32](np.zeros(1), np.zeros(1))
    with pytest.raises(ValueError, match=r"no_guard\[blocks, threads\]"):
        kernel(np.zeros(1), np.zeros(1))
