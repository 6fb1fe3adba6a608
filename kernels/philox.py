"""Random bits from a counter: the same numbers on every device, in any order, with nothing stored.

A backward pass that needs the noise of the forward pass again draws it again.  One source for every
compiler.  All numbers are below 2³² in 64-bit integers, signed ones too: what a product loses above its
64 bits, the masks would drop.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .geometry import same

#: Words that one counter gives.
WORDS = 4
ROUNDS = 10
MASK = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
#: By which the key grows from round to round: the golden ratio, and sqrt(3) - 1.
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
#: The last word of a counter, which keeps the two uses apart.
ATTENTION, ELEMENTS = 0, 1


class Philox(NamedTuple):
    """The functions that :func:`make_philox` returns; all take and return ints."""

    philox: Callable[[int, int, int, int, int], tuple[int, int, int, int]]
    element_words: Callable[[int, int], tuple[int, int, int, int]]
    attention_words: Callable[[int, int, int, int], tuple[int, int, int, int]]
    keep: Callable[[int, int, int, int, int], bool]


def make_philox(compile_: Callable[[Any], Any]) -> Philox:
    """Return the generator for one compiler (see ``geometry.make_geometry``)."""

    @compile_
    def philox(seed, c0, c1, c2, c3):
        """Return four random words of 32 bits for a seed of 64 bits and a counter of four words."""
        k0, k1 = seed & MASK, (seed >> 32) & MASK
        for _ in range(ROUNDS):
            p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
            c0, c1, c2, c3 = (
                ((p1 >> 32) & MASK) ^ c1 ^ k0,
                p1 & MASK,
                ((p0 >> 32) & MASK) ^ c3 ^ k1,
                p0 & MASK,
            )
            k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
        return c0, c1, c2, c3

    @compile_
    def element_words(seed, block):
        """Return the words of elements 4 block … 4 block + 3 of a tensor, in row-major order."""
        return philox(seed, block & MASK, (block >> 32) & MASK, 0, ELEMENTS)

    @compile_
    def attention_words(seed, batch_head, row, col_block):
        """Return the words of columns 4 col_block … 4 col_block + 3 of one row of probabilities."""
        return philox(seed, col_block & MASK, row & MASK, batch_head & MASK, ATTENTION)

    @compile_
    def keep(seed, batch_head, row, col, threshold):
        """Tell whether attention keeps one probability; ``threshold`` from :func:`drop_threshold`."""
        w0, w1, w2, w3 = attention_words(seed, batch_head, row, col // WORDS)
        low = w0 if col % WORDS == 0 else w1
        high = w2 if col % WORDS == 2 else w3
        return (low if col % WORDS < 2 else high) >= threshold

    return Philox(philox, element_words, attention_words, keep)


def drop_threshold(rate: float) -> int:
    """Return the number that a word must reach for its element to be kept.

    Args:
        rate: Probability of dropping, from 0 (every word reaches it) to 1 (none does).
    """
    return round(rate * 2**32)


#: The same functions for plain Python.
PLAIN = make_philox(same)
