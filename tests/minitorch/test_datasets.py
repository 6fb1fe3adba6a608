"""Module 0: the labelled points that the first models learn."""

import random

import pytest

from minitorch.datasets import Graph, datasets

# The rule of each set, written out a second time as a picture: rows from x2 = 0.94 down to 0.04,
# columns from x1 = 0.04 up to 0.94, `#` for class 1. No point lies on a border.
PICTURES = {
    "Simple": ["#####....."] * 10,
    "Diag": [".........."] * 5
    + ["#.........", "##........", "###.......", "####......", "#####....."],
    "Split": ["##......##"] * 10,
    "Xor": ["#####....."] * 5 + [".....#####"] * 5,
    "Circle": [
        *("##########", "##########", "###....###", "##......##", "##......##"),
        *("##......##", "##......##", "###....###", "##########", "##########"),
    ],
}


@pytest.mark.parametrize("name", datasets)
@pytest.mark.parametrize("N", [0, 2, 50])
def test_a_set_has_the_points_that_were_asked_for(name: str, N: int) -> None:
    graph = datasets[name](N)
    assert isinstance(graph, Graph)
    assert graph.N == len(graph.X) == len(graph.y) == N
    assert set(graph.y) <= {0, 1}
    if name != "Spiral":  # its arms end outside the square
        assert all(0.0 <= x <= 1.0 for point in graph.X for x in point)


@pytest.mark.parametrize("name", PICTURES)
def test_the_classes_lie_where_the_picture_shows(name: str, monkeypatch) -> None:
    grid = [(0.04 + 0.1 * column, 0.94 - 0.1 * row) for row in range(10) for column in range(10)]
    draws = iter([coordinate for point in grid for coordinate in point])
    monkeypatch.setattr(random, "random", lambda: next(draws))
    labels = datasets[name](100).y
    marks = "".join("#" if label else "." for label in labels)
    assert [marks[row : row + 10] for row in range(0, 100, 10)] == PICTURES[name]
