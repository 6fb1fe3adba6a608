"""How far a share that was counted may be from the true one."""

from __future__ import annotations

import math

#: Standard normal quantile of a two-sided interval of 95 %.
Z_95 = 1.959964


def wilson_interval(right: int, count: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a share, from 0 to 1.

    Args:
        right: How many of the trials succeeded.
        count: Number of independent trials, 1 or more.
        z: Standard normal quantile; that of a 95 % interval by default.

    Raises:
        ValueError: If there is no trial, or ``right`` is not between 0 and ``count``.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(
            f"an interval needs 1 trial or more and 0 to as many successes, got {right} of {count}"
        )
    share, spread = right / count, z * z / count
    centre = share + spread / 2.0
    half = math.sqrt(share * (1.0 - share) * spread + spread * spread / 4.0)
    low, high = (centre - half) / (1.0 + spread), (centre + half) / (1.0 + spread)
    # Rounding must not put the share outside of its own interval.
    return max(min(low, share), 0.0), min(max(high, share), 1.0)
