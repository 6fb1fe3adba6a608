"""The benchmark of training beside PyTorch: what it compares is alike, its table says what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "project"))  # as for a script that runs there
import bench_training
import gradient_errors
from bench import training_contestants
from bench.measuring import in_child
from bench.training_contestants import OURS, THEIRS, Run, Size, size_of
from bench_training import Bench, difference, main
from training.gpt_presets import PRESETS

TINY = Size(2, 16, 2, 96, True, 24, 3, 5e-3)
QUICK = ["--quick", "--device", "cpu"]


def losses(name: str, size: Size, precision: str, source: Any = None) -> list[float]:
    return Run(name, size, "cpu", precision, source=source).losses(12, name)


# -- the same model on the same batches ------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_float32_losses_are_those_of_pytorch(tied: bool) -> None:
    pytest.importorskip("torch")
    size = TINY._replace(tied=tied)
    ours, theirs = (losses(name, size, "float32") for name in (OURS, THEIRS))
    assert difference(ours, theirs) < 1e-5, (ours, theirs)
    assert ours[-1] < ours[0]


def test_bfloat16_losses_are_as_far_as_those_of_pytorch() -> None:
    pytest.importorskip("torch")
    ours, theirs = (losses(name, TINY, "bfloat16") for name in (OURS, THEIRS))
    rounded = training_contestants.our_model(TINY, "cpu", "bfloat16", "flash")
    base = losses(THEIRS, TINY, "float32", rounded)
    noise = difference(theirs, base)
    assert 0.0 < difference(ours, base) < 4 * noise


def test_float64_comes_in_parts_and_both_sides_are_near_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    source = training_contestants.our_model(TINY, "cpu", "float32", "flash")
    curves = []
    for parts in (1, 2, 4):  # of three texts
        monkeypatch.setattr(training_contestants, "PARTS", parts)
        run = Run(THEIRS, TINY, "cpu", "float64", "naive", source=source)
        curves.append(run.losses(12, THEIRS))
    exact = curves[0]
    assert all(difference(curve, exact) < 1e-12 for curve in curves)
    for name in (OURS, THEIRS):
        assert 1e-12 < difference(losses(name, TINY, "float32"), exact) < 1e-5


def test_naive_attention_gives_the_losses_of_flash() -> None:
    flash, naive = (
        Run(OURS, TINY, "cpu", "float32", kind).losses(3, kind) for kind in ("flash", "naive")
    )
    assert difference(flash, naive) < 1e-5


def test_gradients_of_a_step_are_as_exact_as_those_of_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "record.json"
    gradient_errors.main([*QUICK, "--after", "3", "--json", str(path)])
    rows = {row["parameter"]: row for row in json.loads(path.read_text())["rows"]}
    assert "| attention.k_projection.bias | exact is 0 |" in capsys.readouterr().out
    zero = rows.pop("attention.k_projection.bias")
    assert zero[OURS] > 1.0 and zero["layers"] == 2
    assert len(rows) == 19
    for row in rows.values():
        assert 1e-9 < row[OURS] < 4e-6 and row[OURS] < 8 * row[THEIRS], row


@given(st.sampled_from([*PRESETS]), st.sampled_from([128, 256, 512, 1024, 2048]))
def test_a_step_has_as_many_tokens_at_any_context(preset: str, context: int) -> None:
    own = size_of(preset)
    other = size_of(preset, context)
    assert other.context == context and other.batch >= 1
    assert other.tokens == max(own.tokens, context)
    assert other._replace(context=own.context, batch=own.batch) == own


def test_recomputing_changes_no_loss() -> None:
    plain, again = (
        Run(OURS, TINY, "cpu", "float32", recompute=choice).losses(3, OURS)
        for choice in (False, True)
    )
    assert plain == again


def test_the_longest_context_has_a_text() -> None:
    longest = max(figure.context or 0 for figure in bench_training.FIGURES)
    assert len(training_contestants.corpus_of(size_of("gpt2-small", longest)).held_out) > longest


# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_contexts_pick_figures(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    picked = ["--figures", "context", "--contexts", "8192", "--seconds", "0.01", "--recompute"]
    main([*QUICK, *picked, "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["kind"], row["context"]) == ("context", 8192 // training_contestants.QUICK_CONTEXT)
    assert [*row["utilisation"].values()] == [None, None]  # of a processor


def test_without_pytorch_it_says_so_and_measures_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_training, "load_torch", lambda: None)
    # The smallest step, so that it takes no time.
    monkeypatch.setattr(bench_training, "size_of", lambda *args: TINY)
    path = tmp_path / "record.json"
    picked = [
        "--presets",
        "toy",
        "--figures",
        "speed",
        "losses",
        "--steps",
        "2",
        "--seconds",
        "0.01",
    ]
    assert main([*QUICK, "--against", "torch", *picked, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "PyTorch is not installed" in printed.err
    assert "without PyTorch" in printed.out and "eager step" in printed.out
    record = json.loads(path.read_text())
    speed, *curves = record["rows"]
    assert speed["value"] is None and [*speed["tokens_per_second"]] == [OURS]
    assert speed["tokens_per_second"][OURS]["median"] > 0
    assert [row["precision"] for row in curves] == ["float32", "bfloat16"]
    assert all([*row["curves"]] == [OURS] and row["value"] is None for row in curves)
    assert record["command"].startswith("python project/bench_training.py --quick")
    assert "record.json" not in record["command"]


def found(self: Bench, figure: Any, value: float, **more: Any) -> dict[str, Any]:
    own = {**figure._asdict(), "context": 8, "batch": 1, "is_judged": True, "value": value}
    return {**own, "figure": figure.kind, **more}


@pytest.mark.parametrize(
    ("value", "more", "code"),
    [
        (0.5, {}, 0),
        (3.0, {}, 1),
        (0.5, {"why_not": "out of memory"}, 1),
        (3.0, {"is_judged": False}, 0),
    ],
)
def test_the_exit_code_says_whether_all_is_reached(
    value: float, more: dict[str, Any], code: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Bench, "row", lambda self, figure: found(self, figure, value, **more))
    assert main([*QUICK, "--figures", "memory"]) == code  # a figure of which less is better
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| memory |")]
    assert len(lines) >= 2 and ("| NO |" in lines[0]) == (value > 2.0 and not more)


def test_memory_that_runs_out_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> Any:
        raise MemoryError("8 GiB asked for")

    monkeypatch.setitem(bench_training.KINDS, "attention", none_left)
    bench = Bench(bench_training.parse_args(QUICK), None)
    figure = next(one for one in bench_training.FIGURES if one.kind == "attention")
    row = bench.row(figure)
    assert row["value"] is None and "8 GiB" in row["why_not"]


def test_an_interruption_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = []

    def row(self: Bench, figure: Any) -> dict[str, Any]:
        calls.append(figure)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found(self, figure, 1.0)

    monkeypatch.setattr(Bench, "row", row)
    path = tmp_path / "record.json"
    assert main([*QUICK, "--json", str(path)]) == 130
    assert len(json.loads(path.read_text())["rows"]) == 2
    assert "interrupted: 2 of" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--quick"], ["--json", "x.json"], ["--figures", "memory"], []])
def test_what_is_published_is_the_whole_table(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--publish", *more])
    assert ended.value.code == 2
    assert "--publish writes the whole table" in capsys.readouterr().err


def test_the_peak_of_training_counts_the_model() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak memory of a process is known on Linux only")
    wide = TINY._replace(width=256, layers=4)
    peak = in_child(training_contestants.peak_of_training, OURS, wide, "cpu", "float32")
    weights = 4 * 12 * wide.layers * wide.width**2
    assert peak is not None and 3 * weights < peak < 30 * weights  # weights, gradients and moments


def test_going_on_measures_what_a_record_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def row(self: Bench, figure: Any) -> dict[str, Any]:
        measured.append(figure)
        size = training_contestants.size_of(figure.preset, figure.context, True)
        return {**found(self, figure, 1.0), "context": size.context}

    monkeypatch.setattr(Bench, "row", row)
    path = tmp_path / "record.json"
    picked = [*QUICK, "--json", str(path), "--go-on"]
    main([*picked, "--figures", "losses", "--presets", "toy"])
    first = [*measured]
    main(picked)
    assert 0 < len(first) < len(measured) == len(bench_training.FIGURES)
    assert len(json.loads(path.read_text())["rows"]) == len(measured)
    assert len(set(measured)) == len(measured)
