"""Zeros in place of values that no row reads: zero times what is not finite would be NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import uint32

from kernels.cuda.attention.flash3_wgmma.layout import CLEAR_BARRIER
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.copies import st_shared_v4
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda


@cache
def make_clear_unseen(consumers: int, block_k: int, panels: int) -> Callable[..., None]:
    """Return ``clear_unseen(thread, lane, s, left, bytes_, seen, tile)``, for all threads of all consumers.

    It makes zeros of the rows of a tile of values for which no row has a probability in ``s``: zero times
    what is not finite would be NaN.  ``left`` is how many rows there are from the lane's first one on: one
    beyond the end may see what no other does.  ``bytes_`` is shared memory as bytes, of which block_k, from
    ``seen`` on, are its own; ``thread`` is the number among the consumers' threads.

    Args:
        consumers: Warpgroups that multiply.
        block_k: Rows of the tile.
        panels: Of the tile.
    """
    threads, tiles, chunks = WARPGROUP * consumers, block_k // 8, LINE // 16

    @device_function
    def clear_unseen(thread, lane, s, left, bytes_, seen, tile):
        for n in range(thread, block_k, threads):
            bytes_[seen + n] = 0
        bar_sync(CLEAR_BARRIER, threads)  # no key is marked yet
        for t in range(tiles):
            for i in range(4):
                if s[t, i] != 0 and 8 * (i // 2) < left:
                    bytes_[seen + 8 * t + 2 * (lane % 4) + i % 2] = 1
        bar_sync(CLEAR_BARRIER, threads)  # every thread has marked the keys that it reads
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        for n in range(thread, panels * block_k * chunks, threads):
            if bytes_[seen + n // chunks % block_k] == 0:  # a row of a panel is a line: any order
                st_shared_v4(tile + n * 16, zeros)
        fence_proxy_async()  # products see the zeros
        bar_sync(CLEAR_BARRIER, threads)  # the unseen rows are zeros

    return clear_unseen
