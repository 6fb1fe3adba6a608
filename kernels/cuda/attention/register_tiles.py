"""Tiles on CUDA cores: load a tile to shared memory, and multiply two, in register blocks of threads.

A block of ``rows_of_threads x lanes`` threads works on two tiles.  Thread (ty, tx) owns the rows ty,
ty + rows_of_threads, … of the first tile and the rows tx, tx + lanes, … of the second.  Neighbouring
threads then read neighbouring rows, which are in different banks because each row is padded by one vector.

The functions made here take the thread's indices as arguments and have no barriers.
"""

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import form
from kernels.cuda.device.shared_tiles import SharedTiles, round_up
from kernels.cuda.device.vector import VECTOR, are_vectors
from kernels.cuda.ptx.llvm import load_global, load_shared, store_shared
from kernels.cuda.runtime.kernel import device_function, scalar_type, why_too_large
from kernels.cuda.runtime.sizes import SIZES, LayoutSizes
from kernels.problem.question import Problem
from kernels.runtime.targets import dynamic_shared_memory_bytes
from kernels.scores.program import PLAIN, Features


@dataclass(frozen=True)
class RegisterLayout:
    """The layout of a flash2 block: the sizes of its tile and the numbers of its threads.

    Attributes:
        block_q: Query rows per tile.
        block_k: Key columns per tile.
        lanes: Threads along a row; a power of two, at most 32.
        rows_of_threads: Threads along a column.
        resident: Blocks per multiprocessor, which bounds the registers of a thread.
    """

    block_q: int
    block_k: int
    lanes: int
    rows_of_threads: int
    resident: int = 1

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.lanes * self.rows_of_threads

    def row_stride(self, width: int) -> int:
        """Distance in elements of rows of a tile in shared memory: its padded width plus one vector."""
        return round_up(width, VECTOR * self.lanes) + VECTOR

    def columns(self, width: int) -> int:
        """Columns of an accumulator of that width that one thread owns, a multiple of VECTOR."""
        return round_up(width, VECTOR * self.lanes) // self.lanes


class Variant(NamedTuple):
    """The compile-time parameters of a flash2 kernel.

    Attributes:
        layout: Tiles and threads.
        head_width: head_dim, or more.
        value_width: value_dim, or more.
        dtype: Dtype of all operands.
        vectors: Whether q, k, v and dout are aligned for 128-bit loads.
        features: Options of the call.
    """

    layout: RegisterLayout
    head_width: int
    value_width: int
    dtype: np.dtype[Any]
    vectors: bool
    features: Features = PLAIN


def variant_of(problem: Problem, layout: RegisterLayout, *arrays: Any) -> Variant:
    """Return the variant for a problem and the arrays of which a kernel loads tiles."""
    return Variant(layout, *widths(problem), problem.dtype, are_vectors(*arrays), problem.features)


class BackwardInputs(NamedTuple):
    """The arrays from which a backward kernel loads tiles, each (batch, heads, seq, dim)."""

    dout: Any
    q: Any
    k: Any
    v: Any


class Lane(NamedTuple):
    """The column ``tx`` and the row ``ty`` of a thread among the threads of a flash2 block."""

    tx: Any
    ty: Any


def widths(problem: Problem) -> tuple[int, int]:
    """Return head_dim and value_dim rounded up to the widths for which kernels are compiled.

    Kernels read the sizes themselves from the operands, so that all sizes of each need few kernels.
    """
    return widths_in(problem, SIZES.width_step)


def widths_in(problem: Problem, step: int) -> tuple[int, int]:
    """Return head_dim and value_dim rounded up to multiples of a step."""
    return round_up(problem.head_dim, step), round_up(problem.value_dim, step)


def pick_layout(name: str, problem: Problem, tile: tuple[int, int] | None) -> RegisterLayout:
    """Return the layout of a kernel for a problem: from the table, with the caller's tile if given.

    Args:
        name: A kernel of ``SIZES.flash2``, but "few", which "forward" uses for few query rows.
        problem: The checked call.
        tile: (block_q, block_k), or None.
    """
    sizes = _table_entry(name, problem)
    block_q, block_k = tile or (sizes.block_q, sizes.block_k)
    # dK and dV are summed by key: there a thread owns rows of keys.
    rows, cols = (block_q, block_k) if name in BY_ROWS else (block_k, block_q)
    if name == "atomic":  # and rows of queries too
        rows = math.gcd(rows, cols)
    return RegisterLayout(
        block_q,
        block_k,
        # Powers of two that divide the sides.
        lanes=min(sizes.lanes, cols & -cols),
        rows_of_threads=min(sizes.rows_of_threads, rows & -rows),
        # Measured for the table's own tile; another one may need more registers than that leaves.
        resident=sizes.resident if (block_q, block_k) == sizes[:2] else 1,
    )


def _table_entry(name: str, problem: Problem) -> LayoutSizes:
    if name == "forward" and (problem.seq_q <= SIZES.few_rows or problem.features.is_fixed):
        name = "few"
    table, width = SIZES.flash2[name, problem.dtype.itemsize], max(widths(problem))
    limit, sizes = next((row for row in table if width <= row[0]), table[-1])
    # Beyond the table, half the rows of twice the width take the same memory.
    shrink = ceil_div(width, limit)
    smaller = (max(side // shrink, VECTOR) for side in sizes[:2])
    sizes = LayoutSizes(*smaller, *sizes[2:])
    if problem.score_mod is None and problem.features.modifier_count <= 1:
        return sizes
    # The loop over a thread's scores stays in registers only if the compiler unrolls it.
    block_q, block_k, threads = sizes[0], sizes[1], sizes.lanes * sizes.rows_of_threads
    while block_q * block_k > LONG_SCORES * threads:
        if name in BY_ROWS:
            block_k //= 2
        else:
            block_q //= 2
    resident = min(sizes.resident, LONG_RESIDENT)
    return sizes._replace(block_q=block_q, block_k=block_k, resident=resident)


#: The kernels whose threads own rows of queries.
BY_ROWS = ("forward", "few", "dq", "jvp", "dq_tangent")
#: Scores per thread, and blocks per multiprocessor, if the options do much work per score.
LONG_SCORES, LONG_RESIDENT = 16, 2


def why_not_layout(
    name: str,
    problem: Problem,
    tile: tuple[int, int] | None,
    tiles: Callable[[RegisterLayout, int, int], SharedTiles],
) -> str | None:
    """Return why a kernel cannot run a problem with a tile, or None.

    ``tiles`` returns the kernel's shared tiles for a layout and two widths; see :func:`pick_layout`.
    """
    layout = pick_layout(name, problem, tile)
    blocks = (layout.block_q, layout.block_k)
    if any(block % VECTOR for block in blocks):
        return f"flash2 needs tiles of multiples of {VECTOR}, got {blocks}"
    needed = problem.dtype.itemsize * tiles(layout, *widths(problem)).elements
    # A bit for dropout, and one for a pattern or ``mask_mod``; see tile_bits.
    kinds = problem.features.dropout + problem.features.has_lists
    needed += kinds * layout.block_q * layout.block_k // VECTOR
    return why_too_large(blocks, needed, dynamic_shared_memory_bytes())


@cache
def make_load_tile(
    variant: Variant, rows: int, width: int, stored: np.dtype[Any] | None = None
) -> Callable[..., None]:
    """Return ``load_tile(thread, source, rows, factor, shared, offset)``.

    It copies ``rows``, a ``visits.HeadRows``, times ``factor`` to shared memory, with zeros for rows from
    ``stop`` on and for columns that the source does not have.  Elements out of bounds are never read.
    Those of another dtype than the variant's, ``stored``, are widened.
    """
    layout, vectors, height = variant.layout, variant.vectors, rows
    widen = form(stored or variant.dtype).widen
    stride, threads = layout.row_stride(width), layout.threads
    vectors_a_row = (stride - VECTOR) // VECTOR
    zero = scalar_type(variant.dtype)(0)

    @device_function
    def load_tile(thread, source, rows, factor, shared, offset):
        b, h, first, stop = rows
        dim = source.shape[3]
        for n in range(thread, height * vectors_a_row, threads):
            r = n // vectors_a_row
            c = (n % vectors_a_row) * VECTOR
            w = x = y = z = zero
            if first + r < stop:
                if vectors:
                    if c < dim:
                        w, x, y, z = load_global(source, b, h, first + r, c)
                else:
                    if c < dim:
                        w = widen(source[b, h, first + r, c])
                    if c + 1 < dim:
                        x = widen(source[b, h, first + r, c + 1])
                    if c + 2 < dim:
                        y = widen(source[b, h, first + r, c + 2])
                    if c + 3 < dim:
                        z = widen(source[b, h, first + r, c + 3])
            store_shared(
                shared, offset + r * stride + c, w * factor, x * factor, y * factor, z * factor
            )

    return load_tile


@cache
def make_load_pair(
    variant: Variant, rows: int, left: int, right: int, stored: np.dtype[Any] | None = None
) -> Callable[..., None]:
    """Return ``load_pair(thread, arrays, rows, factor, shared)``: load tiles of q and dout, or of k and v.

    The first is multiplied by ``factor``; ``left`` and ``right`` are the offsets of the tiles.
    """
    widths, one = (variant.head_width, variant.value_width), variant.dtype.type(1)
    of_head, of_value = (make_load_tile(variant, rows, width, stored) for width in widths)

    @device_function
    def load_pair(thread, arrays, rows, factor, shared):
        of_head(thread, arrays[0], rows, factor, shared, left)
        of_value(thread, arrays[1], rows, one, shared, right)

    return load_pair


def make_load_fragment(own_rows: int, step: int, stride: int) -> Callable[..., None]:
    """Return ``load_fragment(fragment, shared, tile, first, col)``: load a vector of each row of a thread.

    They are the rows ``first``, ``first + step``, …
    """

    @device_function
    def load_fragment(fragment, shared, tile, first, col):
        for i in range(own_rows):
            w, x, y, z = load_shared(shared, tile + (first + i * step) * stride + col)
            fragment[i, 0], fragment[i, 1], fragment[i, 2], fragment[i, 3] = w, x, y, z

    return load_fragment


@cache
def make_multiply(
    layout: RegisterLayout, rows: int, cols: int, width: int, dtype: np.dtype[Any]
) -> Callable[..., None]:
    """Return ``multiply(lane, s, fragment, shared, a, b)``: s = A·Bᵀ, for two shared tiles of one width.

    ``s`` is the thread's (rows / rows_of_threads, cols / lanes) registers, ``fragment`` scratch of
    (rows / rows_of_threads, VECTOR); ``a`` and ``b`` are the offsets of the tiles.  A thread with R rows
    and C columns does 4·R·C multiply-adds for R + C vector loads.
    """
    own_rows, own_cols = rows // layout.rows_of_threads, cols // layout.lanes
    stride, depth = layout.row_stride(width), round_up(width, VECTOR)
    lanes, load_fragment = (
        layout.lanes,
        make_load_fragment(own_rows, layout.rows_of_threads, stride),
    )
    zero = scalar_type(dtype)(0)

    @device_function
    def multiply(lane, s, fragment, shared, a, b):
        tx, ty = lane
        for i in range(own_rows):
            for j in range(own_cols):
                s[i, j] = zero
        for d in range(0, depth, VECTOR):
            load_fragment(fragment, shared, a, ty, d)
            for j in range(own_cols):
                w, x, y, z = load_shared(shared, b + (tx + j * lanes) * stride + d)
                for i in range(own_rows):
                    s[i, j] += fragment[i, 0] * w
                    s[i, j] += fragment[i, 1] * x
                    s[i, j] += fragment[i, 2] * y
                    s[i, j] += fragment[i, 3] * z

    return multiply


@cache
def make_accumulate(
    layout: RegisterLayout, rows: int, depth: int, width: int
) -> Callable[..., None]:
    """Return ``accumulate(lane, acc, fragment, shared, p, b)``: acc += P·B, both in shared memory.

    P is (rows, depth), its rows ``depth + VECTOR`` apart; B is (depth, width).  ``acc`` is the thread's
    (rows / rows_of_threads, columns(width)) registers, in groups of four neighbouring columns.
    """
    own_rows = rows // layout.rows_of_threads
    groups = layout.columns(width) // VECTOR
    stride, lanes = layout.row_stride(width), layout.lanes
    load_fragment = make_load_fragment(own_rows, layout.rows_of_threads, depth + VECTOR)

    @device_function
    def accumulate(lane, acc, fragment, shared, p, b):
        tx, ty = lane
        for c in range(0, depth, VECTOR):
            load_fragment(fragment, shared, p, ty, c)
            for g in range(groups):
                for u in range(VECTOR):
                    place = b + (c + u) * stride + (g * lanes + tx) * VECTOR
                    w, x, y, z = load_shared(shared, place)
                    for i in range(own_rows):
                        acc[i, g * VECTOR] += fragment[i, u] * w
                        acc[i, g * VECTOR + 1] += fragment[i, u] * x
                        acc[i, g * VECTOR + 2] += fragment[i, u] * y
                        acc[i, g * VECTOR + 3] += fragment[i, u] * z

    return accumulate


@cache
def make_store_tile(
    layout: RegisterLayout, rows: int, width: int, put: Callable[..., None]
) -> Callable[..., None]:
    """Return ``store_tile(lane, acc, target, rows)``: store ``rows``, a ``visits.HeadRows``.

    The accumulator is (rows, width); columns that the target does not have are not written.
    ``put(target, index, value)`` stores an element.
    """
    own_rows = rows // layout.rows_of_threads
    columns = layout.columns(width)
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads

    @device_function
    def store_tile(lane, acc, target, rows):
        (tx, ty), (b, h, first, stop) = lane, rows
        dim = target.shape[3]
        for i in range(own_rows):
            row = first + ty + i * rows_of_threads
            if row < stop:
                for n in range(columns):
                    col = (n // VECTOR * lanes + tx) * VECTOR + n % VECTOR
                    if col < dim:
                        put(target, (b, h, row, col), acc[i, n])

    return store_tile


@device_function
def assign(target, index, value):
    """Write an element: the ``put`` of a tile owned by one block."""
    target[index] = value


@cache
def make_keep_tile(
    layout: RegisterLayout, rows: int, cols: int, is_turned: bool = False
) -> Callable[..., None]:
    """Return ``keep_tile(lane, s, factor, shared, offset)``: store scores (rows, cols) in shared memory.

    If ``is_turned``, rows of the registers become columns.
    """
    own_rows, own_cols = rows // layout.rows_of_threads, cols // layout.lanes
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    row_step, col_step = (1, rows + VECTOR) if is_turned else (cols + VECTOR, 1)

    @device_function
    def keep_tile(lane, s, factor, shared, offset):
        tx, ty = lane
        for i in range(own_rows):
            for j in range(own_cols):
                place = (ty + i * rows_of_threads) * row_step + (tx + j * lanes) * col_step
                shared[offset + place] = s[i, j] * factor

    return keep_tile


@device_function
def set_all(registers, value):
    """Set every element of a thread's two-dimensional local array."""
    for i in range(registers.shape[0]):
        for j in range(registers.shape[1]):
            registers[i, j] = value


@device_function
def scale_all(registers, factor):
    """Multiply every element of a thread's two-dimensional local array."""
    for i in range(registers.shape[0]):
        for j in range(registers.shape[1]):
            registers[i, j] *= factor
