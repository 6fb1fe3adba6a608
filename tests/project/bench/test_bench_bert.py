"""The benchmark of BERT compares losses before it times steps, and writes a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "project"))

import bench_bert

QUICK = ["--quick", "--device", "cpu", "--seconds", "0.01"]


def test_it_writes_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "bert.json"
    bench_bert.main([*QUICK, "--json", str(record)])
    (row,) = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert row["unpadding"]["median"] > 0 and 0 < row["padding"] < 1
    assert row["loss_difference"] < 1e-5
    if bench_bert.load_torch() is None:
        assert "ratio" not in row and "PyTorch is not installed" in capsys.readouterr().out
    else:
        assert row["ratio"]["packed"]["median"] > 0


def test_losses_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_bert.ALLOWED, "float32", -1.0)
    with pytest.raises(SystemExit, match="the losses differ by"):
        bench_bert.main(QUICK)
