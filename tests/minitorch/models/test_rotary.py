"""Rotary positions and SwiGLU: values and gradients are those of float64, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import minitorch
from kernels.runtime.dtypes import BFLOAT16, rounded
from minitorch import GatedFeedForward, Rotary, from_numpy, grad_check

from ...support.models.llama_folder import LLAMA3, config_of, frequencies_of
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import on_every_backend

Array = npt.NDArray[Any]
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


def turned(x: Array, start: int, frequencies: Array) -> Array:
    """Turn (batch, seq, heads, dim) as complex numbers."""
    half = x.shape[-1] // 2
    angles = (start + np.arange(x.shape[1]))[:, None, None] * frequencies  # (seq, 1, dim / 2)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_every_backend
def test_pairs_are_turned_and_their_gradients_turned_back(
    backend: Any, dtype: np.dtype[Any]
) -> None:
    rng, rotary = np.random.default_rng(0), Rotary(6, 40, theta=50.0)
    for start, seq in ((0, 3), (5, 1), (0, 7), (33, 7)):
        x, dout = (rounded(rng.standard_normal((2, seq, 3, 6)), dtype) for _ in range(2))
        given_x = from_numpy(x, backend, True)
        out = rotary(given_x, start)
        assert out.dtype == dtype
        out.backward(from_numpy(dout, backend))
        wide_x, wide_dout = x.astype(np.float64), dout.astype(np.float64)
        assert_close_arrays(out, turned(wide_x, start, rotary.frequencies), dtype, size=2.0)
        # The gradient of a turn is the turn by the opposite angle.
        back = turned(wide_dout, start, -rotary.frequencies)
        assert_close_arrays(given_x.grad, back, dtype, size=2.0)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "default"}, {"type": "linear", "factor": 3.0}, LLAMA3]
)
def test_frequencies_are_those_of_the_definition(scaling: Any) -> None:
    named = None if scaling is None else {"rope_type": scaling.get("type"), **scaling}
    expected = frequencies_of(config_of(head_dim=16, rope_theta=500.0, rope_scaling=named))
    np.testing.assert_allclose(Rotary(16, 8, 500.0, scaling).frequencies, expected)


# -- SwiGLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@on_every_backend
def test_swiglu_is_that_of_float64(backend: Any, bias: bool) -> None:
    minitorch.manual_seed(0)
    layer = GatedFeedForward(3, 5, 0.0, bias, backend, np.float64)
    x = np.random.default_rng(2).standard_normal((2, 4, 3))
    w = {name: p.value.to_numpy() for name, p in layer.named_parameters()}

    def linear(rows: Array, name: str) -> Array:
        return rows @ w[f"{name}.weights"] + w.get(f"{name}.bias", 0.0)

    gate = linear(x, "linear_gate")
    middle = gate / (1.0 + np.exp(-gate)) * linear(x, "linear_in")
    assert_close_arrays(layer(from_numpy(x, backend)), linear(middle, "linear_out"), np.float64)
    grad_check(layer, from_numpy(x, backend), tol=1e-5)
