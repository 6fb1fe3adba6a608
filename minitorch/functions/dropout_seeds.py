"""The source of the seeds of dropout masks."""

from __future__ import annotations

import random

from kernels.cuda.backend import drawn

#: Number of bits of a seed, without a sign.
BITS = 63


def dropout_seed() -> int:
    """Return a seed from Python's ``random``, which ``manual_seed`` seeds.

    A call captured in a CUDA graph draws a new seed at each replay.
    """
    return drawn(_next)


def _next() -> int:
    return random.getrandbits(BITS)
