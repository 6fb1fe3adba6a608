"""Builders of block-sparse masks from an array of elements, or a function of row and column.

The elements are processed one row of blocks at a time, so that they are never all in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from kernels.common.arguments import as_host_array, whole
from kernels.scores.mods import check_mod
from kernels.sparsity.states import (
    FULL,
    PARTIAL,
    Blocks,
    Bools,
    Grid,
    Layout,
    check_grid,
    pack,
    unpack,
)


def from_dense(mask: Any, block_size: Any = 64) -> Layout:
    """Build a mask from an array of elements.

    Args:
        mask: (seq_q, seq_k) or (heads, seq_q, seq_k) bool, True keeps; any strides.
        block_size: Rows and columns of a block, or one number for both.

    Raises:
        TypeError: If it is not boolean.
        ValueError: If it does not have two or three dimensions.
    """
    array = as_host_array("mask", mask)
    if array.dtype != bool:
        raise TypeError(f"mask must be boolean (True keeps), got {array.dtype}; pass mask != 0")
    if array.ndim not in (2, 3) or (array.ndim == 3 and not len(array)):
        raise ValueError(
            f"mask must have shape (seq_q, seq_k) or (heads, seq_q, seq_k), got {array.shape}: the "
            "lists of blocks are those of all entries of a batch; give one entry's, or attn_mask"
        )
    by_head = array[None] if array.ndim == 2 else array
    grid = check_grid(array.shape[-2], array.shape[-1], block_size)

    def fill(head: int, row: int, rows: int, out: Bools) -> None:
        out[:rows, : grid.seq_k] = by_head[head, row : row + rows]

    return from_strips(grid, len(by_head), fill)[0]


def from_mask_mod(
    mask_mod: Callable[..., Any],
    seq_q: int,
    seq_k: int,
    block_size: Any = 64,
    heads: int = 1,
) -> Layout:
    """Build a mask from a function, which is called once for every element.

    It is compiled with numba if possible, and otherwise runs as Python, a thousand times slower.

    Args:
        mask_mod: ``(batch, head, row, col) -> bool``, True keeps; the batch is always 0, because all
            batches have the same mask.
        seq_q: Query rows.
        seq_k: Key columns.
        block_size: Rows and columns of a block, or one number for both.
        heads: Number of heads; one applies to all.

    Raises:
        TypeError: If it is not a function of these four arguments.
    """
    if not callable(mask_mod):
        raise TypeError(
            f"mask_mod must be a function of (batch, head, row, col), got {type(mask_mod).__name__}"
        )
    check_mod("mask_mod", mask_mod, "(batch, head, row, col)")
    grid = check_grid(seq_q, seq_k, block_size)
    evaluate, mod = _evaluator(mask_mod)

    def fill(head: int, row: int, rows: int, out: Bools) -> None:
        evaluate(mod, head, row, rows, grid.seq_k, out)

    return from_strips(grid, whole("heads", heads, 1), fill)[0]


def from_strips(
    grid: Grid,
    heads: int,
    fill: Callable[[int, int, int, Bools], None],
    most_patterns: int | None = None,
) -> tuple[Layout, bool]:
    """Return the layout of elements that are produced one row of blocks at a time, and whether it is exact.

    Args:
        grid: The blocks.
        heads: Number of heads.
        fill: ``fill(head, row, rows, out)`` writes the visibility of ``rows`` rows from ``row`` on to the
            beginning of ``out``, (block_q, key blocks · block_k).
        most_patterns: Maximum number of patterns; with more, partial blocks are full and the layout is not
            exact.
    """
    is_exact = True
    states = np.zeros((heads, *grid.counts), np.int32)
    numbers: dict[bytes, int] = {}  # bits of a pattern → state
    strip = np.zeros((grid.block_q, grid.counts[1] * grid.block_k), bool)
    for head, i in np.ndindex(*states.shape[:2]):
        row = i * grid.block_q
        rows = min(grid.block_q, grid.seq_q - row)
        strip[rows:] = False
        fill(head, row, rows, strip)
        some: Any = strip.any(axis=0)  # (key blocks · block_k,)
        every: Any = strip[:rows].all(axis=0)
        line = states[head, i]  # (key blocks,)
        line[some.reshape(-1, grid.block_k).any(axis=1)] = FULL
        if not is_exact:
            continue
        partial = np.flatnonzero((line == FULL) & ~every.reshape(-1, grid.block_k).all(axis=1))
        blocks = strip.reshape(grid.block_q, grid.counts[1], grid.block_k)[:, partial].swapaxes(
            0, 1
        )
        line[partial] = [numbers.setdefault(key, PARTIAL + len(numbers)) for key in pack(blocks)]
        if most_patterns is not None and len(numbers) > most_patterns:
            is_exact = False
            states[states >= PARTIAL] = FULL
            numbers.clear()
    return Layout(grid, Blocks(states, unpack(numbers, grid))), is_exact


def _evaluate(mod: Any, head: int, row: int, rows: int, cols: int, out: Bools) -> None:
    """Write the results of a ``mask_mod`` for the rows from ``row`` on, compiled or as plain Python."""
    for r in range(rows):
        for c in range(cols):
            out[r, c] = bool(mod(0, head, row + r, c))


_compiled = numba.njit(_evaluate)


def _evaluator(mask_mod: Callable[..., Any]) -> tuple[Callable[..., None], Any]:
    """Return ``_evaluate`` and its function argument, both compiled if numba can."""
    mod: Any = mask_mod
    if isinstance(mod, FunctionType):
        # An out-of-bounds index into an array is an error, as in Python.
        mod = numba.njit(boundscheck=True)(mod)
    if isinstance(mod, Dispatcher):
        try:
            _compiled(
                mod, 0, 0, 0, 0, np.zeros((0, 0), bool)
            )  # compiles without evaluating an element
            return _compiled, mod
        except Exception:  # numba may raise any error; the function then runs as Python
            pass
    return _evaluate, mask_mod
