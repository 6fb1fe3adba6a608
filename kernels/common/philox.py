"""Counter-based random bits: the same on every device, in any order, without stored state.

A backward pass can therefore recompute the random bits of the forward pass.  There is one source for every
compiler.  All numbers are below 2³² and are held in 64-bit integers.  These may be signed, because
only the low 64 bits of a product are used.

The generator, Philox, has two uses.  Each element of a tensor uses a word of 32 bits after the usual ten
rounds.  Each attention probability uses half a word after only seven rounds, because the multiplications
limit the speed of dropout.  Seven is the smallest number of rounds that passes the BigCrush tests.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), Philox4x32-10 and Philox4x32-7;
its table 2 has the numbers of rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .geometry import same

#: Number of words per counter.
WORDS = 4
#: Number of adjacent columns of attention that share a counter, half a word each.
COLUMNS = 2 * WORDS
ELEMENT_ROUNDS, ATTENTION_ROUNDS = 10, 7
#: Bits of half a word.
HALF = 16
MASK = 0xFFFFFFFF
HALF_MASK = 0xFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
#: Increments of the two words of the key from round to round, from the golden ratio and sqrt(3) - 1.
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
#: The last word of a counter, which keeps the two uses of the generator apart.
ATTENTION, ELEMENTS = 0, 1


class Philox(NamedTuple):
    """The functions of the random generator, from ints to ints; ``make_philox`` returns them."""

    philox_10: Callable[[int, int, int, int, int], tuple[int, int, int, int]]
    philox_7: Callable[[int, int, int, int, int], tuple[int, int, int, int]]
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

    ``word_`` and ``product_`` are faster functions for the low 32 bits of a number, and for the high
    and the low word of a product, where the compiler has them.
    """
    word, product = compile_(word_), compile_(product_)

    @compile_
    def mix(k0, k1, c0, c1, c2, c3):
        """Return the four words after one round with a key of two words."""
        high0, low0 = product(c0, MULTIPLIER_0)
        high1, low1 = product(c2, MULTIPLIER_1)
        return word(high1 ^ c1 ^ k0), low1, word(high0 ^ c3 ^ k1), low0

    def make_rounds(rounds):
        @compile_
        def philox(seed, c0, c1, c2, c3):
            """Return four random words of 32 bits for a seed of 64 bits and a counter of four words."""
            k0, k1 = word(seed), word(seed >> 32)
            for _ in range(rounds):
                c0, c1, c2, c3 = mix(k0, k1, c0, c1, c2, c3)
                k0, k1 = word(k0 + WEYL_0), word(k1 + WEYL_1)
            return c0, c1, c2, c3

        return philox

    philox_10, philox_7 = make_rounds(ELEMENT_ROUNDS), make_rounds(ATTENTION_ROUNDS)

    @compile_
    def element_words(seed, block):
        """Return the words of elements 4 block … 4 block + 3 of a tensor, in row-major order."""
        return philox_10(seed, word(block), word(block >> 32), word(0), word(ELEMENTS))

    @compile_
    def attention_words(seed, batch_head, row, col_block):
        """Return the words of columns 8 col_block … 8 col_block + 7 of one row of probabilities."""
        return philox_7(seed, word(col_block), word(row), word(batch_head), word(ATTENTION))

    @compile_
    def keep(seed, batch_head, row, col, threshold):
        """Tell whether attention keeps a probability; ``threshold``: :func:`attention_threshold`."""
        # TASK 5.6: Half a word of block col // 8, low 16 bits for an even col, reaches the threshold.
        w0, w1, w2, w3 = attention_words(seed, batch_head, row, col // COLUMNS)
        number = col % COLUMNS // 2
        low = w0 if number == 0 else w1
        high = w2 if number == 2 else w3
        own = low if number < 2 else high
        return (own >> HALF if col % 2 else own & HALF_MASK) >= threshold
        # END TASK 5.6

    return Philox(philox_10, philox_7, element_words, attention_words, keep, mix)


def drop_threshold(rate: float) -> int:
    """Return the smallest word with which dropout at a rate from 0 to 1 keeps an element."""
    return round(rate * 2**32)


def attention_threshold(rate: float) -> int:
    """Return the smallest half word with which the dropout of attention keeps a probability.

    The actual rate is the nearest multiple of 2⁻¹⁶; a rate of up to 2⁻¹⁷ drops nothing.
    """
    return round(rate * 2**HALF)


def keep_scale(rate: float) -> float:
    """Return the factor by which kept probabilities are multiplied to preserve their mean.

    It is 1 / (1 - p), where p is the actual, rounded rate; 1 if all are dropped.
    """
    kept = 2**HALF - attention_threshold(rate)
    return 2**HALF / kept if kept else 1.0


#: The functions of :func:`make_philox` for plain Python.
PLAIN = make_philox(same)
