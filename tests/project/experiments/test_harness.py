"""The experiments: each runs in small and leaves a record and a figure; what they share keeps its word."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.runtime.targets import IS_SIMULATOR, why_no_cuda

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "project"), str(ROOT / "project" / "experiments")]  # as for its scripts
import harness  # noqa: E402
from bench import measuring  # noqa: E402
from harness import Experiment, Report, Result  # noqa: E402

pytestmark = pytest.mark.skipif(IS_SIMULATOR, reason="they start the simulator themselves")
TINY = {
    "io_table": ["--batch-heads", "1", "--length", "32", "--head-dim", "8", "--seconds", "0.01"],
    "block_size": ["--batch-heads", "1", "--length", "64", "--head-dim", "8", "--seconds", "0.01"],
    "breakdown": ["--batch-heads", "1", "--length", "32", "--head-dim", "8", "--seconds", "0.01"],
    "peers": ["--heads", "1", "--length", "128", "--head-dim", "8", "--seconds", "0.01"],
}
KEYS = {
    "command",
    "date",
    "device",
    "cores",
    "threads",
    "versions",
    "experiment",
    "kind",
    "settings",
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let results, images and what is built lie in an empty folder."""
    for name in ("RESULTS", "IMAGES", "BUILD"):
        monkeypatch.setattr(harness, name, tmp_path / name.lower())
    return tmp_path


def one_number(measure: Any, name: str = "one_number") -> Experiment:
    """Return an experiment of one column."""

    def table(record: Any) -> str:
        return harness.markdown(["x"], [[row["x"]] for row in record["rows"]])

    def draw(figure: Any, results: list[Result]) -> None:
        for axes, result in harness.panels(figure, results):
            axes.plot([row["x"] for row in result.rows])

    return Experiment(name, "One column.", measure, table, draw)


def of(device: str, name: str, **more: Any) -> str:
    """Return the text of a result file."""
    entries = {"experiment": name, "device": device, "date": "2020-02-02", "cores": 8, "threads": 8}
    made = {"command": "python x.py", "versions": {}}
    return json.dumps({**entries, **made, "rows": [{"x": 1.0}], **more})


def put(elsewhere: Path, folder: str, name: str, text: str) -> None:
    """Write a result file of another device."""
    path = elsewhere / "results" / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_an_experiment_leaves_a_record_and_a_figure(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_path, figure = tmp_path / "record.json", tmp_path / "figure.svg"
    places = ["--json", str(record_path), "--figure", str(figure)]
    assert harness.run(harness.load(name).EXPERIMENT, [*TINY[name], *places]) == 0
    record = json.loads(record_path.read_text())
    assert set(record) >= {*KEYS, "rows", "timing"} and record["rows"]
    assert record["experiment"] == name and record["kind"] == "cpu"
    if name == "io_table":  # what is timed on the CPU is not what is counted
        assert "attention composed of tensor operations" in record["note"]
    assert record["command"] == " ".join([f"python project/experiments/{name}.py", *TINY[name]])
    assert str(tmp_path) not in record_path.read_text()
    assert "measured here" in figure.read_text()
    printed = capsys.readouterr().out
    assert "\n|---|" in printed and record["device"] in printed


def test_every_experiment_has_a_test_that_runs_it() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    tested = {name for name in harness.names() if any(f'"{name}"' in text for text in texts)}
    assert tested | {"hardware_counters"} == {*harness.names()}  # which needs ncu


def test_an_interruption_keeps_what_is_done(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(args: Any, report: Report) -> None:
        for x in report.progress([1.0, 2.0, 3.0]):
            if x == 3.0:
                raise KeyboardInterrupt
            report.add(x=x)
            assert json.loads(report.path.read_text())["rows"][-1] == {"x": x}  # at once

    assert harness.run(one_number(measure), []) == 130
    (record,) = elsewhere.glob("build/cpu-*/one_number.json")
    assert [row["x"] for row in json.loads(record.read_text())["rows"]] == [1.0, 2.0]
    assert (elsewhere / "build" / "one_number.svg").exists()
    assert "2 rows are done" in capsys.readouterr().err


def test_a_file_of_another_device_gets_a_panel_that_says_so(elsewhere: Path) -> None:
    folder = elsewhere / "results" / "gpu"
    folder.mkdir(parents=True)
    (folder / "one_number.json").write_text(of("A GPU", "one_number"))
    experiment = one_number(lambda args, report: report.add(x=2.0))
    assert harness.run(experiment, ["--publish"]) == 0
    drawn = (elsewhere / "images" / "one_number.svg").read_text()
    assert "A GPU (from file, 2020-02-02)" in drawn and "(measured here, " in drawn
    own = elsewhere / "results" / measuring.slug_of("cpu") / "one_number.json"
    assert "--publish" not in json.loads(own.read_text())["command"]
    assert harness.run(experiment, ["--publish", "--redraw"]) == 0
    redrawn = (elsewhere / "images" / "one_number.svg").read_text()
    assert "measured here" not in redrawn and redrawn.count("from file") == 2


def test_a_fresh_result_takes_the_place_of_its_file(elsewhere: Path) -> None:
    for folder in ("cpu-2-cores", "gpu"):
        (elsewhere / "results" / folder).mkdir(parents=True)
        (elsewhere / "results" / folder / "x.json").write_text(of(folder, "x"))
    fresh = Result(json.loads(of("now", "x")), "gpu", fresh=True)
    assert [r.record["device"] for r in harness.beside_files(fresh, "x")] == ["cpu-2-cores", "now"]
    assert [r.record["device"] for r in harness.beside_files(None, "x")] == ["cpu-2-cores", "gpu"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError: "),
        ("[]", "its experiment is 'list'"),
        ('{"rows": []}', "its experiment is None"),
        (of("A GPU", "y"), "its experiment is 'y'"),
        (of("A GPU", "x", versions=None), "versions is None, expected dict"),
        (of("A GPU", "x", rows=[]), "it has no list of rows"),
        (of("A GPU", "x", rows=[1]), "it has no list of rows"),
    ],
)
def test_a_file_that_is_no_record_is_named(elsewhere: Path, text: str, why: str) -> None:
    put(elsewhere, "gpu", "x", text)
    said = r"x\.json is no record of the experiment x; make it with"
    with pytest.raises(ValueError, match=said) as error:
        harness.stored("x")
    assert why in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", harness.names())
def test_rows_that_are_not_an_experiments_own_are_an_error_of_one_line(
    elsewhere: Path, name: str
) -> None:
    """A file may come from anywhere: from another version, say, whose rows had other entries."""
    put(elsewhere, "gpu", name, of("A GPU", name, rows=[{"unknown": 1}]))
    with pytest.raises(SystemExit) as error:
        harness.run(harness.load(name).EXPERIMENT, ["--redraw"])
    text = str(error.value)
    assert f"{name}.json is no record of the experiment {name}; " in text and "\n" not in text


def test_what_was_measured_stays_where_a_file_beside_it_is_foreign(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(elsewhere, "gpu", "one_number", of("A GPU", "one_number", rows=[{"y": 1.0}]))
    put(elsewhere, "hal", "one_number", of("Another", "one_number"))
    with pytest.raises(SystemExit, match=r"gpu/one_number\.json is no record .* \(KeyError"):
        harness.run(one_number(lambda args, report: report.add(x=2.0)), ["--publish"])
    (record,) = (elsewhere / "results").glob("cpu-*/one_number.json")
    assert json.loads(record.read_text())["rows"] == [{"x": 2.0}]
    assert "| 2 |" in capsys.readouterr().out


def test_a_fault_of_our_own_is_no_fault_of_a_file(elsewhere: Path) -> None:
    put(elsewhere, "gpu", "one_number", of("A GPU", "one_number"))
    with pytest.raises(KeyError, match="x"):
        harness.run(one_number(lambda args, report: report.add(y=2.0)), [])


def test_files_of_nonsense_do_not_stop_the_others(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(elsewhere, "gpu", "hardware_counters", "{")
    assert harness.load("all").main(["--only", "hardware_counters"]) == 1
    printed = capsys.readouterr().out
    assert "hardware_counters.json is no record" in printed and "| hardware_counters |" in printed


def test_another_processor_with_as_many_cores_has_a_folder_of_its_own(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = one_number(lambda args, report: report.add(x=2.0))
    for name in ("Processor A", "Processor (R) B", "Processor A"):
        monkeypatch.setattr(measuring, "processor", lambda name=name: name)
        assert harness.run(experiment, ["--publish"]) == 0
    folder = measuring.slug_of("cpu")
    found = {r.folder: r.record["device"] for r in harness.stored("one_number")}
    assert found == {folder: "Processor A", f"{folder}-processor-r-b": "Processor (R) B"}
    drawn = (elsewhere / "images" / "one_number.svg").read_text()
    assert "Processor A" in drawn and "Processor (R) B" in drawn


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
def test_without_a_gpu_the_command_line_says_so_in_one_line() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        harness.run(harness.load("block_size").EXPERIMENT, ["--device", "cuda"])


def test_what_cannot_be_measured_here_is_drawn_from_files(elsewhere: Path) -> None:
    command_of = harness.load("all").command_of
    assert command_of("hardware_counters", "cpu", ["--quick"]) is None
    (elsewhere / "results" / "gpu").mkdir(parents=True)
    (elsewhere / "results" / "gpu" / "hardware_counters.json").write_text(
        of("A GPU", "hardware_counters")
    )
    assert command_of("hardware_counters", "cpu", ["--quick", "--publish"])[2:] == [
        "--redraw",
        "--publish",
    ]
    assert command_of("peers", "cpu", ["--quick"])[2:] == ["--device", "cpu", "--quick"]


def test_the_figures_of_tensor_cores_go_on_from_a_record(tmp_path: Path) -> None:
    import bench_attention
    from bench import against_torch

    given = ["--device", "cuda", "--against", "torch", "--groups", "dense", "masks", "--dims", "64"]
    todo = list(against_torch.plan(bench_attention.parse_args(given)))
    file = tmp_path / "rows.json"
    assert measuring.rows_of(file) == []
    done = todo[:3] + todo[-1:]
    measuring.write_record(file, "command", "device", rows=[one._asdict() for one in done])
    rows = measuring.rows_of(file)
    assert [one for one in todo if against_torch.is_there(one, rows)] == done


def test_the_matrix_product_is_a_figure_of_the_table() -> None:
    from bench.peer_figures import details, table

    row = {"group": "product", "case": "matrix product, 8192^3", "dtype": "bfloat16"}
    rows = [row | {"ratio": ratio, "tflops": {"ours": 500, "cuBLAS": 800}} for ratio in (0.62, 0.8)]
    missed, reached = table(rows).splitlines()[-2:]
    assert missed == "| bfloat16 matrix product, 8192^3 / cuBLAS | 0.62 | >= 0.7 | 0.9 | NO | 1 |"
    assert "| yes |" in reached
    assert "ours 500; cuBLAS 800" in details(rows)


def test_a_command_holds_no_path_of_this_machine() -> None:
    argv = [
        "--json",
        "/a/b.json",
        "--publish",
        "--length",
        "8",
        "--text=/home/me/my text.txt",
        "/c/d.txt",
        "--json=x",
    ]
    command = measuring.command_line("s.py", argv)
    assert command == 'python s.py --length 8 "--text=my text.txt" d.txt'


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.floats(1.0, 1e3))
def test_a_spread_is_in_order_and_a_ratio_is_fair(values: list[float], scale: float) -> None:
    found = measuring.spread(values, scale)
    assert found["low"] <= found["median"] * (1 + 1e-12) and found["rounds"] == len(values)
    assert found["median"] <= found["high"] * (1 + 1e-12)
    doubled = [2 * value for value in values]
    assert measuring.ratio(doubled, values) == measuring.spread([2.0] * len(values))


def test_rounds_are_interleaved_and_what_compiles_is_not_counted() -> None:
    done: list[str] = []
    steps = {name: lambda name=name: done.append(name) or time.sleep(3e-3) for name in "ab"}
    times = measuring.interleaved(
        steps, "cpu", 0.0, least=2, after={"a": lambda: done.append("free")}
    )
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
    assert done[-6:] == ["a", "free", "b"] * 2
    assert done[:-6] == ["a", "a", "free", "b", "b"]


def test_every_other_round_runs_backwards() -> None:
    done: list[str] = []
    steps = {name: lambda name=name: done.append(name) for name in "abc"}
    measuring.interleaved(steps, "cpu", 0.0, least=3, shortest=0.0)
    assert "".join(done[-9:]) == "abccbaabc"


def test_no_round_begins_after_the_last_second() -> None:
    steps = {"a": lambda: time.sleep(0.01)}
    times = measuring.interleaved(steps, "cpu", 9.0, least=5, at_most_seconds=0.0, warm_up=False)
    assert len(times["a"]) == 1


def speaks(number: int) -> tuple[int, str]:
    """Run in a child: print, and return."""
    print("this is no result")
    return number, os.environ.get("NUMBA_ENABLE_CUDASIM", "")


def breaks() -> None:
    """Run in a child: fail."""
    raise ValueError("too small")


def test_a_function_runs_in_a_process_of_its_own() -> None:
    assert measuring.in_child(speaks, 3, simulator=True) == (3, "1")
    with pytest.raises(RuntimeError, match=r"breaks of test_harness\.py .* ValueError: too small"):
        measuring.in_child(breaks)


def cases_of(heads: int, length: int) -> dict[str, Any]:
    return harness.load("peers").cases(heads, length)


@pytest.mark.parametrize("name", cases_of(1, 64) if not IS_SIMULATOR else [])
def test_a_case_means_the_same_in_the_words_of_all_peers(name: str) -> None:
    length, head, peers = 320, 1, harness.load("peers")
    case = cases_of(2, length)[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, length, 8), dtype=np.float32) for _ in range(4)]
    packed = [array[0].transpose(1, 0, 2) for array in arrays]
    operands = arrays if case.sums is None else packed
    ours = peers.OurCall(case, operands, arrays[0].dtype, on_device=False)
    ours.forward()
    out = ours.results[0]
    out = out[:, head] if case.sums is not None else out[0, head]
    q, k, v, _ = (array[0, head].astype(np.float64) for array in arrays)
    rows, cols = np.arange(length)[:, None], np.arange(length)[None]
    scores = q @ k.T / np.sqrt(8)
    if case.score is not None:
        bent = case.score(np, scores, head, rows, cols, case.table)
        if case.bias is not None:
            bias = case.bias()
            expected = scores + (bias[head] if bias.ndim == 3 else bias)
            np.testing.assert_allclose(bent, expected, atol=1e-5)
        scores = bent
    seen = np.ones((length, length), bool)
    if case.visible is not None:
        seen = np.broadcast_to(case.visible(rows, cols, case.table), seen.shape)
        if case.seen is not None:
            np.testing.assert_array_equal(case.seen(), seen)
        blocks = name in ("boolean mask",)  # no work is saved there
        assert blocks or case.part == pytest.approx(seen.mean(), abs=0.05)
    weights = np.where(seen, np.exp(scores - scores.max()), 0.0)
    if not case.dropout_p:
        wanted = weights / weights.sum(1, keepdims=True) @ v
        np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_a_contestant_that_fails_says_why_in_its_row() -> None:
    peers = harness.load("peers")
    assert peers.why_failed(MemoryError("no")) == "out of memory"
    assert peers.why_failed(RuntimeError("first\nsecond")) == "first"
    size = SimpleNamespace(device="cpu", heads=1, length=64, head_dim=4)
    with pytest.raises(peers.Unavailable, match="PyTorch is not installed"):
        peers.Rivals(size, "float32", None).peer_of("MATH", cases_of(1, 64)["dense"])


@pytest.mark.parametrize("name", ["dense", "float mask", "ALiBi", "documents"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cases_run_in_16_bits(dtype: str, name: str) -> None:
    peers, case = harness.load("peers"), cases_of(2, 64)[name]
    size = SimpleNamespace(device="cpu", heads=2, length=64, head_dim=8)
    rivals = peers.Rivals(size, dtype, None)
    ours = rivals.ours_of(case)
    ours.forward()
    ours.backward()
    found = peers.errors(ours.first_heads(), peers.reference(case, rivals.first, rivals.dtype))
    assert max(found.values()) < (0.003 if dtype == "float16" else 0.03), found


def test_the_io_table_reads_the_counters_of_its_own_workload(elsewhere: Path) -> None:
    folder, workload = elsewhere / "results" / "gpu", {"batch_heads": 1}
    folder.mkdir(parents=True)
    row = {"rung": "naive", "pass": "forward", "dram_gb": 2.0}
    text = of("A GPU", "hardware_counters", rows=[row], workload=workload)
    (folder / "hardware_counters.json").write_text(text)
    counters_of = harness.load("io_table").counters_of
    assert counters_of({"device": "A GPU", "workload": workload}) == {("naive", "forward"): row}
    assert counters_of({"device": "A GPU", "workload": {"batch_heads": 2}}) == {}
    assert counters_of({"device": "Another", "workload": workload}) == {}


def test_the_peaks_of_a_cpu_are_above_what_python_could_do() -> None:
    peaks = harness.load("device_peaks").measure_peaks("cpu", budget=0.01)
    assert peaks.tflops > 1e-3 and peaks.gbs > 0.1


def test_figures_are_the_same_for_the_same_rows(elsewhere: Path) -> None:
    result = [Result(json.loads(of("A GPU", "x")), "gpu")]
    texts = []
    for name in ("a.svg", "b.svg"):
        assert harness.draw(one_number(None, "x"), result, elsewhere / name) is None
        texts.append((elsewhere / name).read_text())
    assert texts[0] == texts[1] and not re.search(r"\d{4}-\d\d-\d\dT", texts[0])
