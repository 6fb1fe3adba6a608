"""Products of two tiles on tensor cores, with fragments in registers: S = Q·Kᵀ, and O += P·V.

Each warp multiplies its own rows of the left tile, in tiles of 16, with all rows of the right tile.  A
fragment of the right tile is read from shared memory once for all rows of the warp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import float32, uint32

from kernels.cuda.attention.flash2_mma.float32_terms import (
    LEFT_TERMS,
    NUMBERS,
    RIGHT_TERMS,
    make_split,
)
from kernels.cuda.attention.flash2_mma.tiles import COLS, DEPTH, HALF, ROWS, MmaLayout
from kernels.cuda.ptx.fragments import DEVICE
from kernels.cuda.ptx.mma import MMA, ldmatrix_x4, ldmatrix_x4_trans
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import make_tile_place
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda

square_place, turned_place = DEVICE.square_place, DEVICE.turned_place
#: Maximum number of steps in one loop; a longer product is several loops, each unrolled by itself.
UNROLLED = 8


#: Maximum number of steps of 16 whose products of terms tensor cores add up by themselves.
TOGETHER = 2
#: Width from which on the products of each pair of terms are summed separately.
WIDE = 128


def steps_together(steps: int) -> int:
    """Return the number of steps that tensor cores sum before a float32 addition."""
    return next(n for n in range(TOGETHER, 0, -1) if steps % n == 0)


class Products(NamedTuple):
    """The functions that :func:`make_products` returns, for a pair of neighbouring tiles of sums.

    Attributes:
        begin: ``begin(part)``: set ``part`` to zero.
        multiply: ``multiply(part, a, first, b)``: add the products of one step to ``part``.
        add: ``add(sums, at, part)``: add ``part`` to ``sums[at + m * stride]`` and the next tile of sums,
            for each tile m of A.
        parts: Pairs of tiles of ``part`` for each tile of A.
    """

    begin: Callable[..., None]
    multiply: Callable[..., None]
    add: Callable[..., None]
    parts: int


@cache
def make_products(
    dtype: str, row_tiles: int, stride: int, apart: bool = False, is_transposed: bool = False
) -> Products:
    """Return functions that add products of multi-term numbers to sums with the accuracy of float32.

    Tensor cores truncate sums towards zero, by up to a unit in the last place.  Over the many products of
    a sum this exceeds float32's own rounding.  Groups of a few products are therefore summed from zero, the
    smaller ones of a step first, and CUDA cores add these small partial sums, rounding to nearest.

    Args:
        dtype: See ``float32_terms.NUMBERS``.
        row_tiles: Row tiles of A: term t of tile m is ``a[first + t * row_tiles + m]``; those of the two
            tiles of B are ``b[2 * t]`` and ``b[2 * t + 1]``, and ``part`` is (parts * 2 * row_tiles, 4)
            float32.
        stride: Distance of the sums of consecutive tiles of A.
        apart: Whether ``part`` has separate tiles for the products of a step, so that none waits for
            another.
        is_transposed: Whether the operands are exchanged: their terms then are, so that the order of sums
            is the same.
    """
    numbers = NUMBERS[dtype]
    mma, terms, zero = MMA[numbers.dtype], numbers.terms, np.float32(0)
    lefts, rights, products = LEFT_TERMS[terms], RIGHT_TERMS[terms], len(LEFT_TERMS[terms])
    if is_transposed:
        lefts, rights = rights, lefts
    own, parts = (2 * row_tiles, products) if apart else (0, 1)
    part_tiles = parts * 2 * row_tiles

    @device_function
    def begin(part):
        for n in range(part_tiles):
            for i in range(4):
                part[n, i] = zero

    @device_function
    def multiply(part, a, first, b):
        for p in range(products):
            left, right = first + lefts[p] * row_tiles, 2 * rights[p]
            for m in range(row_tiles):
                mma(part[p * own + 2 * m], a[left + m], b[right])
                mma(part[p * own + 2 * m + 1], a[left + m], b[right + 1])

    @device_function
    def add(sums, at, part):
        for m in range(row_tiles):
            for half in range(2):
                for i in range(4):
                    found = part[2 * m + half, i]
                    for p in range(1, parts):
                        found += part[p * own + 2 * m + half, i]
                    sums[at + m * stride + half, i] += found

    return Products(begin, multiply, add, parts)


@cache
def make_multiply(
    layout: MmaLayout, width: int, dtype: str, b_rows: int = 0, is_transposed: bool = False
) -> Callable[..., None]:
    """Return ``multiply(s, a, b, q_tile, k_tile, lane, row)``: s = Q·Kᵀ for the warp's rows.

    An element is the same number, bit for bit, whatever the layout, and whatever columns of zeros the width
    adds: the backward pass subtracts from it what the forward pass has made of it.

    ``s`` is (row_tiles * block_k / 8, 4) float32; ``a`` (terms * row_tiles, 4) and ``b`` (terms * 2, 2)
    uint32 are scratch; the tiles are addresses, and ``row`` is the warp's first row in the tile of Q.

    Args:
        layout: Layout of the block.
        width: Width of the tiles.
        dtype: See ``float32_terms.NUMBERS``.
        b_rows: Rows of the tile of K, if more than block_k.
        is_transposed: Whether the product is K·Qᵀ, whose terms are added in the same order.
    """
    numbers, place = NUMBERS[dtype], make_tile_place(device_function, HALF * width)
    mma, terms = MMA[numbers.dtype], numbers.terms
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    below = ROWS * HALF * width  # the swizzle begins anew after eight rows
    a_term, b_term = HALF * layout.block_q * width, HALF * (b_rows or layout.block_k) * width

    steps = width // DEPTH
    parts = next(n for n in range(-(-steps // UNROLLED), steps + 1) if steps % n == 0)

    def make_part(part: int) -> Callable[..., None]:
        first, stop = part * steps // parts, (part + 1) * steps // parts

        @device_function
        def multiply(s, a, b, q_tile, k_tile, lane, row):
            a_row, a_chunk = square_place(lane)
            b_row, b_chunk = turned_place(lane)
            if first == 0:
                for n in range(row_tiles * col_tiles):
                    for i in range(4):
                        s[n, i] = 0
            for step in range(first, stop):
                q_place = q_tile + place(row + a_row, 2 * step + a_chunk)
                k_place = k_tile + place(b_row, 2 * step + b_chunk)
                for m in range(row_tiles):
                    ldmatrix_x4(a[m], q_place + m * below)
                for n in range(col_tiles // 2):  # a pair of tiles from four matrices
                    ldmatrix_x4(b[0], k_place + n * below)
                    for m in range(row_tiles):
                        mma(s[m * col_tiles + 2 * n], a[m], b[0])
                        mma(s[m * col_tiles + 2 * n + 1], a[m], b[1])

        return multiply

    # For wide heads, warps have few tiles of S, and would wait for one product after the other.
    of_terms = make_products(dtype, row_tiles, col_tiles, width > WIDE, is_transposed)
    begin, multiply_step, add, parts_of_terms = of_terms
    part_tiles = parts_of_terms * 2 * row_tiles
    nothing = np.float32(-0.0)  # what is added to that stays as it is, and the compiler knows

    def make_part_of_terms(group: int) -> Callable[..., None]:
        first = group * TOGETHER
        together = min(TOGETHER, steps - first)
        a_tiles = together * terms * row_tiles

        @device_function
        def multiply_terms(s, a, b, q_tile, k_tile, lane, row):
            a_row, a_chunk = square_place(lane)
            b_row, b_chunk = turned_place(lane)
            a_terms = cuda.local.array((a_tiles, 4), uint32)  # of terms (rows, 16 · together) / 32
            part = cuda.local.array((part_tiles, 4), float32)  # (rows, 16) / 32: of few steps
            if first == 0:
                for n in range(row_tiles * col_tiles):
                    for i in range(4):
                        s[n, i] = nothing
            for i in range(together):
                q_place = q_tile + place(row + a_row, 2 * (first + i) + a_chunk)
                for t in range(terms):
                    for m in range(row_tiles):
                        at = (i * terms + t) * row_tiles + m
                        ldmatrix_x4(a_terms[at], q_place + t * a_term + m * below)
            for n in range(col_tiles // 2):
                begin(part)
                for i in range(together):
                    k_place = k_tile + place(b_row, 2 * (first + i) + b_chunk)
                    for t in range(terms):
                        ldmatrix_x4(b[2 * t], k_place + t * b_term + n * below)
                    multiply_step(part, a_terms, i * terms * row_tiles, b)
                add(s, 2 * n, part)

        return multiply_terms

    if terms > 1:
        return _one_after_the_other(make_part_of_terms, -(-steps // TOGETHER))
    return _one_after_the_other(make_part, parts)


def _make_add_step(row_tiles: int, own_tiles: int, width: int, dtype: str) -> Callable[..., None]:
    """Return ``add_step(acc, a, b, v_rows, lane, chunk)``: acc += P·V for the 16 columns of P in ``a``.

    Args:
        row_tiles: Tiles of 16 rows of P.
        own_tiles: Tiles of eight columns of V, from the piece ``chunk`` on.
        width: Width of the tile of V, whose 16 rows are at the address ``v_rows``.
        dtype: "float16" or "bfloat16".
    """
    mma, place = MMA[dtype], make_tile_place(device_function, HALF * width)

    @device_function
    def add_step(acc, a, b, v_rows, lane, chunk):
        row, of_lane = square_place(lane)
        for n in range(own_tiles // 2):
            ldmatrix_x4_trans(b[0], v_rows + place(row, chunk + 2 * n + of_lane))
            for m in range(row_tiles):
                mma(acc[m * own_tiles + 2 * n], a[m], b[0])
                mma(acc[m * own_tiles + 2 * n + 1], a[m], b[1])

    return add_step


@cache
def make_accumulate(
    layout: MmaLayout, width: int, dtype: str, own: int = 0, v_rows: int = 0
) -> Callable[..., None]:
    """Return ``accumulate(acc, s, a, b, v_tile, lane, chunk)``: acc += P·V, where P is the rounded s.

    ``acc`` is (row_tiles * own / 8, 4) float32; the others as for :func:`make_multiply`.

    Args:
        layout: Layout of the block.
        width: Width of the tile of V.
        dtype: See ``float32_terms.NUMBERS``.
        own: Number of its columns to multiply, from the piece ``chunk`` on; all of them when 0.
        v_rows: Rows of the tile of V, if more than block_k.
    """
    numbers = NUMBERS[dtype]
    if numbers.terms > 1:
        return _make_accumulate_terms(layout, width, dtype, own or width, v_rows or layout.block_k)
    pack, row_tiles, col_tiles = PACK[numbers.dtype], layout.row_tiles, layout.block_k // COLS
    add_step = _make_add_step(row_tiles, (own or width) // COLS, width, numbers.dtype)
    below = DEPTH * HALF * width  # the swizzle begins anew after eight rows

    @device_function
    def accumulate(acc, s, a, b, v_tile, lane, chunk):
        for step in range(col_tiles // 2):
            for m in range(row_tiles):
                # Two tiles of accumulators side by side are a tile of A.
                left, right = m * col_tiles + 2 * step, m * col_tiles + 2 * step + 1
                a[m, 0] = pack(s[left, 0], s[left, 1])
                a[m, 1] = pack(s[left, 2], s[left, 3])
                a[m, 2] = pack(s[right, 0], s[right, 1])
                a[m, 3] = pack(s[right, 2], s[right, 3])
            add_step(acc, a, b, v_tile + step * below, lane, chunk)

    return accumulate


@cache
def make_accumulate_stored(
    layout: MmaLayout, depth: int, width: int, dtype: str, own: int
) -> Callable[..., None]:
    """Return ``accumulate_stored(acc, a, b, p_tile, v_tile, lane, row, chunk)``: acc += P·V, P in memory.

    P is the warp's rows, from ``row`` on, of the 16-bit tile at ``p_tile`` in shared memory.

    Args:
        layout: Layout of the block.
        depth: Columns of P and rows of V.
        width: Width of the tile of V.
        dtype: See ``float32_terms.NUMBERS``.  Tiles of terms follow each other.
        own: Number of columns of V to multiply, from the piece ``chunk`` on.
    """
    numbers, p_place = NUMBERS[dtype], make_tile_place(device_function, HALF * depth)
    row_tiles, steps, terms = layout.row_tiles, depth // DEPTH, numbers.terms
    p_below, v_below = ROWS * HALF * depth, DEPTH * HALF * width

    if terms > 1:
        p_term, p_tiles = HALF * layout.block_q * depth, steps * terms * row_tiles
        add_groups = _make_add_groups(row_tiles, steps, width, dtype, own, depth)

        @device_function
        def accumulate_terms(acc, a, b, p_tile, v_tile, lane, row, chunk):
            p = cuda.local.array((p_tiles, 4), uint32)  # of terms (rows, depth) / 32, pairs
            at_row, at_chunk = square_place(lane)
            for step in range(steps):
                p_at = p_tile + p_place(row + at_row, 2 * step + at_chunk)
                for t in range(terms):
                    for m in range(row_tiles):
                        at = (step * terms + t) * row_tiles + m
                        ldmatrix_x4(p[at], p_at + t * p_term + m * p_below)
            add_groups(acc, p, b, v_tile, lane, chunk, 0)

        return accumulate_terms

    add_step = _make_add_step(row_tiles, own // COLS, width, numbers.dtype)

    @device_function
    def accumulate_stored(acc, a, b, p_tile, v_tile, lane, row, chunk):
        at_row, at_chunk = square_place(lane)
        for step in range(steps):
            p_at = p_tile + p_place(row + at_row, 2 * step + at_chunk)
            for m in range(row_tiles):
                ldmatrix_x4(a[m], p_at + m * p_below)
            add_step(acc, a, b, v_tile + step * v_below, lane, chunk)

    return accumulate_stored


#: Number of tiles of accumulators that a warp adds to in turn, because a product waits for the last product
#: of the same tile; and the number if the warp keeps more than MANY tiles, which leaves few registers.
IN_TURN, IN_TURN_OF_MANY, MANY = 8, 4, 16


def _make_add_groups(
    row_tiles: int, steps: int, width: int, dtype: str, own: int, v_rows: int
) -> Callable[..., None]:
    """Return ``add_groups(acc, p, b, v_tile, lane, chunk, 0)``: acc += P·V for numbers of several terms.

    ``p`` is (steps * terms * row_tiles, 4) uint32, with the terms of a step's tiles one after the other.
    One loop over all columns would not be unrolled, and the sums would be in local memory.  Therefore
    groups of columns are processed one after the other.
    """
    terms, place = NUMBERS[dtype].terms, make_tile_place(device_function, HALF * width)
    own_tiles, below, v_term = own // COLS, DEPTH * HALF * width, HALF * v_rows * width
    together = steps_together(steps)
    begin, multiply_step, add, _ = make_products(dtype, row_tiles, own_tiles)
    in_turn = IN_TURN if row_tiles * own_tiles <= MANY else IN_TURN_OF_MANY
    pairs = max(in_turn // (2 * row_tiles), 1)
    while own_tiles // 2 % pairs:
        pairs -= 1
    part_tiles = 2 * row_tiles

    def make_add_group(group: int) -> Callable[..., None]:
        @device_function
        def add_group(acc, p, b, v_tile, lane, chunk, _):
            b_row, b_chunk = square_place(lane)
            part = cuda.local.array((part_tiles, 4), float32)  # (rows, 16) / 32: of few steps
            for first in range(0, steps, together):
                for n in range(group * pairs, (group + 1) * pairs):
                    v_place = v_tile + place(b_row, chunk + 2 * n + b_chunk)
                    begin(part)
                    for i in range(first, first + together):
                        for t in range(terms):
                            ldmatrix_x4_trans(b[2 * t], v_place + t * v_term + i * below)
                        multiply_step(part, p, i * terms * row_tiles, b)
                    add(acc, 2 * n, part)

        return add_group

    return _one_after_the_other(make_add_group, own_tiles // (2 * pairs))


def _make_accumulate_terms(
    layout: MmaLayout, width: int, dtype: str, own: int, v_rows: int
) -> Callable[..., None]:
    """Return the function of :func:`make_accumulate`, for numbers of several terms."""
    numbers = NUMBERS[dtype]
    terms, split = numbers.terms, make_split(numbers.dtype)
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    steps = col_tiles // 2
    add_groups = _make_add_groups(row_tiles, steps, width, dtype, own, v_rows)
    p_tiles = steps * terms * row_tiles

    @device_function
    def accumulate_terms(acc, s, a, b, v_tile, lane, chunk):
        # In the place of s: two tiles of it side by side are a tile of A, of each term.
        p = cuda.local.array((p_tiles, 4), uint32)  # of terms (rows, block_k) / 32, pairs
        for m in range(row_tiles):
            for step in range(steps):
                at = step * terms * row_tiles + m
                for i in range(4):
                    tile, half = m * col_tiles + 2 * step + i // 2, 2 * (i % 2)
                    p[at, i], p[at + row_tiles, i] = split(s[tile, half], s[tile, half + 1])
        add_groups(acc, p, b, v_tile, lane, chunk, 0)

    return accumulate_terms


def _one_after_the_other(
    make_step: Callable[[int], Callable[..., None]], count: int, begin: int = 0
) -> Callable[..., None]:
    """Return an unrolled loop over steps with constant indices, which the compiler would not unroll.

    The function calls its two halves.  Inlining copies everything that a function calls, so a chain in
    which each step calls the next would copy the last step as often as there are steps.

    The arguments are those of a product: accumulators, two arrays of fragments, two tiles (or a tile and
    another array), the lane, and the start of its share.

    Args:
        make_step: Returns the step of a number.
        count: Number of steps.
        begin: Number of the first.
    """
    if count == 1:
        return make_step(begin)
    half = count // 2
    before = _one_after_the_other(make_step, half, begin)
    after = _one_after_the_other(make_step, count - half, begin + half)

    @device_function
    def both(acc, x, y, left, right, lane, first):
        before(acc, x, y, left, right, lane, first)
        after(acc, x, y, left, right, lane, first)

    return both
