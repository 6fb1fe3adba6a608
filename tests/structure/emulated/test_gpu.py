"""The emulated GPU is strict: what has not arrived is garbage, and who does not come is missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import float32, uint32, void

from kernels.cuda.ptx import barriers, bulk, copies, inline, numbers, wgmma
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.targets import cuda

from ...support.device.emulated_gpu import EMULATED_ONLY
from ...support.tensor_cores.ptx_kernels import WORDS

pytestmark = EMULATED_ONLY
WAIT = copies.make_cp_async_wait_group(0)


def _run(
    source: Any, *arrays: Any, threads: int = 32, shared_bytes: int = 512, blocks: int = 1
) -> None:
    """Launch a kernel on the memory of arrays."""
    kernel = Kernel(source, void(*[WORDS] * len(arrays)), threads, shared_bytes)
    there = [to_device(array) for array in arrays]
    kernel[blocks, threads](*there)
    for array, found in zip(arrays, there, strict=True):
        array[...] = to_host(found)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_has_arrived_once_it_was_waited_for(waits: bool) -> None:
    def make(ends):
        def kernel(x, out):
            shared = cuda.shared.array(0, uint32)
            thread = cuda.threadIdx.x
            target = copies.shared_address(shared) + 16 * thread
            copies.cp_async_16(target, copies.global_address(x) + 16 * thread, 16)
            copies.cp_async_commit_group()
            if waits:
                WAIT()
            out[0, thread] = shared[4 * thread]
            if ends:
                WAIT()

        return kernel

    x, out = np.arange(128, dtype=np.uint32).reshape(32, 4), np.zeros((1, 32), np.uint32)
    _run(make(True), x, out)
    np.testing.assert_array_equal(out[0], x[:, 0] if waits else np.full(32, 0xFFFFFFFF))
    if not waits:
        with pytest.raises(RuntimeError, match="has ended before the copies"):
            _run(make(False), x, out)


def test_a_barrier_that_not_all_threads_reach_is_an_error() -> None:
    def kernel(out):
        if cuda.threadIdx.x:
            cuda.syncthreads()  # the first thread does not come

    with pytest.raises(RuntimeError, match="wait for all others at a barrier"):
        _run(kernel, np.zeros((1, 32), np.uint32))


@pytest.mark.parametrize("fences", [False, True])
def test_the_copy_engine_sees_what_was_stored_before_a_fence(fences: bool) -> None:
    def kernel(out):
        shared = cuda.shared.array(0, uint32)
        thread = cuda.threadIdx.x
        number = numbers.bits_of(float32(thread))
        copies.st_shared(copies.shared_address(shared) + 4 * thread, number)
        if fences:
            barriers.fence_proxy_async()
        cuda.syncthreads()
        if thread == 0:
            source = copies.shared_address(shared)
            bulk.cp_reduce_async_bulk_add(copies.global_address(out), source, 128)
            bulk.cp_async_bulk_commit_group()
            bulk.wait_for_writes()

    out = np.zeros((1, 32), np.uint32)
    _run(kernel, out)
    found = out.view(np.float32)[0]
    np.testing.assert_array_equal(found, np.arange(32) if fences else np.full(32, np.nan))


@pytest.mark.parametrize("stores", ["before", "too late", "too early"])
def test_a_product_reads_at_once_or_at_last(stores: str) -> None:
    lines, words = wgmma.descriptor_layout(128, 16, 1024), 72 * 128 // 4
    multiply, wait = wgmma.make_wgmma(8, "float16"), wgmma.make_wgmma_wait_group(0)

    def put(tile, word):
        for i in range(cuda.threadIdx.x, words, 128):
            copies.st_shared(tile + 4 * i, uint32(word))
        barriers.fence_proxy_async()
        cuda.syncthreads()

    def kernel(out):
        shared = cuda.shared.array(0, uint32)
        acc = cuda.local.array(4, float32)
        thread, tile = cuda.threadIdx.x, copies.align_up(copies.shared_address(shared), 1024)
        if stores != "too late":
            put(tile, 0)
        wgmma.wgmma_fence()
        multiply(acc, wgmma.descriptor(lines, tile), wgmma.descriptor(lines, tile + 64 * 128), 0)
        wgmma.wgmma_commit_group()
        if stores == "too late":
            put(tile, 0)
        if stores == "too early":
            put(tile, 0x7E007E00)  # what comes next
        wait()
        for i in range(4):
            out[cuda.blockIdx.x, 4 * thread + i] = uint32(acc[i] != 0)

    out = np.zeros((16, 512), np.uint32)
    _run(kernel, out, threads=128, shared_bytes=4 * words + 1024, blocks=16)
    assert out.any() == (stores != "before"), "of products that may read what is not there some do"


@inline.instruction("mov.u32 $result, %laneid;", inline.U32)
def _unknown():
    """Return the lane."""


def test_an_instruction_that_it_does_not_know_is_named() -> None:
    def kernel(out):
        _unknown()

    with pytest.raises(NotImplementedError, match="laneid"):
        _run(kernel, np.zeros((1, 32), np.uint32))
