"""The script that takes barriers away finds them, leaves the rest as it is, and tells when tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from reliability.barriers import FILES, KERNELS, barriers_of, run_by
from reliability.mutations import Mutation, caught_by

ROOT = Path(__file__).resolve().parents[2]
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
    assert [one.line for one in found] == [3, 5, 10]
    assert found[0].kind == "cuda.syncthreads()  # the tile is whole"
    assert found[1].kind == "mbarrier_wait( x, 1 )  # it came"


def test_nothing_else_is_taken_away() -> None:
    one = barriers_of("a", SOURCE)[1]
    lines = (SOURCE[: one.first] + one.text + SOURCE[one.last :]).splitlines()
    expected = SOURCE.splitlines()
    assert lines == [*expected[:4], "        pass", *expected[7:]]


def test_every_file_is_there_and_has_some() -> None:
    for file in FILES:
        assert barriers_of(file, (ROOT / KERNELS / f"{file}.py").read_text(encoding="utf-8")), file
        assert all((ROOT / test).exists() for _, test in run_by(file)), file


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_test_that_catches_a_change_is_named(fails: bool, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    source = "def wait_here():\n    pass\n\n\nwait_here()\n"
    (tree / "a.py").write_text(source, encoding="utf-8")
    test = f"def test_it():\n    assert '\\nwait_here()' in open('a.py').read() or {not fails}\n"
    (tree / "tests" / "test_a.py").write_text(test, encoding="utf-8")
    change = Mutation("a.py", 5, "wait_here()", len(source) - 12, len(source) - 1, "pass")
    found = caught_by(change, tree, [("host", "tests/test_a.py")], 60)
    assert found == ("tests/test_a.py::test_it" if fails else "")
    assert (tree / "a.py").read_text(encoding="utf-8") == source
