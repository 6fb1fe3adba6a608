"""The layers with parameters, up to a language model, on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers

from minitorch import (
    Adam,
    DecoderLM,
    Dropout,
    Embedding,
    FastBackend,
    FeedForward,
    LayerNorm1d,
    Linear,
    Module,
    MultiHeadAttention,
    SimpleBackend,
    Tensor,
    TensorBackend,
    TransformerLayer,
    from_numpy,
    grad_check,
    manual_seed,
    naive_attention,
    tensor,
)

from ..course.test_nn import softmax_of
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import Array, laid_out, lattice, on_backends, on_dtypes

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
@on_dtypes
@few
@given(data())
def test_linear(dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject) -> None:
    shape = tuple(data.draw(integers(1, 4)) for _ in range(data.draw(integers(1, 4))))
    x = data.draw(lattice(shape)).astype(dtype)
    layer = Linear(shape[-1], data.draw(integers(1, 4)), True, backend, dtype)
    w, b = (array.astype(np.float64) for array in values(layer).values())
    out = layer(data.draw(laid_out(x, backend)))
    assert_close_arrays(out, x.astype(np.float64) @ w + b, dtype, size=20.0)


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


@on_backends()
def test_gradients_of_linear(backend: TensorBackend) -> None:
    layer = Linear(3, 2, True, backend)

    def applied(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        layer.weights.value, layer.bias.value = w, b  # type: ignore[union-attr]
        return layer(x)

    grad_check(applied, *(from_numpy(rows(*s), backend) for s in ((2, 4, 3), (3, 2), (2,))))


# --- embedding (its values: test_fused) ------------------------------------------------------


@on_backends()
def test_embedding_has_the_published_parameters(backend: TensorBackend) -> None:
    manual_seed(0)
    layer = Embedding(200, 30, backend)
    table = values(layer)["weights"]
    assert table.shape == (200, 30)
    assert abs(table.mean()) < 0.05
    assert abs(table.std() - 1.0) < 0.05


# --- layer norm (its values: test_fused) -----------------------------------------------------


@on_backends()
@on_dtypes
def test_layer_norm_normalises_each_row(dtype: npt.DTypeLike, backend: TensorBackend) -> None:
    layer = LayerNorm1d(17, 0.0, backend, dtype)
    out = layer(from_numpy((rows(3, 5, 17) * 9 + 4).astype(dtype), backend)).to_numpy()
    assert_close_arrays(out.mean(2), np.zeros((3, 5)), dtype)
    assert_close_arrays(out.var(2), np.ones((3, 5)), dtype)


@on_backends()
def test_layer_norm_scales_and_shifts(backend: TensorBackend) -> None:
    x, gamma, beta = rows(4, 6), rows(6), rows(1, 6)[0] + 1.0
    layer = LayerNorm1d(6, EPS, backend)
    layer.weights.update(from_numpy(gamma, backend))
    layer.bias.update(from_numpy(beta, backend))
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + EPS)
    assert_close_arrays(layer(from_numpy(x, backend)), normal * gamma + beta, np.float64)
    grad_check(layer, from_numpy(x, backend))


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


def test_dropout_draws_with_numpy_as_published() -> None:
    np.random.seed(11)
    expected = np.random.binomial(1, 0.6, (3, 4)) / 0.6
    np.random.seed(11)
    assert_close_arrays(Dropout(0.4)(tensor(np.ones((3, 4)))), expected, np.float64)


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
    layer = MultiHeadAttention(6, 3, causal, 0.0, True, backend, attention=attention, dtype=dtype)
    x = rows(2, 5, 6).astype(dtype)
    expected = attention_of(x.astype(np.float64), values(layer), 3, causal)
    assert_close_arrays(layer(from_numpy(x, backend)), expected, dtype, size=5.0)


@on_backends()
@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_a_causal_layer_does_not_see_the_future(attention: str, backend: TensorBackend) -> None:
    layer = TransformerLayer(4, 2, 0.0, backend=backend, attention=attention, middle_dim=8)
    x = rows(1, 6, 4)
    changed = x.copy()
    changed[:, 4:] += 1.0
    before, after = (layer(from_numpy(array, backend)).to_numpy() for array in (x, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(axis=2).all()


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_the_backends_agree_on_every_layer(attention: str) -> None:
    x = rows(2, 3, 4)
    on_both_backends(lambda b: Linear(4, 3, True, b), x)
    on_both_backends(lambda b: randomised(LayerNorm1d(4, EPS, b)), x)
    on_both_backends(lambda b: Embedding(7, 4, b), np.array([[6, 0], [2, 6]]))
    on_both_backends(lambda b: FeedForward(4, 8, 0.5, True, b), x)
    on_both_backends(lambda b: MultiHeadAttention(4, 2, True, 0.5, True, b, attention=attention), x)
    on_both_backends(
        lambda b: randomised(TransformerLayer(4, 2, 0.5, EPS, True, b, attention=attention)), x
    )


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


def test_a_bias_may_be_left_out() -> None:
    layer = TransformerLayer(4, 2, bias=False)
    assert all(name.startswith("ln") or name.endswith("weights") for name in values(layer))


# --- the language model ----------------------------------------------------------------------


def model_of(backend: TensorBackend = FastBackend, **options: Any) -> DecoderLM:
    manual_seed(1)
    settings = {"n_layer": 1, "middle_dim": 16, **options}
    return DecoderLM(11, 12, 3, 7, 0.0, backend=backend, **settings)


TOKENS = np.random.default_rng(2).integers(0, 11, (3, 8))


def curve(model: DecoderLM, steps: int) -> Array:
    optimiser = Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize(("backend", "steps"), [(FastBackend, 10), (SimpleBackend, 2)])
def test_flash_and_naive_attention_learn_the_same(backend: TensorBackend, steps: int) -> None:
    flash = curve(model_of(backend, attention="flash"), steps)
    naive = curve(model_of(backend, attention="naive"), steps)
    # Adam divides by the root of the squares: near a gradient of 0 it enlarges the roundings.
    assert np.abs(flash - naive).max() < 1e-9
    assert flash[-1] < flash[0]


def test_a_model_of_one_text_learns_it_by_heart() -> None:
    model = model_of(tie_weights=True)
    losses = curve(model, 80)
    assert losses[0] == pytest.approx(np.log(11), abs=0.3)  # it starts by knowing nothing
    assert losses[-1] < 0.2


@on_backends()
def test_logits_and_parameters(backend: TensorBackend) -> None:
    model = model_of(backend, n_layer=2)
    assert model(TOKENS[:, :7]).shape == model(idx=tensor(TOKENS[:, :7])).shape == (3, 7, 11)
    shapes = {name: v.shape for name, v in values(model).items()}
    assert shapes["token_embeddings.weights"] == (11, 12)
    assert shapes["position_embeddings.weights"] == (7, 12)
    assert shapes["lm_head.weights"] == (12, 11)
    assert shapes["t_layer_2.ff.linear_in.weights"] == (12, 16)
    assert len(DecoderLM(11, 12, 3, 7).layer_names) == 4


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


def test_greedy_text_takes_the_likeliest_token() -> None:
    model = model_of()
    ids = [1, 2]
    for _ in range(9):  # beyond the context, which then slides
        ids.append(int(model(np.array([ids[-7:]])).to_numpy()[0, -1].argmax()))
    assert model.generate([1, 2], 9, temperature=0) == ids
    assert model.generate(np.array([1, 2]), 9, temperature=0, seed=5) == ids
    assert model.generate([1, 2], 0) == [1, 2]


def test_a_seed_gives_the_same_text() -> None:
    model = model_of()
    texts = [model.generate([3], 12, seed=seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert texts[2] != texts[3]
    assert all(len(text) == 13 and set(text) <= set(range(11)) for text in texts)


def test_a_low_temperature_is_greedy_and_a_high_one_is_not() -> None:
    model = model_of()
    for p in model.lm_head.parameters():  # type: ignore[union-attr]
        p.update(p.value.detach() * 5.0)
    greedy = model.generate([3], 20, temperature=0)
    assert model.generate([3], 20, temperature=1e-3, seed=1) == greedy
    wild = model.generate([3], 200, temperature=1e3, seed=1)
    assert len(set(wild)) == 11


@pytest.mark.parametrize("training", [True, False])
def test_writing_text_drops_nothing_and_leaves_the_mode(training: bool) -> None:
    model = DecoderLM(11, 12, 3, 7, 0.9, backend=FastBackend, n_layer=1, middle_dim=16)
    (model.train if training else model.eval)()
    np.random.seed(0)
    first = model.generate([1], 6, temperature=0)
    assert model.generate([1], 6, temperature=0) == first
    assert model.training is model.dropout.training is training


@on_backends()
@pytest.mark.parametrize("is_causal", [False, True])
def test_naive_attention(is_causal: bool, backend: TensorBackend) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2)))
    scores = q @ k.swapaxes(2, 3) / 2.0
    if is_causal:
        scores[..., np.arange(5)[:, None] < np.arange(7)] = -np.inf
    expected = softmax_of(scores, 3) @ v
    operands: list[Any] = [from_numpy(x, backend) for x in (q, k, v)]
    assert_close_arrays(
        naive_attention(*operands, is_causal=is_causal), expected, np.float64, size=10.0
    )
