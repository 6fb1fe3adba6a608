"""Tests that must fail: a submission that lets one of them pass has changed what judges it."""

from __future__ import annotations

import secrets
from pathlib import Path

from course.tasks import SPEED, Task

#: A test that must fail → what it means if it passes.
CANARIES = {
    "assert False": "an assertion that fails",
    "with pytest.raises(ValueError):\n        pass": "a test in which nothing is raised",
    "assert 1.0 == pytest.approx(2.0)": "approx(2.0) and 1.0",
    "assert_close_arrays(np.ones(2), np.zeros(2), np.float64)": "arrays of ones and zeros",
    "np.testing.assert_array_equal([1.0], [2.0])": "[1.0] and [2.0]",
    "np.testing.assert_allclose([1.0], [2.0])": "[1.0] and [2.0], nearly",
    "assert_close(1.0, 2.0)": "1.0 and 2.0, nearly",
    "given(integers())(lambda n: never(n))()": "a property that no number has",
}
#: Likewise where speed is measured: a thing is not faster than itself.
SPEED_CANARIES = {
    "assert False": "an assertion that fails",
    "assert_faster(pause, pause, 1.5, lambda *note: None, 'itself')": "any speed at all",
}
CANARY_FILE = """
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers

{imports}

pytestmark = [{marks}]


def never(n):
    assert n != n


def pause():
    sleep(0.002)

"""
COMPARING = (
    "from .strategies import assert_close",
    "from .support.tolerances import assert_close_arrays",
)
TIMING = f"from .{'.'.join(Path(SPEED).with_suffix('').parts[1:])} import assert_faster"


def add_canaries(tree: Path, task: Task, speed: bool = False) -> dict[str, str]:
    """Write tests that must fail, under names that say nothing; return what each one means."""
    arrays = (tree / "tests" / "support" / "tolerances.py").exists()
    right = {test: means for test, means in CANARIES.items() if arrays or "arrays" not in test}
    chosen = SPEED_CANARIES if speed else right
    simulated = task.simulator and not speed
    marks = f"pytest.mark.{task.mark}" + (", pytest.mark.simulator" if simulated else "")
    imports = TIMING if speed else "\n".join(COMPARING[: 1 + arrays])
    head = CANARY_FILE.format(marks=marks, imports=imports)
    names = {f"test_{secrets.token_hex(6)}": body for body in chosen}
    bodies = "\n\n".join(f"def {name}():\n    {body}\n" for name, body in names.items())
    file = f"tests/test_{secrets.token_hex(6)}.py"
    (tree / file).write_text(head + bodies, encoding="utf-8")
    return {f"{file}::{name}": chosen[body] for name, body in names.items()}
