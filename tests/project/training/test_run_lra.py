"""The script of the Long-Range Arena as a user runs it: it learns, goes on, draws, and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import harness
from bench.long_range import (
    crossovers,
    lengths_table,
)
from measurements import long_range
from training import lra_loop
from training.lra_methods import QUICK

from minitorch.models.positions import upsampled_grid
from minitorch.training.model_files import read_checkpoint

pytestmark = pytest.mark.slow

SMALL = ["--tasks", "listops", "--quick", "--steps", "20", "--judge-every", "5", "--device", "cpu"]


def run(out: Path, *options: str, small: list[str] = SMALL, code: int = 0) -> None:
    places = ["--folder", str(out), "--json", str(out / "lra.json")]
    assert harness.run(harness.load("lra"), [*small, *options, *places]) == code


def rows_of(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "lra.json").read_text())["rows"]


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
    small = ["--tasks", "pathfinder", "--quick", "--steps", "2", "--judge-every", "2"]
    run(tmp_path, "--attentions", "linformer", "--device", "cpu", small=small)
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


def test_resuming_adds_what_the_record_lacks(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows_of(own)
    curve = before[0]["curve"]
    assert before[0]["valid_accuracy"] == max(curve["valid_accuracy"])
    assert curve["valid_step"] == [5, 10, 15, 20] and len(curve["train"]) == 20
    run(own, "--attentions", "flash", "linear", "--resume")
    after = rows_of(own)
    assert after[0] == before[0] and [row["attention"] for row in after] == ["flash", "linear"]
    monkeypatch.setattr(long_range, "Training", None)  # training again would fail
    capsys.readouterr()
    run(own, "--attentions", "flash", "linear", "--resume")
    assert "| linear attention |" in capsys.readouterr().out


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
