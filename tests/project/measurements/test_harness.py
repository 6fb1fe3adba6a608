"""The harness of measurements: rows and failures are recorded, and stale records are found."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import pytest
from bench import harness, measuring, plots, records
from bench.harness import Figure, Measurement, Run
from common import child

from kernels.runtime.targets import EMULATED

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(EMULATED, reason="they start the emulated GPU themselves")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let results, images and what is built lie in an empty folder."""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "BUILD", tmp_path / "build")
    monkeypatch.setattr(plots, "IMAGES", tmp_path / "images")
    return tmp_path


def squares(stop: type[BaseException] | None = None, done: list[int] | None = None) -> Measurement:
    """Return a measurement of squares, in which that of 2 may raise."""

    def square(x: int) -> dict[str, int]:
        if done is not None:
            done.append(x)
        if x == 2 and stop is not None:
            raise stop("two is too much")
        return {"square": x * x}

    def cases(run: Run) -> Iterator[Any]:
        for x in run.numbers:
            yield {"x": x}, partial(square, x)

    def draw(record: dict[str, Any]) -> list[plots.Panel]:
        points = [(row["x"], row.get("square", 0)) for row in record["rows"]]
        return [plots.Panel("squares", lines={"squares": points})]

    return Measurement(
        "squares", "What are the squares?", cases, {"cpu": {"normal": {"numbers": (1, 2, 3)}}},
        table=lambda record: "".join(f"{row.get('square')}," for row in record["rows"]), draw=draw,
        figures=lambda record: [Figure("largest", record["rows"][-1].get("square"), 9, is_most=True)],
        paths=("kernels",),
    )  # fmt: skip


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*/squares.json")
    return json.loads(path.read_text())["rows"]


def put(elsewhere: Path, folder: str, **more: Any) -> Path:
    """Write a record of another device."""
    path = elsewhere / "results" / folder / "squares.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {"device": "A GPU", "date": "2020-02-02", "cores": 8, "threads": 8, "command": "x"}
    record = {**entries, "versions": {}, "rows": [{"x": 1, "square": 1}], **more}
    path.write_text(json.dumps(record))
    return path


def test_a_case_that_raises_is_recorded_and_the_others_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harness.run(squares(RuntimeError), []) == 1
    rows = rows_in(elsewhere / "build")
    assert rows == [
        {"x": 1, "square": 1}, {"x": 2, "why_not": "two is too much"}, {"x": 3, "square": 9},
    ]  # fmt: skip
    assert "x 2; why_not two is too much" in capsys.readouterr().out


def test_an_interruption_keeps_the_rows_and_resuming_measures_the_others(elsewhere: Path) -> None:
    assert harness.run(squares(KeyboardInterrupt), ["--publish"]) == 130
    assert [row["x"] for row in rows_in(elsewhere / "build")] == [1]
    assert not (elsewhere / "results").exists(), "what is published is complete"
    done: list[int] = []
    assert harness.run(squares(done=done), ["--resume"]) == 0
    assert done == [2, 3] and [row["square"] for row in rows_in(elsewhere / "build")] == [1, 4, 9]


def test_a_missed_bound_is_an_exit_code_but_in_a_quick_run(elsewhere: Path) -> None:
    assert harness.run(squares(), ["--numbers", "1", "4"]) == 1
    assert harness.run(squares(), ["--numbers", "1", "4", "--quick"]) == 0


def test_a_published_record_is_not_replaced_by_a_shorter_one(elsewhere: Path) -> None:
    assert harness.run(squares(), ["--publish"]) == 0
    assert harness.run(squares(), ["--publish", "--numbers", "1"]) == 0
    assert len(rows_in(elsewhere / "results")) == 3
    (path,) = (elsewhere / "results").glob("*/squares.json")
    record = records.read_record(path)
    assert record["command"] == "python project/measure.py squares"
    assert record["settings"] == {"size": "normal", "numbers": [1, 2, 3]}


def test_a_figure_has_a_panel_for_each_device_that_has_a_record(elsewhere: Path) -> None:
    put(elsewhere, "gpu")
    assert harness.run(squares(), ["--publish"]) == 0
    picture = elsewhere / "images" / "squares.svg"
    drawn = picture.read_text()
    assert "A GPU (from file, 2020-02-02)" in drawn and "(measured here, " in drawn
    assert harness.run(squares(), ["--publish", "--redraw"]) == 0
    redrawn = picture.read_text()
    assert "measured here" not in redrawn and redrawn.count("from file") == 2
    assert harness.run(squares(), ["--publish", "--redraw"]) == 0
    assert picture.read_text() == redrawn, "the same rows make the same file"


def test_a_record_is_stale_when_the_measured_code_changed_after_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(elsewhere), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(file: str) -> str:
        (elsewhere / file).parent.mkdir(exist_ok=True)
        (elsewhere / file).write_text(str(time.time()))
        git("add", file)
        git("commit", "-q", "-m", file)
        return git("log", "-1", "--format=%h")

    git("init", "-q")
    monkeypatch.setattr(records, "ROOT", elsewhere)
    measured = commit("kernels/a.py")
    put(elsewhere, "gpu", versions={"commit": measured})
    put(elsewhere, "hal", date="2020-02-02")  # names no commit: its day counts
    commit("docs/a.md")
    assert measure.stale(squares(), "squares") == {"gpu": 0, "hal": 1}
    commit("kernels/b.py")
    assert measure.stale(squares(), "squares") == {"gpu": 1, "hal": 2}
    listing = measure.listing({"squares": squares()}, only_stale=True)
    assert "What are the squares?" in listing and "gpu: 1 commits old" in listing


def test_several_run_in_processes_of_their_own_and_a_failure_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[str, str | None]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        name, *options = command[2:]
        assert options == ["--device", "cpu", "--quick"]
        called.append((name, env.get("CUDA_VISIBLE_DEVICES")))
        return 3 if name == "options" else 0

    monkeypatch.setattr(measure.subprocess, "call", call)
    given = ["options", "sparsity", "--device", "cpu", "--quick", "--gpus", "3"]
    assert measure.main(given) == 3
    assert called == [("options", "3"), ("sparsity", "3")]
    assert "| options | failed with exit code 3 |" in capsys.readouterr().out


def test_rounds_are_interleaved_and_compilation_is_not_counted() -> None:
    done: list[str] = []
    steps = {name: lambda name=name: done.append(name) or time.sleep(3e-3) for name in "ab"}
    after = {"a": lambda: done.append("free")}
    times = measuring.interleaved(steps, "cpu", 0.0, least=2, after=after)
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
    assert done == ["a", "a", "free", "b", "b"] + ["a", "free", "b"] * 2
    done.clear()
    steps = {name: lambda name=name: done.append(name) for name in "abc"}
    measuring.interleaved(steps, "cpu", 0.0, least=3, shortest=0.0)
    assert "".join(done[-9:]) == "abccbaabc", "every other round runs backwards"


def speaks(number: int) -> tuple[int, str]:
    """Run in a child: print, and return."""
    print("this is no result")
    return number, os.environ.get("MINITORCH_EMULATE", "")


def breaks() -> None:
    """Run in a child: fail."""
    raise ValueError("too small")


def test_a_function_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert child.in_child(speaks, 3, emulated=True) == (3, "1")
    with pytest.raises(
        RuntimeError, match=r"breaks of .*test_harness failed .* ValueError: too small"
    ):
        child.in_child(breaks)
