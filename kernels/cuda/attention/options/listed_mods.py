"""Evaluate a ``mask_mod`` on the device into the states of blocks and the bits of partial ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.cuda.attention.options.mods import (
    MOST_PLACES,
    mask_function,
    numbers_for,
    numbers_type,
)
from kernels.cuda.runtime.arrays import empty_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.recorder import recorded_by
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.listed_mods import MOST_PATTERNS, Asked, on_host
from kernels.runtime.targets import cuda, why_no_cuda
from kernels.runtime.types import int32, int64, types, uint8, void
from kernels.scores.templates import numbers_of, template_of
from kernels.sparsity.elements import BlockRow, from_lines
from kernels.sparsity.states import FULL, HIDDEN, PARTIAL, Layout

#: Maximum number of bytes of bits that are on the device at a time.
MOST_BYTES = 1 << 25
#: Threads of a block.
THREADS = SIZES.row_threads
_BYTES = np.dtype(np.uint8)


def on_device(asked: Asked) -> tuple[Layout, bool]:
    """Evaluate a function on the device; see ``problem.listed_mods.Evaluate``.

    The states of blocks, and the bits of partial blocks, are copied to the host.  The evaluation is not
    part of a recorded call, because it is not repeated.  A function that the device cannot run, such as one
    with captured arrays beyond the 64 KB of constants of a float64 kernel, is evaluated on the host.

    Raises:
        TypeError: If numba cannot compile the function.
    """
    if why_no_cuda() is not None or max(asked.grid.seq) > MOST_PLACES:
        return on_host(asked)
    try:
        with recorded_by(None):
            return _on_device(asked)
    except Exception:  # of numba or ptxas, or for want of memory
        return on_host(asked)


def _on_device(asked: Asked) -> tuple[Layout, bool]:
    grid, (lines, columns) = asked.grid, asked.grid.counts
    row_bytes = grid.block_k // 8
    step = max(min(MOST_BYTES // max(columns * grid.block_q * row_bytes, 1), lines), 1)
    kernel = evaluate_kernel(template_of(asked.function), grid.block, asked.dtype)
    numbers = numbers_for(numbers_of(asked.function), asked.dtype)
    states = empty_device((step, columns), _BYTES)
    bits = empty_device((step, columns, grid.block_q, row_bytes), _BYTES)
    evaluated: dict[str, Any] = {}  # of the lines that were evaluated last

    def read(head: int, i: int) -> BlockRow:
        if i % step == 0:
            launch = kernel[(columns, min(step, lines - i)), THREADS]
            launch(numbers, *divmod(head, asked.heads), i, grid.seq, asked.bounds, states, bits)
            evaluated.update(states=to_host(states), bits=None)

        def patterns(chosen: Any) -> list[bytes]:
            if not len(chosen):
                return []
            if evaluated["bits"] is None:
                evaluated["bits"] = to_host(bits)
            return [evaluated["bits"][i % step, j].tobytes() for j in chosen.tolist()]

        line = evaluated["states"][i % step]  # (key blocks,)
        return BlockRow(line != HIDDEN, line == FULL, patterns)

    return from_lines(grid, asked.batches * asked.heads, read, MOST_PATTERNS)


@lru_cache(maxsize=64)
def evaluate_kernel(
    function: Callable[..., Any], block: tuple[int, int], dtype: np.dtype[Any]
) -> Kernel:
    """Return the kernel that evaluates a function for blocks of rows and a multiple of eight columns."""
    (block_q, block_k), in_mod = block, mask_function(function, dtype)

    def evaluate_blocks(numbers, batch, head, first, seq, bounds, states, bits):
        """Fill states and bits.

        Computes: the state of each block, and a bit for each of its elements, the highest bit of a
            byte first
        Source: none
        Grid: (key blocks, query blocks)
        Block: (threads,)
        One thread does: rows of a block
        Shared: none
        Registers: one byte of bits
        Global traffic: writes states and bits once
        Needs: nothing
        """
        j, i, (seq_q, seq_k), (lower, upper) = cuda.blockIdx.x, cuda.blockIdx.y, seq, bounds
        row, col = (first + i) * block_q, j * block_k
        has_any, has_all = False, True
        for r in range(cuda.threadIdx.x, block_q, cuda.blockDim.x):
            for byte in range(block_k // 8):
                visible = 0
                for u in range(8):
                    at_row, at_col = row + r, col + 8 * byte + u
                    visible *= 2
                    if at_row < seq_q and at_col < seq_k:
                        distance, is_seen = at_col - at_row, False
                        if lower <= distance and distance <= upper:
                            is_seen = in_mod(numbers, batch, head, at_row, at_col)
                        if is_seen:
                            visible += 1
                            has_any = True
                        else:
                            has_all = False
                bits[i, j, r, byte] = uint8(visible)
        # Of all threads of the block.
        is_some = cuda.syncthreads_or(int32(has_any))
        is_every = cuda.syncthreads_and(int32(has_all))
        if cuda.threadIdx.x == 0:
            state = PARTIAL if is_some else HIDDEN
            states[i, j] = uint8(FULL if is_every else state)

    pair, arrays = types.UniTuple(int64, 2), (types.Array(uint8, dims, "C") for dims in (2, 4))
    numbers_kind = numbers_type(function, dtype)
    return Kernel(evaluate_blocks, void(numbers_kind, int64, int64, int64, pair, pair, *arrays))
