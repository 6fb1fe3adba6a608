"""Builders of block-sparse masks from an array of elements, or a function of row and column.

The elements are processed one row of blocks at a time, so that they are never all in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, whole
from kernels.scores.derivatives import kinds_of
from kernels.scores.mods import as_mask_mod
from kernels.scores.templates import numbers_of, template_of
from kernels.sparsity.states import (
    FULL,
    PARTIAL,
    BlockGrid,
    Blocks,
    Bools,
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
    """Build a mask from a function, which is evaluated once for every element.

    It is compiled with numba if possible, and otherwise runs as Python, thousands of times slower.  A
    function of the same source that captures other numbers is not compiled again.

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
    mod: Any = as_mask_mod(mask_mod)
    grid = check_grid(seq_q, seq_k, block_size)
    evaluate = compiled_fill(mod) or partial(_fill, lambda numbers, *place: mod(*place), ())
    bounds = -grid.seq_q, grid.seq_k

    def fill(head: int, row: int, rows: int, out: Bools) -> None:
        evaluate(0, head, row, rows, grid.seq_k, bounds, out)

    return from_strips(grid, whole("heads", heads, 1), fill)[0]


def from_strips(
    grid: BlockGrid,
    heads: int,
    fill: Callable[[int, int, int, Bools], None],
    most_patterns: int | None = None,
) -> tuple[Layout, bool]:
    """Return the layout of elements that are produced one row of blocks at a time, and whether it is exact.

    ``fill(head, row, rows, out)`` writes the visibility of ``rows`` rows from ``row`` on to the
    beginning of ``out``, (block_q, key blocks · block_k); see :func:`from_lines` for the rest.
    """
    strip = np.zeros((grid.block_q, grid.counts[1] * grid.block_k), bool)
    blocks = strip.reshape(grid.block_q, grid.counts[1], grid.block_k)

    def read(head: int, i: int) -> BlockRow:
        row = i * grid.block_q
        rows = min(grid.block_q, grid.seq_q - row)
        strip[rows:] = False
        fill(head, row, rows, strip)
        some: Any = strip.any(axis=0)  # (key blocks · block_k,)
        every: Any = strip[:rows].all(axis=0)
        return BlockRow(
            some.reshape(-1, grid.block_k).any(axis=1),
            every.reshape(-1, grid.block_k).all(axis=1),
            lambda chosen: pack(blocks[:, chosen].swapaxes(0, 1)),
        )

    return from_lines(grid, heads, read, most_patterns)


class BlockRow(NamedTuple):
    """The elements of one row of mask blocks."""

    some: Bools  #: (key blocks,) bool: whether any element is visible.
    #: (key blocks,) bool: whether all elements are; False is allowed for a short last block.
    every: Bools
    #: Returns the packed bits of the blocks with these indices, see ``states.pack``.
    patterns: Callable[[npt.NDArray[np.intp]], list[bytes]]


def from_lines(
    grid: BlockGrid,
    heads: int,
    read: Callable[[int, int], BlockRow],
    most_patterns: int | None = None,
) -> tuple[Layout, bool]:
    """Return the layout of rows of blocks, and whether it is exact.

    ``read(head, i)`` returns row ``i`` of the blocks, in order.  With more than ``most_patterns``
    patterns, partial blocks are full and the layout is not exact.
    """
    is_exact = True
    states = np.zeros((heads, *grid.counts), np.int32)
    numbers: dict[bytes, int] = {}  # bits of a pattern → state
    for head, i in np.ndindex(*states.shape[:2]):
        some, every, patterns = read(head, i)
        line = states[head, i]  # (key blocks,)
        line[some] = FULL
        if not is_exact:
            continue
        chosen = np.flatnonzero(some & ~every)
        line[chosen] = [numbers.setdefault(key, PARTIAL + len(numbers)) for key in patterns(chosen)]
        if most_patterns is not None and len(numbers) > most_patterns:
            is_exact = False
            states[states >= PARTIAL] = FULL
            numbers.clear()
    return Layout(grid, Blocks(states, unpack(numbers, grid))), is_exact


def _fill(
    mod: Any, numbers: Any, batch: int, head: int, row: int, rows: int, seq_k: int,
    bounds: tuple[int, int], out: Bools,
) -> None:  # fmt: skip
    """Write the results of a ``mask_mod`` for ``rows`` rows from ``row`` on; False out of bounds.

    ``mod`` takes the numbers before the indices.
    """
    lower, upper = bounds
    for r in range(rows):
        line = out[r]  # (key blocks · block_k,)
        first = min(max(row + r + lower, 0), seq_k)
        stop = max(min(row + r + upper + 1, seq_k), first)
        line[:first] = False
        line[stop:] = False
        for col in range(first, stop):
            line[col] = bool(mod(numbers, batch, head, row + r, col))


_compiled_fill = numba.njit(error_model="numpy")(_fill)


def compiled_fill(
    mask_mod: Callable[..., Any], error_model: Literal["python", "numpy"] = "python"
) -> Callable[..., None] | None:
    """Return a compiled function that evaluates a ``mask_mod``, or None if numba cannot compile it.

    It is ``fill(batch, head, row, rows, seq_k, (lower, upper), out)``, which writes the results for
    ``rows`` rows from ``row`` on, for the columns from row + lower to row + upper; others are False.
    A division by zero raises in the error model "python", but not in "numpy".
    """
    try:
        mod = compiled_mod(template_of(mask_mod), error_model)
        fill = partial(_compiled_fill, mod, numbers_of(mask_mod))
        fill(0, 0, 0, 0, 0, (0, 0), np.zeros((0, 0), bool))  # compiles, and evaluates no element
    except Exception:  # numba may raise any error
        return None
    return fill


@lru_cache(maxsize=64)
def compiled_mod(template: Any, error_model: Literal["python", "numpy"]) -> Any:
    """Return the compiled function of numbers and the arguments of a user function.

    Each template is compiled once.  A callable that is no function raises a TypeError.
    """
    mod = template
    if not hasattr(mod, "py_func"):
        # An out-of-bounds index into an array is an error, as in Python.
        mod = numba.njit(error_model=error_model, boundscheck=True)(mod)
    return mod if kinds_of(template) else numba.njit(lambda numbers, *args: mod(*args))
