"""Mixed precision as a policy of a model; residual, dropout and norm as one; recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch
from kernels.runtime.dtypes import BFLOAT16, FLOAT32, rounded
from minitorch import CudaBackend, FastBackend, SimpleBackend, TensorBackend
from minitorch.accelerated.joined_layers import run_joined
from minitorch.backends.matmul_precision import PRECISIONS

from ...support.models.captured_training import step_of

IDS = np.array([[1, 4, 1, 2]])


def model_of(backend: TensorBackend = FastBackend, **options: Any) -> minitorch.DecoderLM:
    minitorch.manual_seed(0)
    own = {"p_dropout": 0.0, "n_layer": 1, "middle_dim": 8, "backend": backend, **options}
    return minitorch.DecoderLM(5, 8, 2, 3, **own)


class Noted(minitorch.Module):
    """Hands on what it gets, and notes its dtype and the precision of products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: minitorch.Tensor) -> minitorch.Tensor:
        self.seen.append((x.dtype, minitorch.get_matmul_precision()))
        return x


@pytest.mark.parametrize("backend", [SimpleBackend, FastBackend], ids=["simple", "fast"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_what_a_model_stores_multiplies_and_sums_in(backend: TensorBackend, name: str) -> None:
    own = PRECISIONS[name]
    model = model_of(backend, precision=name)
    for path, p in model.named_parameters():
        assert p.value.dtype == (own.norms if ".ln" in f".{path}" else own.dtype), path
    noted = Noted()
    setattr(model, "dropout", noted)  # noqa: B010  # of another type
    logits = model(IDS[:, :-1])
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    assert logits.dtype == own.dtype and loss.dtype == FLOAT32
    assert noted.seen == [(own.dtype, own.products)] * 2
    assert minitorch.get_matmul_precision() == "float32"
    loss.backward()
    optimizer = minitorch.AdamW(model.parameters(), 1e-4, max_norm=1.0)
    optimizer.step()
    halves = [p for p in model.parameters() if p.value.dtype == BFLOAT16]
    assert {*optimizer.masters} == {*halves} and bool(halves) == (name == "bfloat16")
    for p, master in optimizer.masters.items():
        assert master.dtype == FLOAT32
        np.testing.assert_array_equal(p.value.to_numpy(), rounded(master.to_numpy(), BFLOAT16))


def test_bfloat16_learns_as_float32_does() -> None:
    """From the same weights, on the same batches: apart by the rounding of 8 bits and no more."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, (30, 4, 2)).repeat(2, axis=2)
    curves = {}
    for name in ("float32", "bfloat16"):
        model = model_of(precision=name, n_layer=2)
        for p, q in zip(
            model.parameters(), model_of(dtype=np.float32, n_layer=2).parameters(), strict=True
        ):
            p.update(q.value.detach().to(p.value.dtype))
        step = step_of(model, minitorch.AdamW(model.parameters(), 1e-2, max_norm=1.0))
        curves[name] = np.array([step(x[:, :-1], x[:, 1:]).item() for x in text])
    assert curves["float32"][-5:].mean() < 0.8 * curves["float32"][:5].mean()
    np.testing.assert_allclose(curves["bfloat16"], curves["float32"], atol=0.04)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_joined_layers_are_the_layers(rate: float, recompute: bool) -> None:
    """Where there is no kernel, bit for bit, with the same numbers dropped."""
    found = []
    for runs_joined in (False, True):
        model = model_of(p_dropout=rate, n_layer=2, attention_dropout=rate)
        layers = [getattr(model, name) for name in model.layer_names]
        x = model.token_embeddings(IDS)
        minitorch.manual_seed(1)
        if runs_joined:
            call: Any = minitorch.checkpoint if recompute else lambda fn, *inputs: fn(*inputs)
            x = run_joined(layers, model.ln, x, call)
        else:
            for layer in layers:
                x = layer(x)
            x = model.ln(x)
        loss = (x * x * x).sum()
        loss.backward()
        named = [(n, p.value.grad) for n, p in model.named_parameters() if p.value.grad is not None]
        assert len(named) == 35
        found.append([(n, g.to_numpy().tobytes()) for n, g in named] + [loss.item()])
    assert found[0] == found[1]


@pytest.mark.emulated
def test_on_the_device_the_layers_are_joined_and_equal_those_of_the_host() -> None:
    losses, grads = [], []
    for backend in (FastBackend, CudaBackend):
        model = model_of(backend, dtype=np.float32)
        x = model.token_embeddings(IDS)
        layer = model.t_layer_1
        alone = layer(x).to_numpy()
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
        loss.backward()
        losses.append((alone, loss.to_numpy()))
        grads.append([p.value.grad.to_numpy() for p in model.parameters()])
    for one, two in (*zip(*losses, strict=True), *zip(*grads, strict=True)):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)
