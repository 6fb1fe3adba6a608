"""The script of the Long-Range Arena as a user runs it: it learns, goes on, draws, and refuses."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "project"))  # as for a script that runs there
from bench import harness  # noqa: E402
from bench.long_range import (  # noqa: E402
    crossovers,
    lengths_table,
    rates_table,
    results_table,
    steps_tables,
)
from data.long_range import load_task  # noqa: E402
from measurements import long_range  # noqa: E402
from training import lra_loop  # noqa: E402
from training.lra_methods import QUICK  # noqa: E402

from minitorch.models.positions import upsampled_grid  # noqa: E402
from minitorch.training.model_files import read_checkpoint  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = ["--tasks", "listops", "--quick", "--steps", "20", "--judge-every", "5", "--device", "cpu"]


def run(out: Path, *options: str, small: list[str] = SMALL, code: int = 0) -> None:
    places = ["--folder", str(out), "--json", str(out / "lra.json")]
    assert harness.run(harness.load("lra"), [*small, *options, *places]) == code


def rows_of(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "lra.json").read_text())["rows"]


def refused(
    capsys: pytest.CaptureFixture[str], out: Path, *options: str, small: list[str] = SMALL
) -> str:
    """Run the trainings in this process; return the one line with which they end."""
    with pytest.raises(SystemExit) as ended:
        run(out, *options, small=small)
    error = capsys.readouterr().err + (
        ended.value.code if isinstance(ended.value.code, str) else ""
    )
    return error.rpartition("\r")[2]


@pytest.fixture(autouse=True)
def no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of memory take a process each."""
    monkeypatch.setattr(long_range, "peak_in_child", lambda *args: 2**20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_range, "peak_in_child", lambda *args: 2**20)
        run(out, "--attentions", "flash")
    return out


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """Return a copy that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "own"))


def test_pathfinder_begins_on_smaller_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training: Any = long_range.Training
    begun: list[tuple[str, Any]] = []

    def noted(task: Any, *args: Any) -> Any:
        *others, start = args
        given: list[Any] = []

        def begins() -> Any:
            given.append(start())
            return given[0]

        made = training(task, *others, start and begins)
        begun.append((task.name, *(given or [None])))
        return made

    monkeypatch.setattr(long_range, "Training", noted)
    small = [
        "--tasks",
        "pathfinder",
        "--quick",
        "--steps",
        "2",
        "--judge-every",
        "2",
        "--device",
        "cpu",
    ]
    run(tmp_path, "--attentions", "linformer", small=small)
    assert [name for name, _ in begun] == ["pathfinder-8", "pathfinder-16", "pathfinder"]
    assert begun[0][1] is None
    for (_, start), side, before in zip(begun[1:], (16, 32), (8, 16), strict=True):
        folder = tmp_path / "pathfinder-linformer-seed-0-lr-0.001" / f"pathfinder-{before}"
        best, _ = read_checkpoint(folder / lra_loop.BEST)
        of_length = {name for name in best if "project_" in name}
        assert of_length and start.keys() == best.keys() - of_length
        positions = start["position_embeddings.weights"]
        np.testing.assert_array_equal(
            positions, upsampled_grid(best["position_embeddings.weights"], side)
        )
        assert positions.shape == (side**2, QUICK.width)
    (row,) = rows_of(tmp_path)
    assert row["source"].endswith("begun with the model of 16 pixels")


@pytest.mark.parametrize("attention", ["flash", "linear"])
def test_a_tiny_training_lowers_the_loss(attention: str, tmp_path: Path) -> None:
    task = load_task("listops", tmp_path, quick=True)
    settings = replace(QUICK, steps=60, judge_every=30)
    row = lra_loop.Training(task, attention, settings, 0, "fast", tmp_path / "run", 1e-2).run()
    losses = row["curve"]["train"]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert row["done"] and row["step_ms"] > 0 and 0 <= row["test_accuracy"] <= 1


def test_the_best_model_is_the_one_that_is_tested(finished: Path) -> None:
    (row,) = rows_of(finished)
    curve = row["curve"]
    best = max(curve["valid_accuracy"])
    assert curve["valid_step"] == [5, 10, 15, 20] and len(curve["train"]) == 20
    assert row["valid_accuracy"] == best
    assert row["best_step"] == curve["valid_step"][curve["valid_accuracy"].index(best)]
    assert row["source"] == "generated" and row["stand_in"] is False


def test_a_resumed_training_continues_the_same_curve(tmp_path: Path) -> None:
    task = load_task("listops", tmp_path, quick=True)
    settings = replace(QUICK, steps=20, judge_every=5, dropout=0.2)

    def training(folder: str, goes_on: bool = False) -> lra_loop.Training:
        return lra_loop.Training(
            task, "performer", settings, 3, "fast", tmp_path / folder, None, goes_on
        )

    unbroken = training("a").run()

    class Stopped(Exception):
        pass

    broken, done = training("b"), 0
    take = broken.take_step

    def stop_after_12(*batch: Any) -> Any:
        nonlocal done
        done += 1
        if done > 12:
            raise Stopped
        return take(*batch)

    broken.take_step = stop_after_12  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        broken.run()
    resumed = training("b", goes_on=True)
    assert resumed.resumed == [10]
    row = resumed.run()
    assert row["curve"] == unbroken["curve"]
    assert row["test_accuracy"] == unbroken["test_accuracy"]
    other = replace(settings, width=8)
    with pytest.raises(lra_loop.CheckpointError, match="had other values of width than this one"):
        lra_loop.Training(task, "performer", other, 3, "fast", tmp_path / "b", None, True)


def test_resuming_adds_what_the_record_lacks(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows_of(own)
    run(own, "--attentions", "flash", "linear", "--resume")
    after = rows_of(own)
    assert after[0] == before[0] and [row["attention"] for row in after] == ["flash", "linear"]
    monkeypatch.setattr(long_range, "Training", None)  # training again would fail
    capsys.readouterr()
    run(own, "--attentions", "flash", "linear", "--resume")
    assert "| linear attention |" in capsys.readouterr().out


def test_several_trainings_are_in_one_table_and_picture(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run(own, "--attentions", "flash", "local", "naive", "--resume")
    rows = {row["attention"]: row for row in rows_of(own)}
    assert set(rows) == {"flash", "local", "naive"}
    assert rows["naive"]["curve"]["train"] == pytest.approx(
        rows["flash"]["curve"]["train"], rel=1e-3
    )
    out = capsys.readouterr().out
    assert "listops (generated)" in out and "| Transformer |" in out


def test_ctrl_c_keeps_the_training_for_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(lra_loop.CtrlC):
        def __enter__(self) -> Asked:
            super().__enter__()
            self.asked = True
            return self

    with monkeypatch.context() as patch:
        patch.setattr(lra_loop, "CtrlC", Asked)
        run(tmp_path, "--attentions", "flash", code=130)
    assert [row["done"] for row in rows_of(tmp_path)] == [False]
    run(tmp_path, "--attentions", "flash", "--resume")
    assert [row["done"] for row in rows_of(tmp_path)] == [True]


def test_wrong_options_are_refused_in_one_line(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, words in (
        (["--attentions", "flash", "--resume", "--steps", "30"], "had other values of steps"),
        (["--data", "x"], "add --tasks text, retrieval or image"),
        (["--tasks", "text", "--data", str(tmp_path / "no")], "train/pos"),
    ):
        assert words in refused(capsys, own, *options), options
    (own / "lra.json").write_text("{}")
    assert "is not a record" in refused(capsys, own, "--resume")


def test_a_crossover_is_the_length_from_which_on_a_method_stays_faster() -> None:
    times = {"flash": (1, 2, 4, 8), "linear": (2, 1.5, 5, 6), "local": (0.5, 1, 2, 4),
             "smyrf": (9, 9, 9, 9), "naive": (0.5, 3, None, None)}  # fmt: skip
    rows = [
        {"length": length, "ms": {
            name: None if values[i] is None else {"median": values[i]} for name, values in times.items()
        }}
        for i, length in enumerate((256, 512, 1024, 2048))
    ]  # fmt: skip
    assert crossovers(rows) == {"linear": 2048, "local": 256, "smyrf": None, "naive": None}
    table = lengths_table(rows)
    assert "| Smyrf | 9 | 9 | 9 | 9 | not up to 2,048 |" in table
    assert "| Transformer | 0.5 | 3 | – | – |" in table


def test_tables_name_the_source_and_the_spread_of_seeds() -> None:
    base = {
        "task": "text",
        "source": "stand-in: bytes of Python's sources",
        "done": True,
        "lr": 1e-3,
    }
    rows = [
        {**base, "attention": name, "seed": seed, "test_accuracy": accuracy, "valid_accuracy": accuracy,
         "step_ms": ms, "peak_bytes": peak}
        for name, seed, accuracy, ms, peak in (
            ("naive", 0, 0.5, 10.0, 2**21), ("flash", 0, 0.5, 4.0, 2**20), ("flash", 1, 0.6, 6.0, 2**20)
        )
    ]  # fmt: skip
    table = results_table(rows)
    assert "text (stand-in: bytes of Python's sources)" in table
    assert "| FlashAttention | 55.0 ± 5.0 | 2 | 5 | 2.00 | 1 | 0.50 |" in table
    rates = rates_table([*rows, {**rows[0], "lr": 3e-3, "valid_accuracy": 0.7}])
    assert "| text, Transformer | 50.0 | **70.0** |" in rates


def test_the_steps_of_all_attentions_are_compared_with_naive_ones() -> None:
    rows = [
        {"task": task, "source": "x", "attention": name, "ms": {"median": ms}, "peak_bytes": peak}
        for task, name, ms, peak in (
            ("listops", "naive", 8.0, 8), ("listops", "flash", 4.0, 2),
            ("image", "naive", 8.0, 8), ("image", "flash", 1.0, 4),
        )
    ]  # fmt: skip
    speed, memory = steps_tables(rows).split("\n\n")
    assert "| FlashAttention | 2.00 | 8.00 | 4.00 |" in speed
    assert "| FlashAttention | 0.250 | 0.500 | 0.354 |" in memory


def test_turned_images_are_each_one_of_eight() -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (64, 9)).astype(np.uint8)
    seen = set()
    for before, after in zip(images, lra_loop.turned(images, random), strict=True):
        square = before.reshape(3, 3)
        ways = [np.rot90(x, n) for x in (square, square[:, ::-1]) for n in range(4)]
        (way,) = (i for i, x in enumerate(ways) if (x == after.reshape(3, 3)).all())
        seen.add(way)
    assert seen == set(range(8))
