"""Rows and keys that options hide may hold anything: what Hopper's kernel by key tiles does about it.

A tensor core multiplies the zeros of hidden elements too, and zero times what is not finite is NaN; see
``flash2_mma.nonfinite``.  Only if an operand has such numbers, each tile's rows of q and dout that
no key of it sees
are made zeros, and dQ takes its keys from a copy in which those that no row sees are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import uint32

from kernels.cuda.attention.flash3_wgmma.layout import CLEAR_BARRIER
from kernels.cuda.device.warpgroups import LINE
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.copies import ld_shared_v4, st_shared_v4
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda

#: Of a packed pair, without the signs: zero or not.
_LOW, _HIGH = 0x00007FFF, 0x7FFF0000
CHUNKS = LINE // CHUNK


class Guarded(NamedTuple):
    """What of a block is made zeros.

    Attributes:
        threads: That do it: of all consumers.
        block_q: Rows of a query tile, block_k of a key tile.
        block_k: Keys of a key tile.
        q_panels: Panels of a tile of q, and of keys.
        dout_panels: Of dout.
        adds_dq: The keys are needed for dQ.
    """

    threads: int
    block_q: int
    block_k: int
    q_panels: int
    dout_panels: int
    adds_dq: bool


@cache
def make_clear_unseen(sizes: Guarded) -> Callable[..., None]:
    """Return ``clear_unseen(thread, own_key, lane, s, p, bytes_, seen, q, dout, keys, copy)``.

    Of the gradients ``s``, P · slope, and the packed P ∘ Z in ``p``, what is not zero is seen.  All
    consumers call it; when it returns the unseen rows of the tiles q and dout are zeros, and ``copy`` is
    that of the keys without the unseen ones.  ``bytes_`` is shared memory as bytes, of which those from
    ``seen`` on are for rows and keys; ``own_key`` is the lane's first key in the tile.
    """
    threads, block_q, block_k, q_panels, dout_panels, adds_dq = sizes
    row_tiles = block_q // 8

    @device_function
    def clear_rows(thread, bytes_, seen, tile, panels, zeros):
        for n in range(thread, panels * block_q * CHUNKS, threads):
            if (
                bytes_[seen + n // CHUNKS % block_q] == 0
            ):  # a row of a panel is a line, in any order
                st_shared_v4(tile + n * CHUNK, zeros)

    @device_function
    def clear_unseen(thread, own_key, lane, s, p, bytes_, seen, q, dout, keys, copy):
        seen_keys, words = seen + block_q, cuda.local.array(4, uint32)  # words (4,)
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        for n in range(thread, block_q + block_k, threads):
            bytes_[seen + n] = 0
        bar_sync(CLEAR_BARRIER, threads)  # nothing is marked yet
        for t in range(row_tiles):
            for i in range(4):
                pair = p[t // 2, 2 * (t % 2) + i // 2] & (_HIGH if i % 2 else _LOW)
                if pair != 0 or s[t, i] != 0:
                    bytes_[seen + 8 * t + 2 * (lane % 4) + i % 2] = 1
                    bytes_[seen_keys + own_key + 8 * (i // 2)] = 1
        bar_sync(
            CLEAR_BARRIER, threads
        )  # every thread has marked its rows and keys, and read the tiles
        clear_rows(thread, bytes_, seen, q, q_panels, zeros)
        clear_rows(thread, bytes_, seen, dout, dout_panels, zeros)
        if adds_dq:
            for n in range(thread, q_panels * block_k * CHUNKS, threads):
                if bytes_[seen_keys + n // CHUNKS % block_k] != 0:
                    ld_shared_v4(words, keys + n * CHUNK)
                    st_shared_v4(copy + n * CHUNK, words)
                else:
                    st_shared_v4(copy + n * CHUNK, zeros)
        fence_proxy_async()  # products see the zeros
        bar_sync(CLEAR_BARRIER, threads)  # the unseen rows are zeros

    return clear_unseen


def _nothing(thread, own_key, lane, s, p, bytes_, seen, q, dout, keys, copy):
    pass


def clear_unseen_of(sizes: Guarded, is_guarded: bool) -> Any:
    """Return :func:`make_clear_unseen`'s function, or one that does nothing."""
    return make_clear_unseen(sizes) if is_guarded else device_function(_nothing)
