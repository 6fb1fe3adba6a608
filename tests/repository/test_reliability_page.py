"""The page of promises: its tests exist, every record is shown, and one that is missing is said to be."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RECORDS = ROOT / "docs" / "results" / "reliability"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("project", "docs/extensions", "docs"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    return importlib.import_module("long_checks")


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    files = {file: ROOT / file for file, _ in named}
    assert [file for file, path in files.items() if not path.exists()] == []
    known = {file: functions_of(path) for file, path in files.items()}
    assert [f"{file}::{name}" for file, name in named if name not in known[file]] == []


def test_every_record_is_shown_and_is_one(extension: ModuleType) -> None:
    shown = re.findall(r"^```\{reliability\} (\w+)", PAGE.read_text(encoding="utf-8"), re.M)
    there = sorted(path.stem for path in RECORDS.glob("*.json"))
    assert set(there) <= set(shown)
    for name in there:
        assert extension.read_record(extension.file_of(name))["command"] in extension.as_markdown(
            name
        )


def written(folder: Path, **figures: Any) -> Path:
    origin = {"device": "A processor", "date": "2030-01-02", "command": "python a.py", "cores": 2,
              "threads": 2, "versions": {"numpy": "9"}}  # fmt: skip
    (folder / "a.json").write_text(json.dumps({**origin, **figures}))
    return folder


def test_figures_and_rows_are_tables(extension: ModuleType, tmp_path: Path) -> None:
    rows = [{"part": "lint", "ended": "passed", "seconds": 1234, "more": [1]}]
    written(tmp_path, minutes=12.5, all_passed=True, rows=rows).joinpath("a.json").rename(
        tmp_path / "ci.json"
    )
    text = extension.as_markdown("ci", folder=tmp_path)
    assert "2030-01-02, A processor, 2 cores, `python a.py`" in text
    for line in ("| minutes | 12.5 |", "| all parts passed | yes |", "| lint | passed | 1,234 |"):
        assert line in text


@pytest.mark.parametrize("content", ["[]", "{}", "no JSON"])
def test_a_file_that_is_no_record_is_an_error(
    extension: ModuleType, tmp_path: Path, content: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError):
        extension.as_markdown("a", folder=tmp_path)


RUN = """[tests] 12 passed in 3 s
passed     12 s  tests
passed      3 s  slow

1 minutes 30 seconds in all
passed      2 s  lint
passed     12 s  tests
passed      0 s  slow
"""


@pytest.mark.parametrize(("change", "code"), [(("", ""), 0), (("passed     12", "FAILED     12"), 1),
                                              (("1 minutes", "45 minutes"), 1)])  # fmt: skip
def test_a_run_of_ci_is_a_row_for_each_part(
    change: tuple[str, str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "project"))
    harness = importlib.import_module("bench.harness")
    log, path = tmp_path / "log.txt", tmp_path / "ci.json"
    log.write_text(RUN.replace(*change), encoding="utf-8")
    assert harness.run(harness.load("ci"), ["--log", str(log), "--json", str(path)]) == code
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [row["part"] for row in record["rows"]] == ["lint", "tests", "slow"]
    assert [row["seconds"] for row in record["rows"]] == [2, 12, 0]
    assert record["minutes"] == (45.5 if "45" in change[1] else 1.5)


def test_a_part_of_a_run_of_ci_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "project"))
    harness = importlib.import_module("bench.harness")
    log = tmp_path / "log.txt"
    log.write_text(RUN.split("1 minutes")[0], encoding="utf-8")
    with pytest.raises(SystemExit, match="no output of a whole run"):
        harness.run(harness.load("ci"), ["--log", str(log), "--json", str(tmp_path / "ci.json")])
    assert not (tmp_path / "ci.json").exists()
