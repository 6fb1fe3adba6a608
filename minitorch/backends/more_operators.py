"""Functions of numbers that the course does not have, for operations that it does not have."""

from __future__ import annotations

import math


def elu(x: float) -> float:
    """Return x where it is positive, else e^x - 1."""
    return float(x) if x > 0.0 else math.expm1(x)


def elu_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `elu` at x."""
    return d if x > 0.0 else d * math.exp(x)


def exp_difference(x: float, y: float) -> float:
    """Compute e^(x - y)."""
    return math.exp(x - y)


def keep(condition: float, x: float) -> float:
    """Return x where the condition is not 0, else 0.0."""
    return x if condition != 0.0 else 0.0


def drop(condition: float, x: float) -> float:
    """Return 0.0 where the condition is not 0, else x."""
    return 0.0 if condition != 0.0 else x
