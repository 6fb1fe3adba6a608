"""Device memory from CUDA's stream-ordered allocator, with a cache of freed blocks."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_void_p
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from kernels.runtime.cuda_errors import explain_code, out_of_memory

#: Maximum number of bytes that the driver stages itself before an asynchronous copy returns.
STAGED = 64 << 10
#: Maximum number of bytes that are copied in such pieces; each piece takes a call of the driver.
MOST_STAGED = 32 * STAGED
#: Sizes are multiples of ``SMALLEST_UNIT``; large ones of larger units, up to a sixteenth of the size and
#: ``LARGEST_UNIT``.
SMALLEST_UNIT, LARGEST_UNIT = 512, 2 << 20
#: Memory that is held may exceed the peak in use by half of it plus these bytes.
SPARE = 64 << 20
#: What a call of the driver does, for error messages.
MANAGING, COPYING = "managing device memory", "copying an array to the device"


class Block(NamedTuple):
    """A block of device memory in the pool; blocks are ordered by their addresses."""

    start: int  #: Its address.
    device: int  #: Number of its device.
    size: int  #: Bytes.
    address: Any  #: The address in the driver's type.
    pointer: c_void_p  #: The address as numba's launches take it.


@lru_cache(maxsize=4096)
def _rounded(size: int) -> int:
    """Return the size of the block for so many bytes."""
    unit = SMALLEST_UNIT
    if size > 32 * SMALLEST_UNIT:
        unit = min(1 << (size.bit_length() - 5), LARGEST_UNIT)
    return (size + unit - 1) & -unit


class Pool:
    """The memory pool that the driver keeps for each device, and a cache of freed blocks.

    An allocation receives the freed block of its size and device with the lowest address.  This needs
    no call of the driver, and each training step has its tensors at the same addresses.  All work,
    including the driver's allocations, is ordered by the legacy default stream, so a block may be
    written to as soon as the last kernel that uses it has been launched.  An array that is used on a
    different stream must be kept until that stream has finished its work.

    The cache is emptied if the device has too little memory, or if the held blocks exceed the peak in
    use by a half.  cuMemAllocAsync then reuses the freed memory for other sizes; it takes 2 µs, and
    at times milliseconds.

    The driver, ``cuda.bindings.driver``, is not called before the first allocation; ``enter`` makes a
    CUDA context current on the calling thread.
    """

    def __init__(self, driver: Any, enter: Callable[[], Any]):
        self._driver = driver
        self._enter = enter
        self._allocate, self._free = driver.cuMemAllocAsync, driver.cuMemFreeAsync
        self._stream = driver.CUstream(0)
        self._success = driver.CUresult.CUDA_SUCCESS
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._several = False
        self.cached: dict[tuple[int, int], list[Block]] = {}  #: Freed blocks by size and device.
        self.is_cached = True  #: Whether freed blocks are kept.
        # Bytes, counted where a block is not cached.
        self._held = self._most_used = self._most_held = 0
        # What could not be freed where its last reference went; a finaliser runs on any thread.
        self._left: deque[Block] = deque()

    def prepare(self) -> bool:
        """Make the driver's pools keep their memory; tell whether every device has a pool."""
        driver, attributes = self._driver, self._driver.CUdevice_attribute
        self._enter()
        count = self.call(driver.cuDeviceGetCount)
        self._several = count > 1
        supported = attributes.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        if not all(self.call(driver.cuDeviceGetAttribute, supported, i) for i in range(count)):
            return False
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        for device in range(count):
            pool = self.call(driver.cuDeviceGetMemPool, device)
            # 0, what it is unless someone chose, gives all back at each synchronisation.
            if int(self.call(driver.cuMemPoolGetAttribute, pool, threshold)) == 0:
                keep_all = driver.cuuint64_t(2**64 - 1)
                self.call(driver.cuMemPoolSetAttribute, pool, threshold, keep_all)
        return True

    def allocate(self, *sizes: int) -> list[Block]:
        """Return a block on the current device for each number of bytes; it may have a few bytes more.

        Too little memory raises a MemoryError, and a failed driver or an earlier kernel a
        RuntimeError.
        """
        device = self._device() if self._several else 0
        blocks: list[Block] = []
        for size in sizes:
            size = _rounded(size)
            try:
                block = heappop(self.cached[size, device])
            except (KeyError, IndexError):
                try:
                    block = self._new_block(size)
                except BaseException:
                    for block in blocks:
                        self.free(block)
                    raise
            blocks.append(block)
        return blocks

    def free(self, block: Block) -> None:
        """Free a block from any thread; launched kernels may still use it."""
        if self.is_cached:
            heappush(self.cached[block.size, block.device], block)
        else:
            self.release(block)

    def release(self, block: Block) -> None:
        """Return a block to the driver in stream order, for example a block of an unusual size."""
        if self._several and block.device != self._device():
            self._left.append(block)  # the stream of another device orders nothing
            return
        (error,) = self._free(block.address, self._stream)
        if error == self._no_context:
            self._left.append(block)
        else:
            self._held -= block.size

    def _new_block(self, size: int) -> Block:
        """Return a block from the driver."""
        if self._left:
            self._free_left()
        if self._held + size > self._most_held:
            in_cache = self._bytes_in_cache()
            self._most_used = max(self._most_used, self._held - in_cache + size)
            self._most_held = self._most_used + self._most_used // 2 + SPARE
            if self._held + size > self._most_held:
                self._empty_cache()
        error, address = self._allocate(size, self._stream)
        if error != self._success:
            address = self._allocate_again(error, address, size)
        self._held += size
        device = self._device() if self._several else 0
        self.cached.setdefault((size, device), [])
        return Block(int(address), device, size, address, c_void_p(int(address)))

    def _bytes_in_cache(self, device: int | None = None) -> int:
        """Return the bytes of cached blocks, on one device or on all."""
        cached = [*self.cached.items()]  # other threads add sizes
        return sum(size * len(found) for (size, own), found in cached if device in (None, own))

    def _empty_cache(self) -> None:
        """Return all cached blocks to the driver."""
        for blocks in [*self.cached.values()]:
            with suppress(IndexError):  # other threads take blocks, too
                while True:
                    self.release(heappop(blocks))

    def upload(self, address: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous host array to an address in stream order; the array may be written to at once.

        The driver stages up to :data:`STAGED` bytes of NumPy's own memory without waiting for the
        device, so an array is copied in such pieces.  For a very large array, or memory of
        another library, which may be pinned and would be read later, the call waits until it has
        been read.

        Source: CUDA Driver API, API synchronization behavior.
        """
        source, size = array.ctypes.data, array.nbytes
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        is_owned = owner.base is None or isinstance(owner.base, bytes)
        if not is_owned or size > MOST_STAGED:
            self.call(self._driver.cuMemcpyHtoD, address, source, size, doing=COPYING)
            return
        for start in range(0, size, STAGED):
            piece = min(STAGED, size - start)
            to = address + start, source + start, piece, self._stream
            self.call(self._driver.cuMemcpyHtoDAsync, *to, doing=COPYING)

    def trim(self) -> None:
        """Return free memory to the device, once its work is done, for other uses."""
        self._enter()
        self._empty_cache()
        self._free_left()
        self.call(self._driver.cuCtxSynchronize)
        self.call(self._driver.cuMemPoolTrimTo, self._pool(), 0)

    def in_use(self) -> int:
        """Return the number of allocated bytes of the current device, once its work is done."""
        self._enter()
        self._free_left()
        held = self._read(self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return held - self._bytes_in_cache(self._device() if self._several else 0)

    def reset_peak(self) -> int:
        """Restart the measurement of the peak; return the bytes in use.

        Until :meth:`peak` no freed block is cached, so that the driver counts what is in use.
        """
        self.is_cached = False
        self._empty_cache()
        high = self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        self._enter()
        zero = self._driver.cuuint64_t(0)  # the one value that the driver takes
        self.call(self._driver.cuMemPoolSetAttribute, self._pool(), high, zero)
        return self.in_use()

    def peak(self) -> int:
        """Return the peak of bytes in use since :meth:`reset_peak`, and end the measurement."""
        peak = self._read(self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        self.is_cached = True
        return peak

    def _read(self, attribute: Any) -> int:
        self.call(self._driver.cuCtxSynchronize)
        return int(self.call(self._driver.cuMemPoolGetAttribute, self._pool(), attribute))

    def _allocate_again(self, error: Any, address: Any, size: int) -> Any:
        """Allocate again after a failure, once memory has been freed."""
        driver = self._driver
        no_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        if error == self._no_context:  # the first allocation on this thread
            self._enter()
            error, address = self._allocate(size, self._stream)
        if error == no_memory:
            gc.collect()  # cycles of references hold memory too, and so does what readers have returned
            # Free memory in pieces of other sizes goes back to the device, to be had in one piece.
            self.trim()
            error, address = self._allocate(size, self._stream)
        if error == no_memory:
            free, total = self.call(driver.cuMemGetInfo)
            raise out_of_memory(size, int(free), int(total))
        if error != self._success:
            raise explain_code(error.name, "allocating device memory")
        return address

    def _free_left(self) -> None:
        """Free blocks that could not be freed before, as far as possible."""
        for _ in range(len(self._left)):
            self.release(self._left.popleft())

    def _pool(self) -> Any:
        return self.call(self._driver.cuDeviceGetMemPool, self._device())

    def _device(self) -> int:
        error, device = self._driver.cuCtxGetDevice()
        return int(device) if error == self._success else -1

    def call(self, function: Callable[..., Any], *args: Any, doing: str = MANAGING) -> Any:
        """Call the driver and return its result, or raise its error."""
        error, *answer = function(*args)
        if error == self._no_context:  # the first call on this thread
            self._enter()
            error, *answer = function(*args)
        if error != self._success:
            raise explain_code(error.name, doing)
        return answer[0] if len(answer) == 1 else tuple(answer)
