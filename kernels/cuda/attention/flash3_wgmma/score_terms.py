"""The parts of a score that Hopper's forward and backward kernels compute alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32, int32, int64

from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words
from kernels.cuda.attention.flash3_wgmma.packed_mask import QUAD, STEP, make_pairs
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.score_functions import Features
from kernels.cuda.ptx.numbers import UNPACK
from kernels.cuda.runtime.kernel import device_function


@device_function
def _no_numbers(flat, extras):
    return int64(0), int64(0)


def has_mods(features: Features) -> bool:
    """Tell whether a user's functions get the places of elements."""
    return features.score_mod is not None or features.mask_mod is not None


def numbers_of(features: Features) -> Callable[..., Any]:
    """Return ``Elements.own``; without a mod the numbers are not used."""
    return numbers_of_mods if has_mods(features) else _no_numbers


def distance_of(features: Features) -> Callable[..., Any]:
    """Return ``distance(row, col, extras)``: how far ALiBi says that places are apart, else row - col."""

    @device_function
    def from_diagonal(row, col, extras):
        return float32(row + extras.diagonal - col)

    @device_function
    def difference(row, col, extras):
        return float32(int32(row - col))

    return from_diagonal if features.slopes else difference


def difference_of(features: Features) -> Callable[..., Any]:
    """Return ``difference(distance, extras)``: row - col, of what ``distance_of`` gives."""

    @device_function
    def without_diagonal(distance, extras):
        return distance - float32(extras.diagonal)

    @device_function
    def itself(distance, extras):
        return distance

    return without_diagonal if features.slopes else itself


def seen_words(features: Features, cols: int) -> int:
    """Return how many words a lane has in ``seen``."""
    has_pairs = features.mask in UNPACK
    return bit_words(cols) + (QUAD * (cols // STEP) if has_pairs else 0)


def pairs_of(
    features: Features, cols: int
) -> tuple[Callable[..., None], Callable[..., Any]] | None:
    """Return the functions of ``make_pairs`` for all words of a tile, or None without such a mask."""
    if features.mask not in UNPACK:
        return None
    return make_pairs(features.mask, bit_words(cols))
