"""What a kernel finds under the name ``cuda``: the place of its thread, its memory, and its barriers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .checks import Checks
from .schedule import WARP, Meeting, Turns

#: A byte that makes every float16, bfloat16, float32 and float64 of it NaN.
GARBAGE = 0xFF
#: Bytes of shared memory for the static arrays of a block.
STATIC = 48 << 10
#: The mask of all lanes of a warp.
ALL = 0xFFFFFFFF

Array = np.ndarray[Any, Any]


class Index(NamedTuple):
    """An index or a size in three dimensions, such as ``blockIdx`` or ``blockDim``."""

    x: int
    y: int
    z: int


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a type that a kernel names."""
    if isinstance(kind, types.Type):
        return np.dtype(str(kind))
    return np.dtype(kind if isinstance(kind, type) else getattr(kind, "dtype", kind))


def empty(shape: Any, dtype: Any) -> Array:
    """Return an array of garbage."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = GARBAGE
    return array


_poisoned = lru_cache(maxsize=256)(empty)


@lru_cache(maxsize=64)
def places(size: Index) -> list[Index]:
    """Return the indices in a grid or a block, x fastest."""
    return [Index(x, y, z) for z in range(size.z) for y in range(size.y) for x in range(size.x)]


class Block:
    """The state of a running block.

    Args:
        index: Its index in the grid.
        size: Its threads along each dimension.
        shared_bytes: Dynamic shared memory.
        begin: Called with the number of the thread whose turn begins.
    """

    def __init__(self, index: Index, size: Index, shared_bytes: int, begin: Callable[[int], None]):
        self.index = index
        self.threads = threads = size.x * size.y * size.z
        self.dynamic = -(-shared_bytes // 16) * 16
        self.shared = _poisoned(self.dynamic + STATIC, np.dtype(np.uint8)).copy()
        self.static: dict[Any, Any] = {}
        self.end = self.dynamic
        self.turns = Turns(threads, index, begin)
        self.everyone = Meeting(0, threads, threads, self.turns)
        self.warps = [self._meeting(first, WARP) for first in range(0, threads, WARP)]
        self.parts: dict[tuple[int, int], Meeting] = {}

    def _meeting(self, first: int, size: int) -> Meeting:
        return Meeting(first, size, min(size, self.threads - first), self.turns)

    def warp(self, mask: int = ALL) -> Meeting:
        """Return where the lanes of a mask meet, in the warp of the running thread."""
        number = self.turns.now // WARP
        whole = self.warps[number]
        mask = int(mask) & ((1 << whole.count) - 1)
        lanes = mask.bit_count()
        if lanes == whole.count:
            return whole
        if not mask >> (self.turns.now - whole.first) & 1:
            raise ValueError(f"a thread takes part that the mask {mask:#x} does not name")
        if (number, mask) not in self.parts:
            self.parts[number, mask] = Meeting(whole.first, WARP, lanes, self.turns)
        return self.parts[number, mask]


def _picked(lane_of: Callable[[int, int], int]) -> Callable[[list[Any]], list[Any]]:
    """Return a shuffle: each lane receives the value of the lane that ``lane_of`` names, or its own."""

    def act(values: list[Any]) -> list[Any]:
        results: list[Any] = [None] * len(values)
        for lane, own in enumerate(values):
            if own is not None:
                source = lane_of(lane, own[1])
                other = values[source] if 0 <= source < len(values) else None
                results[lane] = (own if other is None else other)[0]
        return results

    return act


def _same_for_all(fold: Callable[[list[Any]], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [fold([value for value in values if value is not None])] * len(values)


_XOR = _picked(lambda lane, step: lane ^ step)
_FROM = _picked(lambda lane, source: source % WARP)
_UP = _picked(lambda lane, step: lane - step)
_DOWN = _picked(lambda lane, step: lane + step)
_ANY, _ALL, _SUM = map(_same_for_all, (any, all, sum))


def _ballot(values: list[Any]) -> list[Any]:
    return [np.uint32(sum(bool(x) << i for i, x in enumerate(values)))] * len(values)


def _equal_masks(values: list[Any]) -> list[Any]:
    return [np.uint32(sum((x == own) << i for i, x in enumerate(values))) for own in values]


class Shared:
    """``cuda.shared``."""

    def __init__(self, device: Device):
        self._device = device

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Return dynamic shared memory, or the static array of the line of the kernel that asks."""
        device = self._device
        block, frame = device.block, sys._getframe(1)
        place = frame.f_code, frame.f_lasti, dtype
        found = block.static.get(place)
        if found is None:
            kind = dtype_of(dtype)
            if shape == 0:
                found = block.shared[: block.dynamic // kind.itemsize * kind.itemsize].view(kind)
            else:
                count = int(np.prod(shape)) * kind.itemsize
                start, block.end = block.end, block.end + -(-count // 16) * 16
                if block.end > len(block.shared):
                    raise MemoryError(
                        f"the static shared arrays of a block take {block.end - block.dynamic:,} bytes; "
                        f"a block has {STATIC:,}: take smaller ones"
                    )
                found = block.shared[start : start + count].view(kind).reshape(shape)
            if device.checks is not None:
                found = device.checks.shared(found, frame)
            block.static[place] = found
        return found


class Local:
    """``cuda.local``."""

    def __init__(self, device: Device):
        self._device = device

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Array:
        """Return a thread's own array of garbage."""
        found, checks = _poisoned(shape, dtype_of(dtype)).copy(), self._device.checks
        return found if checks is None else checks.local(found, sys._getframe(1))


class Atomic:
    """``cuda.atomic``; threads run one at a time, so that nothing is atomic but what is counted."""

    def _make(change: Callable[[Any, Any], Any]) -> Any:  # type: ignore[misc]
        def atomic(self: Any, array: Any, index: Any, value: Any) -> Any:
            if hasattr(array, "update"):  # it checks, or counts
                return array.update(index, lambda old: change(old, value))
            old = array[index]
            array[index] = change(old, value)
            return old

        return atomic

    add = _make(lambda old, value: old + value)
    sub = _make(lambda old, value: old - value)
    max = _make(lambda old, value: old if old >= value else value)
    min = _make(lambda old, value: old if old <= value else value)
    nanmax = _make(lambda old, value: np.fmax(old, value))
    nanmin = _make(lambda old, value: np.fmin(old, value))
    and_ = _make(lambda old, value: old & value)
    or_ = _make(lambda old, value: old | value)
    xor = _make(lambda old, value: old ^ value)
    exch = _make(lambda old, value: value)
    inc = _make(lambda old, value: 0 if old >= value else old + 1)
    dec = _make(lambda old, value: value if old == 0 or old > value else old - 1)
    _swap = _make(lambda old, pair: pair[1] if old == pair[0] else old)

    def cas(self, array: Any, index: Any, old: Any, value: Any) -> Any:
        return self._swap(array, index, (old, value))

    def compare_and_swap(self, array: Any, old: Any, value: Any) -> Any:
        return self._swap(array, 0, (old, value))


class Device:
    """What a kernel finds under the name ``cuda``.

    Attributes:
        threadIdx: Of the running thread; so with the others.
        block: The running block.
        checks: What names races, in a kernel of ``cuda.jit``; None in a kernel of the library.
        on_barrier: Called with the frame of each thread that reaches ``syncthreads``, which skips the
            barrier if the result is true, and with None when a thread ends.
        order: Given the places of the blocks, returns them in the order in which they run.
    """

    warpsize = WARP
    block: Block
    checks: Checks | None = None
    on_barrier: Callable[[FrameType | None], Any] | None = None
    order: Callable[[list[Index]], Iterable[Index]] = iter

    def __init__(self) -> None:
        self.threadIdx = self.blockIdx = Index(0, 0, 0)
        self.blockDim = self.gridDim = Index(1, 1, 1)
        self.shared, self.local, self.atomic = Shared(self), Local(self), Atomic()
        self._places = [self.threadIdx]
        self.const = SimpleNamespace(array_like=lambda array: array)

    def begin_block(self, index: Index, grid: Index, size: Index, shared_bytes: int) -> Block:
        """Begin the next block of a launch."""
        self.blockIdx, self.gridDim, self.blockDim = index, grid, size
        self._places = places(size)
        self.block = Block(index, size, shared_bytes, self._begin)
        return self.block

    def _begin(self, number: int) -> None:
        self.threadIdx = self._places[number]

    def place_of(self, number: int) -> Index:
        """Return the index of a thread in its block."""
        return self._places[number]

    def grid(self, dims: int) -> Any:
        """Return the index of the thread in the grid."""
        thread, block, size = self.threadIdx, self.blockIdx, self.blockDim
        x = block.x * size.x + thread.x
        if dims == 1:
            return x
        y = block.y * size.y + thread.y
        return (x, y) if dims == 2 else (x, y, block.z * size.z + thread.z)

    def gridsize(self, dims: int) -> Any:
        """Return the number of threads of the grid along each dimension."""
        sizes = tuple(a * b for a, b in zip(self.gridDim, self.blockDim, strict=True))
        return sizes[0] if dims == 1 else sizes[:dims]

    @property
    def laneid(self) -> int:
        return self.block.turns.now % WARP

    # -- barriers, votes and shuffles --------------------------------------------------------------

    def syncthreads(self) -> None:
        if self.on_barrier is not None and self.on_barrier(sys._getframe(1)):
            return
        if self.checks is not None:
            self.checks.reach(sys._getframe(1))
        self.block.everyone.hold(None)

    def syncthreads_or(self, value: Any) -> int:
        return int(self.block.everyone.hold(bool(value), _ANY))

    def syncthreads_and(self, value: Any) -> int:
        return int(self.block.everyone.hold(bool(value), _ALL))

    def syncthreads_count(self, value: Any) -> int:
        return int(self.block.everyone.hold(bool(value), _SUM))

    def syncwarp(self, mask: int = ALL) -> None:
        self.block.warp(mask).hold(0)

    def any_sync(self, mask: int, value: Any) -> bool:
        return bool(self.block.warp(mask).hold(bool(value), _ANY))

    def all_sync(self, mask: int, value: Any) -> bool:
        return bool(self.block.warp(mask).hold(bool(value), _ALL))

    def ballot_sync(self, mask: int, value: Any) -> Any:
        return self.block.warp(mask).hold(bool(value), _ballot)

    def match_any_sync(self, mask: int, value: Any) -> Any:
        return self.block.warp(mask).hold(value, _equal_masks)

    def shfl_sync(self, mask: int, value: Any, lane: int) -> Any:
        return self.block.warp(mask).hold((value, int(lane)), _FROM)

    def shfl_xor_sync(self, mask: int, value: Any, step: int) -> Any:
        return self.block.warp(mask).hold((value, int(step)), _XOR)

    def shfl_up_sync(self, mask: int, value: Any, step: int) -> Any:
        return self.block.warp(mask).hold((value, int(step)), _UP)

    def shfl_down_sync(self, mask: int, value: Any, step: int) -> Any:
        return self.block.warp(mask).hold((value, int(step)), _DOWN)

    def threadfence(self) -> None:
        pass

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, nanoseconds: int) -> None:
        pass

    # -- arithmetic ----------------------------------------------------------------------------------

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Any:
        return type(x)(np.float64(x) * np.float64(y) + np.float64(z))

    @staticmethod
    def popc(x: Any) -> int:
        return bin(int(x)).count("1")

    @staticmethod
    def selp(condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y


DEVICE = Device()

#: The names by which a kernel waits for other threads.
MEETING = {name for name in vars(Device) if name.startswith("sync") or name.endswith("_sync")}
