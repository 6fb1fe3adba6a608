"""Where dropout takes the seeds from that decide its bits."""

from __future__ import annotations

import random

from kernels.cuda.backend import drawn

#: Of a seed, without a sign.
BITS = 63


def dropout_seed() -> int:
    """Return a seed from Python's ``random``, which ``manual_seed`` decides.

    A call that becomes a graph draws another one for each replay.
    """
    return drawn(_next)


def _next() -> int:
    return random.getrandbits(BITS)
