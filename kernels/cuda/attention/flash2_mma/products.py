"""Products of two tiles on tensor cores, with fragments in registers: S = Q·Kᵀ, and O += P·V.

Each warp multiplies its own rows of the left tile, in tiles of 16, with all rows of the right tile.  A
fragment of the right tile is read from shared memory once for all rows of the warp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.attention.flash2_mma.tiles import COLS, DEPTH, HALF, ROWS, MmaKeyLayout, MmaLayout
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.ptx.fragments import square_place, turned_place
from kernels.cuda.ptx.mma import MMA, ldmatrix_x4, ldmatrix_x4_trans
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import make_tile_place
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import uint32

#: Maximum number of steps in one loop; a longer product is several loops, each unrolled by itself.
UNROLLED = 8


@cache
def make_load_left(row_tiles: int, width: int, is_transposed: bool = False) -> Callable[..., None]:
    """Return ``load_left(a, at, tile, step, share)``: the left operand of a step of 16 columns, to a[at:].

    They are tiles of 16 rows of a tile in shared memory, from the row ``share.row`` on; or of its
    transpose, from that piece on.
    """
    place, below = make_tile_place(device_function, HALF * width), ROWS * HALF * width

    @device_function
    def load_left(a, at, tile, step, share):
        row, chunk = square_place(share.lane)
        start = tile + place(share.row + row, 2 * step + chunk)
        for m in range(row_tiles):
            ldmatrix_x4(a[at + m], start + m * below)  # the swizzle begins anew after eight rows

    @device_function
    def load_transposed(a, at, tile, step, share):
        row, chunk = turned_place(share.lane)
        for m in range(row_tiles):
            start = tile + place(row, share.row + 2 * m + chunk)
            ldmatrix_x4_trans(a[at + m], start + step * below)

    return load_transposed if is_transposed else load_left


@cache
def make_load_right(width: int, is_transposed: bool = False) -> Callable[..., None]:
    """Return ``load_right(b, at, tile, step, n, share)``: two tiles of a right operand, to b[at:].

    They are the rows 16·n of the tile, for a product with its transpose; or else its columns 16·n, from the
    piece ``share.chunk`` on.
    """
    place, below = make_tile_place(device_function, HALF * width), DEPTH * HALF * width

    @device_function
    def load_rows(b, at, tile, step, n, share):
        row, chunk = turned_place(share.lane)
        ldmatrix_x4(b[at], tile + place(row, 2 * step + chunk) + n * below)

    @device_function
    def load_right(b, at, tile, step, n, share):
        row, chunk = square_place(share.lane)
        ldmatrix_x4_trans(b[at], tile + place(row, share.chunk + 2 * n + chunk) + step * below)

    return load_rows if is_transposed else load_right


@cache
def make_multiply(dtype: str, layout: MmaLayout, width: int) -> Callable[..., None]:
    """Return ``multiply(s, q_tile, k_tile, share)``: s = Q·Kᵀ for the rows of the ``WarpLane`` ``share``.

    An element is the same number, bit for bit, whatever the layout, and whatever columns of zeros the width
    adds: the backward pass subtracts from it what the forward pass has made of it.

    ``s`` is (row_tiles * block_k / 8, 4) float32, and the tiles are addresses.
    """
    mma, steps, zero = MMA[dtype], width // DEPTH, np.float32(0)
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    load_q, load_k = make_load_left(row_tiles, width), make_load_right(width, is_transposed=True)
    parts = next(n for n in range(-(-steps // UNROLLED), steps + 1) if steps % n == 0)

    def make_part(part: int) -> Callable[..., None]:
        first, stop = part * steps // parts, (part + 1) * steps // parts

        @device_function
        def multiply(s, q_tile, k_tile, share):
            a = cuda.local.array((row_tiles, 4), uint32)  # (rows, 16) / 32, in pairs: Q
            b = cuda.local.array((2, 2), uint32)  # (16, 16) / 32, in pairs: K
            if first == 0:
                set_all(s, zero)
            for step in range(first, stop):
                load_q(a, 0, q_tile, step, share)
                for n in range(col_tiles // 2):  # a pair of tiles from four matrices
                    load_k(b, 0, k_tile, step, n, share)
                    for m in range(row_tiles):
                        mma(s[m * col_tiles + 2 * n], a[m], b[0])
                        mma(s[m * col_tiles + 2 * n + 1], a[m], b[1])

        return multiply

    return one_after_the_other(make_part, parts)


@cache
def make_accumulate(
    dtype: str, layout: MmaLayout, width: int, cols: int = 0
) -> Callable[..., None]:
    """Return ``accumulate(acc, s, v_tile, share)``: acc += P·V, where P is the rounded s.

    ``acc`` is (row_tiles * cols / 8, 4) float32; the others as for :func:`make_multiply`.
    """
    pack_left, tiles = _make_pack_left(dtype, layout), (layout.row_tiles, (cols or width) // COLS)
    return _make_accumulate(dtype, pack_left, layout.block_k // DEPTH, width, *tiles)


def _make_pack_left(dtype: str, layout: MmaLayout) -> Callable[..., None]:
    """Return ``pack_left(a, at, s, step, share)``: the left operand of a step, rounded accumulators."""
    pack, row_tiles, col_tiles = PACK[dtype], layout.row_tiles, layout.block_k // COLS

    @device_function
    def pack_left(a, at, s, step, share):
        for m in range(row_tiles):
            # Two tiles of accumulators side by side are a tile of A.
            left, right = m * col_tiles + 2 * step, m * col_tiles + 2 * step + 1
            a[at + m, 0] = pack(s[left, 0], s[left, 1])
            a[at + m, 1] = pack(s[left, 2], s[left, 3])
            a[at + m, 2] = pack(s[right, 0], s[right, 1])
            a[at + m, 3] = pack(s[right, 2], s[right, 3])

    return pack_left


def make_accumulate_stored(
    dtype: str, layout: MmaLayout, depth: int, width: int, columns: int
) -> Callable[..., None]:
    """Return ``accumulate_stored(acc, p_tile, v_tile, share)``: acc += P·V, with P in shared memory."""
    load_p, tiles = make_load_left(layout.row_tiles, depth), (layout.row_tiles, columns // COLS)
    return _make_accumulate(dtype, load_p, depth // DEPTH, width, *tiles)


def make_accumulate_transposed(
    dtype: str, layout: MmaKeyLayout, width: int, row_tiles: int, own_tiles: int
) -> Callable[..., None]:
    """Return ``accumulate_transposed(acc, ds_tile, k_tile, share)``: acc += dS·K, with dSᵀ in a tile."""
    load_ds = make_load_left(row_tiles, layout.block_q, is_transposed=True)
    return _make_accumulate(dtype, load_ds, layout.block_k // DEPTH, width, row_tiles, own_tiles)


@cache
def _make_accumulate(
    dtype: str, load_left: Any, steps: int, width: int, row_tiles: int, own_tiles: int
) -> Callable[..., None]:
    """Return ``accumulate(acc, p, v_tile, share)``, where ``load_left`` makes a step of P of ``p``."""
    mma, load_v = MMA[dtype], make_load_right(width)

    @device_function
    def accumulate(acc, p, v_tile, share):
        a = cuda.local.array((row_tiles, 4), uint32)  # (rows, 16) / 32, in pairs: P
        b = cuda.local.array((2, 2), uint32)  # (16, 16) / 32, in pairs: V
        for step in range(steps):
            load_left(a, 0, p, step, share)
            for n in range(own_tiles // 2):
                load_v(b, 0, v_tile, step, n, share)
                for m in range(row_tiles):
                    mma(acc[m * own_tiles + 2 * n], a[m], b[0])
                    mma(acc[m * own_tiles + 2 * n + 1], a[m], b[1])

    return accumulate


@cache
def make_multiply_tangents(
    dtype: str, layout: MmaLayout, width: int, by_keys: bool = False
) -> Callable[..., None]:
    """Return ``multiply((s, s_tangent), (q, q_tangent), (k, k_tangent), share)``.

    It computes S = Q·Kᵀ, the same numbers as :func:`make_multiply`, and Ṡ = Q·K̇ᵀ + Q̇·Kᵀ, whose terms are
    added in the same order ``by_keys``, for K and Q in place of Q and K.
    """
    load_q, load_k = make_load_left(layout.row_tiles, width), make_load_right(width, True)
    tiles = layout.row_tiles, layout.block_k // COLS
    loads, zero = (load_q, load_k, width // DEPTH), np.float32(0)
    add = _make_add_tangents(dtype, *loads, *tiles, left_first=by_keys)

    @device_function
    def multiply(sums, left, right, share):
        set_all(sums[0], zero)
        set_all(sums[1], zero)
        add(sums, left, right, share)

    return multiply


@cache
def make_accumulate_tangents(
    dtype: str, layout: MmaLayout, width: int, cols: int
) -> Callable[..., None]:
    """Return ``accumulate((acc, acc_tangent), (s, s_tangent), (v, v_tangent), share)``.

    It computes acc += P·V and its tangent += Ṗ·V + P·V̇, where P and Ṗ are the rounded s.
    """
    pack_left, load_v = _make_pack_left(dtype, layout), make_load_right(width)
    tiles = layout.row_tiles, cols // COLS
    return _make_add_tangents(dtype, pack_left, load_v, layout.block_k // DEPTH, *tiles)


def _make_add_tangents(
    dtype: str,
    load_left: Any,
    load_right: Any,
    steps: int,
    row_tiles: int,
    col_tiles: int,
    left_first: bool = False,
) -> Callable[..., None]:
    """Return ``add((c, c_tangent), (a, a_tangent), (b, b_tangent), share)``: C += A·B and its tangent.

    Fragments of A, Ȧ, B and Ḃ are loaded once for the three products.  In a step, A·Ḃ is added before Ȧ·B,
    or with ``left_first`` after it.
    """
    mma, own_tiles = MMA[dtype], 2 * row_tiles
    a_first, b_first = (row_tiles, 0) if left_first else (0, 2)
    a_last, b_last = row_tiles - a_first, 2 - b_first
    parts = next(n for n in range(-(-steps // UNROLLED), steps + 1) if steps % n == 0)

    def make_part(part: int) -> Callable[..., None]:
        first, stop = part * steps // parts, (part + 1) * steps // parts

        @device_function
        def add(sums, left, right, share):
            a = cuda.local.array((own_tiles, 4), uint32)  # (rows, 16) / 32, in pairs: A, Ȧ
            b = cuda.local.array((4, 2), uint32)  # (16, 16) / 32, in pairs: B, Ḃ
            for step in range(first, stop):
                load_left(a, 0, left[0], step, share)
                load_left(a, row_tiles, left[1], step, share)
                for n in range(col_tiles // 2):
                    load_right(b, 0, right[0], step, n, share)
                    load_right(b, 2, right[1], step, n, share)
                    for m in range(row_tiles):
                        for u in range(2):
                            mma(sums[0][m * col_tiles + 2 * n + u], a[m], b[u])
                            mma(sums[1][m * col_tiles + 2 * n + u], a[a_first + m], b[b_first + u])
                    for m in range(row_tiles):  # apart, so that no sum waits for itself
                        for u in range(2):
                            mma(sums[1][m * col_tiles + 2 * n + u], a[a_last + m], b[b_last + u])

        return add

    return one_after_the_other(make_part, parts)


def one_after_the_other(
    make_step: Callable[[int], Callable[..., None]], count: int, begin: int = 0
) -> Callable[..., None]:
    """Return an unrolled loop over steps with constant indices, which the compiler would not unroll.

    The function calls its two halves.  Inlining copies everything that a function calls, so a chain in
    which each step calls the next would copy the last step as often as there are steps.

    The arguments are those of a product: accumulators, the two operands, and the ``WarpLane``.
    """
    if count == 1:
        return make_step(begin)
    half = count // 2
    before = one_after_the_other(make_step, half, begin)
    after = one_after_the_other(make_step, count - half, begin + half)

    @device_function
    def both(acc, left, right, share):
        before(acc, left, right, share)
        after(acc, left, right, share)

    return both
