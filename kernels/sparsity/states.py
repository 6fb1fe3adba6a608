"""The data of a block-sparse mask: states of blocks and patterns of elements; checks, & and |."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, shown, whole
from kernels.common.geometry import ceil_div

#: States of a block; from ``PARTIAL`` on it has the pattern with index state - PARTIAL.
HIDDEN, FULL, PARTIAL = 0, 1, 2

#: Sides of a block are multiples of this, like those of kernels' tiles.
SIDE = 16
#: Maximum number of blocks of one head, whose states take a gigabyte.
MOST_BLOCKS = 2**28

States = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class BlockGrid(NamedTuple):
    """The scores of one head, divided into mask blocks; the last block of each side may be smaller."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int

    @property
    def seq(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.seq_q, self.seq_k

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.block_q, self.block_k

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of blocks along the rows and the columns."""
        return ceil_div(self.seq_q, self.block_q), ceil_div(self.seq_k, self.block_k)

    @property
    def starts(self) -> tuple[Any, Any]:
        """First row of each block, (query blocks, 1), and first column, (key blocks,)."""
        rows, cols = self.counts
        return np.arange(rows)[:, None] * self.block_q, np.arange(cols) * self.block_k


class Blocks(NamedTuple):
    """The arrays of a block mask."""

    states: Any  #: (heads, query blocks, key blocks), see ``HIDDEN``, ``FULL`` and ``PARTIAL``.
    patterns: Any  #: (count, block_q, block_k), True keeps; count is 0 if no block is partial.


class Layout(NamedTuple):
    """A grid of mask blocks, and the state of each block."""

    grid: BlockGrid
    blocks: Blocks


def check_grid(seq_q: Any, seq_k: Any, block_size: Any, heads: Any = 1) -> BlockGrid:
    """Return lengths and a block size, one number or (rows, columns), as a grid of so many heads.

    A number that is not whole raises a TypeError; a negative length, a side that is not a positive
    multiple of ``SIDE``, or too many blocks of all heads, a ValueError.
    """
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size,) * 2
    if len(pair) != 2:
        raise TypeError(
            f"block_size must be one number or (rows, columns), got {shown(block_size)}; pass 64 or "
            "(64, 128)"
        )
    sides = [whole("block_size", side, 1) for side in pair]
    if any(side % SIDE for side in sides):
        raise ValueError(
            f"block_size must be a multiple of {SIDE}, as the tiles of kernels are, got {block_size}; "
            f"the next is {tuple(ceil_div(side, SIDE) * SIDE for side in sides)}"
        )
    grid = BlockGrid(whole("seq_q", seq_q, 0), whole("seq_k", seq_k, 0), *sides)
    blocks = whole("heads", heads, 1) * max(math.prod(grid.counts), 1)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"{grid.seq_q} rows and {grid.seq_k} columns in blocks of {grid.block}, with heads={heads}, "
            f"are {blocks} blocks, more than {MOST_BLOCKS}; use larger blocks or fewer heads, or "
            "is_causal and window_size, which need none"
        )
    return grid


def check_blocks(states: Any, patterns: Any, grid: BlockGrid) -> Blocks:
    """Return states as (heads, query blocks, key blocks) int32, and patterns.

    Other dtypes than whole numbers and booleans raise a TypeError; a missing state of a block, or
    pattern of a state, a ValueError.
    """
    states = as_host_array("states", states)
    if states.dtype.kind not in "biu":
        raise TypeError(
            f"states must be whole numbers (0 hidden, 1 full, 2 and more partial) or booleans, got "
            f"{states.dtype}; convert them"
        )
    if states.ndim == 2:
        states = states[None]
    if states.ndim != 3 or states.shape[1:] != grid.counts or not len(states):
        raise ValueError(
            f"states must have shape (heads, {grid.counts[0]}, {grid.counts[1]}), one for each block of "
            f"{grid.block_q} rows and {grid.block_k} columns in {grid.seq_q} rows and {grid.seq_k} "
            f"columns, the last ones short; got {states.shape}"
        )
    patterns = np.zeros((0, *grid.block), bool) if patterns is None else patterns
    patterns = as_host_array("patterns", patterns)
    if patterns.dtype != bool:
        raise TypeError(
            f"patterns must be boolean (True keeps), got {patterns.dtype}; pass patterns != 0"
        )
    if patterns.ndim != 3 or patterns.shape[1:] != grid.block:
        raise ValueError(
            f"patterns must have shape (count, {grid.block_q}, {grid.block_k}), (count, block_q, "
            f"block_k), got {patterns.shape}"
        )
    least, most = states.min(initial=HIDDEN), states.max(initial=FULL)
    if least < HIDDEN or most >= PARTIAL + len(patterns):
        raise ValueError(
            f"states must be from 0 to {PARTIAL + len(patterns) - 1}: 0 hidden, 1 full, 2 and more one "
            f"of the {len(patterns)} patterns; got from {least} to {most}"
        )
    return Blocks(states.astype(np.int32), patterns)


def canonical(blocks: Blocks, grid: BlockGrid) -> Blocks:
    """Return the canonical form, in which equal masks have equal arrays, contiguous and not shared.

    Patterns are unique, used, sorted by their bits, and False beyond the last row and column; a block in
    which every element (or none) is kept is full (or hidden).
    """
    states, patterns = blocks
    partial = states >= PARTIAL  # (heads, query blocks, key blocks)
    short_q, short_k = grid.seq_q % grid.block_q, grid.seq_k % grid.block_k
    cut = np.zeros(grid.counts, np.int64)  # 2: rows of a block are cut off, 1: columns, 3: both
    cut[-1:] += 2 * bool(short_q)
    cut[:, -1:] += bool(short_k)
    code = (states[partial] - PARTIAL) * 4 + np.broadcast_to(cut, states.shape)[partial]
    used = np.zeros(4 * len(patterns), bool)
    used[code] = True
    codes = np.flatnonzero(used)  # (uses,)
    own = patterns[codes // 4]  # (uses, block_q, block_k)
    by_row, by_col = codes & 2 > 0, codes & 1 > 0
    own[by_row, short_q:] = False
    own[by_col, :, short_k:] = False
    area = np.where(by_row, short_q, grid.block_q) * np.where(by_col, short_k, grid.block_k)
    count = np.count_nonzero(own, axis=(1, 2))  # (uses,)
    keys = pack(own)
    split = (count > 0) & (count < area)
    distinct = sorted({key for key, is_split in zip(keys, split, strict=True) if is_split})
    numbers = {key: PARTIAL + number for number, key in enumerate(distinct)}
    becomes = np.zeros(4 * len(patterns), np.int32)
    becomes[codes] = [numbers.get(key, HIDDEN) for key in keys]
    becomes[codes[count == area]] = FULL
    out = np.array(states, np.int32, order="C")
    out[partial] = becomes[code]
    return Blocks(out, unpack(distinct, grid))


def pack(patterns: Bools) -> list[bytes]:
    """Return the bits of each pattern of (count, block_q, block_k), eight a byte."""
    flat = patterns.reshape(len(patterns), patterns.shape[1] * patterns.shape[2])
    return [line.tobytes() for line in np.packbits(flat, axis=1)]


def unpack(keys: Iterable[bytes], grid: BlockGrid) -> Bools:
    """Return the patterns of bits, (count, block_q, block_k)."""
    bits = np.unpackbits(np.frombuffer(b"".join(keys), np.uint8))
    return bits.view(bool).reshape(-1, *grid.block)


def combine(a: Blocks, b: Blocks, neutral: int, operation: Any) -> Blocks:
    """Return the intersection or union of two masks, block by block; one head broadcasts to several.

    ``neutral`` is the neutral state, ``FULL`` for ``&`` and ``HIDDEN`` for ``|``, and the opposite
    state dominates; ``operation`` is that on elements, ``np.logical_and`` or ``np.logical_or``.
    """
    shift = len(a.patterns)
    b_states = np.where(b.states >= PARTIAL, b.states + shift, b.states)
    winner = HIDDEN + FULL - neutral
    states = np.where(a.states == neutral, b_states, a.states)  # (heads, query blocks, key blocks)
    states[(a.states == winner) | (b.states == winner)] = winner
    both = (a.states >= PARTIAL) & (b.states >= PARTIAL)
    one, other = (
        np.broadcast_to(mask.states, both.shape)[both].astype(np.int64) - PARTIAL for mask in (a, b)
    )
    base = max(len(b.patterns), 1)
    pairs, number = np.unique(one * base + other, return_inverse=True)
    states[both] = PARTIAL + shift + len(b.patterns) + number
    new = operation(a.patterns[pairs // base], b.patterns[pairs % base])  # (pairs, …)
    return Blocks(states, np.concatenate([a.patterns, b.patterns, new]))


def shows(blocks: Blocks, grid: BlockGrid, head: Any, row: Any, col: Any) -> Bools:
    """Tell whether elements of a mask are visible, for arrays of whole numbers that broadcast."""
    states, patterns = blocks
    own = states[head % len(states), row // grid.block_q, col // grid.block_k]
    seen = own == FULL
    if len(patterns):
        kept = patterns[np.maximum(own - PARTIAL, 0), row % grid.block_q, col % grid.block_k]
        seen = seen | ((own >= PARTIAL) & kept)
    return seen


def stack(masks: Iterable[Blocks]) -> Blocks:
    """Concatenate the heads of masks."""
    states, patterns, shift = [], [], 0
    for mask in masks:
        states.append(np.where(mask.states >= PARTIAL, mask.states + shift, mask.states))
        patterns.append(mask.patterns)
        shift += len(mask.patterns)
    return Blocks(np.concatenate(states), np.concatenate(patterns))
