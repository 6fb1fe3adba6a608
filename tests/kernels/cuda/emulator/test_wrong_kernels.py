"""What the emulated GPU says of the mistakes that students make: threads, lines, arrays, and what to do."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import float32

from kernels.cuda.emulator import api as cuda

SIZE = 8
#: What no case names: blocks, threads, the shapes of ``out`` and ``a``, and whether ``out`` is garbage.
ONE = {"grid": 1, "block": SIZE, "out": SIZE, "a": SIZE, "empty": False}
SQUARE = {"block": (4, 4), "out": (4, 4)}
BARRIER = r"a race on .*with no barrier in between; call cuda\.syncthreads\(\)"
UNREAD = r"which no thread has written; \w+ is written in {other}"
DIVERGENT = r"wait for all others at a barrier.* move the barrier out of the branch or loop"
CASES: dict[Callable[..., None], tuple[str, dict[str, Any]]] = {}


def told(words: str, **sizes: Any) -> Any:
    """Note what a kernel must be told, and how it is launched."""

    def note(kernel: Any) -> Any:
        CASES[kernel] = words, ONE | sizes
        return kernel

    return note


@told(r"a race on out\[0\]: thread .* and thread .*cuda\.atomic\.add")
def lost_update(out, a):
    out[0] += a[cuda.threadIdx.x]  # wrong


@told(r"a race on the shared array tile\[\d\]: .*{other}.*, with no barrier .*between the two")
def no_barrier(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]  # other
    out[i] = tile[SIZE - 1 - i]  # wrong


@told(r"a race on the shared array partial\[\d\].*no barrier")
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


@told(r"the shared array tile\[\d\]: .* it in {other}.*, with no barrier .* end of the loop")
def no_barrier_at_the_end_of_a_loop(out, a):
    tile = cuda.shared.array(SIZE, float32)
    i, total = cuda.threadIdx.x, 0.0
    for k in range(2):
        tile[i] = a[i] + k  # wrong
        cuda.syncthreads()
        total += tile[(i + 1) % SIZE]  # other
    out[i] = total


@told(
    r"thread \(\d, 0, 0\) and 2 more in .* thread \(3, 0, 0\) and 4 more have ended; move the barrier"
)
def barrier_in_a_branch(out, a):
    i = cuda.threadIdx.x
    if i < 3:
        cuda.syncthreads()  # wrong
    out[i] = a[i]


@told(
    r"thread \(\d, 0, 0\) and 6 more in .*, and thread \(5, 0, 0\) has ended; .* return before it"
)
def return_before_a_barrier(out, a):
    i = cuda.threadIdx.x
    if i == 5:
        return
    cuda.syncthreads()  # wrong
    out[i] = a[i]


@told(r"index \(8\) is out of bounds of the array a of shape \(8,\) \(thread \(7")
def no_guard(out, a):
    i = cuda.grid(1) + 1
    out[i] = a[i]  # wrong


@told(r"index \(\d\) is out of bounds of the array half of shape \(4,\)")
def small_shared_array(out, a):
    half = cuda.shared.array(4, float32)
    half[cuda.threadIdx.x] = a[0]  # wrong


@told(r"out of bounds of the array tile of shape \(2, 4\)")
def exchanged_axes(out, a):
    tile, i = cuda.shared.array((2, 4), float32), cuda.threadIdx.x
    tile[i % 4, i // 4] = a[i]  # wrong


@told(r"reads the shared array total\[0\] in .* before .* writes it")
def accumulated_in_garbage(out, a):
    total, i = cuda.shared.array(1, float32), cuda.threadIdx.x
    if i == 0:
        total[0] += a[0]  # wrong
    out[i] = 0


@told(r"a race on out\[\d\]: .* block \(0, .* block \(1, .*any order", grid=2)
def index_of_the_thread_alone(out, a):
    out[cuda.threadIdx.x] = a[cuda.threadIdx.x] + cuda.blockIdx.x  # wrong


@told(r"the array out has integer indices, got \d\.\d; use //")
def quotient_as_index(out, a):
    out[cuda.threadIdx.x / 2] = a[0]  # wrong


@told(r"index \(8\) is out of bounds of .* a of shape \(8,\) .*thread \(3", grid=3, block=5)
def guard_that_is_off_by_one(out, a):
    i = cuda.grid(1)
    if i <= out.size:
        out[i] = -a[i]  # wrong


@told(r"element \[5\] of .* has never been written, of which", grid=2, block=4, empty=True)
def index_without_the_block_size(out, a):
    i = cuda.blockIdx.x + cuda.threadIdx.x
    if i < out.size:
        out[i] = a[i]  # wrong


@told(r"element \[4\] of .* has never been written, of which", block=4, empty=True)
def too_few_blocks(out, a):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = a[i]  # wrong


@told(r"element \[1\] of .* has never been written", grid=2, block=4, out=2, empty=True)
def result_of_the_first_thread_of_the_grid(out, a):
    total, i = cuda.shared.array(1, float32), cuda.grid(1)
    if cuda.threadIdx.x == 0:
        total[0] = 0.0
    cuda.syncthreads()
    cuda.atomic.add(total, 0, a[i])
    cuda.syncthreads()
    if i == 0:
        out[cuda.blockIdx.x] = total[0]  # wrong


@told(r"it reads out\[\d\], which nothing has written \(thread", empty=True)
def accumulated_in_an_empty_output(out, a):
    out[cuda.grid(1)] += a[cuda.grid(1)]  # wrong


@told(DIVERGENT)
def barrier_for_the_lower_half(out, a):
    partial, i, half = cuda.shared.array(SIZE, float32), cuda.threadIdx.x, SIZE // 2
    partial[i] = a[i]
    cuda.syncthreads()
    while half:
        if i < half:
            partial[i] += partial[i + half]
            cuda.syncthreads()  # wrong
        half //= 2
    if i == 0:
        out[0] = partial[0]


@told(DIVERGENT)
def barrier_in_a_branch_before_a_read_of_others(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]
    if i < 3:
        cuda.syncthreads()  # wrong
    out[i] = tile[SIZE - 1 - i]


@told(r"wait for all others at a barrier.*{other}.* move the barrier")
def barrier_of_each_branch(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]
    if i < 4:
        cuda.syncthreads()  # wrong
    else:
        cuda.syncthreads()  # other
    out[i] = tile[SIZE - 1 - i]


@told(r"wait for all others at a barrier.*{other}.* move the barrier")
def barrier_in_a_branch_and_another_behind_it(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]
    if i % 2:
        cuda.syncthreads()  # wrong
    out[i] = tile[i]
    cuda.syncthreads()  # other


@told(BARRIER, block=64, out=64, a=64)
def barrier_of_a_warp_alone(out, a):
    tile, i = cuda.shared.array(64, float32), cuda.threadIdx.x
    tile[i] = a[i]  # other
    cuda.syncwarp()
    out[i] = tile[63 - i]  # wrong


@told(r"wait for others of their warp: thread .* move the shuffle, .* out of the branch")
def shuffle_in_a_branch(out, a):
    i = cuda.threadIdx.x
    value = a[i]
    if i < 4:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, 4)  # wrong
    out[i] = value


@told(UNREAD + r" .* elements \[0\] to \[5\] of it", a=6)
def nothing_beyond_the_end(out, a):
    partial, i, half = cuda.shared.array(SIZE, float32), cuda.threadIdx.x, SIZE // 2
    if i < a.size:
        partial[i] = a[i]  # other
    while half:
        cuda.syncthreads()
        if i < half:
            partial[i] += partial[i + half]  # wrong
        half //= 2
    if i == 0:
        out[0] = partial[0]


@told(UNREAD, grid=SIZE, block=1)
def blocks_and_threads_exchanged(out, a):
    tile, i = cuda.shared.array(SIZE, float32), cuda.threadIdx.x
    tile[i] = a[i]  # other
    cuda.syncthreads()
    out[cuda.blockIdx.x] = tile[0] + tile[1]  # wrong


@told(r"a race on the shared array partial\[\d\]: .*no barrier.*end of the loop")
def prefix_sum_in_place(out, a):
    partial, i, step = cuda.shared.array(SIZE, float32), cuda.threadIdx.x, 1
    partial[i] = a[i]
    while step < SIZE:
        cuda.syncthreads()
        if i >= step:
            partial[i] += partial[i - step]  # wrong
        step *= 2
    out[i] = partial[i]


@told(r"a race on out\[\d\]: .*writes it.*")
def reversed_in_place(out, a):
    i = cuda.threadIdx.x
    out[i] = out[SIZE - 1 - i]  # wrong


@told(r"a race on out\[\d\].* blocks run in any order", grid=2, block=4)
def barrier_between_blocks(out, a):
    i = cuda.grid(1)
    out[i] = a[i]  # other
    cuda.syncthreads()
    out[i] = out[(i + 4) % SIZE]  # wrong


@told(r"a race on out\[\d, \d\].* give each element to one thread", a=(4, 4), **SQUARE)
def row_instead_of_an_element(out, a):
    i, j = cuda.grid(2)
    out[i] = a[i, j]  # wrong


@told(BARRIER + " at the end of the loop", a=(4, 8), **SQUARE)
def product_without_a_barrier_at_the_end(out, a):
    tile, total = cuda.shared.array((4, 4), float32), 0.0
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    for k in range(0, a.shape[1], 4):
        tile[i, j] = a[i, k + j]  # wrong
        cuda.syncthreads()
        for n in range(4):
            total += tile[i, n] * tile[j, n]  # other
    out[i, j] = total


@told(UNREAD, a=(4, 3), **SQUARE)
def product_without_zeros(out, a):
    tile, total = cuda.shared.array((4, 4), float32), 0.0
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    if j < a.shape[1]:
        tile[i, j] = a[i, j]  # other
    cuda.syncthreads()
    for n in range(4):
        total += tile[i, n] * tile[j, n]  # wrong
    out[i, j] = total


@told(
    r"index \(.*\) is out of bounds of the array out of shape \(4, 8\)",
    grid=(2, 2),
    block=(4, 4),
    out=(4, 8),
    a=(8, 4),
)
def product_with_exchanged_results(out, a):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[j, i] = a[i, 0] * a[j, 1]  # wrong


@told(r"cuda\.blockDim\.x.* constant")
def shared_array_of_a_variable_size(out, a):
    tile, i = cuda.shared.array(cuda.blockDim.x, float32), cuda.threadIdx.x  # wrong
    tile[i] = a[i]
    out[i] = tile[i]


@told(r"reads the local array total\[0\] .*before it writes it")
def register_without_a_zero(out, a):
    total = cuda.local.array(1, float32)
    for value in range(3):
        total[0] += value  # wrong
    out[cuda.threadIdx.x] = total[0]


@told(r"a\[-1\] .* end")
def left_neighbour_of_the_first(out, a):
    i = cuda.threadIdx.x
    out[i] = a[i] - a[i - 1]  # wrong


@told(r"a kernel returns nothing, and")
def result_returned(out, a):
    return a[cuda.threadIdx.x]  # wrong


def line_of(kernel: Callable[..., None], mark: str) -> str:
    """Return the name of the line of a kernel that has a comment."""
    lines, first = inspect.getsourcelines(kernel)
    return next(f"line {first + i}" for i, line in enumerate(lines) if line.endswith(f"# {mark}\n"))


def launched(kernel: Callable[..., None], **sizes: Any) -> Any:
    """Launch a kernel on arrays of its sizes, and return its output."""
    grid, block, out, a, empty = sizes.values()
    numbers = np.arange(1, np.prod(a) + 1, dtype=np.float32).reshape(a)
    results = (
        cuda.device_array(out, np.float32) if empty else cuda.to_device(np.zeros(out, np.float32))
    )
    cuda.jit(kernel)[grid, block](results, cuda.to_device(numbers))
    return results.copy_to_host()


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_a_wrong_kernel_is_told_its_mistake_and_its_line(kernel: Callable[..., None]) -> None:
    pattern, sizes = CASES[kernel]
    if "{other}" in pattern:
        pattern = pattern.replace("{other}", line_of(kernel, "other"))
    with (
        warnings.catch_warnings(),
        pytest.raises((RuntimeError, LookupError, TypeError, UserWarning)) as error,
    ):
        warnings.simplefilter("error")
        launched(kernel, **sizes)
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
