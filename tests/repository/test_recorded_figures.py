"""Numbers in the documentation are looked up in the records when the site is built."""

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
harness: Any = importlib.import_module("bench.harness")
recorded: Any = importlib.import_module("recorded")
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
    assert recorded.look_up(RECORD, path) == expected


def test_a_number_is_formatted_and_a_device_without_a_file_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "speedup.json").write_text(json.dumps(RECORD))
    text = "speedup {} rows/mask=a b/flash/median .1f"
    assert recorded.number(text.format("gpu"), tmp_path) == "2.0"
    assert recorded.number(text.format("cpu"), tmp_path) == recorded.MISSING
    with pytest.raises(ValueError, match="got 'speedup gpu rows'"):
        recorded.number("speedup gpu rows", tmp_path)


def text_of(*patterns: str) -> str:
    pages = [page for pattern in patterns for page in sorted((ROOT / "docs").glob(pattern))]
    return "".join(page.read_text(encoding="utf-8") for page in pages)


def test_every_table_of_a_record_is_shown_and_can_be_made() -> None:
    shown = re.findall(
        r"^```\{record-table\} ([\w-]+)$(?:\n:device: (\S+))?", text_of("**/*.md"), re.MULTILINE
    )
    assert {name for name, _ in shown} == {"summary", *record_tables.TABLES}
    for name, device in shown:
        text = record_tables.as_markdown(name, device or None)
        tables = re.findall(r"^\|.+\n\|[-:|]+\n((?:\|.+\n?)+)", text, re.MULTILINE)
        assert tables, "there is a table"
        rows = [row for body in tables for row in body.splitlines()]
        assert [row for row in rows if not re.search(r"\d", row.split("|", 2)[2])] == []


def test_the_table_in_the_readme_is_what_the_records_hold() -> None:
    readme_table: Any = importlib.import_module("readme_table")
    assert readme_table.table_in_readme() == readme_table.table(), (
        "run python docs/readme_table.py --write"
    )
