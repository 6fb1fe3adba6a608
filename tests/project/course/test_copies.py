"""Submissions with much code in common are listed, whatever its names and comments."""

from __future__ import annotations

from pathlib import Path

import pytest
from course.copies import copies
from course.markers import ROOT, read_bodies

OWN = """    total = 0.0
    for number in range(3):
        # Add a third of the product.
        total = total + x * y * (1.0 / 3.0) if number < 3 else total
    return total"""
RENAMED = OWN.replace("total", "t").replace("number", "i").replace("# Add", "# Sum up")
OTHER = """    if x < 0.0:
        return -((-x) * y)
    pair = [x, y]
    return pair[0] * pair[1]"""
SOLUTION = next(
    "\n".join(body)
    for key, body in read_bodies(ROOT, ["minitorch/operators.py"]).items()
    if key.name == "sigmoid"
)


def listed(tmp_path: Path, *bodies: str, function: str = "mul") -> list[list[str]]:
    for i, body in enumerate(bodies):
        file = tmp_path / f"s{i}" / "minitorch" / "operators.py"
        file.parent.mkdir(parents=True)
        text = f"def {function}(x, y):\n    # TASK 0.1: h\n{body}\n    # END TASK 0.1\n"
        file.write_text(text, encoding="utf-8")
    return list(copies(tmp_path, [f"s{i}" for i in range(len(bodies))]))


def test_a_copy_with_other_names_and_comments_is_listed(tmp_path: Path) -> None:
    assert listed(tmp_path, OWN, OTHER, RENAMED) == [["s0", "s2", "100%", "0.1 mul"]]


@pytest.mark.parametrize(
    ("function", "bodies"),
    [
        ("sigmoid", [SOLUTION, SOLUTION]),  # as the course has it
        ("mul", [OWN, RENAMED, OWN, OTHER]),  # as most have it
        ("mul", ["    return y * x", "    return y * x"]),  # too short to tell
        ("mul", ['    raise NotImplementedError("Task 0.1: h")'] * 2),
    ],
    ids=["the solution", "most", "short", "a stub"],
)
def test_code_that_anyone_may_write_is_not_listed(
    function: str, bodies: list[str], tmp_path: Path
) -> None:
    assert listed(tmp_path, *bodies, function=function) == []


def test_a_submission_that_cannot_be_read_is_compared_with_none(tmp_path: Path) -> None:
    assert listed(tmp_path, OWN, OWN + "\n    # TASK 0.2: h") == []
