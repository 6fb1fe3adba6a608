"""Random numbers and sort keys of the methods that group positions by locality-sensitive hashing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kernels.common.arguments import whole

from ...nn import max as max_over
from ...tensor import Tensor
from .support import shared_constant

#: Number of bits of a seed, without a sign.
BITS = 63


def hash_seed(seed: int | None) -> int:
    """Return a seed; None draws one from Python's ``random``, which ``manual_seed`` seeds."""
    return random.getrandbits(BITS) if seed is None else whole("seed", seed, 0)


def gaussian(shape: tuple[int, ...], seed: int) -> Any:
    """Draw standard normal numbers, float64; equal seeds draw equal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def nearest(scores: Tensor) -> Tensor:
    """Return the number of the largest score of each row: (…, 1) for (…, count), a constant."""
    scores = scores.detach()
    numbers = shared_constant(scores, np.arange(scores.shape[-1]))
    return max_over((scores == max_over(scores, -1)) * numbers, -1)
