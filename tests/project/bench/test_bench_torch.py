"""The benchmark of PyTorch's operator: it measures every part and writes a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "project"))

import bench_torch


def test_it_writes_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    record = tmp_path / "torch.json"
    options = ["--quick", "--device", "cpu", "--seconds", "0.01", "--only", "call", "step"]
    bench_torch.main([*options, "--json", str(record)])
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert [row["kind"] for row in rows] == ["call"] * 4 + ["step"]
    for row in rows:
        assert row["ms"]["ours"]["median"] > 0 and row["best"] in row["ms"]
    assert capsys.readouterr().out.count("times as fast as") == len(rows)


def test_without_pytorch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_torch, "load_torch", lambda: None)
    with pytest.raises(SystemExit, match="pip install torch"):
        bench_torch.main([])
