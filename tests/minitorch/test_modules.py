"""The layers with parameters, up to a language model, on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

from minitorch import (
    Adam,
    DecoderLM,
    Dropout,
    Embedding,
    FastBackend,
    Linear,
    Module,
    MultiHeadAttention,
    SimpleBackend,
    TensorBackend,
    TransformerLayer,
    from_numpy,
    grad_check,
    manual_seed,
)

from ..support.models.captured_training import step_of
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import Array, on_backends, on_dtypes

few = settings(max_examples=10)
EPS = 1e-5


def values(module: Module) -> dict[str, Array]:
    """Return the parameters of a module as arrays, by name."""
    return {name: p.value.to_numpy() for name, p in module.named_parameters()}


def gradients(module: Module) -> dict[str, Array]:
    return {name: p.value.grad.to_numpy() for name, p in module.named_parameters()}


def randomised(module: Module) -> Module:
    """Give every parameter other values than its start, which may be 0 or 1."""
    rng = np.random.default_rng(5)
    for p in module.parameters():
        value = rng.standard_normal(p.value.shape).astype(p.value.dtype)
        p.update(from_numpy(value, p.value.backend))
    return module


def on_both_backends(make: Any, *inputs: Any) -> None:
    """Check that a module gives the same output and gradients on both backends."""
    seen = []
    for backend in (SimpleBackend, FastBackend):
        manual_seed(3)
        module = make(backend)
        np.random.seed(4)
        out = module(*(from_numpy(x, backend) if x.dtype.kind == "f" else x for x in inputs))
        weights = np.linspace(-1.0, 2.0, out.size).reshape(out.shape)
        (out * from_numpy(weights, backend)).sum().backward()
        seen.append((out.to_numpy(), gradients(module)))
    (simple, simple_gradients), (fast, fast_gradients) = seen
    assert_close_arrays(fast, simple, np.float64, "output", 10.0)
    assert fast_gradients.keys() == simple_gradients.keys()
    for name, gradient in simple_gradients.items():
        assert_close_arrays(fast_gradients[name], gradient, np.float64, f"d{name}", 100.0)


def rows(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape)


# --- linear ----------------------------------------------------------------------------------


@on_backends()
def test_linear_has_the_published_parameters(backend: TensorBackend) -> None:
    layer = Linear(4, 3, True, backend)
    assert {name: v.shape for name, v in values(layer).items()} == {"weights": (4, 3), "bias": (3,)}
    assert all((np.abs(v) <= 0.5).all() for v in values(layer).values())  # 1 / sqrt(4)
    plain = Linear(4, 3, False, backend)
    assert plain.bias is None
    assert list(values(plain)) == ["weights"]
    x = from_numpy(rows(2, 4), backend)
    assert_close_arrays(plain(x), x.to_numpy() @ values(plain)["weights"], np.float64)


# --- embedding (its values: test_fused) ------------------------------------------------------


@on_backends()
def test_embedding_has_the_published_parameters(backend: TensorBackend) -> None:
    manual_seed(0)
    layer = Embedding(200, 30, backend)
    table = values(layer)["weights"]
    assert table.shape == (200, 30)
    assert abs(table.mean()) < 0.05
    assert abs(table.std() - 1.0) < 0.05


# --- dropout ---------------------------------------------------------------------------------


@on_backends()
@on_dtypes
def test_dropout_drops_in_training_only(dtype: npt.DTypeLike, backend: TensorBackend) -> None:
    manual_seed(2)
    x = from_numpy(np.ones((50, 80), dtype), backend, requires_grad=True)
    layer = Dropout(0.25)
    out = layer(x)
    kept = out.to_numpy() != 0.0
    assert abs(kept.mean() - 0.75) < 0.03
    assert_close_arrays(out, kept / 0.75, dtype)
    out.sum().backward()
    assert_close_arrays(x.grad, kept / 0.75, dtype, "gradient")
    layer.eval()
    assert layer(x) is x
    assert Dropout(0.0)(x) is x


# --- attention and transformer layer ---------------------------------------------------------


def attention_of(x: Array, p: dict[str, Array], heads: int, causal: bool) -> Array:
    """Attend with the weights of a MultiHeadAttention, in plain NumPy."""
    batch, seq, width = x.shape

    def heads_of(name: str) -> Array:
        flat = x @ p[f"{name}_projection.weights"] + p[f"{name}_projection.bias"]
        return flat.reshape(batch, seq, heads, width // heads).swapaxes(1, 2)

    q, k, v = (heads_of(name) for name in "qkv")
    scores = q @ k.swapaxes(2, 3) / np.sqrt(width // heads)
    if causal:
        scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(3, keepdims=True))
    probs /= probs.sum(3, keepdims=True)
    joined = (probs @ v).swapaxes(1, 2).reshape(batch, seq, width)
    return joined @ p["out_projection.weights"] + p["out_projection.bias"]


@on_backends()
@on_dtypes
@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention(
    causal: bool, attention: str, dtype: npt.DTypeLike, backend: TensorBackend
) -> None:
    layer = MultiHeadAttention(
        6, 3, causal, 0.0, True, backend, attention=attention, dtype=dtype, attention_dropout=0.5
    )
    x = rows(2, 5, 6).astype(dtype)
    dropped = layer(from_numpy(x, backend)).to_numpy()
    layer.eval()
    expected = attention_of(x.astype(np.float64), values(layer), 3, causal)
    assert_close_arrays(layer(from_numpy(x, backend)), expected, dtype, size=5.0)
    assert np.abs(dropped - expected).max() > 0.01


@pytest.mark.parametrize("tie_weights", [False, True])
def test_the_backends_agree_on_a_language_model(tie_weights: bool) -> None:
    on_both_backends(
        lambda b: randomised(DecoderLM(
            7, 4, 2, 5, 0.3, EPS, True, b, n_layer=2, middle_dim=8, tie_weights=tie_weights,
        )),
        np.array([[6, 0, 3], [2, 6, 6]]),
    )  # fmt: skip


@on_backends()
def test_gradients_of_a_transformer_layer(backend: TensorBackend) -> None:
    layer = TransformerLayer(4, 2, 0.0, EPS, True, backend, middle_dim=6)
    grad_check(layer, from_numpy(rows(2, 3, 4), backend))


# --- the language model ----------------------------------------------------------------------


def model_of(backend: TensorBackend = FastBackend, **options: Any) -> DecoderLM:
    manual_seed(1)
    settings = {"n_layer": 1, "middle_dim": 16, **options}
    return DecoderLM(11, 12, 3, 7, 0.0, backend=backend, **settings)


TOKENS = np.random.default_rng(2).integers(0, 11, (3, 8))


def curve(model: DecoderLM, steps: int) -> Array:
    step = step_of(model, Adam(model.parameters(), lr=0.01))
    return np.array([step(TOKENS[:, :-1], TOKENS[:, 1:]).item() for _ in range(steps)])


def test_a_model_of_one_text_learns_it_by_heart() -> None:
    model = model_of(tie_weights=True)
    losses = curve(model, 80)
    assert losses[0] == pytest.approx(np.log(11), abs=0.3)  # it starts by knowing nothing
    assert losses[-1] < 0.2


def test_the_loss_is_the_mean_cross_entropy() -> None:
    model = model_of()
    logits = model(TOKENS[:, :-1]).to_numpy().reshape(-1, 11)
    chosen = logits[np.arange(21), TOKENS[:, 1:].reshape(-1)]
    expected = (np.log(np.exp(logits).sum(1)) - chosen).mean()
    assert_close_arrays(model.loss(TOKENS[:, :-1], TOKENS[:, 1:]), expected[None], np.float64)


def test_tied_weights_are_one_table() -> None:
    tied, apart = model_of(tie_weights=True), model_of()
    assert tied.lm_head is None
    assert set(values(apart)) - set(values(tied)) == {"lm_head.weights", "lm_head.bias"}
    # Both uses add to its gradient: the tokens that occur, and every token that is scored.
    tied.loss(TOKENS[:1, :2], TOKENS[:1, 1:3]).backward()
    assert (gradients(tied)["token_embeddings.weights"] != 0.0).any(axis=1).all()
    apart.loss(TOKENS[:1, :2], TOKENS[:1, 1:3]).backward()
    moved = (gradients(apart)["token_embeddings.weights"] != 0.0).any(axis=1)
    assert set(np.flatnonzero(moved)) == set(TOKENS[0, :2].tolist())


@pytest.mark.parametrize("training", [True, False])
def test_writing_text_drops_nothing_and_leaves_the_mode(training: bool) -> None:
    model = DecoderLM(11, 12, 3, 7, 0.9, backend=FastBackend, n_layer=1, middle_dim=16)
    (model.train if training else model.eval)()
    np.random.seed(0)
    first = model.generate([1], 6, temperature=0)
    assert model.generate([1], 6, temperature=0) == first
    assert model.training is model.dropout.training is training
