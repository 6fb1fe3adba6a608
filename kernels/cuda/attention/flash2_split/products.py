"""Products of float32 numbers on float16 tensor cores, each number a sum of two float16 terms.

A float16 has 11 bits of significand, as many as TF32, and tensor cores multiply it at twice the rate.  Two
of them have 22, and the sign of the second adds one: x = high + low.  The three larger parts of a product,

    x·y ≈ high·high' + high·low' + low·high'

omit 2⁻²² of the product, less than float32 sums lose.  Numbers are scaled first (``arithmetic``); the error
of a second term is then at most 2⁻²⁵, that is 2⁻³⁹ of the largest number.

The terms of a tile are two tiles in shared memory, one after the other, and those of an operand are two
operands in global memory: the second begins where the rows of the first end.

Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the
FP32 theoretical peak performance", 2022; there the second term has its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.attention.flash2_mma.products import (
    make_load_left,
    make_load_right,
    one_after_the_other,
)
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    DEPTH,
    HALF,
    ROWS,
    MmaKeyLayout,
    MmaLayout,
    make_copy_tile,
)
from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.ptx.copies import st_shared
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.mma import MMA
from kernels.cuda.ptx.numbers import PACK, UNPACK
from kernels.cuda.ptx.swizzle import make_tile_place
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint32

mma, pack, unpack = MMA["float16"], PACK["float16"], UNPACK["float16"]
#: Number of terms, and those of the left and of the right operand whose products are added.  Smaller
#: products come first, because tensor cores truncate the bits that do not fit the sum so far.
TERMS, LEFT, RIGHT = 2, (1, 0, 0), (0, 1, 0)
#: Fragments of two tiles of B, of each term.
B_TILES = 2 * TERMS
_ZERO = np.float32(0)
#: Maximum number of steps of 16 whose products of terms tensor cores add up by themselves.
TOGETHER = 2
#: Width from which on the products of each pair of terms are summed separately.
WIDE = 128
#: Number of tiles of accumulators that a warp adds to in turn, because a product waits for the last product
#: of the same tile; and the number if the warp keeps more than MANY tiles, which leaves few registers.
IN_TURN, IN_TURN_OF_MANY, MANY = 8, 4, 16


@device_function
def split(x, y):
    """Return two pairs of terms whose sum is the pair of float32, the larger terms first.

    If a number is not finite, its second term is 0.
    """
    high = pack(x, y)
    high_x, high_y = unpack(high)
    low_x, low_y = x - high_x, y - high_y
    # Infinity less infinity is NaN.
    low_x = low_x if low_x == low_x else _ZERO
    low_y = low_y if low_y == low_y else _ZERO
    return high, pack(low_x, low_y)


@cache
def make_copy_terms(threads: int, rows: int, width: int) -> Callable[..., None]:
    """Return the function of ``tiles.make_copy_tile`` for both terms of an operand."""
    copy = make_copy_tile(threads, rows, width, vectors=True)

    @device_function
    def copy_terms(thread, source, span, target):
        b, h, first, stop = span
        for t in range(TERMS):
            seq = t * source.shape[2]
            of_term = HeadRows(b, h, first + seq, stop + seq)
            copy(thread, source, of_term, target + t * (rows * HALF * width))

    return copy_terms


@cache
def make_keep_terms(layout: MmaLayout, rows: int, width: int) -> Callable[..., None]:
    """Return the function of ``tiles.make_keep_tile`` for terms, in tiles of ``rows`` rows."""
    place = make_tile_place(device_function, HALF * width)
    row_tiles, col_tiles, term = layout.row_tiles, layout.block_k // COLS, HALF * rows * width

    @device_function
    def keep_terms(s, tile, share):
        own_row, own_byte = share.row + lane_row(share.lane), HALF * lane_col(share.lane)
        for m in range(row_tiles):
            for n in range(col_tiles):
                for half in range(2):
                    i, at = m * col_tiles + n, own_row + m * ROWS + 8 * half
                    to = tile + place(at, share.chunk + n) + own_byte
                    high, low = split(s[i, 2 * half], s[i, 2 * half + 1])
                    st_shared(to, high)
                    st_shared(to + term, low)

    return keep_terms


def _make_add_steps(
    row_tiles: int, stride: int, together: int, load_right: Any, term: int,
    *, apart: bool = False, is_transposed: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return ``add_steps(sums, n, a, first, tile, step, share)``: add products of ``together`` steps.

    The sums are those of the two tiles of pair ``n`` of B: ``sums[2 * n + m * stride]`` and the next one,
    for each tile m of A.  Term t of tile m of A is ``a[first + t * row_tiles + m]``; later steps follow.
    ``load_right`` loads B from ``tile``, where the second term begins ``term`` bytes later.

    Tensor cores truncate sums towards zero, by up to a unit in the last place.  Over the many products of
    a sum this exceeds float32's own rounding.  Groups of a few products are therefore summed from zero, the
    smaller ones of a step first, and CUDA cores add these small partial sums, rounding to nearest.  If
    ``apart``, the products of a step have separate partial sums, so that none waits for another.  The terms
    of transposed operands are exchanged, for the same order of sums.
    """
    lefts, rights = (RIGHT, LEFT) if is_transposed else (LEFT, RIGHT)
    products, a_step = len(LEFT), TERMS * row_tiles
    pair, parts = (2 * row_tiles, products) if apart else (0, 1)
    part_tiles = parts * 2 * row_tiles

    @device_function
    def add_steps(sums, n, a, first, tile, step, share):
        b = cuda.local.array((B_TILES, 2), uint32)  # both terms of a tile (16, 16) of B
        part = cuda.local.array((part_tiles, 4), float32)  # (rows, 16) / 32: partial sums
        set_all(part, _ZERO)
        for i in range(together):
            for t in range(TERMS):
                load_right(b, 2 * t, tile + t * term, step + i, n, share)
            for p in range(products):
                left, right = first + i * a_step + lefts[p] * row_tiles, 2 * rights[p]
                for m in range(row_tiles):
                    mma(part[p * pair + 2 * m], a[left + m], b[right])
                    mma(part[p * pair + 2 * m + 1], a[left + m], b[right + 1])
        for m in range(row_tiles):
            for half in range(2):
                for i in range(4):
                    total = part[2 * m + half, i]
                    for p in range(1, parts):
                        total += part[p * pair + 2 * m + half, i]
                    sums[2 * n + m * stride + half, i] += total

    return add_steps


@cache
def make_multiply_terms(
    layout: MmaLayout, width: int, b_rows: int = 0, is_transposed: bool = False
) -> Callable[..., None]:
    """Return the function of ``flash2_mma.products.make_multiply`` for tiles of terms."""
    row_tiles, col_tiles, steps = layout.row_tiles, layout.block_k // COLS, width // DEPTH
    load_q, load_k = make_load_left(row_tiles, width), make_load_right(width, is_transposed=True)
    a_term, b_term = HALF * layout.block_q * width, HALF * (b_rows or layout.block_k) * width
    # For wide heads, warps have few tiles of S, and would wait for one product after the other.
    kind = {"apart": width > WIDE, "is_transposed": is_transposed}
    nothing = np.float32(-0.0)  # what is added to that stays as it is, and the compiler knows

    def make_part(group: int) -> Callable[..., None]:
        first = group * TOGETHER
        together = min(TOGETHER, steps - first)
        a_tiles = together * TERMS * row_tiles
        add_steps = _make_add_steps(row_tiles, col_tiles, together, load_k, b_term, **kind)

        @device_function
        def multiply_terms(s, q_tile, k_tile, share):
            # A lane holds 1/32 of the terms of its warp's tile (rows, 16 · together).
            a = cuda.local.array((a_tiles, 4), uint32)
            if first == 0:
                set_all(s, nothing)
            for i in range(together):
                for t in range(TERMS):
                    at = (i * TERMS + t) * row_tiles
                    load_q(a, at, q_tile + t * a_term, first + i, share)
            for n in range(col_tiles // 2):
                add_steps(s, n, a, 0, k_tile, first, share)

        return multiply_terms

    return one_after_the_other(make_part, -(-steps // TOGETHER))


def _make_add_groups(
    row_tiles: int, steps: int, width: int, columns: int, v_rows: int
) -> Callable[..., None]:
    """Return ``add_groups(acc, p, v_tile, share)``: acc += P·V.

    ``p`` is (steps * TERMS * row_tiles, 4) uint32, with the terms of a step's tiles one after the other.
    One loop over all columns would not be unrolled, and the sums would be in local memory.  Therefore
    groups of columns are processed one after the other.
    """
    own_tiles, v_term, load_v = columns // COLS, HALF * v_rows * width, make_load_right(width)
    together = math.gcd(steps, TOGETHER)  # in one sum
    add_steps = _make_add_steps(row_tiles, own_tiles, together, load_v, v_term)
    in_turn = IN_TURN if row_tiles * own_tiles <= MANY else IN_TURN_OF_MANY
    pairs = max(in_turn // (2 * row_tiles), 1)
    while own_tiles // 2 % pairs:
        pairs -= 1

    def make_add_group(group: int) -> Callable[..., None]:
        @device_function
        def add_group(acc, p, v_tile, share):
            for first in range(0, steps, together):
                for n in range(group * pairs, (group + 1) * pairs):
                    add_steps(acc, n, p, first * TERMS * row_tiles, v_tile, first, share)

        return add_group

    return one_after_the_other(make_add_group, own_tiles // (2 * pairs))


@cache
def make_accumulate_terms(
    layout: MmaLayout, width: int, columns: int = 0, b_rows: int = 0
) -> Callable[..., None]:
    """Return the function of ``flash2_mma.products.make_accumulate`` for terms."""
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    steps, v_rows = col_tiles // 2, b_rows or layout.block_k
    add_groups = _make_add_groups(row_tiles, steps, width, columns or width, v_rows)
    p_tiles = steps * TERMS * row_tiles

    @device_function
    def accumulate_terms(acc, s, v_tile, share):
        # A lane holds 1/32 of the terms of P (rows, block_k), two terms in a register.  Two neighbouring
        # tiles of s become a tile of first terms and a tile of second terms.
        p = cuda.local.array((p_tiles, 4), uint32)
        for m in range(row_tiles):
            for step in range(steps):
                at = step * TERMS * row_tiles + m
                for i in range(4):
                    tile, half = m * col_tiles + 2 * step + i // 2, 2 * (i % 2)
                    p[at, i], p[at + row_tiles, i] = split(s[tile, half], s[tile, half + 1])
        add_groups(acc, p, v_tile, share)

    return accumulate_terms


@cache
def make_stored_terms(
    layout: MmaLayout, depth: int, width: int, columns: int
) -> Callable[..., None]:
    """Return the function of ``flash2_mma.products.make_accumulate_stored`` for tiles of terms."""
    row_tiles, steps, term = layout.row_tiles, depth // DEPTH, HALF * layout.block_q * depth
    add_groups = _make_add_groups(row_tiles, steps, width, columns, depth)
    load_p, p_tiles = make_load_left(row_tiles, depth), steps * TERMS * row_tiles

    @device_function
    def stored_terms(acc, p_tile, v_tile, share):
        p = cuda.local.array((p_tiles, 4), uint32)  # terms of (rows, depth), two in a register
        for step in range(steps):
            for t in range(TERMS):
                load_p(p, (step * TERMS + t) * row_tiles, p_tile + t * term, step, share)
        add_groups(acc, p, v_tile, share)

    return stored_terms


@cache
def make_transposed_terms(
    layout: MmaKeyLayout, width: int, row_tiles: int, own_tiles: int
) -> Callable[..., None]:
    """Return the function of ``flash2_mma.products.make_accumulate_transposed`` for tiles of terms."""
    ds_term, k_term = (HALF * layout.block_k * size for size in (layout.block_q, width))
    load_ds = make_load_left(row_tiles, layout.block_q, is_transposed=True)
    load_k, steps = make_load_right(width), layout.block_k // DEPTH
    together = math.gcd(steps, TOGETHER)  # in one sum
    add_steps = _make_add_steps(row_tiles, own_tiles, together, load_k, k_term)
    a_tiles = together * TERMS * row_tiles

    @device_function
    def transposed_terms(acc, ds_tile, k_tile, share):
        a = cuda.local.array((a_tiles, 4), uint32)  # the terms of each step, (16 row_tiles, 16)
        for first in range(0, steps, together):
            for i in range(together):
                for t in range(TERMS):
                    at = (i * TERMS + t) * row_tiles
                    load_ds(a, at, ds_tile + t * ds_term, first + i, share)
            for n in range(own_tiles // 2):
                add_steps(acc, n, a, 0, k_tile, first, share)

    return transposed_terms
