"""Tables and figures in the documentation are those of the records."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / part) for part in ("project", "docs/extensions", "docs")]
if importlib.util.find_spec("sphinx") is None:
    pytest.skip("sphinx is not installed: pip install -e '.[docs]'", allow_module_level=True)
figures: Any = importlib.import_module("figures")
measured: Any = importlib.import_module("measured")
record_tables: Any = importlib.import_module("record_tables")

RECORD = {
    "rows": [
        {"length": 128, "flash": {"median": 0.5}},
        {"length": 2048, "flash": {"median": 2.0}, "mask": "a b"},
    ],
    "largest": [[1, 7], [2, 8]],
    "causal / dense": 0.5,
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("rows/length=2048/flash/median", 2.0),
        ("rows/mask=a b/length", 2048),
        ("rows/mask=a b&length=2048/flash/median", 2.0),
        ("rows/0/length", 128),
        ("largest/-1/1", 8),
        (r"causal \/ dense", 0.5),
    ],
)
def test_a_path_leads_to_a_number(path: str, expected: float) -> None:
    assert figures.look_up(RECORD, path) == expected


def test_a_number_is_formatted(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "speedup.json").write_text(json.dumps(RECORD))
    assert figures.number("speedup gpu rows/mask=a b/flash/median .1f", tmp_path) == "2.0"
    with pytest.raises(ValueError, match="got 'speedup gpu rows'"):
        figures.number("speedup gpu rows", tmp_path)


def test_every_table_of_a_record_is_shown_and_can_be_made() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    marks = [match for text in pages for match in measured.MARK.findall(text)]
    assert {name for kind, name, _ in marks if kind == "Table"} >= {*record_tables.TABLES}
    for kind, name, target in marks:
        text = measured.shown(kind, name, target)
        tables = re.findall(r"^\|.+\n\|[-:|]+\n((?:\|.+\n?)+)", text, re.MULTILINE)
        assert tables or kind == "Figure"
        if kind == "Table":
            rows = [row for body in tables for row in body.splitlines()]
            assert [row for row in rows if not re.search(r"\d", row.split("|", 2)[2])] == []


def test_figures_in_the_sources_are_those_of_the_records() -> None:
    assert [*figures.stale()] == [], "run python docs/figures.py --write"
