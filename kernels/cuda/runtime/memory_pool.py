"""Device memory from CUDA's stream-ordered allocator, and a cache of freed blocks before it."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from kernels.runtime.cuda_errors import explain_code, out_of_memory

#: Bytes that the driver copies to a place of its own before an asynchronous copy returns.
STAGED = 64 << 10
#: Bytes that are copied in such pieces at most; each takes a call of the driver.
MOST_STAGED = 32 * STAGED
#: Sizes are multiples of this, and larger ones of up to ``LARGEST_UNIT``, a sixteenth of the size at most.
SMALLEST_UNIT, LARGEST_UNIT = 512, 2 << 20
#: Memory that is held may exceed the most that was in use by a half and these bytes.
SPARE = 64 << 20


class Block(NamedTuple):
    """A block of memory; blocks compare by their addresses.

    Attributes:
        start: Its address.
        device: It lies on.
        size: Bytes.
        address: As the driver has it.
    """

    start: int
    device: int
    size: int
    address: Any


class Pool:
    """The memory pool that the driver keeps for each device, and a cache of freed blocks.

    An allocation gets the freed block of its size and device with the lowest address.  This needs no call
    of the driver, and each training step has its tensors at the same addresses.  All work is in the order
    of the legacy default stream, to which the driver's allocations belong too, so a block may be written to
    as soon as the last kernel that uses it has been launched.  An array that is used on another stream must
    be kept until that stream has done its work.

    The cache is emptied if the device has too little memory, and if the blocks held exceed the most that
    were in use by a half.  cuMemAllocAsync then finds memory for other sizes in what was freed; it takes
    2 µs, and at times milliseconds.

    Nothing is asked of the driver before the first allocation.

    Args:
        driver: ``cuda.bindings.driver``.
        enter: Makes a CUDA context current on the calling thread.
    """

    def __init__(self, driver: Any, enter: Callable[[], Any]):
        self._driver = driver
        self._enter = enter
        self._allocate, self._free = driver.cuMemAllocAsync, driver.cuMemFreeAsync
        self._stream = driver.CUstream(0)
        self._success = driver.CUresult.CUDA_SUCCESS
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._several = False
        self._cached: dict[tuple[int, int], list[Block]] = {}  # by size and device
        self._is_cached = True
        self._held = self._most_used = self._most_held = (
            0  # bytes, counted where a block is not cached
        )
        # What could not be freed where its last reference went; a finaliser runs on any thread.
        self._left: deque[Block] = deque()

    def prepare(self) -> bool:
        """Let the pools keep their memory; tell whether every device has one."""
        driver, attributes = self._driver, self._driver.CUdevice_attribute
        self._enter()
        count = self._call(driver.cuDeviceGetCount)
        self._several = count > 1
        supported = attributes.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        if not all(self._call(driver.cuDeviceGetAttribute, supported, i) for i in range(count)):
            return False
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        for device in range(count):
            pool = self._call(driver.cuDeviceGetMemPool, device)
            # 0, what it is unless someone chose, gives all back at each synchronisation.
            if int(self._call(driver.cuMemPoolGetAttribute, pool, threshold)) == 0:
                keep_all = driver.cuuint64_t(2**64 - 1)
                self._call(driver.cuMemPoolSetAttribute, pool, threshold, keep_all)
        return True

    def allocate(self, size: int) -> Block:
        """Return ``size`` bytes or a few more on the current device.

        Args:
            size: One or more.

        Raises:
            MemoryError: If the device has not that much left.
            RuntimeError: If the driver fails, or a kernel has failed before.
        """
        unit = SMALLEST_UNIT
        if size > 32 * SMALLEST_UNIT:
            unit = min(1 << (size.bit_length() - 5), LARGEST_UNIT)
        size = (size + unit - 1) & -unit
        device = self._device() if self._several else 0
        try:
            return heappop(self._cached[size, device])
        except (KeyError, IndexError):
            return self._new_block(size)

    def free(self, block: Block) -> None:
        """Take a block back from any thread; what has been launched may still use it."""
        if self._is_cached:
            try:
                heappush(self._cached[block.size, block.device], block)
            except KeyError:
                heappush(self._cached.setdefault((block.size, block.device), []), block)
        else:
            self.release(block)

    def release(self, block: Block) -> None:
        """Give a block back to the driver, in stream order, as one of an unusual size should be."""
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
        return Block(int(address), self._device() if self._several else 0, size, address)

    def _bytes_in_cache(self, device: int | None = None) -> int:
        """Return the bytes of cached blocks, on one device or on all."""
        cached = [*self._cached.items()]  # other threads add sizes
        return sum(size * len(found) for (size, own), found in cached if device in (None, own))

    def _empty_cache(self) -> None:
        """Give all cached blocks back to the driver."""
        for blocks in [*self._cached.values()]:
            with suppress(IndexError):  # other threads take blocks, too
                while True:
                    self.release(heappop(blocks))

    def upload(self, address: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array of the host to an address, in stream order; it may be written to at once.

        The driver copies up to :data:`STAGED` bytes of NumPy's own memory at once, and the call does not
        wait for the device: an array is copied in such pieces.  For a very large one, or memory of somebody
        else, which may be locked in place and would be read later, the call waits until it has been read.

        Raises:
            RuntimeError: If the driver fails, or a kernel has failed before.

        Source: CUDA Driver API, API synchronization behavior.
        """
        source, size = array.ctypes.data, array.nbytes
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        is_owned = owner.base is None or isinstance(owner.base, bytes)
        if not is_owned or size > MOST_STAGED:
            self._copied(self._driver.cuMemcpyHtoD, address, source, size)
            return
        for start in range(0, size, STAGED):
            piece = min(STAGED, size - start)
            to = address + start
            self._copied(self._driver.cuMemcpyHtoDAsync, to, source + start, piece, self._stream)

    def _copied(self, copy: Callable[..., Any], *numbers: Any) -> None:
        """Copy, or raise what went wrong."""
        (error,) = copy(*numbers)
        if error == self._no_context:  # the first call on this thread
            self._enter()
            (error,) = copy(*numbers)
        if error != self._success:
            raise explain_code(error.name, "copying an array to the device")

    def trim(self) -> None:
        """Give what is free back to the device, for others or for one large piece; waits for its work."""
        self._enter()
        self._empty_cache()
        self._free_left()
        self._call(self._driver.cuCtxSynchronize)
        self._call(self._driver.cuMemPoolTrimTo, self._pool(), 0)

    def in_use(self) -> int:
        """Return how many bytes of the current device are allocated, once its work is done."""
        self._enter()
        self._free_left()
        held = self._read(self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return held - self._bytes_in_cache(self._device() if self._several else 0)

    def reset_peak(self) -> int:
        """Begin to watch for the peak anew; return what is in use.

        Until :meth:`peak` no freed block is cached, so that the driver counts what is in use.
        """
        self._is_cached = False
        self._empty_cache()
        high = self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        self._enter()
        zero = self._driver.cuuint64_t(0)  # the one value that the driver takes
        self._call(self._driver.cuMemPoolSetAttribute, self._pool(), high, zero)
        return self.in_use()

    def peak(self) -> int:
        """Return the most bytes of the current device in use since :meth:`reset_peak`, which ends here."""
        peak = self._read(self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        self._is_cached = True
        return peak

    def _read(self, attribute: Any) -> int:
        self._enter()
        self._call(self._driver.cuCtxSynchronize)
        return int(self._call(self._driver.cuMemPoolGetAttribute, self._pool(), attribute))

    def _allocate_again(self, error: Any, address: Any, size: int) -> Any:
        """Allocate after a failure, once what can be mended is."""
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
            free, total = self._call(driver.cuMemGetInfo)
            raise out_of_memory(size, int(free), int(total))
        if error != self._success:
            raise explain_code(error.name, "allocating device memory")
        return address

    def _free_left(self) -> None:
        """Free what was left behind, as far as it can be freed here."""
        for _ in range(len(self._left)):
            self.release(self._left.popleft())

    def _pool(self) -> Any:
        return self._call(self._driver.cuDeviceGetMemPool, self._device())

    def _device(self) -> int:
        error, device = self._driver.cuCtxGetDevice()
        return int(device) if error == self._success else -1

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the driver and return its answer, or raise what went wrong."""
        error, *answer = function(*args)
        if error != self._success:
            raise explain_code(error.name, "managing device memory")
        return answer[0] if len(answer) == 1 else tuple(answer)
