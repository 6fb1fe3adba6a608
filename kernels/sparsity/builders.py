"""Builders of block-sparse masks; ``BlockMask`` has them as class methods.

A layout may still contain a pattern twice, or a partial block in which every element is visible.
``BlockMask`` brings the layouts of all builders into canonical form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array, flag, whole
from kernels.scores.visibility import is_visible
from kernels.sparsity.states import (
    FULL,
    HIDDEN,
    PARTIAL,
    BlockGrid,
    Bools,
    Layout,
    canonical,
    check_blocks,
    check_grid,
    combine,
)


def butterfly(seq_q: int, seq_k: int, block_size: Any = 64) -> Layout:
    """Make blocks (i, j) visible if i = j or their indices differ in one bit.

    These are the nonzero blocks of the sum of all butterfly factors, one for each bit.  Of n blocks in a
    row, 1 + log2 n are visible.  If n is not a power of two, the pattern for the next power of two is
    cropped.  If there are more rows than columns, or the reverse, the pattern is stretched along the longer
    side.

    Args:
        seq_q: Number of query rows.
        seq_k: Number of key columns.
        block_size: Rows and columns of a block, or one number for both.  The pattern consists of
            squares whose side is the least common multiple of the two.

    Source: the flat block butterfly of Pixelated Butterfly (Dao et al., 2021), the fixed pattern of
    block-sparse FlashAttention (Dao et al., 2022, section 3.3).
    """
    grid = check_grid(seq_q, seq_k, block_size)
    counts = _squares(grid)
    i, j = (np.arange(count) * min(counts) // max(count, 1) for count in counts)
    bits = i[:, None] ^ j  # (query squares, key squares)
    return _of_squares(grid, bits & (bits - 1) == 0)  # they differ in no bit, or in one


def strided(  # beyond module 5
    seq_q: int,
    seq_k: int,
    stride: int | None = None,
    block_size: Any = 64,
    is_causal: bool = True,
) -> Layout:
    """Make the ``stride`` preceding blocks visible, and those at distances that are multiples of it.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        stride: Stride in blocks; None means the square root of the number of blocks, with which the
            fewest blocks are visited.
        block_size: Rows and columns of a block, or one number for both; see ``butterfly``.
        is_causal: Mask later columns, as in the paper; False applies the pattern in both directions.

    Source: the strided attention of Sparse Transformers (Child et al., 2019), with the patterns of its two
    heads combined, and for blocks instead of elements, because a pattern of single elements would leave no
    block fully masked.
    """
    grid = check_grid(seq_q, seq_k, block_size)
    rows, cols = _squares(grid)
    step = max(math.isqrt(cols), 1) if stride is None else whole("stride", stride, 1)
    step = min(step, rows + cols)  # no two blocks are farther apart
    distance = np.arange(rows)[:, None] - np.arange(cols)  # (query squares, key squares)
    is_causal = flag("is_causal", is_causal)
    near_or_at_stride = _of_squares(grid, (np.abs(distance) <= step) | (distance % step == 0))
    if not is_causal:
        return near_or_at_stride
    return _combined(near_or_at_stride, causal(seq_q, seq_k, block_size), FULL, np.logical_and)


def dilated(  # beyond module 5
    seq_q: int, seq_k: int, block_size: Any = 64, *, dilation: int = 4, heads: int = 1
) -> Layout:
    """Make every ``dilation``-th block visible, starting from a different block in each head.

    In head h, block j of columns is visible to block i of rows if j - i - h is a multiple of ``dilation``.
    Each head sees an evenly spaced sample of the blocks, and ``dilation`` heads together see all of them.
    If there are fewer column blocks than ``dilation``, the dilation is the number of column blocks, so that
    each row block sees one column block.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        block_size: Rows and columns of a block, or one number for both; see ``butterfly``.
        dilation: Distance between visible blocks, in blocks.
        heads: Number of heads with their own pattern.

    Source: the dilated attention of LongNet (Ding et al., 2023, section 3.2) with a single segment, for
    blocks instead of elements.
    """
    grid = check_grid(seq_q, seq_k, block_size, heads)
    rows, cols = _squares(grid)
    step = max(min(whole("dilation", dilation, 1), cols), 1)
    h, i = np.arange(heads)[:, None, None], np.arange(rows)[:, None]
    return _of_squares(grid, (np.arange(cols) - i - h) % step == 0)  # (heads, squares, squares)


def bigbird(  # beyond module 5
    seq_q: int,
    seq_k: int,
    block_size: Any = 64,
    *,
    window: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    heads: int = 1,
    seed: int = 0,
) -> Layout:
    """Make adjacent, global and random blocks visible (BigBird).

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        block_size: Rows and columns of a block, or one number for both; see ``butterfly``.
        window: Number of blocks around the diagonal, including the block on it; must be odd.
        global_blocks: Number of leading rows and columns of blocks that are fully visible.
        random_blocks: Number of further blocks drawn for each row of blocks and each head, without
            replacement.
        heads: Number of heads with their own pattern.
        seed: Seed of the random blocks; global generators are not used.

    Source: BigBird (Zaheer et al., 2020), in its blocked form; the defaults are those of its base model.
    """
    grid = check_grid(seq_q, seq_k, block_size, heads)
    if whole("window", window, 1) % 2 == 0:
        raise ValueError(
            f"window must be odd, as many blocks before the diagonal as after it, got {window}; use "
            f"{window + 1}"
        )
    first = whole("global_blocks", global_blocks, 0)
    counts = _squares(grid)
    drawn = min(whole("random_blocks", random_blocks, 0), counts[1])
    i, j = np.arange(counts[0])[:, None], np.arange(counts[1])
    kept = (np.abs(i - j) <= window // 2) | (i < first) | (j < first)
    kept = np.repeat(kept[None], heads, axis=0)  # (heads, squares, squares)
    # Raw words of PCG64, which NumPy guarantees to be stable across versions.
    words = np.random.PCG64(whole("seed", seed, 0)).random_raw(kept.size).reshape(kept.shape)
    if drawn:
        words >>= np.uint64(1)
        words[kept] = np.iinfo(np.uint64).max  # what is kept already comes last
        least = np.argpartition(words, drawn - 1, axis=2)[:, :, :drawn]
        np.put_along_axis(kept, least, True, axis=2)
    return _of_squares(grid, kept)


def band(seq_q: int, seq_k: int, lower: int, upper: int, block_size: Any = 64) -> Layout:
    """Make columns from ``row + lower`` to ``row + upper``, both inclusive, visible to each row.

    Causal masks and windows are bands; only blocks on an edge of the band are partial.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        lower: Lower bound of column - row; -seq_q or less means no bound.
        upper: Upper bound of column - row; seq_k or more means no bound.
        block_size: Rows and columns of a block, or one number for both.
    """
    grid = check_grid(seq_q, seq_k, block_size)
    # Clipping here does not change the visible columns, and avoids overflow of NumPy's integers.
    lower = min(max(whole("lower", lower), -grid.seq_q), grid.seq_k)
    upper = min(max(whole("upper", upper), -grid.seq_q), grid.seq_k)
    row, col = grid.starts
    # Over a block, col - row takes every value from least to most.
    least = col - np.minimum(row + grid.block_q, grid.seq_q) + 1  # (query blocks, key blocks)
    most = np.minimum(col + grid.block_k, grid.seq_k) - 1 - row
    states = ((most >= lower) & (least <= upper) & (lower <= upper)).astype(np.int32)
    partial = (states == FULL) & ((least < lower) | (most > upper))
    # A pattern depends only on the distance of the block from the diagonal.
    distances, number = np.unique((col - row)[partial], return_inverse=True)
    states[partial] = PARTIAL + number
    r, c = np.arange(grid.block_q)[:, None], np.arange(grid.block_k)
    return _made(grid, states, is_visible(r, c + distances[:, None, None], lower, upper))


def causal(seq_q: int, seq_k: int, block_size: Any = 64, causal_offset: int = 0) -> Layout:
    """Make columns up to ``row + causal_offset`` visible to each row, element by element.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        block_size: Rows and columns of a block, or one number for both.
        causal_offset: seq_k - seq_q aligns the diagonal bottom-right.
    """
    return local(seq_q, seq_k, -1, 0, block_size, causal_offset=causal_offset)


def local(
    seq_q: int,
    seq_k: int,
    left: int,
    right: int | None = None,
    block_size: Any = 64,
    *,
    causal_offset: int = 0,
) -> Layout:
    """Make a window of columns visible to each row, element by element, as ``window_size`` does.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        left: The first visible column is ``row + causal_offset - left``; -1 means no bound.
        right: The last visible column is ``row + causal_offset + right``; -1 means no bound, and None
            means ``left``.
        block_size: Rows and columns of a block, or one number for both.
        causal_offset: Shift of the diagonal; seq_k - seq_q aligns it bottom-right.
    """
    left = whole("left", left, -1)
    right = left if right is None else whole("right", right, -1)
    offset = whole("causal_offset", causal_offset)
    lower = offset - left if left >= 0 else -whole("seq_q", seq_q)
    upper = offset + right if right >= 0 else whole("seq_k", seq_k)
    return band(seq_q, seq_k, lower, upper, block_size)


def local_global(  # beyond module 5
    seq_q: int,
    seq_k: int,
    left: int,
    right: int | None = None,
    global_tokens: int | Sequence[int] = 1,
    block_size: Any = 64,
    *,
    causal_offset: int = 0,
) -> Layout:
    """Make a window and the global tokens visible to each row; a global token sees every column.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        left: The first visible column is ``row + causal_offset - left``; -1 means no bound.
        right: The last visible column is ``row + causal_offset + right``; -1 means no bound, and None
            means ``left``.
        global_tokens: Positions of the global tokens, or the number of leading tokens that are global.
        block_size: Rows and columns of a block, or one number for both.
        causal_offset: Shift of the diagonal; seq_k - seq_q aligns it bottom-right.

    Source: Longformer (Beltagy et al., 2020, section 3.1).
    """
    grid = check_grid(seq_q, seq_k, block_size)
    positions = as_host_array("global_tokens", global_tokens)
    if positions.dtype.kind not in "iu" and positions.size:
        raise TypeError(
            f"global_tokens must be whole numbers, got {positions.dtype}; pass positions or a number"
        )
    if positions.ndim == 0:
        positions = np.arange(min(whole("global_tokens", global_tokens, 0), max(grid.seq)))
    if positions.min(initial=0) < 0 or positions.max(initial=-1) >= max(grid.seq):
        raise ValueError(
            f"global_tokens must be positions from 0 to {max(grid.seq) - 1}, got from "
            f"{positions.min()} to {positions.max()}"
        )
    layout = local(seq_q, seq_k, left, right, block_size, causal_offset=causal_offset)
    chosen = np.isin(np.arange(max(grid.seq)), positions)
    for axis in (0, 1):
        layout = _combined(layout, _lines(grid, chosen, axis), HIDDEN, np.logical_or)
    return layout


def _made(grid: BlockGrid, states: Any, patterns: Any = None) -> Layout:
    return Layout(grid, check_blocks(states, patterns, grid))


def _combined(a: Layout, b: Layout, neutral: int, operation: Any) -> Layout:  # beyond module 5
    """Return ``&`` or ``|`` of two layouts of one grid; see ``combine``."""
    one, other = canonical(a.blocks, a.grid), canonical(b.blocks, b.grid)
    return Layout(a.grid, combine(one, other, neutral, operation))


def _squares(grid: BlockGrid) -> tuple[int, int]:
    """Return the number of squares of a pattern of square blocks along the rows and the columns."""
    side = math.lcm(*grid.block)
    return -(-grid.seq_q // side), -(-grid.seq_k // side)


def _of_squares(grid: BlockGrid, kept: Bools) -> Layout:
    """Return the layout of (…, squares, squares), True keeps; each block is in one square."""
    side = math.lcm(*grid.block)
    row, col = (start // side for start in grid.starts)
    return _made(grid, kept[..., row, col])


def _lines(grid: BlockGrid, chosen: Bools, axis: int) -> Layout:  # beyond module 5
    """Return the layout in which the chosen rows (axis 0) or columns (axis 1) are visible."""
    padded = np.zeros(grid.counts[axis] * grid.block[axis], bool)
    chosen = chosen[: grid.seq[axis]]
    padded[: len(chosen)] = chosen
    kinds, number = np.unique(padded.reshape(-1, grid.block[axis]), axis=0, return_inverse=True)
    states = np.expand_dims(PARTIAL + number.reshape(-1), 1 - axis)
    patterns = np.broadcast_to(np.expand_dims(kinds, 2 - axis), (len(kinds), *grid.block))
    return _made(grid, np.broadcast_to(states, grid.counts), patterns)
