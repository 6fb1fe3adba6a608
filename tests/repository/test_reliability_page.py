"""The page of promises names tests that exist, and its records are tables."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    known = {file: functions_of(ROOT / file) for file, _ in named}
    assert [f"{file}::{name}" for file, name in named if name not in known[file]] == []


def test_every_record_is_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("docs/extensions", "docs"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    extension = importlib.import_module("long_checks")
    shown = re.findall(r"^\[Check: (\w+)\]", PAGE.read_text(encoding="utf-8"), re.M)
    there = [x.stem for x in (ROOT / "docs" / "results" / "reliability").glob("*.json")]
    assert {*there} <= {*shown}
    for name in there:
        assert "\n| " in extension.as_markdown(name)
    for content in ("[]", "{}", "no JSON"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError):
            extension.as_markdown("a", folder=tmp_path)
