"""The experiments on tiny sizes: what they record is consistent, and becomes a table and a figure."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kernels.runtime.targets import IS_SIMULATOR, why_no_cuda

EXPERIMENTS = Path(__file__).parents[3] / "project" / "experiments"
sys.path.append(str(EXPERIMENTS))
import harness  # noqa: E402
from harness import load  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning")
#: Where the experiments run: here, and in the simulator where this process is in it.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.simulator)]
on_devices = pytest.mark.parametrize("device", DEVICES)
TEXT = "the cat sat on the mat; " * 80


@pytest.fixture(autouse=True)
def no_children(monkeypatch: pytest.MonkeyPatch, quick_barriers: None) -> Iterator[None]:
    """Let nothing start a process of its own; what one would count is tested by itself."""
    monkeypatch.setattr(load("softmax_ladder"), "in_child", lambda *args, **more: MOVED)
    monkeypatch.setattr(load("training"), "peak", lambda *args: 10**6)
    yield


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step run once in the simulator, where a call takes a second."""
    timed = load("speedup").interleaved

    def once(steps: Any, device: str, budget: float, **more: Any) -> Any:
        if device == "cuda":
            more |= {"least": 1, "most": 1, "warm_up": False}
        return timed(steps, device, budget, **more)

    for name in ("speedup", "sparsity", "softmax_ladder"):
        monkeypatch.setattr(load(name), "interleaved", once)


MOVED = {"naive": [2, 1], "safe": [3, 1], "online": [2, 1]}


def result_of(module: ModuleType, device: str, folder: Path) -> harness.Result:
    """Run an experiment, and draw its figure where matplotlib is installed."""
    experiment = module.EXPERIMENT
    path = folder / "record.json"
    args = argparse.Namespace(device=device, size="normal")
    report = harness.Report(experiment, args, "python test", path)
    experiment.measure(args, report)
    result = harness.Result(report.read(), "here", fresh=True)
    assert experiment.table(result.record).count("\n") > len(result.rows)
    why_not = harness.draw(experiment, [result, result], folder / "figure.svg")
    assert why_not is None or importlib.util.find_spec("matplotlib") is None, why_not
    return result


def set_size(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **sizes: Any) -> None:
    for device, size in sizes.items():
        monkeypatch.setitem(module.SIZES[device], "normal", size)


@on_devices
def test_softmax_ladder(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("softmax_ladder")
    monkeypatch.setattr(module, "ELEMENTS", {device: {"normal": 2**9}})
    monkeypatch.setattr(module, "POWERS", {device: (5, 8, 20)})
    monkeypatch.setattr(module, "SEARCHED", 64)
    result = result_of(module, device, tmp_path)
    assert [row["length"] for row in result.rows] == [32, 256], "more than there are elements"
    largest = result.record["largest"]
    assert largest["safe"] is None and largest["online"] is None
    assert largest["naive"] == pytest.approx(88.7228 - math.log(64), abs=0.02)
    assert largest["naive"] == pytest.approx(result.record["expected"], abs=0.02)


@on_devices
def test_speedup(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("speedup")
    monkeypatch.setattr(module, "HEAD_DIM", 4)
    # The published kernels have blocks of 1,024 threads, each a thread of Python's in the simulator.
    monkeypatch.setitem(module.BASELINES, "cuda", ("composed", "naive"))
    set_size(monkeypatch, module, **{device: module.Size(1, (4, 8), 0.0, 1e9)})
    result = result_of(module, device, tmp_path)
    names = {*module.BASELINES[device], module.FLASH[device]}
    for row in result.rows:
        assert names == row.keys() - {"length", "speedup"}
        assert row["speedup"].keys() == names - {module.FLASH[device]}
        for name in names:
            assert all(row[name][quantity]["median"] > 0 for quantity in module.QUANTITIES)


def test_speedup_leaves_out_who_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("speedup")
    measured = module.measure_length

    def slow(running: Any, *args: Any) -> Any:
        row = measured(running, *args)
        if "naive" in row:
            row["naive"]["training"]["median"] = 1e6
        return row

    monkeypatch.setattr(module, "measure_length", slow)
    set_size(monkeypatch, module, cpu=module.Size(1, (16, 32), 0.0, 1.0))
    first, second = result_of(module, "cpu", tmp_path).rows
    assert "naive" in first and "naive" not in second and "flash" in second


def test_inference_records_no_graph() -> None:
    module = load("speedup")
    contestants = sys.modules["bench.contestants"]
    flash = contestants.contestants("cpu", causal=False)["flash"]
    arrays = contestants.random_arrays((1, 8, 4))
    constant, recording = module.Constant(flash, arrays), module.Recording(flash, arrays)
    for one in (constant, recording):
        one.forward()
    assert constant.out.history is None or not constant.out.requires_grad()
    assert recording.out.requires_grad()
    np.testing.assert_array_equal(constant.out.to_numpy(), recording.out.to_numpy())


@pytest.mark.slow
@on_devices
def test_sparsity(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sparsity")
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "HEAD_DIM", 4)
    monkeypatch.setattr(module, "PARTS", (1 / 4,))
    set_size(monkeypatch, module, **{device: module.Size(64, 1, 0.0)})
    rows = {row["mask"]: row for row in result_of(module, device, tmp_path).rows}
    assert rows.keys() == {"random, 0.25", "butterfly", "dense"}
    assert [rows[name]["density"] for name in rows] == [1.0, 0.25, 0.75]
    assert rows["dense"]["forward_part"]["median"] == 1.0


def test_an_interruption_of_sparsity_keeps_the_masks_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, timed = load("sparsity"), []
    interleaved = module.interleaved

    def stopped(*args: Any, **more: Any) -> Any:
        timed.append(args)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return interleaved(*args, **more)

    monkeypatch.setattr(module, "interleaved", stopped)
    monkeypatch.setattr(module, "BLOCK", 16)
    set_size(monkeypatch, module, cpu=module.Size(64, 1, 0.0))
    places = ["--json", str(tmp_path / "record.json"), "--figure", str(tmp_path / "figure.svg")]
    assert harness.run(module.EXPERIMENT, places) == 130
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [row["mask"] for row in rows] == ["dense", "random, 0.25"]
    assert all(row["backward"]["median"] > 0 for row in rows)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_masks_of_sparsity_are_the_same(device: str) -> None:
    module = load("sparsity")
    for size in module.SIZES[device].values():
        masks = [mask for name, mask in module.masks(size.length).items() if name != "butterfly"]
        densities = [mask.density for mask in masks]
        assert len(set(densities)) == len(densities) >= 4, size


@pytest.mark.parametrize("part", [0.01, 0.3, 1.0])
def test_every_row_of_blocks_visits_as_many_random_tiles(part: float) -> None:
    mask = load("sparsity").random_tiles(1500, part)
    visited = (mask.states != 0).sum(-1)
    assert (visited == max(1, round(part * 12))).all()


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that are what naive attention keeps give that number back, and the length that fills."""
    module = load("memory")

    def peaks(function: Any, name: str, heads: int, length: int) -> dict[str, int]:
        grows = heads * length * length * 4 if name == "naive" else heads * length * 100
        return {"inference": 2 * grows, "training": 6 * grows}

    monkeypatch.setattr(module, "in_child", peaks)
    monkeypatch.setattr(module, "capacity", lambda device: 6 * 2 * 4 * 1000**2)
    set_size(monkeypatch, module, cpu=module.Size(2, (100, 200, 400, 800), 300))
    result = result_of(module, "cpu", tmp_path)
    assert [("naive" in row) for row in result.rows] == [True, True, False, False]
    longest = result.record["longest"]
    assert longest["naive"] == {"inference": math.isqrt(3 * 1000**2), "training": 1000}
    assert longest["flash"]["training"] == 6 * 2 * 4 * 1000**2 // (6 * 2 * 100)
    assert module.matrices(result.rows, "naive", "training", 2) == 6.0


def test_memory_tries_nothing_that_might_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("memory")
    tried = []

    def peaks(function: Any, name: str, heads: int, length: int) -> dict[str, int]:
        tried.append((name, length))
        return dict.fromkeys(module.MODES, length * length)

    monkeypatch.setattr(module, "in_child", peaks)
    monkeypatch.setattr(module, "capacity", lambda device: 1_000_000)
    set_size(monkeypatch, module, cpu=module.Size(1, (250, 500, 1000), 10**9))
    result_of(module, "cpu", tmp_path)
    assert [length for name, length in tried if name == "naive"] == [250, 500]
    assert [length for name, length in tried if name == "flash"] == [250, 500, 1000]


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is known on Linux only"
)
def test_the_peak_of_naive_attention_is_a_few_matrices() -> None:
    module = load("memory")
    measuring = sys.modules["bench.measuring"]
    length, heads = 1024, 2
    peaks = measuring.in_child(module.peaks_of_process, "naive", heads, length)
    matrix = heads * length * length * 4
    assert 1.5 * matrix < peaks["inference"] < 3.5 * matrix
    assert peaks["inference"] < peaks["training"] < 9 * matrix


def tiny_training(module: ModuleType) -> Any:
    return module.Size(8, 2, 1, 32, 5e-3, 16, 10, (8, 16), 10, 2, 8)


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("training")
    monkeypatch.setattr(module, "read_text", lambda path: TEXT)
    monkeypatch.setattr(module, "torch_peers", lambda device: [])
    set_size(monkeypatch, module, cpu=tiny_training(module))
    result = result_of(module, "cpu", tmp_path)
    curves, short, long = result.rows
    assert curves["runs"]["naive"]["difference"] < 1e-5
    assert len(curves["runs"]["flash"]["losses"]) == 10
    assert short["tokens"] == long["tokens"] == 10 * 32
    assert short["runs"].keys() == {"naive", "flash"} and long["runs"].keys() == {"flash"}
    assert result.record["efficiency"]["flash"]["8"] == 1.0


@pytest.mark.skipif(IS_SIMULATOR, reason="PyTorch's peers need no simulator")
def test_a_peer_in_pytorch_has_the_same_losses() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed; it is no requirement")
    module = load("training")
    row = module.curves("cpu", tiny_training(module), TEXT)
    for name in ("PyTorch math", "PyTorch flash"):
        assert row["runs"][name]["difference"] < 1e-5, name


def test_efficiency_is_relative_to_512() -> None:
    module = load("training")
    rows = [
        {
            "kind": "context",
            "context": context,
            "runs": {"flash": {"tokens_per_second": {"median": speed}}},
        }
        for context, speed in ((256, 300.0), (512, 200.0), (4096, 50.0))
    ]
    found = module.efficiency([{"kind": "curves"}, *rows])
    assert found == {"naive": {}, "flash": {"256": 1.5, "512": 1.0, "4096": 0.25}}


def test_without_a_gpu_an_experiment_says_so() -> None:
    if why_no_cuda() is None:
        pytest.skip("CUDA kernels can run here")
    with pytest.raises(SystemExit, match="NUMBA_ENABLE_CUDASIM"):
        harness.run(load("speedup").EXPERIMENT, ["--device", "cuda", "--quick"])


def test_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("float8")
    monkeypatch.setattr(module, "CHECKED", {"normal": (1, 64, 1024)})
    rows = {row["contestant"]: row["error"] for row in result_of(module, "cpu", tmp_path).rows}
    assert rows.keys() == {module.COMPOSED, *module.CONTESTANTS} == module.PAPER.keys()
    assert rows["float16"] < rows[module.COMPOSED] < rows["float8_e4m3+hadamard"]
    timed = {
        "tflops": {key: {"median": 9.0} for key in module.CONTESTANTS},
        "length": 8,
        "causal": True,
    }
    timed["speedup"] = {key: {"median": 1.5} for key in [*module.CONTESTANTS][1:]}
    errors = {"contestant": "float16", "error": 1e-4, "paper": 1.9e-4}
    assert "8, causal" in module.table({"shape": "small", "rows": [errors, timed]})
