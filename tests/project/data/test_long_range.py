"""The generated tasks of the Long-Range Arena: their answers are right, their bounds hold, seeds decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data import listops as listops_data
from data.listops import VOCABULARY, ListOps, draw_expression, listops
from data.pathfinder import PUBLISHED, draw_picture
from hypothesis import given
from hypothesis import strategies as st

from ...support.examples import at_most

SMALL = ListOps(depth=4, most_arguments=5, least_length=10, most_length=40,
                counts={"train": 6, "valid": 2, "test": 2})  # fmt: skip
FUNCTIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluated(ids: Any) -> tuple[int, int]:
    """Evaluate an expression with a stack; return its value and its depth."""
    stack: list[list[Any]] = [[]]
    depth = 1
    for token in (VOCABULARY[i] for i in ids):
        if token in FUNCTIONS:
            stack.append([token])
            depth = max(depth, len(stack))
        elif token == "]":
            operator, *values = stack.pop()
            assert len(values) >= 2
            stack[-1].append(FUNCTIONS[operator](values))
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value, depth


@at_most(30)
@given(seed=st.integers(0, 10**6))
def test_an_expression_has_the_value_of_its_operations(seed: int) -> None:
    ids, value = draw_expression(np.random.default_rng(seed), SMALL)
    found, depth = evaluated(ids)
    assert found == value
    assert depth <= SMALL.depth
    assert SMALL.least_length <= len(ids) <= SMALL.most_length


def test_a_set_is_written_once_and_read_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "listops.npz"
    made = listops(path, 0, SMALL)
    monkeypatch.setattr(listops_data, "draw_set", None)  # drawing again would fail
    read = listops(path, 0, SMALL)
    for part, examples in made.items():
        assert len(examples.y) == SMALL.counts[part]
        np.testing.assert_array_equal(read[part].X, examples.X)
        np.testing.assert_array_equal(read[part].y, examples.y)
    assert not (made["train"].X[0] == made["valid"].X[0]).all()
    with pytest.raises(SystemExit, match="delete the file"):
        listops(path, 1, SMALL)
    path.write_bytes(b"none")
    with pytest.raises(SystemExit, match="not a set of sequences"):
        listops(path, 0, SMALL)


# -- Pathfinder ----------------------------------------------------------------------------------

#: Where a contour begins, and where it ends: places in its paddles.
BOTH_ENDS = (np.s_[0, :2], np.s_[-1, 2:])


def apart(first: Any, second: Any) -> float:
    """Return the least distance of two contours, measured at points along their paddles."""
    places = np.linspace(0.0, 1.0, 9)[:, None]
    points = [
        (c[:, None, :2] + places * (c[:, None, 2:] - c[:, None, :2])).reshape(-1, 2)
        for c in (first, second)
    ]
    return float(np.hypot(*(points[0][:, None] - points[1][None]).transpose(2, 0, 1)).min())


@pytest.mark.parametrize("size", PUBLISHED)
def test_contours_stay_apart_and_markers_tell_the_class(size: int) -> None:
    task = PUBLISHED[size]
    for seed in range(6):
        picture = draw_picture(np.random.default_rng(seed), task)
        contours = picture.contours
        assert picture.pixels.shape == (size, size) and picture.pixels.max() == 255
        assert [len(c) for c in contours[:2]] == [task.contour_length] * 2
        assert len(contours) == 2 + task.distractors
        for i, first in enumerate(contours):
            for second in contours[:i]:
                # Paddles are measured at three points, and cross at none of them.
                assert apart(first, second) > task.margin * 0.5
        begins, ends = ([tuple(c[place]) for c in contours[:2]] for place in BOTH_ENDS)
        between = np.hypot(*np.subtract(*begins))
        assert between == pytest.approx(task.seed_distance)
        first, last = (tuple(marker) for marker in picture.markers)
        assert (begins.index(first) == ends.index(last)) == bool(picture.label)
