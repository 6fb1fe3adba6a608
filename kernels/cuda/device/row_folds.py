"""Maximum and sum over the threads that share a row, and the number of such threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.common.geometry import ceil_div
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, device_function
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.targets import cuda

#: Number of elements per thread from which a further warp shares a row.
SHARE = 8


class RowBlock(NamedTuple):
    """The shape of a thread block: ``threads`` threads along x share a row, and ``rows`` rows lie along y.

    There are several rows only if a row has at most a warp, so that no barrier waits for a different row.
    """

    threads: int
    rows: int

    @property
    def slots(self) -> int:
        """Elements of shared memory that the folds need."""
        return ceil_div(self.threads, WARP)


def row_block(length: int) -> RowBlock:
    """Return the block for rows of one length; the order of sums depends on the length alone."""
    return block_of(length, SHARE)


def block_of(length: int, share: int) -> RowBlock:
    """Return the block whose threads have at most ``share`` elements of a row each, if it may."""
    least, most, rows = SIZES.row_threads_least, SIZES.row_threads_most, SIZES.row_warps
    threads = least
    while threads * share < length and threads < most:
        threads *= 2
    return RowBlock(threads, rows if threads == least else 1)


def make_row_folds(block: RowBlock) -> tuple[Any, Any]:
    """Return maximum and sum over the threads that share a row, for one shape of block.

    They take ``(partial, value)``, a shared array of ``block.slots`` elements and the thread's value, and
    return the same bits to every thread.  Every thread of the block must call them.
    """
    return _make_fold(block, _larger), _make_fold(block, _added)


@device_function
def _larger(x, y):
    return max(x, y)


@device_function
def _added(x, y):
    return x + y


def make_lane_folds(lanes: int) -> tuple[Any, Any]:
    """Return maximum and sum over neighbouring lanes of a warp, a power of two; all get the result."""
    return _make_lane_fold(lanes, _larger), _make_lane_fold(lanes, _added)


def _make_lane_fold(lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    steps = lanes.bit_length() - 1

    @device_function
    def fold(value):
        for i in range(steps):
            value = combine(value, cuda.shfl_xor_sync(ALL_LANES, value, 1 << i))
        return value

    return fold


def _make_fold(block: RowBlock, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the fold by one function of two numbers."""
    fold_warp, warps = _make_lane_fold(min(WARP, block.threads), combine), block.slots
    if warps == 1:
        return device_function(lambda partial, value: fold_warp(value))

    @device_function
    def fold_block(partial, value):
        value = fold_warp(value)
        if cuda.threadIdx.x % WARP == 0:
            partial[cuda.threadIdx.x // WARP] = value
        cuda.syncthreads()  # the value of every warp is stored before a thread reads it
        result = partial[0]
        for i in range(1, warps):
            result = combine(result, partial[i])
        cuda.syncthreads()  # all have read before another fold overwrites the values
        return result

    return fold_block
