"""A row in registers: its distribution among threads, loads, stores and dropout.

A kernel that reads a row several times thus reads memory once.  A row that is too long for registers is
kept in the threads' local memory, which is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.philox import WORDS
from kernels.cuda.device.half import EIGHT, form, make_read_eight, make_write_eight
from kernels.cuda.device.one_source import PHILOX
from kernels.cuda.device.row_folds import RowBlock, block_of
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import acc_dtype

#: Number of pieces per thread from which a further warp shares a row.
PIECES = 2

_element_words = PHILOX.element_words


class RowTile(NamedTuple):
    """The distribution of a row over the registers of its threads, in pieces of eight elements."""

    block: RowBlock  # Threads that share a row, and rows of a block
    pieces: int  # Pieces per thread
    #: Whether a piece is eight neighbours, moved by 128-bit vectors; else its elements are a row of threads
    #: apart.
    vectors: bool

    @property
    def elements(self) -> int:
        """Elements of a thread."""
        return self.pieces * EIGHT


def row_tile(length: int, vectors: bool) -> RowTile:
    """Return the tile for rows of one length; sums depend on it alone.

    ``vectors`` tells whether rows begin at multiples of 16 bytes and are whole pieces.
    """
    block = block_of(length, PIECES * EIGHT)
    pieces = ceil_div(max(length, 1), block.threads * EIGHT)
    # Not a kernel for each length.
    return RowTile(block, 1 << (pieces - 1).bit_length(), vectors)


class RowAccess(NamedTuple):
    """The functions that load and store a thread's part of a row; ``make_row_access`` returns them."""

    column: Callable[..., Any]  # ``(k, thread)``: the column of element k of a thread
    #: ``(own, array, start, thread, stop)``: load the elements of the row at ``start`` of a flat array, in
    #: the dtype of computation, with zeros from column ``stop`` on.
    load: Callable[..., None]
    #: ``(array, start, own, thread, stop)``: store the elements, each rounded once.
    store: Callable[..., None]
    round: Callable[..., None]  # ``(own)``: round the elements as a store and a load would
    #: ``(own, start, thread, stop, noise)``: apply dropout to the elements at these places of a tensor: 0
    #: if the random word of an element is below the threshold, else times the scale.  The record ``noise``
    #: has the fields seed, threshold and scale.
    drop: Callable[..., None]


@cache
def make_row_access(tile: RowTile, dtype: np.dtype[Any]) -> RowAccess:
    """Return the functions for a tile and the dtype of an array, including 16-bit ones."""
    (threads, _), pieces, count = tile.block, tile.pieces, tile.elements
    zero, (_, widen, narrow, _) = acc_dtype(dtype).type(0), form(dtype)
    read_eight, write_eight = make_read_eight(dtype), make_write_eight(dtype, narrow)

    @device_function
    def round_own(own):
        for k in range(count):
            own[k] = widen(narrow(own[k]))

    @device_function
    def apart(k, thread):
        return k * threads + thread

    @device_function
    def load_apart(own, array, start, thread, stop):
        for k in range(count):
            col = apart(k, thread)
            own[k] = widen(array[start + col]) if col < stop else zero

    @device_function
    def store_apart(array, start, own, thread, stop):
        for k in range(count):
            col = apart(k, thread)
            if col < stop:
                array[start + col] = narrow(own[k])

    @device_function
    def drop_apart(own, start, thread, stop, noise):
        for k in range(count):
            col = apart(k, thread)
            if col < stop:
                place = start + col
                words, number = _element_words(noise.seed, place // WORDS), place % WORDS
                low = words[0] if number == 0 else words[1]
                high = words[2] if number == 2 else words[3]
                word = low if number < 2 else high
                own[k] = noise.scale * own[k] if word >= noise.threshold else zero

    @device_function
    def side_by_side(k, thread):
        return (k // EIGHT * threads + thread) * EIGHT + k % EIGHT

    @device_function
    def load_pieces(own, array, start, thread, stop):
        for piece in range(pieces):
            k, col = piece * EIGHT, (piece * threads + thread) * EIGHT
            if col < stop:
                eight = read_eight(array, start + col)
                for i in range(EIGHT):
                    own[k + i] = eight[i]
            else:
                for i in range(EIGHT):
                    own[k + i] = zero

    @device_function
    def store_pieces(array, start, own, thread, stop):
        for piece in range(pieces):
            k, col = piece * EIGHT, (piece * threads + thread) * EIGHT
            if col < stop:
                low = own[k], own[k + 1], own[k + 2], own[k + 3]
                high = own[k + 4], own[k + 5], own[k + 6], own[k + 7]
                write_eight(array, start + col, low + high)

    @device_function
    def drop_pieces(own, start, thread, stop, noise):
        for piece in range(pieces):
            k, col = piece * EIGHT, (piece * threads + thread) * EIGHT
            if col < stop:
                for half in range(EIGHT // WORDS):  # the counter of four neighbours
                    at = k + half * WORDS
                    words = _element_words(noise.seed, (start + col) // WORDS + half)
                    for i in range(WORDS):
                        kept = noise.scale * own[at + i]
                        own[at + i] = kept if words[i] >= noise.threshold else zero

    if tile.vectors:
        return RowAccess(side_by_side, load_pieces, store_pieces, round_own, drop_pieces)
    return RowAccess(apart, load_apart, store_apart, round_own, drop_apart)
