"""Tiles of flash1 in shared memory: copies, sums and products of rows, element by element."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.runtime.kernel import device_function


class Statistics(NamedTuple):
    """Four numbers of each row that the forward pass writes: L, the rounding error of L, l and m."""

    lse: Any
    lse_rest: Any
    row_sum: Any
    row_max: Any


@device_function
def tile_rows(b, h, number, size, seq):
    """Return the ``HeadRows`` of a tile, its first row and its height; the last tile may be short."""
    first = number * size
    rows = min(size, seq - first)
    return HeadRows(b, h, first, first + rows), first, rows


@device_function
def load_tile(thread, threads, array, rows, dim, tile):
    """Copy rows of one head to shared memory: a thread copies every threads-th element."""
    for e in range(thread, (rows.stop - rows.first) * dim, threads):
        tile[e // dim, e % dim] = array[rows.b, rows.h, rows.first + e // dim, e % dim]


@device_function
def load_tiles(thread, threads, arrays, rows, dims, tiles):
    """Copy rows of two arrays; see :func:`load_tile`."""
    load_tile(thread, threads, arrays[0], rows, dims[0], tiles[0])
    load_tile(thread, threads, arrays[1], rows, dims[1], tiles[1])


@device_function
def clear(thread, threads, array, rows, dim):
    """Fill rows of one head with zeros."""
    for e in range(thread, (rows.stop - rows.first) * dim, threads):
        array[rows.b, rows.h, rows.first + e // dim, e % dim] = 0


@device_function
def clear_results(thread, threads, out, statistics, rows, dim):
    """Set O and l to 0 and m to minus infinity, in rows of one head."""
    clear(thread, threads, out, rows, dim)
    for row in range(rows.first + thread, rows.stop, threads):
        statistics.row_sum[rows.b, rows.h, row] = 0
        statistics.row_max[rows.b, rows.h, row] = -math.inf


@device_function
def clear_tile(thread, threads, tile, rows, dim):
    """Fill rows of a tile in shared memory with zeros."""
    for e in range(thread, rows * dim, threads):
        tile[e // dim, e % dim] = 0


@device_function
def store_tile(thread, threads, tile, array, rows, dim):
    """Copy rows from shared memory to one head: a thread copies every threads-th element."""
    for e in range(thread, (rows.stop - rows.first) * dim, threads):
        array[rows.b, rows.h, rows.first + e // dim, e % dim] = tile[e // dim, e % dim]


@device_function
def store_tiles(thread, threads, tiles, arrays, rows, dims):
    """Copy rows to two arrays; see :func:`store_tile`."""
    store_tile(thread, threads, tiles[0], arrays[0], rows, dims[0])
    store_tile(thread, threads, tiles[1], arrays[1], rows, dims[1])


@device_function
def row_max_of(a, i, count):
    """Return the maximum of the first elements of row i."""
    largest = a[i, 0]
    for n in range(1, count):
        largest = max(largest, a[i, n])
    return largest


@device_function
def row_sum_of(a, i, count):
    """Return the sum of the first elements of row i."""
    total = a[i, 0]
    for n in range(1, count):
        total += a[i, n]
    return total


@device_function
def dot_rows(a, i, b, j, count):
    """Return row i of A times row j of B, an element of A Bᵀ."""
    total = a[i, 0] * b[j, 0]
    for n in range(1, count):
        total += a[i, n] * b[j, n]
    return total


@device_function
def dot_row_column(a, i, b, j, count):
    """Return row i of A times column j of B, an element of A B."""
    total = a[i, 0] * b[0, j]
    for n in range(1, count):
        total += a[i, n] * b[n, j]
    return total


@device_function
def dot_columns(a, i, b, j, count):
    """Return column i of A times column j of B, an element of Aᵀ B."""
    total = a[0, i] * b[0, j]
    for n in range(1, count):
        total += a[n, i] * b[n, j]
    return total
