"""The script that takes barriers away finds them, leaves the rest as it is, and tells when tests fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "project"))

from reliability import barriers  # noqa: E402
from reliability.barriers import FILES, KERNELS, Barrier, barriers_of, caught_by, without  # noqa: E402

SOURCE = """
def kernel(x):
    cuda.syncthreads()  # the tile is whole
    if x:
        mbarrier_wait(
            x, 1
        )  # it came
    y = wait_for(x)
    cuda.other()
    wait_for_all()
"""


def test_what_orders_threads_is_found() -> None:
    found = barriers_of("a", SOURCE)
    assert [(one.first, one.last) for one in found] == [(3, 3), (5, 7), (10, 10)]
    assert found[0].text == "cuda.syncthreads()  # the tile is whole"
    assert found[1].text == "mbarrier_wait( x, 1 )  # it came"


def test_nothing_else_is_taken_away() -> None:
    lines = without(barriers_of("a", SOURCE)[1], SOURCE).splitlines()
    expected = SOURCE.splitlines()
    assert lines == [*expected[:4], "        pass", *expected[7:]]


def test_every_file_is_there_and_has_some() -> None:
    for file in FILES:
        assert barriers_of(file, (ROOT / KERNELS / f"{file}.py").read_text(encoding="utf-8")), file


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_test_that_catches_a_removal_is_named(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barriers, "TESTED_BY", {("a",): ("tests/test_a",)})
    place = tmp_path / KERNELS / "a.py"
    place.parent.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    place.write_text("def wait_here():\n    pass\n\n\nwait_here()\n", encoding="utf-8")
    is_there = f"'\\nwait_here()' in open({str(place)!r}, encoding='utf-8').read()"
    test = f"def test_it():\n    assert {is_there} or {not fails}\n"
    (tmp_path / "tests" / "test_a.py").write_text(test, encoding="utf-8")
    before = place.read_text(encoding="utf-8")
    found = caught_by(Barrier("a", 5, 5, "wait_here()"), tmp_path, 2)
    assert found == ("tests/test_a.py::test_it" if fails else "")
    assert place.read_text(encoding="utf-8") == before
