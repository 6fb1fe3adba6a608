"""The command that hands out and grades: what it prints, refuses and returns."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from course.command import main
from course.markers import fill, is_solved, read_bodies
from course.starter_trees import start

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["grade", "nowhere"], "has no folder minitorch"),
        (["grade", str(ROOT), "--task", "3.9"], "there is no task '3.9'; there are 3.1, 3.2"),
    ],
)
def test_what_cannot_be_graded_ends_with_two(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert error in capsys.readouterr().err


def test_a_task_of_a_later_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(0, tmp_path / "zero")
    assert main(["grade", str(tmp_path / "zero"), "--task", "2.1"]) == 2
    assert "is the tree of module 0" in capsys.readouterr().err


def test_a_tree_is_graded_by_the_course_or_else_by_its_tests(tmp_path: Path) -> None:
    start(0, tree := tmp_path / "tree")
    fill(tree, ["0.1", "0.4"], read_bodies(ROOT))
    command = [sys.executable, "project/course.py", "grade", ".", "--task", "0.4"]

    def run(*options: str) -> tuple[int, str]:
        done = subprocess.run([*command, *options], cwd=tree, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, text = run()
    assert code == 0 and "10/10" in text, text
    for name, code in (("test_module", 0), ("add_lists", 1)):
        tests = [sys.executable, "project/course.py", "test", ".", "-k", name]
        assert subprocess.run(tests, cwd=tree, capture_output=True).returncode == code
    stamp = (tree / "course.json").read_text(encoding="utf-8")
    (tree / "course.json").write_text(stamp.replace(str(ROOT), "/moved"), encoding="utf-8")
    code, text = run("--task", "0.3")
    assert code == 1 and "is not in /moved; name its folder with --course" in text, text
    assert "there are no points" in text and "NotImplementedError: Task 0.3: map" in text, text
    assert re.search(r"0\.3 .*failed", text) and re.search(r"0\.4 .*passed", text), text
    assert "Task 0.3: " in text and "10/10" not in text
    code, text = run("--course", str(ROOT))
    assert code == 0 and "10/10" in text, text
    code, text = run("--course", str(tree))
    assert code == 2 and "is not the course" in text
    code, text = run("--gpu")
    assert code == 2 and "without the course, only --task with one of 0.1" in text


def test_a_folder_of_submissions_becomes_a_table_and_is_not_graded_twice(tmp_path: Path) -> None:
    folder, table = tmp_path / "all", tmp_path / "points.csv"
    folder.mkdir()
    for name in ("ada", "=1+1", "broken"):
        start(0, folder / name)
    (folder / "broken" / "course.json").write_text("{", encoding="utf-8")
    fill(folder / "ada", ["0.4"], read_bodies(ROOT))
    with (folder / "ada" / "minitorch" / "module.py").open("a", encoding="utf-8") as file:
        file.write("\ntry:\n    open('/outside', 'w')\nexcept OSError:\n    pass\n")
    command = ["grade", "--all", str(folder), "--csv", str(table), "--task", "0.4"]
    assert main(command) == 2  # one of them could not be graded
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [(r["submission"], r["0.4"], r["possible"], r["refused"]) for r in rows] == [
        ("'=1+1", "0", "10", "0"), ("ada", "10", "10", "1"), ("broken", "", "", ""),
    ]  # fmt: skip
    assert "is damaged" in rows[2]["error"]
    assert "passed" in (tmp_path / "points" / "ada.txt").read_text(encoding="utf-8")
    shutil.rmtree(folder / "broken")
    before = (tmp_path / "points" / "ada.json").stat().st_mtime_ns
    assert main(command) == 0
    assert (tmp_path / "points" / "ada.json").stat().st_mtime_ns == before
    assert main(["grade", "--all", str(folder)]) == 2


def test_a_release_keeps_the_solutions_out_of_what_students_get(tmp_path: Path) -> None:
    assert main(["release", "1", str(tmp_path / "one")]) == 0
    own = {key: body for key, body in read_bodies(ROOT).items() if key.task.startswith("1.")}
    given = read_bodies(tmp_path / "one" / "student")
    assert all(not is_solved(given[key]) for key in own)
    assert str(ROOT) not in (tmp_path / "one" / "student" / "course.json").read_text()
    workflow = (tmp_path / "one" / "student" / ".github" / "workflows" / "grade.yml").read_text()
    assert "course.py grade ." in workflow
    with zipfile.ZipFile(tmp_path / "one" / "autograder.zip") as file:
        assert {"setup.sh", "run_autograder", "course/minitorch/scalar.py"} <= {*file.namelist()}
        compile(file.read("run_autograder"), "run_autograder", "exec")


def test_the_autograder_grades_what_it_has_unpacked(tmp_path: Path) -> None:
    """As Gradescope runs it, in a folder of this test instead of its own."""
    place = tmp_path / "autograder"
    assert main(["release", "0", str(tmp_path / "zero")]) == 0
    with zipfile.ZipFile(tmp_path / "zero" / "autograder.zip") as file:
        file.extractall(place / "source")
    (place / "results").mkdir()
    shutil.copytree(tmp_path / "zero" / "student", place / "submission" / "packed")
    script = (place / "source" / "run_autograder").read_text().replace("/autograder/", f"{place}/")
    (place / "run_autograder.py").write_text(script)
    subprocess.run([sys.executable, place / "run_autograder.py"], check=True, cwd=tmp_path)
    results = json.loads((place / "results" / "results.json").read_text())
    assert [test["max_score"] for test in results["tests"]] == [10, 10, 10, 10], results
    assert all(test["score"] == 0 for test in results["tests"])
    assert "Task 0.1: " in results["tests"][0]["output"]
