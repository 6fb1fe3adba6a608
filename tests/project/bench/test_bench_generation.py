"""The benchmark of generation, with a tiny model: it runs and records what it timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "project"))

import bench_generation


def test_a_tiny_model_is_timed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    bench_generation.main(["--quick", "--rounds", "1", "--json", str(tmp_path / "a.json")])
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["tokens_per_second"]["ours"]["median"] > 0
    assert record["ratios"] == {} and "is not installed" in str(record["why_not"])
    assert "tokens/s" in capsys.readouterr().out


def test_transformers_continue_with_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    bench_generation.main(["--quick", "--rounds", "1", "--json", str(tmp_path / "a.json")])
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["same_tokens"] == {"transformers, eager": True}
    assert record["ratios"]["transformers, eager"]["median"] > 0
