"""The encoder of BERT: what it computes, padded and packed; its two heads; wrong calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from minitorch import EncoderLM, FastBackend, SimpleBackend

from ...support.models.captured_training import FIRST, step_of
from ...support.tolerances import assert_close_arrays
from ..functions.test_fused import gelu_of, softmax_of

VOCABULARY, WIDTH, HEADS, POSITIONS = 19, 8, 2, 40


def model(attention: str = "flash", seed: int = 0, **options: Any) -> EncoderLM:
    minitorch.manual_seed(seed)
    options = {"backend": FastBackend, "dtype": np.float64, **options}
    return EncoderLM(
        VOCABULARY, WIDTH, HEADS, POSITIONS, 0.0, attention=attention, middle_dim=12, **options
    )


class Batch(NamedTuple):
    """Padded sequences; a third of the tokens, and the first one, are to be predicted."""

    ids: Any
    targets: Any
    lengths: Any
    segments: Any

    @property
    def packed(self) -> Batch:
        shown = np.arange(self.ids.shape[1]) < self.lengths[:, None]
        return Batch(self.ids[shown], self.targets[shown], self.lengths, self.segments[shown])

    def filled(self, count: int) -> Batch:
        """Return a packed batch with padding behind its last sequence."""
        return Batch(
            np.pad(self.ids, (0, count), constant_values=VOCABULARY - 1),
            np.pad(self.targets, (0, count), constant_values=-100),
            self.lengths,
            np.pad(self.segments, (0, count)),
        )


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    shape = len(lengths), max(lengths)
    shown = np.arange(shape[1]) < np.array(lengths)[:, None]
    ids, original = rng.integers(0, VOCABULARY, (2, *shape))
    chosen = shown & (rng.random(shape) < 1 / 3)
    chosen[0, 0] = True
    targets = np.where(chosen, original, -100)
    return Batch(ids, targets, np.array(lengths), rng.integers(0, 2, shape))


def loss_and_gradients(own: Any, *args: Any) -> tuple[float, dict[str, Any]]:
    loss = own.loss(*args)
    loss.backward()
    found = {name: p.value.grad for name, p in own.named_parameters()}
    assert None not in found.values()
    return loss.item(), {name: grad.to_numpy() for name, grad in found.items()}


def assert_same(first: tuple[float, Any], second: tuple[float, Any]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-11)
    for name, gradient in first[1].items():
        assert_close_arrays(gradient, second[1][name], np.float64, name)


some_lengths = st.lists(st.integers(1, POSITIONS), min_size=1, max_size=5)


@given(some_lengths, st.integers(0, 99))
@settings(max_examples=15)
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(
    lengths: list[int], seed: int
) -> None:
    padded = batch_of(lengths, seed)
    expected = loss_and_gradients(model(), *padded)
    assert_same(loss_and_gradients(model(), *padded.packed), expected)
    assert_same(loss_and_gradients(model(), *padded.packed.filled(1 + seed)), expected)
    assert_same(loss_and_gradients(model("naive"), *padded), expected)


def normed(x: Any, norm: Any) -> Any:
    deviation = x - x.mean(-1, keepdims=True)
    scaled = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + norm.eps)
    return scaled * norm.weights.value.to_numpy() + norm.bias.value.to_numpy()


def times(x: Any, layer: Any) -> Any:
    return x @ layer.weights.value.to_numpy() + layer.bias.value.to_numpy()


def textbook_logits(own: EncoderLM, ids: Any, segments: Any) -> Any:
    """Return the logits of one sequence, (seq, vocabulary), by BERT's equations in NumPy."""
    words, places, kinds = (
        table.weights.value.to_numpy()
        for table in (own.token_embeddings, own.position_embeddings, own.segment_embeddings)
    )
    x = normed(words[ids] + places[: len(ids)] + kinds[segments], own.ln)
    for name in own.layer_names:
        layer = getattr(own, name)
        attention = layer.attention
        q, k, v = (
            times(x, getattr(attention, f"{part}_projection"))
            .reshape(len(ids), HEADS, WIDTH // HEADS)
            .transpose(1, 0, 2)
            for part in "qkv"
        )
        probs = softmax_of(q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS))
        joined = (probs @ v).transpose(1, 0, 2).reshape(len(ids), WIDTH)
        x = normed(x + times(joined, attention.out_projection), layer.ln_1)
        x = normed(
            x + times(gelu_of(times(x, layer.ff.linear_in)), layer.ff.linear_out), layer.ln_2
        )
    x = normed(gelu_of(times(x, own.head)), own.head_ln)
    return x @ words.T + own.head_bias.value.to_numpy()


@pytest.mark.parametrize("backend", [FastBackend, SimpleBackend])
def test_logits_are_those_of_the_equations(backend: Any) -> None:
    own, batch = model(backend=backend), batch_of([7, 3])
    found = own(batch.ids, batch.lengths, batch.segments).to_numpy()
    for row, length in enumerate(batch.lengths):
        expected = textbook_logits(own, batch.ids[row, :length], batch.segments[row, :length])
        assert_close_arrays(found[row, :length], expected, np.float64)


def test_the_loss_takes_the_logits_of_the_predicted_positions() -> None:
    own, batch = model(), batch_of([7, 20, 1])
    logits = own(batch.ids, batch.lengths, batch.segments).to_numpy()
    chosen = batch.targets != -100
    own_logits = softmax_of(logits[chosen])[np.arange(chosen.sum()), batch.targets[chosen]]
    assert own.loss(*batch).item() == pytest.approx(-np.log(own_logits).mean(), rel=1e-11)


def test_without_segments_or_lengths_all_are_0_or_whole() -> None:
    own, ids = model(), batch_of([9, 9]).ids
    assert_close_arrays(
        own(ids), own(ids, np.array([9, 9]), np.zeros_like(ids)).to_numpy(), np.float64
    )
    assert not np.allclose(own(ids).to_numpy(), own(ids, None, np.ones_like(ids)).to_numpy())


def wanted(rng: np.random.Generator, size: int, shown: int) -> Any:
    """Return targets, of which 9 among the first ones are to be predicted."""
    targets = np.full(size, -100)
    targets[rng.choice(shown, 9, replace=False)] = 1
    return targets


def on_device() -> EncoderLM:
    minitorch.manual_seed(0)
    return EncoderLM(
        20, 128, 2, 32, n_layer=2, attention_dropout=0.1, backend=minitorch.CudaBackend,
        precision="bfloat16",
    )  # fmt: skip


@pytest.mark.cuda
def test_captured_packed_steps_are_eager_ones() -> None:
    found = []
    for most_shapes in (0, 2):
        own, rng = on_device(), np.random.default_rng(0)
        step, losses = step_of(own, minitorch.AdamW(own.parameters(), max_norm=1.0)), []
        step = minitorch.graph_step(step, most_shapes=most_shapes) if most_shapes else step
        minitorch.manual_seed(1)
        for number in range(2 * FIRST + 6):
            total, lengths = (512, 640)[number % 2], rng.integers(5, 33, 15)
            ids, targets = rng.integers(0, 20, total), wanted(rng, total, lengths.sum())
            losses.append(step(ids, targets, lengths).to_numpy().tobytes())
        found.append((losses, [p.value.to_numpy().tobytes() for p in own.parameters()]))
    assert found[0] == found[1] and len({*found[0][0]}) > FIRST


def test_a_post_norm_layer_with_a_cache_gives_the_rows_of_one_without() -> None:
    minitorch.manual_seed(0)
    layer = minitorch.TransformerLayer(
        8, 2, 0.0, backend=FastBackend, norm_first=False, dtype=np.float32
    )
    layer.eval()
    cache = minitorch.LayerCache(1, 2, 6, 4, FastBackend, np.dtype(np.float32))
    x = minitorch.rand((1, 6, 8), FastBackend, dtype=np.float32)
    whole = layer(x).to_numpy()
    parts = [
        layer(minitorch.from_numpy(x.to_numpy()[:, [i]], FastBackend), cache) for i in range(6)
    ]
    found = np.concatenate([part.to_numpy() for part in parts], 1)
    assert_close_arrays(found, whole, np.float32)


def test_packed_sequences_keep_windows_sinks_and_groups_of_heads() -> None:
    minitorch.manual_seed(0)
    layer = minitorch.MultiHeadAttention(
        8, 4, True, 0.0, backend=FastBackend, dtype=np.float64, n_kv_head=2, window=3, sinks=True
    )
    assert layer.sink is not None
    layer.sink.update(minitorch.from_numpy(np.arange(4.0), FastBackend))
    x = minitorch.rand((1, 9, 8), FastBackend, dtype=np.float64)
    found = layer(x, cu_seqlens=[0, 4, 9]).to_numpy()
    for part in (slice(0, 4), slice(4, 9)):
        alone = layer(minitorch.from_numpy(x.to_numpy()[:, part], FastBackend))
        assert_close_arrays(found[:, part], alone.to_numpy(), np.float64)
