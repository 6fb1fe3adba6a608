"""Attention on arrays: every rung on the host against the float64 textbook."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.cpu.matmul.tile_product import exp2
from kernels.problem.operands import make_operands
from kernels.runtime.jit import FASTMATH

from ..support.attention.strategies import FEATURES, Case, cases, planted
from ..support.tolerances import assert_close_arrays

TARGETS = {"numpy": launch.NUMPY, "cpu": launch.CPU}
RUNGS = [(target, rung.name) for target in TARGETS for rung in TARGETS[target].rungs]


@numba.njit(fastmath=FASTMATH)
def exp2_of(x: Any) -> Any:
    """Return 2**x by the CPU kernels' own function, in a loop that vectorises as theirs do."""
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = exp2(x[i])
    return out


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(actual: Any, expected: Any, case: Case, what: str) -> None:
    """Compare; a gradient is a sum of products, so its rounding grows with the largest element."""
    finite = np.abs(expected[np.isfinite(expected)])
    size = max(1.0, float(finite.max(initial=0.0)))
    assert_close_arrays(actual, expected, case.q.dtype, what=what, size=size)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@given(case=cases())
def test_every_rung_is_the_textbook(target: str, rung: str, case: Case) -> None:
    case.check(case.run(TARGETS[target], rung, case.tile), f"of {rung} on {target}")


@pytest.mark.fuzz
@pytest.mark.parametrize(("target", "rung"), RUNGS)
@given(case=cases(features=FEATURES))
def test_every_rung_has_every_option(target: str, rung: str, case: Case) -> None:
    case.check(case.run(TARGETS[target], rung, case.tile), f"of {rung} on {target}")


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=4)
def test_each_option_is_the_textbook(
    feature: str, target: str, rung: str, data: st.DataObject
) -> None:
    case = data.draw(cases(features=[feature], leads=st.sampled_from([[2], [2, 1]])))
    case.check(case.run(TARGETS[target], rung, case.tile), f"of {rung} on {target}")


@given(case=cases(features=FEATURES))
def test_public_functions_are_the_textbook(case: Case) -> None:
    expected = case.oracle()
    out, lse = kernels.flash_attention_forward(*case.operands, **case.options)
    gradients = kernels.flash_attention_backward(
        case.dout, *case.operands, out, lse, dlse=case.dlse,
        mask_gradient=case.has_mask_gradient, sink_gradient=case.has_sink, **case.options,
    )  # fmt: skip
    actual = [out, lse, *gradients]
    for (name, wanted), got in zip(expected.items(), actual, strict=True):
        assert got.shape == wanted.shape
        check(got, wanted, case, name)


@given(case=cases([np.float64]), tile=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_tile_size_changes_nothing(case: Case, tile: tuple[int, int]) -> None:
    for target in TARGETS.values():
        one, other = case.run(target, "flash2", case.tile), case.run(target, "flash2", tile)
        for name in one:
            check(one[name], other[name], case, f"{name}, tile {tile}")


@given(case=cases(), factor=st.sampled_from([30.0, 1e3, 1e6]))
def test_large_scores_do_not_overflow(case: Case, factor: float) -> None:
    case.q = np.abs(case.q * factor).astype(case.q.dtype)
    actual, expected = case.run(launch.CPU), case.oracle()
    lse = actual.pop("lse")
    assert (lse < np.inf).all()  # minus infinity where a row sees nothing
    assert all(np.isfinite(x).all() for x in actual.values())
    # With scores this large the rounding of a score decides; only a peaked softmax is exact.
    if factor == 30.0 and case.q.dtype == np.float64:
        assert_close_arrays(actual["out"], expected["out"], np.float64, what="out")


@given(case=cases())
def test_rows_of_softmax_sum_to_one(case: Case) -> None:
    case.v = np.ones_like(case.v)
    out, lse = kernels.flash_attention_forward(*case.operands, **case.options)
    expected = np.broadcast_to(np.isfinite(lse)[..., None], out.shape)  # 0 where nothing is seen
    assert_close_arrays(out, expected, case.q.dtype, what="out with values of one")


@given(case=cases())
def test_equal_keys_give_the_mean_of_the_values_they_see(case: Case) -> None:
    case.k = np.ones_like(case.k)
    out, _ = kernels.flash_attention_forward(*case.operands, **case.options)
    distance = np.arange(case.k.shape[-2]) - np.arange(case.q.shape[-2])[:, None]
    distance -= case.options.get("causal_offset", 0)
    left, right = case.options.get("window_size", (-1, -1))
    seen = np.ones(distance.shape)
    seen[(distance < -left) & (left >= 0)] = 0
    seen[(distance > right) & (right >= 0)] = 0
    seen[(distance > 0) & case.options["is_causal"]] = 0
    mean = (seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)) @ case.plain().v
    assert_close_arrays(out, np.broadcast_to(mean, out.shape), case.q.dtype, what="out")


@given(
    case=cases([np.float64], features=[name for name in FEATURES if name != "dlse"]), data=st.data()
)
@settings(max_examples=15)
def test_gradients_are_finite_differences(case: Case, data: st.DataObject) -> None:
    results = case.run(launch.CPU)
    arrays = {"q": case.q, "k": case.k, "v": case.v}
    if case.has_mask_gradient:
        arrays["mask"] = case.options["attn_mask"]
    names = ("dq", "dk", "dv")[: len(arrays)]
    gradients = dict(zip("qkv", case.own([results[name] for name in names]), strict=True))
    gradients["mask"] = results.get("dmask")
    step = 1e-5
    for name, array in arrays.items():
        index = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
        values = []
        for sign in (1, -1):
            moved = {**arrays, name: np.array(array)}
            moved[name][index] += sign * step
            options = {**case.options, **({"attn_mask": moved["mask"]} if "mask" in moved else {})}
            out, _ = kernels.flash_attention_forward(moved["q"], moved["k"], moved["v"], **options)
            values.append((out * case.dout).sum())
        slope = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose(gradients[name][index], slope, rtol=1e-5, atol=1e-6)


@given(case=cases(features=FEATURES))
def test_every_output_element_is_written(case: Case) -> None:
    problem = case.problem()
    for target in TARGETS.values():
        rung = target.pick(problem)
        shapes = {
            "out": problem.out_shape, "lse": problem.lse_shape, "lse_rest": problem.lse_shape,
            "dq": problem.q_shape,
            "dk": (*problem.grouped_lead, *problem.k_shape[-2:]),
            "dv": (*problem.grouped_lead, *problem.v_shape[-2:]),
        }  # fmt: skip
        blank = {name: np.full(shape, np.nan, problem.dtype) for name, shape in shapes.items()}
        operands = make_operands(target.memory, problem, *case.operands, case.options)
        operands = operands.having(**blank, dout=case.dout, dlse=case.dlse)
        viewed = operands.viewed(target.memory, problem)
        rung.forward(problem, case.tile, viewed)
        rung.backward(problem, case.tile, viewed)
        assert (blank.pop("lse") < np.inf).all()
        assert all(np.isfinite(x).all() for x in blank.values())


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@pytest.mark.parametrize(
    "hide",
    [
        {"is_causal": True, "causal_offset": -3},
        {"attn_mask": np.arange(9)[:, None] >= 3},
        {"attn_mask": np.where(np.arange(9)[:, None] >= 3, 0.0, -np.inf)},
        {"mask_mod": lambda batch, head, row, col: row >= 3},
    ],
    ids=["causal", "boolean", "float", "mask_mod"],
)
def test_a_row_that_sees_nothing_is_zero(target: str, rung: str, hide: dict[str, Any]) -> None:
    q, k, v, dout, dlse = draw(0, *[(2, 9, 4)] * 4, (2, 9))
    case = Case(q, k, v, dout, hide, (4, 4), dlse)
    results = case.run(TARGETS[target], rung, case.tile)
    assert (results["out"][:, :3] == 0).all() and (results["dq"][:, :3] == 0).all()
    assert (results["lse"][:, :3] == -np.inf).all() and np.isfinite(results["lse"][:, 3:]).all()
    assert all(np.isfinite(x).all() for name, x in results.items() if name != "lse")
    if "causal_offset" in hide:  # no row sees the last three
        assert (results["dk"][:, 6:] == 0).all() and (results["dv"][:, 6:] == 0).all()


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@given(drawn=planted(cases(lengths=st.integers(1, 20))))
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_come_out_where_the_textbook_has_them(
    target: str, rung: str, drawn: tuple[Case, float]
) -> None:
    case, value = drawn
    case.check_what_is_not_finite(case.run(TARGETS[target], rung, case.tile), value)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_scores_that_overflow_are_nan_and_not_zero(target: str, rung: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 4), np.float32)
    case = Case(x, x, x, x, {"scale": 1e39}, (4, 4))  # a row's product with itself is positive
    assert all(np.isnan(result).all() for result in case.run(TARGETS[target], rung).values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_is_exact_to_the_last_place(dtype: Any) -> None:
    lowest = dtype(np.finfo(dtype).minexp)
    x = np.linspace(lowest, 1, 100_001).astype(dtype)
    wanted = np.exp2(x.astype(np.longdouble)).astype(dtype)
    assert (np.abs(exp2_of(x) - wanted) <= 2 * np.spacing(wanted)).all()
    special = np.array([np.nan, -np.inf, 2 * lowest, 0.0, 1.0], dtype)
    np.testing.assert_array_equal(exp2_of(special), np.array([np.nan, 0, 0, 1, 2], dtype))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 2, 300, 24), np.float32) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True}, (32, 32))
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = case.run(launch.CPU)
    finally:
        numba.set_num_threads(threads)
    for _ in range(5):
        together = case.run(launch.CPU)
        assert all(np.array_equal(alone[name], together[name]) for name in alone)


def test_float32_is_as_accurate_as_its_own_textbook() -> None:
    """At most twice the error (gradients three times) of the same mathematics in float32."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (3 * rng.standard_normal((2, 2, 257, 64), np.float32) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True}, (128, 64))
    expected, fused = case.oracle(), case.run(launch.CPU)
    plain = case.run(launch.CPU, "naive")
    for name, wanted in expected.items():
        allowed = (2 if name in ("out", "lse") else 3) * np.abs(plain[name] - wanted).max()
        assert np.abs(fused[name] - wanted).max() <= allowed + 1e-6, name


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from the kernel")
def test_memory_is_linear_in_the_length() -> None:
    """One score matrix of 12,288 x 12,288 float32 is 576 MB; forward and backward take far less."""
    script = """
import pathlib, numpy as np, kernels
def peak():
    return int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])
def go(n):
    q, k, v, dout = (np.ones((1, 1, n, 16), np.float32) for _ in range(4))
    out, lse = kernels.flash_attention_forward(q, k, v, is_causal=True)
    kernels.flash_attention_backward(dout, q, k, v, out, lse, is_causal=True)
go(64)
before = peak()
go(12288)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 60_000, "kilobytes beyond those of a tiny call"


def test_reference_by_hand() -> None:
    """Two keys, one query: the numbers of a paper-and-pencil example."""
    q, k, v = np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]]), np.array([[0.0], [4.0]])
    out, lse = kernels.flash_attention_forward(q, k, v, rung="naive")
    np.testing.assert_allclose(out, [[3.0]])
    np.testing.assert_allclose(lse, [np.log(4.0)])


def test_available_rungs_names_what_runs_here() -> None:
    assert kernels.available_rungs()["flash2"] is None


def test_available_rungs_says_what_a_device_is_too_old_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(launch.CUDA.memory), "why_not", lambda self: None)
    monkeypatch.setattr("kernels.cuda.device.per_device.compute_capability", lambda: (8, 6))
    available = kernels.available_rungs()
    assert {name for name, reason in available.items() if reason} == {"flash3_wgmma"}
    assert available["flash3_wgmma"] == "it needs compute capability 9.0, this device has 8.6"


def test_waiting_threads_give_the_cores_away_unless_the_user_says_otherwise() -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    script = f"import os, kernels; print([os.environ.get(name) for name in {names}])"
    bare = {name: value for name, value in os.environ.items() if name not in names}
    bare["OMP_DISPLAY_ENV"] = "true"  # GCC's runtime prints how it waits
    for own, policy in (
        ({}, "PASSIVE"),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "7"}, None),
        ({"KMP_BLOCKTIME": "9"}, None),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script], env={**bare, **own}, capture_output=True, check=True, text=True
        )  # fmt: skip
        # Of ours only that stays which LLVM's and Intel's runtime reads late; processes inherit it.
        wanted = own or {"KMP_BLOCKTIME": "0"}
        assert done.stdout.strip() == str([wanted.get(name) for name in names])
        if policy and "OMP_WAIT_POLICY" in done.stderr:
            assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
