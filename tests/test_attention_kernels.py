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
from kernels import launch, reference
from kernels.compiled import FASTMATH, WAITING
from kernels.cpu.products import exp2

from .attention_strategies import Case, cases, planted, sum_to
from .tolerances import assert_close_arrays

TARGETS = {"numpy": launch.NUMPY, "cpu": launch.CPU}
RUNGS = [(target, rung.name) for target in TARGETS for rung in TARGETS[target].rungs]


def run(target: launch.Target, case: Case, rung: str = "auto", tile: Any = None) -> dict[str, Any]:
    """Run one rung forward and backward."""
    problem = case.problem(rung=rung)
    out, lse = launch.forward(target, problem, *case.operands, tile)
    gradients = launch.backward(target, problem, case.dout, *case.operands, out, lse, tile)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@numba.njit(fastmath=FASTMATH)
def exp2_of(x: Any) -> Any:
    """Return 2**x by the CPU kernels' own function, in a loop that vectorises as theirs do."""
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = exp2(x[i])
    return out


def check(actual: Any, expected: Any, case: Case, what: str) -> None:
    """Compare; a gradient is a sum of products, so its rounding grows with the largest element."""
    size = max(1.0, float(np.abs(expected).max()))
    assert_close_arrays(actual, expected, case.q.dtype, what=what, size=size)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@given(case=cases())
def test_every_rung_is_the_textbook(target: str, rung: str, case: Case) -> None:
    actual = run(TARGETS[target], case, rung, case.tile)
    for name, expected in case.oracle().items():
        summed = sum_to(actual[name], expected.shape)
        check(summed, expected, case, f"{name} of {rung} on {target}")


@given(case=cases())
def test_public_functions_are_the_textbook(case: Case) -> None:
    expected = case.oracle()
    out, lse = kernels.flash_attention_forward(*case.operands, **case.options)
    gradients = kernels.flash_attention_backward(
        case.dout, *case.operands, out, lse, **case.options
    )
    actual = [out, lse, *gradients]
    for (name, wanted), got in zip(expected.items(), actual, strict=True):
        assert got.shape == wanted.shape
        check(got, wanted, case, name)


@given(case=cases([np.float64]), tile=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_tile_size_changes_nothing(case: Case, tile: tuple[int, int]) -> None:
    for target in TARGETS.values():
        one, other = run(target, case, "flash2", case.tile), run(target, case, "flash2", tile)
        for name in one:
            check(one[name], other[name], case, f"{name}, tile {tile}")


@given(case=cases(), factor=st.sampled_from([30.0, 1e3, 1e6]))
def test_large_scores_do_not_overflow(case: Case, factor: float) -> None:
    case.q = np.abs(case.q * factor).astype(case.q.dtype)
    actual, expected = run(launch.CPU, case), case.oracle()
    lse = actual.pop("lse")
    assert (lse < np.inf).all()  # minus infinity where a row sees nothing
    assert all(np.isfinite(x).all() for x in actual.values())
    # With scores this large the rounding of a score decides; only a peaked softmax is exact.
    if factor == 30.0 and case.q.dtype == np.float64:
        assert_close_arrays(actual["out"], expected["out"], np.float64, what="out")


@given(case=cases())
def test_rows_of_softmax_sum_to_one(case: Case) -> None:
    case.v = np.ones_like(case.v)
    out, lse = launch.forward(launch.CPU, case.problem(), *case.operands)
    expected = np.broadcast_to(np.isfinite(lse)[..., None], out.shape)  # 0 where nothing is seen
    assert_close_arrays(out, expected, case.q.dtype, what="out with values of one")


@given(case=cases())
def test_equal_keys_give_the_mean_of_the_values_they_see(case: Case) -> None:
    case.k = np.ones_like(case.k)
    out, _ = launch.forward(launch.CPU, case.problem(), *case.operands)
    seq_q, seq_k = case.q.shape[-2], case.k.shape[-2]
    seen = np.ones((seq_q, seq_k))
    if case.options["is_causal"]:
        seen = np.tril(seen, case.options.get("causal_offset", 0))
    mean = (seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)) @ case.plain()[0][2]
    assert_close_arrays(out, np.broadcast_to(mean, out.shape), case.q.dtype, what="out")


@given(case=cases([np.float64]), data=st.data())
@settings(max_examples=15)
def test_gradients_are_finite_differences(case: Case, data: st.DataObject) -> None:
    out, lse = kernels.flash_attention_forward(*case.operands, **case.options)
    gradients = kernels.flash_attention_backward(
        case.dout, *case.operands, out, lse, **case.options
    )
    step = 1e-5
    for which, gradient in enumerate(gradients):
        operands = [np.array(x) for x in case.operands]
        index = tuple(data.draw(st.integers(0, n - 1)) for n in gradient.shape)
        values = []
        for sign in (1, -1):
            operands[which] = np.array(case.operands[which])
            operands[which][index] += sign * step
            out, _ = kernels.flash_attention_forward(*operands, **case.options)
            values.append((out * case.dout).sum())
        slope = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-5, atol=1e-6)


@given(case=cases())
def test_every_output_element_is_written(case: Case) -> None:
    problem = case.problem()
    q, k, v, dout = (
        launch._four_dims(launch.CPU.memory, problem, x) for x in (*case.operands, case.dout)
    )
    for target in TARGETS.values():
        rung = target.pick(problem)
        out = np.full(dout.shape, np.nan, problem.dtype)
        lse = np.full(dout.shape[:-1], np.nan, problem.dtype)
        rung.forward(problem, case.tile, q, k, v, out, lse)
        gradients = [np.full(x.shape, np.nan, problem.dtype) for x in (q, k, v)]
        rung.backward(problem, case.tile, dout, q, k, v, out, lse, *gradients)
        assert (lse < np.inf).all()
        assert all(np.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.parametrize("rung", ["flash2", "naive"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_row_that_sees_nothing_is_zero(target: str, rung: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 4)) for _ in range(3))
    problem = kernels.make_problem(q, k, v, is_causal=True, rung=rung)
    hidden = kernels.Problem(**{**vars(problem), "diagonal": -3})  # rows 0 to 2 see no column
    out, lse = launch.forward(TARGETS[target], hidden, q, k, v, (4, 4))
    dout = rng.standard_normal(out.shape)
    dq, dk, dv = launch.backward(TARGETS[target], hidden, dout, q, k, v, out, lse, (4, 4))
    assert (out[:, :3] == 0).all() and (lse[:, :3] == -np.inf).all() and (dq[:, :3] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv)) and np.isfinite(lse[:, 3:]).all()
    assert (dk[:, 6:] == 0).all() and (dv[:, 6:] == 0).all()  # no row sees the last three


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@given(drawn=planted(cases(lengths=st.integers(1, 20))))
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_come_out_where_the_textbook_has_them(
    target: str, rung: str, drawn: tuple[Case, float]
) -> None:
    case, value = drawn
    case.check_what_is_not_finite(run(TARGETS[target], case, rung, case.tile), value)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_scores_that_overflow_are_nan_and_not_zero(target: str, rung: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 4), np.float32)
    case = Case(x, x, x, x, {"scale": 1e39}, (4, 4))  # a row's product with itself is positive
    assert all(np.isnan(result).all() for result in run(TARGETS[target], case, rung).values())


@pytest.mark.parametrize(("target", "rung"), RUNGS)
def test_a_key_that_no_row_sees_may_be_anything(target: str, rung: str) -> None:
    """NaN in a tile of keys that no tile of queries visits reaches nothing; in a hidden key no score."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, n, 4)) for n in (6, 16, 16, 6))
    case = Case(q, k, v, dout, {"is_causal": True}, (4, 4))
    clean = run(TARGETS[target], case, rung, case.tile)
    hidden = np.arange(16)[:, None] >= 8  # the last row of a tile of queries is number 7
    case.k = np.where(hidden, np.nan, k)
    if rung == "flash2":
        case.v = np.where(hidden, np.nan, v)
    spoilt = run(TARGETS[target], case, rung, case.tile)
    # The textbook multiplies hidden keys by zero in its gradients.
    for name in clean if rung == "flash2" else ("out", "lse"):
        np.testing.assert_array_equal(spoilt[name], clean[name], err_msg=name)


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
        alone = run(launch.CPU, case)
    finally:
        numba.set_num_threads(threads)
    for _ in range(5):
        together = run(launch.CPU, case)
        assert all(np.array_equal(alone[name], together[name]) for name in alone)


def test_float32_is_as_accurate_as_its_own_textbook() -> None:
    """At most twice the error (gradients three times) of the same mathematics in float32."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (3 * rng.standard_normal((2, 2, 257, 64), np.float32) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True}, (128, 64))
    expected, fused = case.oracle(), run(launch.CPU, case)
    plain = run(launch.CPU, case, "naive")
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
    out, lse = reference.attention(kernels.make_problem(q, k, v), q, k, v)
    np.testing.assert_allclose(out, [[3.0]])
    np.testing.assert_allclose(lse, [np.log(4.0)])


def test_available_rungs_names_what_runs_here() -> None:
    assert kernels.available_rungs()["flash2"] is None


def test_waiting_threads_give_the_cores_away_unless_the_user_says_otherwise() -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    script = f"import os, kernels; print([os.environ.get(name) for name in {names}])"
    bare = {name: value for name, value in os.environ.items() if name not in names}
    for own in ({}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "9"}):
        done = subprocess.run(
            [sys.executable, "-c", script], env={**bare, **own}, capture_output=True, check=True
        )
        wanted = own or WAITING
        assert done.stdout.decode().strip() == str([wanted.get(name) for name in names])
