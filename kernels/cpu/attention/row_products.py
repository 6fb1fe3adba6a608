"""Products of one row with the keys and the values of a tile, in the order of memory, for decoding.

The numbers of a row are added in the same order, whatever other rows and keys there are.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu.matmul.vector_registers import (
    VECTOR_BYTES,
    add_dots,
    add_outer,
    load_block,
    store_block,
    store_sums,
    zero_block,
)
from kernels.cpu.runtime import plain_python

#: Keys whose scores are computed together.  More at a time are faster in cache, but the processor does not
#: recognise the order in which they are read, and does not load ahead: docs/notes-cpu.md.
KEYS = 2


def _make_dots(vectors):
    """Return a function that adds to a block the products of keys and a query, some vectors at a time."""

    @njit
    def dots(block, k, c, q, row, start):
        width, d = vectors * (VECTOR_BYTES // k.itemsize), start
        while d + width <= k.shape[1]:
            block = add_dots(block, k, c, q, row, d, vectors)
            d += width
        return block, d

    return dots


_dots_of_eight, _dots_of_two, _dots_of_one = map(_make_dots, (8, 2, 1))


def _scores(q, row, k, s, first):
    s[row, first : first + len(k)] = k @ q[row]


@plain_python.instead(_scores)
@njit
def scores_of_row(q, row, k, s, first):
    """Write the products of a row of q, scaled, and the rows of k to s[row], from the column ``first`` on.

    q is (rows, head_dim), k (cols, head_dim) and s (rows, ``KEYS`` columns more); the
    elements of a row are adjacent.  The sum of a product does not depend on the other rows or keys.
    """
    for c in range(0, len(k), KEYS):
        block, d = _dots_of_eight(zero_block(k, KEYS, 1), k, c, q, row, 0)
        block, d = _dots_of_two(block, k, c, q, row, d)
        block, d = _dots_of_one(block, k, c, q, row, d)
        store_sums(block, s, row, first + c)
        for i in range(d, k.shape[1]):
            for r in range(min(KEYS, len(k) - c)):
                s[row, first + c + r] += q[row, i] * k[c + r, i]


def _make_add_vectors(vectors):
    """Return a function that adds weights[row, first:] · v to a number of vectors of acc[row]."""

    @njit
    def add_vectors(weights, row, first, v, acc, start):
        own = weights[row : row + 1, first:]  # (1, columns)
        width, i = vectors * (VECTOR_BYTES // v.itemsize), start
        while i + width <= v.shape[1]:
            block = load_block(acc, row, i, 1, vectors)
            for c in range(len(v)):
                block = add_outer(block, own, 0, v, i, c)
            store_block(block, acc, row, i)
            i += width
        return i

    return add_vectors


def _values(weights, row, first, v, acc):
    acc[row] += weights[row, first : first + len(v)] @ v


_eight, _four, _single = map(_make_add_vectors, (8, 4, 1))


@plain_python.instead(_values)
@njit
def add_values(weights, row, first, v, acc):
    """Add weights[row, first:] · v, one row of v after the other, to acc[row].

    v is (cols, value_dim), weights (rows, columns) and acc (rows, value_dim); the elements of a row are
    adjacent.
    """
    i = _eight(weights, row, first, v, acc, 0)
    i = _four(weights, row, first, v, acc, i)
    i = _single(weights, row, first, v, acc, i)
    for c in range(len(v) if i < v.shape[1] else 0):
        for e in range(i, v.shape[1]):
            acc[row, e] += weights[row, first + c] * v[c, e]
