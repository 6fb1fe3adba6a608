"""Every wrong call of the tables raises what is documented, says what to do, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .areas import all_cases
from .cases import Wrong, judge

CASES = [
    pytest.param(area, label, case, backend, id=f"{label}-{backend_name}")
    for area, label, case, backend_name, backend in all_cases()
]


@pytest.fixture
def somewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts and files write to the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize(("area", "label", "case", "backend"), CASES)
def test_a_wrong_call_says_what_to_do(
    area: str, label: str, case: Wrong, backend: Any, record_property: Any
) -> None:
    record_property("area", area)
    record_property("case", label)
    record_property("raised", judge(case, backend))


@pytest.mark.slow
def test_wrong_calls_are_refused_without_assertions_too(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.bad_calls.areas"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
