"""Data sets of labelled points in the plane, from easy to hard to separate."""

import math
import random
from dataclasses import dataclass


def _check_count(N: int) -> None:
    if not isinstance(N, int) or N < 0:
        raise ValueError(
            f"N must be the number of points, a whole number, 0 or more; got {N!r:.40}"
        )


def make_pts(N: int) -> list[tuple[float, float]]:
    """Draw points uniformly from the unit square.

    They come from Python's `random` module, so `random.seed` fixes them.

    Args:
        N: The number of points.

    Returns:
        A list of N pairs (x1, x2).

    Raises:
        ValueError: If N is not a whole number, or negative.
    """
    _check_count(N)
    return [(random.random(), random.random()) for _ in range(N)]


@dataclass
class Graph:
    """A set of labelled points.

    Attributes:
        N: The number of points.
        X: The points, pairs (x1, x2).
        y: The class of each point, 0 or 1.
    """

    N: int
    X: list[tuple[float, float]]
    y: list[int]


def simple(N: int) -> Graph:
    """Draw N points; class 1 is the left half."""
    X = make_pts(N)
    return Graph(N, X, [int(x1 < 0.5) for x1, _ in X])


def diag(N: int) -> Graph:
    """Draw N points; class 1 is the corner below the line x1 + x2 = 0.5."""
    X = make_pts(N)
    return Graph(N, X, [int(x1 + x2 < 0.5) for x1, x2 in X])


def split(N: int) -> Graph:
    """Draw N points; class 1 is a strip on the left and a strip on the right."""
    X = make_pts(N)
    return Graph(N, X, [int(x1 < 0.2 or x1 > 0.8) for x1, _ in X])


def xor(N: int) -> Graph:
    """Draw N points; class 1 has exactly one coordinate above 0.5."""
    X = make_pts(N)
    return Graph(N, X, [int((x1 < 0.5 < x2) or (x2 < 0.5 < x1)) for x1, x2 in X])


def circle(N: int) -> Graph:
    """Draw N points; class 1 is outside a circle around the centre, of squared radius 0.1."""
    X = make_pts(N)
    return Graph(N, X, [int((x1 - 0.5) ** 2 + (x2 - 0.5) ** 2 > 0.1) for x1, x2 in X])


def spiral(N: int) -> Graph:
    """Lay points along two arms that wind around the centre, one arm for each class.

    The points are not random. Each arm has N // 2 points, so an odd N gives one point fewer. The
    arms end outside the unit square.
    """
    _check_count(N)
    half = N // 2
    # The first few steps are left out: the arms meet at the centre.
    turns = [10.0 * i / half for i in range(5, 5 + half)]
    arm0 = [(_spiral_x(t) + 0.5, _spiral_y(t) + 0.5) for t in turns]
    arm1 = [(_spiral_y(-t) + 0.5, _spiral_x(-t) + 0.5) for t in turns]
    return Graph(2 * half, arm0 + arm1, [0] * half + [1] * half)


def _spiral_x(t: float) -> float:
    return t * math.cos(t) / 20.0


def _spiral_y(t: float) -> float:
    return t * math.sin(t) / 20.0


datasets = {
    "Simple": simple,
    "Diag": diag,
    "Split": split,
    "Xor": xor,
    "Circle": circle,
    "Spiral": spiral,
}
