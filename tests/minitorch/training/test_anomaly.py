"""NaN and infinity are found where they are made: operation, pass, index, and the user's line."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import (
    SGD,
    Adam,
    AnomalyError,
    FastBackend,
    Parameter,
    Scalar,
    Tensor,
    TensorBackend,
    detect_anomaly,
    from_numpy,
)

from ...tensor_strategies import on_backends

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the same faults


def leaf(array: Any, backend: TensorBackend = FastBackend, dtype: Any = np.float64) -> Tensor:
    return from_numpy(np.asarray(array, dtype), backend, requires_grad=True)


def fault(compute: Callable[[], Any]) -> AnomalyError:
    with pytest.raises(AnomalyError) as caught, detect_anomaly():
        compute()
    return caught.value


# -- which operation -----------------------------------------------------------------------------

#: Keeps small finite numbers finite and above 0.
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "Sigmoid": lambda x: x.sigmoid(),
    "Mul": lambda x: x * 0.5,
    "Add": lambda x: x + 1.0,
    "Permute": lambda x: x.permute(1, 0),
    "View": lambda x: x.contiguous().view(*x.shape),
}
#: Makes a number that is none of some element 0, in the forward pass.
HARMFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "Inv": lambda x: 1.0 / x,
    "Exp": lambda x: (1000.0 - x * 1000.0).exp(),
    "PowerScalar": lambda x: x**-2.0,
}


@on_backends()
@given(
    st.lists(st.sampled_from(sorted(HARMLESS)), max_size=3),
    st.sampled_from(sorted(HARMFUL)),
    st.lists(st.sampled_from(sorted(HARMLESS)), max_size=2),
    st.integers(0, 1),
    st.integers(0, 2),
)
def test_the_first_operation_at_fault_is_named(
    backend: TensorBackend, before: list[str], bad: str, after: list[str], row: int, col: int
) -> None:
    x = leaf(np.full((2, 3), 0.75), backend)
    spot = np.zeros((2, 3))
    spot[row, col] = 1.0

    def compute() -> None:
        y = x
        for name in before:
            y = HARMLESS[name](y)
        # 0 in one place, 1 elsewhere, whatever the steps before have made of it.
        hole = from_numpy(1.0 - (spot.T if y.shape == (3, 2) else spot), backend)
        y = HARMFUL[bad](y * 0.0 + hole)
        for name in after:
            y = HARMLESS[name](y)

    error = fault(compute)
    index = (col, row) if before.count("Permute") % 2 else (row, col)
    assert (error.operation, error.phase, error.index) == (bad, "forward", index)
    assert bad in str(error) and str(index) in str(error)


def test_the_error_tells_where_the_user_called() -> None:
    x = leaf([[1.0, 0.0]])

    def inner() -> Tensor:
        return 1.0 / x  # the line

    error = fault(lambda: inner().sum())
    lines, first = inspect.getsourcelines(inner)
    assert error.site is not None and error.site.file == __file__
    assert error.site.line == first + 1 and "# the line" in lines[1]
    assert f"test_anomaly.py:{first + 1} in inner: return 1.0 / x" in str(error)
    assert isinstance(error, FloatingPointError)
    assert (error.shape, error.shapes, error.value) == ((1, 2), ((1, 2),), np.inf)
    again = pickle.loads(pickle.dumps(error))  # as a pool of processes does
    assert (str(again), again.index) == (str(error), error.index)


def test_a_fault_in_the_backward_pass_names_the_forward_line() -> None:
    x = leaf(np.zeros((2, 3)))

    def forward() -> Tensor:
        return x**0.5

    error = fault(lambda: forward().sum().backward())
    assert (error.operation, error.phase, error.index) == ("PowerScalar", "backward", (0, 0))
    assert error.site is not None and error.site.name == "forward"
    outside = forward().sum()
    error = fault(outside.backward)
    assert error.phase == "backward" and error.site is None
    assert "run its forward pass within detect_anomaly" in str(error)


@pytest.mark.parametrize(
    ("operation", "compute"),
    [
        ("LayerNorm", lambda x: minitorch.LayerNorm1d(3, 0.0, FastBackend)(x * 0.0)),
        ("Softmax", lambda x: minitorch.softmax(x, 1)),
        ("Gelu", lambda x: minitorch.GELU(x)),
        ("CrossEntropy", lambda x: minitorch.softmax_loss(x, np.zeros(2, int))),
        ("FlashAttention", lambda x: x.view(1, 1, 2, 3).flash_attention(
            *(from_numpy(np.full((1, 1, 2, 3), value)) for value in (1e200, 1.0)))),
    ],
)  # fmt: skip
def test_fused_functions_are_looked_at(operation: str, compute: Callable[[Tensor], Tensor]) -> None:
    given_nan = operation in ("Softmax", "Gelu", "CrossEntropy")
    values = np.array([[1.0, 2.0, 3.0], [1.0, np.nan if given_nan else 1e200, 0.0]])
    x = from_numpy(values)
    x.requires_grad_(True)
    error = fault(lambda: compute(x))
    assert error.operation == operation and error.phase == "forward"
    assert ("came in from outside" in str(error)) == given_nan


def test_scalars_are_looked_at() -> None:
    x = Scalar(1e200)
    error = fault(lambda: x * x)
    assert (error.operation, error.phase, error.index) == ("Mul", "forward", ())
    assert "1e+200, 1e+200" in str(error) and "x * x" in str(error)
    y = Scalar(1e-120) * 1.0
    error = fault(lambda: (1e100 / y).backward(1e100))
    assert (error.operation, error.phase) == ("Inv", "backward")
    parameter = Parameter(Scalar(1e308))
    parameter.value.derivative = -1e308
    error = fault(SGD([parameter], lr=2.0).step)
    assert (error.operation, error.phase, error.value) == ("SGD", "step", np.inf)


# -- not a fault ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("mask", ["boolean", "floating", "causal"])
def test_rows_that_see_nothing_are_no_fault(attention: str, mask: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (leaf(rng.standard_normal((1, 2, 5, 4))) for _ in range(3))
    seen = np.ones((5, 5), bool)
    seen[2] = False
    options: dict[str, Any] = {
        "boolean": {"attn_mask": seen},
        "floating": {"attn_mask": from_numpy(np.where(seen, 0.0, -np.inf))},
        "causal": {"is_causal": True, "causal_offset": -2},
    }[mask]
    attend = minitorch.naive_attention if attention == "naive" else Tensor.flash_attention
    with detect_anomaly():
        out, lse = attend(q, k, v, **options, return_lse=True)
        out.sum().backward()
    assert np.isneginf(lse.to_numpy()).any() and np.isfinite(out.to_numpy()).all()


def test_an_infinity_that_was_given_is_no_fault_and_nan_is_one() -> None:
    x = from_numpy(np.array([1.0, np.inf, -np.inf]))
    with detect_anomaly():
        (x * 2.0 + 1.0).exp()
    error = fault(lambda: x * 0.0)
    assert (error.operation, error.index) == ("Mul", (1,)) and np.isnan(error.value)
    assert "infinity at (1,)" in str(error)


# -- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SGD, Adam])
@on_backends()
def test_an_optimiser_that_moves_too_far_is_named(make: Any, backend: TensorBackend) -> None:
    parameter = Parameter(from_numpy(np.full(3, 1.79e308), backend), "weights")
    parameter.value.grad = from_numpy(np.array([0.0, 0.0, -1.0]), backend)
    error = fault(make([parameter], lr=1e307).step)
    # Where the step is composed of operations, one of them is at fault.
    assert error.operation == (make.__name__ if backend is FastBackend else "Add")
    assert (error.value, error.index) == (np.inf, (2,))
    assert backend is not FastBackend or (error.phase == "step" and "weights" in str(error))


# -- when it is on -------------------------------------------------------------------------------


def test_nothing_is_looked_at_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("looked at")

    for name in ("forward", "check_gradients", "check_step"):
        monkeypatch.setattr(type(detect_anomaly.value), name, never)
    x = leaf([0.0, 1.0])
    y = 1.0 / x
    y.sum().backward()
    (Scalar(1e200) * 1e200).backward()
    parameter = Parameter(x)
    parameter.value.grad = x.detach()
    SGD([parameter]).step()
    with pytest.raises(AssertionError, match="looked at"), detect_anomaly():
        _ = y * 1.0


def test_it_nests_decorates_and_stays_in_its_thread() -> None:
    x = from_numpy(np.array([0.0]))

    @detect_anomaly()
    def decorated() -> Tensor:
        return 1.0 / x

    with detect_anomaly():
        with detect_anomaly():
            pass
        with pytest.raises(AnomalyError):
            _ = 1.0 / x
        results: list[float] = []
        thread = threading.Thread(target=lambda: results.append((1.0 / x).item()))
        thread.start()
        thread.join()
        assert results == [np.inf]
    assert (1.0 / x).item() == np.inf
    with pytest.raises(AnomalyError):
        decorated()
    assert (1.0 / x).item() == np.inf


def test_the_environment_switches_it_on() -> None:
    code = "from minitorch.scalars.modes import modes; print(modes.observer is not None)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "MINITORCH_DETECT_ANOMALY": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
