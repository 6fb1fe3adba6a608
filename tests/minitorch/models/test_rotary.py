"""Rotary positions and SwiGLU: values and gradients are those of float64, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from kernels.runtime.dtypes import BFLOAT16, rounded
from minitorch import GatedFeedForward, Rotary, from_numpy

from ...support.models.llama_folder import LLAMA3, config_of, frequencies_of
from ...support.tolerances import assert_close_arrays

Array = npt.NDArray[Any]
EVERYWHERE = [
    pytest.param(minitorch.SimpleBackend, id="simple"),
    pytest.param(minitorch.FastBackend, id="fast"),
    pytest.param(minitorch.CudaBackend, id="cuda", marks=pytest.mark.simulator),
]
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


def turned(x: Array, start: int, frequencies: Array) -> Array:
    """Turn (batch, seq, heads, dim) as complex numbers."""
    half = x.shape[-1] // 2
    angles = (start + np.arange(x.shape[1]))[:, None, None] * frequencies  # (seq, 1, dim / 2)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", EVERYWHERE)
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


@given(first=st.integers(0, 30), second=st.integers(0, 30), shift=st.integers(0, 30))
@settings(max_examples=20)
def test_a_product_depends_on_the_distance_alone(first: int, second: int, shift: int) -> None:
    rng, rotary = np.random.default_rng(1), Rotary(8, 61)
    q, k = (from_numpy(rng.standard_normal((1, 1, 1, 8))) for _ in range(2))
    scores = [
        (rotary(q, first + by) * rotary(k, second + by)).sum().item() for by in (0, shift)
    ]  # fmt: skip
    np.testing.assert_allclose(*scores, atol=1e-10)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "default"}, {"type": "linear", "factor": 3.0}, LLAMA3]
)
def test_frequencies_are_those_of_the_definition(scaling: Any) -> None:
    named = None if scaling is None else {"rope_type": scaling.get("type"), **scaling}
    expected = frequencies_of(config_of(head_dim=16, rope_theta=500.0, rope_scaling=named))
    np.testing.assert_allclose(Rotary(16, 8, 500.0, scaling).frequencies, expected)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Rotary(5, 8), ValueError, "even size, got head_dim 5"),
        (lambda: Rotary(4, 8, theta=0.0), ValueError, "rotary_theta must be positive"),
        (lambda: Rotary(4, 8, theta="1"), TypeError, "rotary_theta must be a number"),  # type: ignore[arg-type]
        (lambda: Rotary(4, 8, scaling={"rope_type": "yarn"}), ValueError, "'yarn', supported is"),
        (lambda: Rotary(4, 8, scaling={**LLAMA3, "factor": -1}), ValueError, "factor of a rotary"),
        (lambda: Rotary(4, 8, scaling={**LLAMA3, "low_freq_factor": 9.0}), ValueError, "must be below"),
        (lambda: Rotary(4, 8)(minitorch.rand((1, 3, 1, 4)), 6), ValueError, "8 positions, got 3 after 6"),
        (lambda: lm(rotary_scaling=LLAMA3), ValueError, "pass rotary_theta"),
        (lambda: lm(norm="batch"), ValueError, r"norm must be one of 'layer', 'rms', got 'batch'"),
        (lambda: lm(feed_forward="relu"), ValueError, "feed_forward must be one of"),
        (lambda: lm(n_kv_head=3), ValueError, "n_kv_head must divide n_head, got 3 and 4"),
        (lambda: lm(n_kv_head=2, attention="local"), ValueError, "groups of heads, window and sinks need"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def lm(**options: Any) -> minitorch.DecoderLM:
    return minitorch.DecoderLM(5, 8, 4, 6, n_layer=1, **options)


# -- SwiGLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_swiglu_and_its_gradients_are_those_of_float64(backend: Any, bias: bool) -> None:
    minitorch.manual_seed(0)
    layer = GatedFeedForward(3, 5, 0.0, bias, backend, np.float64)
    rng = np.random.default_rng(2)
    x, dout = rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 4, 3))
    given_x = from_numpy(x, backend, True)
    out = layer(given_x)
    out.backward(from_numpy(dout, backend))
    w = {name: p.value.to_numpy() for name, p in layer.named_parameters()}

    def linear(rows: Array, name: str) -> Array:
        return rows @ w[f"{name}.weights"] + w.get(f"{name}.bias", 0.0)

    gate, up = linear(x, "linear_gate"), linear(x, "linear_in")
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    middle = gate * sigmoid * up
    assert_close_arrays(out, linear(middle, "linear_out"), np.float64)
    dmiddle = dout @ w["linear_out.weights"].T
    dup = dmiddle * gate * sigmoid
    dgate = dmiddle * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dx = dgate @ w["linear_gate.weights"].T + dup @ w["linear_in.weights"].T
    assert_close_arrays(given_x.grad, dx, np.float64)
    pairs = {"linear_gate": (x, dgate), "linear_in": (x, dup), "linear_out": (middle, dout)}
    gradients = {name: p.value.grad for name, p in layer.named_parameters()}
    for name, (rows, grad) in pairs.items():
        expected = np.einsum("bsi,bso->io", rows, grad)
        assert_close_arrays(gradients[f"{name}.weights"], expected, np.float64)
        if bias:
            assert_close_arrays(gradients[f"{name}.bias"], grad.sum((0, 1)), np.float64)


# -- a whole model -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_gradients_of_a_llama_are_those_of_small_differences(backend: Any) -> None:
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        5, 4, 2, 4, 0.0, bias=False, backend=backend, n_layer=1, middle_dim=5, n_kv_head=1,
        rotary_theta=10.0, norm="rms", feed_forward="swiglu", tie_weights=True, dtype=np.float64,
    )  # fmt: skip
    ids = np.array([[1, 4, 2, 0]])
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        value, gradient = parameter.value.to_numpy().copy(), parameter.value.grad.to_numpy()
        direction = rng.standard_normal(value.shape)
        losses = []
        for step in (1e-5, -1e-5):
            parameter.update(from_numpy(value + step * direction, backend))
            losses.append(model.loss(ids[:, :-1], ids[:, 1:]).item())
        parameter.update(from_numpy(value, backend))
        found = (losses[0] - losses[1]) / 2e-5
        expected = (gradient * direction).sum()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_llama_of_any_precision_learns(precision: str, backend: Any) -> None:
    if backend is minitorch.SimpleBackend:
        pytest.skip("the fast and the CUDA backend have kernels of their own")
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        5, 8, 2, 4, 0.0, bias=False, backend=backend, n_layer=1, middle_dim=8, n_kv_head=1,
        rotary_theta=10.0, norm="rms", feed_forward="swiglu", precision=precision,
    )  # fmt: skip
    optimizer = minitorch.AdamW(model.parameters(), lr=0.05)
    ids, losses = np.array([[1, 4, 2, 0]]), []
    for _ in range(2):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
