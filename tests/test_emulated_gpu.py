"""The emulated GPU is strict: what has not arrived is garbage, and who does not come is missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import uint32, void

from kernels.cuda.device import Kernel
from kernels.cuda.ptx import copies, inline
from kernels.targets import cuda

from .emulated_engines import TensorMap
from .emulated_gpu import launch
from .ptx_cases import WORDS, Case, worst_error
from .ptx_kernels import CASES as OF_A_WARP
from .ptx_kernels_hopper import CASES as OF_A_BLOCK

WAIT = copies.make_cp_async_wait_group(0)


def _run(source: Any, *arrays: Any, threads: int = 32) -> None:
    launch(Kernel(source, void(*[WORDS] * len(arrays)), threads, shared_bytes=512), (1, 1), *arrays)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_has_arrived_once_it_was_waited_for(waits: bool) -> None:
    def kernel(x, out):
        shared = cuda.shared.array(0, uint32)
        thread = cuda.threadIdx.x
        target = copies.shared_address(shared) + 16 * thread
        copies.cp_async_16(target, copies.global_address(x) + 16 * thread, 16)
        copies.cp_async_commit_group()
        if waits:
            WAIT()
        out[0, thread] = shared[4 * thread]

    x, out = np.arange(128, dtype=np.uint32).reshape(32, 4), np.zeros((1, 32), np.uint32)
    _run(kernel, x, out)
    np.testing.assert_array_equal(out[0], x[:, 0] if waits else np.full(32, 0xFFFFFFFF))


def test_a_barrier_that_not_all_threads_reach_is_an_error() -> None:
    def kernel(out):
        if cuda.threadIdx.x:
            cuda.syncthreads()  # the first thread does not come

    with pytest.raises(RuntimeError, match="wait for others"):
        _run(kernel, np.zeros((1, 32), np.uint32))


def test_an_error_of_one_thread_ends_the_kernel() -> None:
    def kernel(out):
        out[0, cuda.threadIdx.x] = 1  # there are but 32
        cuda.syncthreads()  # so that the others wait

    with pytest.raises(IndexError):
        _run(kernel, np.zeros((1, 32), np.uint32), threads=64)


@inline.instruction("mov.u32 $result, %laneid;", inline.U32)
def _unknown():
    """Return the lane."""


def test_an_instruction_that_it_does_not_know_is_named() -> None:
    def kernel(out):
        _unknown()

    with pytest.raises(NotImplementedError, match="laneid"):
        _run(kernel, np.zeros((1, 32), np.uint32))


@pytest.mark.parametrize("case", OF_A_WARP + OF_A_BLOCK, ids=lambda case: case.name)
def test_every_kernel_of_one_instruction_does_what_is_expected_of_it(case: Case) -> None:
    inputs, out, expected, allowed = case.make(np.random.default_rng(0))
    maps = [TensorMap(inputs[i], box, swizzle) for i, box, _, swizzle in case.maps]
    places = {len(inputs) + n: one for n, one in enumerate(maps)}
    encoded = [np.zeros(128, np.uint8) for _ in maps]
    launch(case.kernel, (1, 1), *inputs, *encoded, out, maps=places)
    assert worst_error(out, expected, allowed) <= 1
