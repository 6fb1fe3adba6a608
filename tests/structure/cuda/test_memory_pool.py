"""The pool of device memory, and what errors of CUDA are turned into, on a driver of our own."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from kernels.cuda.runtime import arrays
from kernels.cuda.runtime.memory_pool import SPARE, Block, Pool
from kernels.runtime import cuda_errors, targets

from ...support.device.fake_device import FakeDriver, Result

CAPACITY = 1 << 20


class Driver(FakeDriver):
    """A driver of one device, or of several, that counts what is allocated."""

    CUmemPool_attribute = SimpleNamespace(
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD=4, CU_MEMPOOL_ATTR_USED_MEM_CURRENT=7,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH=8,
    )  # fmt: skip

    def __init__(self, devices: int = 1, threshold: int = 0, capacity: int = CAPACITY):
        super().__init__()
        self.capacity, self.allocations, self.high = capacity, 0, 0
        self.blocks: dict[int, tuple[int, int]] = {}  # address → device, size
        self.thresholds = [threshold] * devices
        self.current: int | None = None
        self.waste = 0  # bytes that the pool holds in pieces of no use
        self.fault: Result | None = None
        self.next_address = 256

    def enter(self) -> None:
        self.current = self.current or 0

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, len(self.thresholds)

    def cuDeviceGetMemPool(self, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, device

    def cuMemPoolGetAttribute(self, pool: int, attribute: int) -> tuple[Any, ...]:
        used = sum(size for device, size in self.blocks.values() if device == pool)
        return Result.CUDA_SUCCESS, {4: self.thresholds[pool], 7: used, 8: self.high}[attribute]

    def cuMemPoolSetAttribute(self, pool: int, attribute: int, value: int) -> tuple[Any, ...]:
        if attribute == 8:
            self.high = self.used
        else:
            self.thresholds[pool] = value
        return (Result.CUDA_SUCCESS,)

    def cuMemPoolTrimTo(self, pool: int, keep: int) -> tuple[Any, ...]:
        self.waste = 0
        return (Result.CUDA_SUCCESS,)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        if self.current is None:
            return Result.CUDA_ERROR_INVALID_CONTEXT, None
        return Result.CUDA_SUCCESS, self.current

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.capacity - self.used, self.capacity

    @property
    def used(self) -> int:
        return sum(size for _, size in self.blocks.values())

    def cuMemAllocAsync(self, size: int, stream: int) -> tuple[Any, ...]:
        self.allocations += 1
        if self.fault is not None:
            return self.fault, None
        if self.current is None:
            return Result.CUDA_ERROR_INVALID_CONTEXT, None
        if self.used + self.waste + size > self.capacity:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.next_address += 256
        self.blocks[self.next_address] = (self.current, size)
        self.high = max(self.high, self.used)
        return Result.CUDA_SUCCESS, self.next_address

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[Any, ...]:
        if self.current is None:
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        assert self.blocks.pop(address)[0] == self.current, "freed in the order of another device"
        return (Result.CUDA_SUCCESS,)


def pool_of(driver: Driver) -> Pool:
    pool = Pool(driver, driver.enter)
    assert pool.prepare()
    return pool


@given(lists(tuples(integers(1, CAPACITY // 32), integers(0, 3)), max_size=30))
def test_each_block_is_freed_once_whichever_thread_drops_it(steps: list[tuple[int, int]]) -> None:
    driver = Driver(devices=2)
    pool = pool_of(driver)
    held: list[Block] = []
    for size, action in steps:
        driver.current = (0, 1, None, 0)[action]
        if action < 2:
            (block,) = pool.allocate(size)
            assert driver.blocks[block.address] == (action, block.size) and block.device == action
            assert size <= block.size <= size + max(size // 16, 511)
            assert block.address not in {other.address for other in held}
            held.append(block)
        elif held:
            pool.free(held.pop(0))  # on no device, or perhaps on the other one
    while held:
        pool.free(held.pop())
    for device in (0, 1, 0):
        driver.current = device
        assert pool.in_use() == 0
        pool.trim()
    assert driver.blocks == {}


def test_a_freed_block_goes_to_the_next_allocation_of_its_size() -> None:
    driver = Driver(devices=2)
    pool = pool_of(driver)
    driver.current, blocks = 0, list[Block]()
    for _ in range(3):
        blocks = pool.allocate(1000, 1024, 5000)
        for block in blocks:
            pool.free(block)
    assert driver.allocations == 3
    driver.current = 1
    assert pool.allocate(1000)[0].address not in {block.address for block in blocks}


def test_what_is_cached_stays_below_half_of_what_was_in_use() -> None:
    driver = Driver(capacity=1 << 40)
    pool = pool_of(driver)
    blocks = pool.allocate(*[SPARE] * 6)
    for block in blocks:
        pool.free(block)
    for size in range(SPARE, 6 * SPARE, SPARE // 2):
        pool.free(*pool.allocate(size))
        assert driver.used <= 9 * SPARE + SPARE
    assert driver.used > 0 == pool.in_use()


def test_the_peak_counts_what_is_in_use() -> None:
    driver = Driver()
    pool = pool_of(driver)
    (kept,) = pool.allocate(4096)
    pool.free(*pool.allocate(8192))
    for _ in range(2):
        assert pool.reset_peak() == 4096
        for size in (512, 1024):
            pool.free(*pool.allocate(size))
        assert pool.peak() - 4096 == 1024
        pool.free(*pool.allocate(8192))
    pool.free(kept)


def test_memory_is_kept_unless_someone_chose_otherwise() -> None:
    for before, after in ((0, 2**64 - 1), (4096, 4096)):
        driver = Driver(devices=2, threshold=before)
        pool_of(driver)
        assert driver.thresholds == [after, after]


def test_a_thread_without_a_context_gets_one() -> None:
    driver = Driver()
    pool = pool_of(driver)
    driver.current = None
    (block,) = pool.allocate(512)
    assert pool.in_use() == 512
    pool.free(block)
    assert pool.in_use() == 0


def test_memory_in_pieces_is_put_together() -> None:
    driver = Driver()
    pool = pool_of(driver)
    driver.waste = CAPACITY
    pool.allocate(CAPACITY)
    assert pool.in_use() == CAPACITY


def test_too_little_memory_says_how_much_there_is() -> None:
    driver = Driver()
    pool = pool_of(driver)
    (kept,) = pool.allocate(CAPACITY // 2)
    with pytest.raises(
        MemoryError, match=r"1\.00 MiB were asked for, 512\.00 KiB of 1\.00 MiB"
    ) as e:
        pool.allocate(CAPACITY)
    assert "smaller batch" in str(e.value)
    pool.free(kept)
    pool.allocate(CAPACITY)
    assert pool.in_use() == CAPACITY


def test_an_allocation_after_a_fault_names_the_kernels() -> None:
    driver = Driver()
    pool = pool_of(driver)
    driver.fault = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    cuda_errors.LAUNCHED.extend(["first", "second"])
    with pytest.raises(
        RuntimeError, match=r"launched earlier read or wrote outside.*first, second;"
    ):
        pool.allocate(8)


# -- errors ----------------------------------------------------------------------------------------


def error_of(name: str, text: str, module: str = "numba.cuda.cudadrv.driver") -> Exception:
    """Return an error that looks like numba's or CUDA's."""
    kind: Any = type(name, (Exception,), {"__module__": module})
    return kind(text)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            error_of("LinkerError", "[222] Call to cuLinkAddData results in "
                     "CUDA_ERROR_UNSUPPORTED_PTX_VERSION\nptxas application: ..."),
            RuntimeError, ("the kernel k failed", "driver is older than the CUDA toolkit", "update"),
        ),
        (
            error_of("CUDAError", "CUDA_ERROR_OUT_OF_MEMORY: The API call failed", "cuda.core._utils"),
            MemoryError, ("the kernel k needs more than is free", "smaller batch"),
        ),
        (
            error_of("NvvmSupportError", "libNVVM cannot be found. Do `conda install`"),
            RuntimeError, ("NVVM", 'pip install "numba-cuda[cu13]"'),
        ),
        (
            error_of("CudaAPIError", "[999] Call to cuX results in CUDA_ERROR_UNKNOWN"),
            RuntimeError, ("the driver refused it", "CUDA_ERROR_UNKNOWN"),
        ),
        (
            error_of("CudaAPIError", "[700] Call to cuX results in CUDA_ERROR_ILLEGAL_ADDRESS"),
            RuntimeError, ("a kernel launched earlier", "restart", "before, last", "SYNC=1"),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_an_error_of_cuda_is_one_sentence(
    error: Exception, kind: type[Exception], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "BLOCKING", False)
    cuda_errors.LAUNCHED.clear()
    for name in ("before", "last"):
        with targets.launching(name):
            pass
    with pytest.raises(kind) as raised, targets.launching("k"):
        raise error
    message = str(raised.value)
    assert not [word for word in words if word not in message], message
    assert "\n" not in message and raised.value.__suppress_context__
    assert list(cuda_errors.LAUNCHED) == ["before", "last"]


def test_errors_of_others_pass() -> None:
    for manager in (targets.launching("k"), targets.explained("work")):
        with pytest.raises(IndexError, match="mine CUDA_ERROR_ILLEGAL_ADDRESS"), manager:
            raise IndexError("mine CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_launch_that_waits_names_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise error_of("CudaAPIError", "[716] ... CUDA_ERROR_MISALIGNED_ADDRESS")

    monkeypatch.setattr(targets, "BLOCKING", True)
    monkeypatch.setattr(targets, "cuda", SimpleNamespace(synchronize=synchronize))
    expected = r"the kernel flash9 failed: it read or wrote at an address"
    with pytest.raises(RuntimeError, match=expected), targets.launching("flash9"):
        pass


def test_what_keeps_cuda_from_running_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_devices() -> bool:
        raise error_of("CudaSupportError", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    for available, reason, words in (
        (lambda: True, None, None),
        (lambda: False, None, "pip install"),  # a driver and no NVVM
        (lambda: False, "CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"),
        (
            lambda: False,
            "\nCUDA driver library cannot be found.\n",
            "cannot be found; check nvidia",
        ),
        (no_devices, None, "restart the machine"),
    ):
        fake = SimpleNamespace(is_available=available, cuda_error=lambda reason=reason: reason)
        monkeypatch.setattr(targets, "cuda", fake)
        why = targets._why_no_cuda.__wrapped__()
        assert (why is None) == (words is None)
        assert words is None or (why is not None and words in why and "fast backend" in why)


@pytest.mark.cuda
def test_memory_comes_from_the_pool_and_goes_back() -> None:
    pool = arrays.pool()
    if pool is None:
        pytest.skip("another memory manager is in charge")
    gc.collect()
    before, size = pool.in_use(), 4 << 20
    for _ in range(100):  # each array takes the place of the one before
        arrays.empty_device((1 << 20,), np.dtype("f4"))
    assert pool.in_use() == before
    array = arrays.empty_device((1 << 20,), np.dtype("f4"))
    view = arrays.device_view(array, (1 << 10, 1 << 10), (1, 1 << 10))
    assert view.strides == (4, 4 << 10) and view.size == array.size
    del array
    assert pool.in_use() >= before + size, "a view holds the memory"
    del view
    assert pool.in_use() == before


@pytest.mark.cuda
def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError, match="were asked for"):
        arrays.empty_device((1 << 44,), np.dtype("f4"))
