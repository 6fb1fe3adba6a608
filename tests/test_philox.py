"""The counter-based generator: its published words, and that every compiler gives the same ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, tuples
from numba import njit

from kernels.philox import PLAIN, drop_threshold, make_philox

COMPILED = make_philox(njit)

#: Counter, key and words, from the known answers of the Random123 library for philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

seeds = integers(0, 2**63 - 1)
words = integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    seed = key[0] + (key[1] << 32)
    assert PLAIN.philox(seed, *counter) == expected
    signed = seed - 2**64 if seed >= 2**63 else seed  # the same 64 bits
    assert COMPILED.philox(signed, *counter) == expected


@given(seeds, tuples(words, words, words, words))
def test_compiled_code_gives_the_same_words(seed: int, counter: tuple[int, ...]) -> None:
    assert COMPILED.philox(seed, *counter) == PLAIN.philox(seed, *counter)


@given(seeds, integers(0, 2**40))
def test_elements_beyond_32_bits_have_words_of_their_own(seed: int, block: int) -> None:
    found = PLAIN.element_words(seed, block)
    assert COMPILED.element_words(seed, block) == found
    assert PLAIN.element_words(seed, block + 2**32) != found
    assert PLAIN.attention_words(seed, 0, block >> 32, block) != found


@given(seeds, words, words, words)
def test_keep_is_one_word_of_four(seed: int, batch_head: int, row: int, col: int) -> None:
    word = PLAIN.attention_words(seed, batch_head, row, col // 4)[col % 4]
    for philox in (PLAIN, COMPILED):
        assert philox.keep(seed, batch_head, row, col, word)
        assert not philox.keep(seed, batch_head, row, col, word + 1)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_the_threshold_drops_the_part_it_was_told_to(rate: float) -> None:
    drawn = np.array([PLAIN.element_words(7, block) for block in range(2000)])
    part = (drawn < drop_threshold(rate)).mean()
    assert abs(part - rate) < 4.0 * np.sqrt(rate * (1.0 - rate) / drawn.size) + 1e-12
