"""The curriculum of Path-X as a user runs it: it goes on bit for bit, draws, and refuses."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import harness
from data import sequence_sets
from training import lra_loop, saliency

import minitorch
from minitorch.training.model_files import read_checkpoint

from ...support.scripts import refused

pytestmark = pytest.mark.slow

SMALL = ["--quick", "--steps", "6", "--judge-every", "2", "--tested", "16",
         "--attention", "flash", "block-sparse", "--device", "cpu"]  # fmt: skip


def run(out: Path, *options: str, code: int = 0) -> None:
    places = ["--folder", str(out), "--json", str(out / "pathx.json")]
    given = [*SMALL, "--resume", *options, *places]
    assert harness.run(harness.load("pathx"), given) == code


def rows_of(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "pathx.json").read_text())["rows"]


def line_of(out: Path, *options: str) -> str:
    """Return the one line with which a run ends."""
    return refused(lambda given: run(out, *given), *options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    run(out)
    return out


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """Return a copy that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "own"))


def test_each_stage_has_an_interval_saliency_and_a_curve(finished: Path) -> None:
    rows = rows_of(finished)
    assert [(row["side"], row["attention"]) for row in rows] == [(8, "flash"), (16, "block_sparse")]
    for row in rows:
        low, high = row["interval"]
        assert 0 <= low <= row["test_accuracy"] <= high <= 1 and row["tested"] == 16
        assert all(value >= 0 for value in row["saliency"].values())
        assert row["curve"]["valid_step"] == [2, 4, 6] and len(row["curve"]["train"]) == 6
    assert "begun with the model of 8 pixels" in rows[1]["source"]
    pytest.importorskip("matplotlib")
    for name in ("saliency-8", "saliency-16"):
        assert (finished / f"{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("options", [[], ["--examples", "20"]])
def test_interrupted_runs_end_with_the_same_bits(
    options: list[str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = finished
    if options:
        run(unbroken := tmp_path / "unbroken", *options)
    turned, steps, ctrl_c = lra_loop.turned, 0, lra_loop.CtrlC()

    def then_ctrl_c(*args: Any) -> Any:
        """Ask for the end after each fourth step."""
        nonlocal steps
        steps += 1
        ctrl_c.asked = steps % 4 == 0
        return turned(*args)

    monkeypatch.setattr(lra_loop, "turned", then_ctrl_c)
    monkeypatch.setattr(lra_loop, "CtrlC", lambda: ctrl_c)
    for code in (130, 130, 0):  # it is asked after 4, 8 and 12 of 12 steps
        run(tmp_path / "b", *options, code=code)
    for a, b in zip(rows_of(unbroken), rows_of(tmp_path / "b"), strict=True):
        assert a["curve"] == b["curve"] and a["test_loss"] == b["test_loss"]
    for file in unbroken.glob("*/best.safetensors"):
        one, _ = read_checkpoint(file)
        other, _ = read_checkpoint(tmp_path / "b" / file.relative_to(unbroken))
        assert one.keys() == other.keys()
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_a_finished_run_is_not_repeated_and_other_options_are_refused(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows_of(own)
    monkeypatch.setattr(lra_loop.Training, "run", None)  # training again would fail
    run(own)
    assert rows_of(own) == before
    monkeypatch.undo()
    (own / "pathx.json").unlink()
    assert "had other values of steps than this one" in line_of(own, "--steps", "7")
    assert "values of source" in line_of(own, "--stages", "16", "--attention", "block-sparse")


def test_damage_and_a_full_disk_are_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = own / "pathx.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "rows": rows_of(own)[:1]}))
    (last,) = (own / "pathfinder-16" / "checkpoints").iterdir()
    best = own / "pathfinder-8" / lra_loop.BEST
    for file in last, best:
        whole = file.read_bytes()
        file.write_bytes(whole[:99])
        assert f"{file}: the checkpoint cannot be read" in line_of(own)
        file.unlink()
    record.rename(own / "kept.json")
    assert "finished training is missing; delete" in line_of(own)
    (own / "kept.json").rename(record)
    best.write_bytes(whole)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lra_loop, "save_checkpoint", full)
    assert "No space left on device); make room and run the same command again" in line_of(own)
    record.write_text("{}")
    assert "is not a record" in line_of(own)


def test_batches_drawn_ahead_are_those_drawn_on_demand() -> None:
    def rows(done: int, processes: int) -> Any:
        batches = sequence_sets.fresh_batches(drawn, 4, 7, done, 5, processes)
        found = [next(batches) for _ in range(4 - done)]
        batches.close()
        return np.concatenate([np.c_[batch.X, batch.y] for batch in found])

    first = rows(0, 0)
    for processes in (0, 1):
        np.testing.assert_array_equal(rows(2, processes), first[10:])
    assert len(np.unique(first, axis=0)) == len(first) == 20


def drawn(random: np.random.Generator) -> tuple[Any, int]:
    return random.integers(0, 256, 4).astype(np.uint8), int(random.integers(2))


def test_saliency_is_the_slope_of_the_difference_of_the_logits() -> None:
    minitorch.manual_seed(0)
    model = minitorch.SequenceClassifier(
        256, 8, 2, 16, 2, 0.0, n_layer=1, middle_dim=8, side=4, backend=minitorch.FastBackend
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 256, (2, 16))
    found = saliency.saliency(model, ids)
    assert found.shape == (2, 16) and model.training

    def difference(along: np.ndarray) -> float:
        x = model.embed(ids).detach().to_numpy().copy()
        x[1, 7] += along.astype(x.dtype)
        logits = model.head(model.pool(minitorch.from_numpy(x, minitorch.FastBackend)))
        away, joined = logits.to_numpy()[1]
        return joined - away

    slopes = [(difference(step) - difference(-step)) / 2e-2 for step in 1e-2 * np.eye(8)]
    assert found[1, 7] == pytest.approx(np.linalg.norm(slopes), rel=1e-2)
