"""The counter-based generator: its published words, that every compiler gives the same ones, and chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, tuples
from numba import njit

import kernels
from kernels.common.philox import (
    ATTENTION_ROUNDS,
    ELEMENT_ROUNDS,
    PLAIN,
    attention_threshold,
    keep_scale,
    make_philox,
)

COMPILED = make_philox(njit)

#: Rounds, counter, key and words: the known answers of the Random123 library for philox4x32.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2
ZEROS = (0,) * 4, (0,) * 2
KNOWN = [
    (7, *ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, *ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, *ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, *ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]

seeds = integers(0, 2**63 - 1)
words = integers(0, 2**32 - 1)


def _philox(functions: Any, rounds: int) -> Any:
    return {ATTENTION_ROUNDS: functions.philox_7, ELEMENT_ROUNDS: functions.philox_10}[rounds]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN)
def test_the_published_words(
    rounds: int, counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    seed = key[0] + (key[1] << 32)
    assert _philox(PLAIN, rounds)(seed, *counter) == expected
    signed = seed - 2**64 if seed >= 2**63 else seed  # the same 64 bits
    assert _philox(COMPILED, rounds)(signed, *counter) == expected


@given(seeds, tuples(words, words, words, words))
def test_compiled_code_gives_the_same_words(seed: int, counter: tuple[int, ...]) -> None:
    for rounds in (ATTENTION_ROUNDS, ELEMENT_ROUNDS):
        assert _philox(COMPILED, rounds)(seed, *counter) == _philox(PLAIN, rounds)(seed, *counter)


@given(seeds, integers(0, 2**40))
def test_elements_beyond_32_bits_have_words_of_their_own(seed: int, block: int) -> None:
    found = PLAIN.element_words(seed, block)
    assert COMPILED.element_words(seed, block) == found
    assert PLAIN.element_words(seed, block + 2**32) != found
    assert PLAIN.attention_words(seed, 0, block >> 32, block) != found


@given(seeds, words, words, words)
def test_keep_is_half_a_word_of_eight(seed: int, batch_head: int, row: int, col: int) -> None:
    words = PLAIN.attention_words(seed, batch_head, row, col // 8)
    number = sum(word << 32 * i for i, word in enumerate(words))  # eight halves, the lowest first
    half = number >> 16 * (col % 8) & 0xFFFF
    for philox in (PLAIN, COMPILED):
        assert philox.keep(seed, batch_head, row, col, half)
        assert not philox.keep(seed, batch_head, row, col, half + 1)


@given(floats(0.0, 1.0))
def test_the_factor_of_what_is_kept_is_that_of_the_rate_that_is_drawn(rate: float) -> None:
    drawn = attention_threshold(rate) / 2**16
    assert abs(drawn - rate) <= 2.0**-17
    assert keep_scale(rate) * (1.0 - drawn) == (pytest.approx(1.0, rel=1e-15) if drawn < 1 else 0.0)


def test_rates_at_the_ends_keep_everything_and_nothing() -> None:
    assert (attention_threshold(0.0), keep_scale(0.0)) == (0, 1.0)
    assert (attention_threshold(2.0**-17), keep_scale(2.0**-17)) == (0, 1.0)
    assert (attention_threshold(1.0), keep_scale(1.0)) == (2**16, 1.0)
    shape = 1, 40, 40
    assert kernels.dropout_mask(shape, 2.0**-18, 3).all()
    assert not kernels.dropout_mask(shape, 1.0 - 2.0**-18, 3).any()


# --- chance --------------------------------------------------------------------------------------------
# Numbers are fixed by their seeds: a test holds or does not.  Bounds are those that chance leaves to one
# generator in some ten thousand.

SHAPE = HEADS, ROWS, COLS = 8, 128, 256


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_attention_drops_the_part_it_was_told_to(rate: float) -> None:
    dropped = ~kernels.dropout_mask(SHAPE, rate, 11)
    deviation = np.sqrt(rate * (1.0 - rate) / dropped.size)
    assert abs(dropped.mean() - rate) < 4.0 * deviation + 2.0**-17


def _chi_square_of_pairs(x: Any, y: Any, rate: float) -> float:
    """Return by how much pairs differ from independent ones: chi-square of three degrees of freedom."""
    found = np.bincount(2 * x.ravel().astype(np.int64) + y.ravel(), minlength=4)
    kept = 1.0 - attention_threshold(rate) / 2**16
    expected = x.size * np.outer([1 - kept, kept], [1 - kept, kept]).ravel()
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_independent(rate: float) -> None:
    kept = kernels.dropout_mask(SHAPE, rate, 12)
    pairs = {
        f"{name} {step} apart": (kept[at[0]], kept[at[1]])
        for name, axis, steps in (
            ("heads", 0, (1,)),
            ("rows", 1, (1, 8)),
            ("columns", 2, (1, 2, 8)),
        )
        for step in steps
        for at in [
            [(slice(None),) * axis + (part,) for part in (slice(None, -step), slice(step, None))]
        ]
    }
    for seed in (13, 12 + 2**32):
        pairs[f"seeds 12 and {seed}"] = kept, kernels.dropout_mask(SHAPE, rate, seed)
    # Of a chi-square of three degrees of freedom one in ten thousand is beyond 21.
    found = {name: _chi_square_of_pairs(*pair, rate) for name, pair in pairs.items()}
    assert max(found.values()) < 21.0, found
