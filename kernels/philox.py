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
    mix: Callable[[int, int, int, int, int, int], tuple[int, int, int, int]]


def _word(x: Any) -> Any:
    """Return the low 32 bits of a number."""
    return x & MASK


def _product(x: Any, y: Any) -> Any:
    """Return the high and the low word of a product of two words."""
    product = x * y
    return (product >> 32) & MASK, product & MASK


def make_philox(
    compile_: Callable[[Any], Any],
    word_: Callable[[Any], Any] = _word,
    product_: Callable[[Any, Any], Any] = _product,
) -> Philox:
    """Return the generator for one compiler.

    Args:
        compile_: See ``geometry.make_geometry``.
        word_: Returns the low 32 bits of a number; for a compiler that has better.
        product_: Returns the high and the low word of a product of two words; likewise.
    """
    word, product = compile_(word_), compile_(product_)

    @compile_
    def mix(k0, k1, c0, c1, c2, c3):
        """Return the four words after one round with a key of two words."""
        high0, low0 = product(c0, MULTIPLIER_0)
        high1, low1 = product(c2, MULTIPLIER_1)
        return word(high1 ^ c1 ^ k0), low1, word(high0 ^ c3 ^ k1), low0

    @compile_
    def philox(seed, c0, c1, c2, c3):
        """Return four random words of 32 bits for a seed of 64 bits and a counter of four words."""
        k0, k1 = word(seed), word(seed >> 32)
        for _ in range(ROUNDS):
            c0, c1, c2, c3 = mix(k0, k1, c0, c1, c2, c3)
            k0, k1 = word(k0 + WEYL_0), word(k1 + WEYL_1)
        return c0, c1, c2, c3

    @compile_
    def element_words(seed, block):
        """Return the words of elements 4 block … 4 block + 3 of a tensor, in row-major order."""
        return philox(seed, word(block), word(block >> 32), word(0), word(ELEMENTS))

    @compile_
    def attention_words(seed, batch_head, row, col_block):
        """Return the words of columns 4 col_block … 4 col_block + 3 of one row of probabilities."""
        return philox(seed, word(col_block), word(row), word(batch_head), word(ATTENTION))

    @compile_
    def keep(seed, batch_head, row, col, threshold):
        """Tell whether attention keeps one probability; ``threshold`` from :func:`drop_threshold`."""
        # TASK 5.6: Word col % 4 of the counter of column col // 4 is compared with the threshold.
        w0, w1, w2, w3 = attention_words(seed, batch_head, row, col // WORDS)
        low = w0 if col % WORDS == 0 else w1
        high = w2 if col % WORDS == 2 else w3
        return (low if col % WORDS < 2 else high) >= threshold
        # END TASK 5.6

    return Philox(philox, element_words, attention_words, keep, mix)


def drop_threshold(rate: float) -> int:
    """Return the number that a word must reach for its element to be kept.

    Args:
        rate: Probability of dropping, from 0 (every word reaches it) to 1 (none does).
    """
    return round(rate * 2**32)


#: The same functions for plain Python.
PLAIN = make_philox(same)
