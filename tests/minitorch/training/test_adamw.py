"""AdamW: the textbook's steps, in one launch on a device, masters for 16 bits, clipped gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, acc_dtype, rounded
from kernels.runtime.targets import EMULATED
from minitorch import CudaBackend, Parameter, TensorBackend, from_numpy
from minitorch.training.adamw import AdamW

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, on_every_backend

#: Several parts, one, and of dimensions that decay and that do not.
SHAPES = [(3, 7), (5,), (1,), (2, 2, 4)]


class Textbook:
    """AdamW in float64, from gradients as they are given."""

    def __init__(
        self, values: list[Array], max_norm: float, betas: Any = (0.9, 0.999), **options: float
    ):
        self.values = [value.astype(np.float64) for value in values]
        self.m = [np.zeros(value.shape) for value in values]
        self.v = [np.zeros(value.shape) for value in values]
        self.max_norm, self.betas, self.steps, self.options = max_norm, betas, 0, options

    def step(self, grads: list[Array]) -> float:
        """Move the values; return the norm of the gradients before clipping."""
        (beta1, beta2), lr, decay = self.betas, self.options["lr"], self.options["weight_decay"]
        wide = [grad.astype(np.float64) for grad in grads]
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in wide))
        self.steps += 1
        for i, grad in enumerate(wide):
            grad = grad * min(1.0, self.max_norm / norm)
            self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * grad
            self.v[i] = beta2 * self.v[i] + (1.0 - beta2) * grad**2
            m_hat = self.m[i] / (1.0 - beta1**self.steps)
            v_hat = self.v[i] / (1.0 - beta2**self.steps)
            kept = 1.0 - lr * decay * (self.values[i].ndim >= 2)
            self.values[i] = kept * self.values[i] - lr * m_hat / (np.sqrt(v_hat) + 1e-8)
        return norm


def drawn(dtypes: list[Any], seed: int, scale: float = 1.0) -> list[Array]:
    """Draw an array for each of ``SHAPES``, with the dtypes in turn."""
    rng = np.random.default_rng(seed)
    pairs = zip(SHAPES, dtypes * len(SHAPES), strict=False)
    return [rounded(scale * rng.standard_normal(shape), np.dtype(dtype)) for shape, dtype in pairs]


@on_every_backend
@pytest.mark.parametrize(
    "dtypes",
    [[FLOAT32], [FLOAT64], [BFLOAT16], [FLOAT16, FLOAT32]],
    ids=["float32", "float64", "bfloat16", "mixed"],
)
@settings(max_examples=2 if EMULATED else 5)
@given(seed=st.integers(0, 2**32 - 1), max_norm=st.sampled_from([0.5, math.inf]))
def test_steps_are_the_textbooks(
    backend: TensorBackend, dtypes: list[Any], seed: int, max_norm: float
) -> None:
    values, options = drawn(dtypes, seed), {"lr": 0.01, "weight_decay": 0.1}
    parameters = [Parameter(from_numpy(value, backend)) for value in values]
    limit = None if max_norm == math.inf else max_norm
    optimiser, exact = (
        AdamW(parameters, **options, max_norm=limit),
        Textbook(values, max_norm, **options),
    )
    for step in range(3):
        grads = drawn(dtypes, seed + 1 + step, 0.1)
        for p, grad in zip(parameters, grads, strict=True):
            p.value.grad = from_numpy(grad, backend)
        optimiser.step()
        norm = exact.step(grads)
        assert all(p.value.grad is None for p in parameters)
        if limit is not None:
            assert optimiser.grad_norm is not None
            assert optimiser.grad_norm.item() == pytest.approx(norm, rel=1e-12)
    for p, value, wanted in zip(parameters, values, exact.values, strict=True):
        sums = acc_dtype(value.dtype)
        # Clipping rounds a gradient of 16 bits where it is a step of its own.
        size = 1.0 if backend is CudaBackend or limit is None else 100.0
        if p in optimiser.masters:
            master = optimiser.masters[p]
            assert_close_arrays(master, wanted, sums, "a master", size)
            np.testing.assert_array_equal(
                p.value.to_numpy(), rounded(master.to_numpy(), value.dtype)
            )
        else:
            assert sums == value.dtype
            assert_close_arrays(p.value, wanted, sums, "a parameter", size)


@on_every_backend
def test_the_state_goes_on_where_it_was(backend: TensorBackend) -> None:
    def train(optimiser: AdamW, steps: range) -> None:
        for step in steps:
            grads = drawn([BFLOAT16, FLOAT32], step)
            for p, grad in zip(optimiser.parameters, grads, strict=True):
                p.value.grad = from_numpy(grad, backend)
            optimiser.step()

    def made(values: list[Array]) -> AdamW:
        return AdamW([Parameter(from_numpy(value, backend)) for value in values], max_norm=1.0)

    whole = made(drawn([BFLOAT16, FLOAT32], 0))
    train(whole, range(1, 3))
    resumed = made([np.array(p.value.to_numpy()) for p in whole.parameters])
    resumed.load_state_dict(whole.state_dict())
    for optimiser in (whole, resumed):
        train(optimiser, range(3, 5))
    for expected, found in zip(whole.parameters, resumed.parameters, strict=True):
        np.testing.assert_array_equal(found.value.to_numpy(), expected.value.to_numpy())
    with pytest.raises(ValueError, match="master"):
        made([np.ones(2)]).load_state_dict(whole.state_dict())


@pytest.mark.emulated
def test_a_step_is_one_launch_for_each_kind_and_two_for_the_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = [Parameter(from_numpy(v, CudaBackend)) for v in drawn([BFLOAT16, FLOAT32], 0)]
    optimiser = AdamW(parameters, max_norm=1.0)
    names: list[str] = []
    launched = Kernel.__getitem__

    def watched(kernel: Kernel, launch: Any) -> Any:
        names.append(kernel.name)
        return launched(kernel, launch)

    for _ in range(2):  # the first makes moments and masters
        for p, grad in zip(parameters, drawn([BFLOAT16, FLOAT32], 1), strict=True):
            p.value.grad = from_numpy(grad, CudaBackend)
        names.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Kernel, "__getitem__", watched)
            optimiser.step()
    assert sorted(names) == ["adam_many"] * 2 + ["norm_end"] + ["squares"] * 2


@pytest.mark.emulated
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30], ids=str)
def test_a_norm_that_is_no_number_or_huge(value: float) -> None:
    p = Parameter(from_numpy(np.ones(3, np.float32), CudaBackend))
    optimiser = AdamW([p], lr=0.1, weight_decay=0.0, max_norm=1.0)
    p.value.grad = from_numpy(np.array([value, 0.0, 0.0], np.float32), CudaBackend)
    optimiser.step()
    assert optimiser.grad_norm is not None
    norm, found = optimiser.grad_norm.item(), p.value.to_numpy()
    np.testing.assert_allclose(norm, np.float32(value))
    if math.isfinite(value):  # its square is beyond float32
        np.testing.assert_allclose(found, [0.9, 1.0, 1.0], rtol=1e-6)
    else:
        assert np.isnan(found[0])


@pytest.mark.cuda
def test_many_tensors_of_many_parts_get_the_same_bits_every_time() -> None:
    shapes = [(1,), (16_383,), (16_385,), (300, 1000), (7, 11, 13)]

    def run() -> tuple[list[Array], list[Array]]:
        """Return the masters after three steps, and the textbook's values."""
        rng = np.random.default_rng(0)
        values = [rounded(rng.standard_normal(s), BFLOAT16) for s in shapes]
        parameters = [Parameter(from_numpy(v, CudaBackend)) for v in values]
        optimiser = AdamW(parameters, lr=0.01, weight_decay=0.1, max_norm=1.0)
        exact = Textbook(values, 1.0, lr=0.01, weight_decay=0.1)
        for _ in range(3):
            grads = [rounded(rng.standard_normal(s), BFLOAT16) for s in shapes]
            for p, grad in zip(parameters, grads, strict=True):
                p.value.grad = from_numpy(grad, CudaBackend)
            optimiser.step()
            exact.step(grads)
        return [optimiser.masters[p].to_numpy() for p in parameters], exact.values

    masters, exact = run()
    for _ in range(4):
        for again, first in zip(run()[0], masters, strict=True):
            np.testing.assert_array_equal(again, first)
    for master, wanted in zip(masters, exact, strict=True):
        assert_close_arrays(master, wanted, FLOAT32, "a master")
