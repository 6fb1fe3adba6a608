"""Each measurement runs in small, and what it compares is alike."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import contestants, harness, records
from bench.harness import Run
from bench.peer_cases import cases as cases_of
from bench.torch_attention import Rivals
from bench.training_contestants import OURS, THEIRS, Size, Training, our_model
from measurements.bench_training import difference

from kernels.runtime.targets import EMULATED

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning")
HERE = pytest.mark.skipif(EMULATED, reason="it starts the emulated GPU itself")
#: Those that a laptop runs within seconds; what is left needs ranks, transformers or long trainings.
QUICK = (
    "sparsity", "options", "evolution", "float8", "speedup", "peers", "lra_lengths",
    "gradient_errors", "torch", "derivatives",
)  # fmt: skip
SLOW = (
    "leaks", "bench_attention", "softmax_ladder", "block_size", "io_table", "breakdown", "memory",
    "training", "bench_training", "bert", "generation", "bench_cpu", "small_calls", "lra_steps",
)  # fmt: skip
NEEDS_TORCH = ("gradient_errors", "torch")
#: On the emulated GPU: settings so small that a call takes seconds.
TINY: dict[str, dict[str, Any]] = {
    "speedup": {"heads": 1, "lengths": (4, 8), "seconds": 0.0, "baselines": ("composed", "naive")},
    "sparsity": {"heads": 1, "length": 128, "seconds": 0.0},
    "softmax_ladder": {"elements": 2**9, "powers": (5, 8), "searched": 64, "seconds": 0.0},
    "bench_attention": {"batch": 1, "heads": 1, "lengths": (8,), "head_dim": 8,
                        "only": ("composed", "flash2")},
    "lra_lengths": {"lengths": (8,), "precision": "float32", "attentions": ("naive", "flash")},
}  # fmt: skip


@HERE
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_measurement_runs_quickly_on_the_cpu(name: str, tmp_path: Path) -> None:
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    one = harness.load(name)
    path, figure = tmp_path / "record.json", tmp_path / "figure.svg"
    given = ["--quick", "--device", "cpu", "--json", str(path), "--figure", str(figure)]
    code = harness.run(one, ["--record", name, *given])
    record = records.read_record(path)
    failed = [row["why_not"] for row in record["rows"] if "why_not" in row]
    assert code == 0, failed
    assert record["command"] == f"python project/measure.py {name} --quick --device cpu"
    is_drawn = one.draw is not None and bool(record["rows"]) and find_spec("matplotlib") is not None
    assert figure.exists() == is_drawn


@HERE
def test_every_measurement_has_settings_for_its_devices_and_a_question() -> None:
    known = harness.load_all()
    assert {*QUICK, *SLOW} <= {*known} and len(known) > 30
    for name, one in known.items():
        assert one.answers.rstrip(")").endswith(("?", "measures nothing", "been made")), name
        for device in one.devices:
            for size in harness.SIZES:
                assert harness.settings_of(one, device, size, name) is not None


@pytest.mark.emulated
@pytest.mark.skipif(not EMULATED, reason="on a GPU they run by themselves")
@pytest.mark.parametrize("name", TINY)
def test_a_measurement_of_a_gpu_runs_on_the_emulated_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness.load(name)
    module = sys.modules[one.cases.__module__]
    moved = {"naive": [2, 1], "safe": [3, 1], "online": [2, 1]}
    monkeypatch.setattr(module, "in_child", lambda *args, **more: moved, raising=False)
    monkeypatch.setattr(module, "HEAD_DIM", 4, raising=False)
    settings = harness.settings_of(one, "cuda", "normal", name) | TINY[name]
    run = Run(one, "cuda", "quick", settings)
    once = {"most": 1, "least": 1, "warm_up": False}
    timed = Run.timed
    monkeypatch.setattr(
        Run, "timed", lambda self, steps, *_, **more: timed(self, steps, 0.0, **more | once)
    )
    assert run.measure(one.cases(run)) == 0, run.rows
    assert run.rows and all("why_not" not in row for row in run.rows)


@pytest.mark.parametrize("name", cases_of(1, 64) if not EMULATED else [])
def test_a_case_means_the_same_to_all_peers(name: str) -> None:
    length, head = 320, 1
    case = cases_of(2, length)[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, length, 8), dtype=np.float32) for _ in range(4)]
    packed = [array[0].transpose(1, 0, 2) for array in arrays]
    operands = arrays if case.sums is None else packed
    ours = contestants.case_call(case, operands, arrays[0].dtype, "cpu")
    ours.forward()
    out = ours.results[0]
    out = out[:, head] if case.sums is not None else out[0, head]
    q, k, v, _ = (array[0, head].astype(np.float64) for array in arrays)
    rows, cols = np.arange(length)[:, None], np.arange(length)[None]
    scores = q @ k.T / np.sqrt(8)
    if case.score is not None:
        scores = case.score(np, scores, head, rows, cols, case.table)
    seen = np.ones((length, length), bool)
    if case.visible is not None:
        seen = np.broadcast_to(case.visible(rows, cols, case.table), seen.shape)
        blocks = name in ("boolean mask",)  # no work is saved there
        assert blocks or case.part == pytest.approx(seen.mean(), abs=0.05)
    weights = np.where(seen, np.exp(scores - scores.max()), 0.0)
    if not case.dropout_p:
        wanted = weights / weights.sum(1, keepdims=True) @ v
        np.testing.assert_allclose(out, wanted, atol=1e-5)


@HERE
@pytest.mark.parametrize("name", ["dense", "float mask", "ALiBi", "documents"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cases_run_in_16_bits(dtype: str, name: str) -> None:
    case = cases_of(2, 64)[name]
    size = SimpleNamespace(device="cpu", heads=2, length=64, head_dim=8)
    rivals = Rivals(size, dtype, None)
    found = rivals.call(None, case).first_heads()
    wanted = contestants.reference(case, rivals.first(), rivals.dtype)
    errors = contestants.errors(found, wanted)
    assert max(errors.values()) < (0.003 if dtype == "float16" else 0.03), errors


# -- trainings ---------------------------------------------------------------------------------------------

SMALL = Size(2, 16, 2, 96, True, 24, 3, 5e-3)


def losses(name: str, size: Size, precision: str, source: Any = None) -> list[float]:
    return Training(name, size, "cpu", precision, source=source).losses(12)


@HERE
@pytest.mark.parametrize("tied", [True, False])
def test_float32_losses_are_those_of_pytorch(tied: bool) -> None:
    pytest.importorskip("torch")
    size = SMALL._replace(tied=tied)
    ours, theirs = (losses(name, size, "float32") for name in (OURS, THEIRS))
    assert difference(ours, theirs) < 1e-5, (ours, theirs)
    assert ours[-1] < ours[0]
    source = our_model(size, "cpu", "float32")
    exact = Training(THEIRS, size, "cpu", "float64", "naive", source=source).losses(12)
    assert 1e-12 < difference(ours, exact) < 1e-5


@HERE
def test_bfloat16_losses_are_as_far_as_those_of_pytorch() -> None:
    pytest.importorskip("torch")
    ours, theirs = (losses(name, SMALL, "bfloat16") for name in (OURS, THEIRS))
    base = losses(THEIRS, SMALL, "float32", our_model(SMALL, "cpu", "bfloat16"))
    assert 0.0 < difference(ours, base) < 4 * difference(theirs, base)


@HERE
def test_naive_attention_and_recomputing_change_no_loss() -> None:
    flash, naive, again = (
        Training(OURS, SMALL, "cpu", "float32", kind, recompute=recompute).losses(3)
        for kind, recompute in (("flash", False), ("naive", False), ("flash", True))
    )
    assert difference(flash, naive) < 1e-5 and flash == again
