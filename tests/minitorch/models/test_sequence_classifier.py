"""The encoder classifier: what it computes, what padding does, that it learns, and wrong calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import FastBackend, SequenceClassifier
from minitorch.models.config import ATTENTIONS
from minitorch.models.document_classifier import DocumentClassifier

from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays

OPTIONS = {
    "linformer": {"length": 40, "count": 8},
    "reformer": {"seed": 0, "chunk": 8},
    "smyrf": {"seed": 0, "cluster": 8},
    "block_sparse": {"block_size": 16},
}


def model(attention: str = "flash", **options: Any) -> SequenceClassifier:
    minitorch.manual_seed(0)
    return SequenceClassifier(
        9, 8, 2, 40, 3, 0.0, attention=attention, attention_options=OPTIONS.get(attention),
        middle_dim=16, backend=FastBackend, **options,
    )  # fmt: skip


def ids(*shape: int, low: int = 1, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(low, 9, shape)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("documents", [1, 2])
def test_every_attention_classifies_and_learns(attention: str, documents: int) -> None:
    own = model(attention, pad_id=0, documents=documents)
    X = ids(4, *[2] * (documents - 1), 37)
    X[0, ..., 30:] = 0
    assert own(X).shape == (4, 3)
    own.loss(X, np.array([0, 1, 2, 0])).backward()
    missing = [name for name, p in own.named_parameters() if p.value.grad is None]
    assert missing == []


@pytest.mark.parametrize("attention", ["naive", "flash", "performer", "linear"])
def test_padding_does_not_change_the_logits(attention: str) -> None:
    own = model(attention, pad_id=0)
    X = ids(2, 20)
    padded = np.concatenate([X, np.zeros((2, 13), int)], 1)
    assert_close_arrays(own(padded), own(X).to_numpy(), own(X).dtype, attention, size=4.0)


def test_the_head_of_a_pair_sees_both_documents_their_product_and_their_distance() -> None:
    own = model(documents=2)
    X = ids(3, 2, 11)
    u, v = (own.encode(X[:, i]).to_numpy() for i in (0, 1))
    expected = np.concatenate([u, v, u * v, np.abs(u - v)], 1)
    assert_close_arrays(own.features(X), expected, own.features(X).dtype, size=4.0)


def test_predict_returns_the_largest_logit_without_dropout_and_keeps_the_mode() -> None:
    own = SequenceClassifier(9, 8, 2, 40, 3, 0.5, backend=FastBackend)
    X = ids(5, 11)
    found = own.predict(X)
    assert np.array_equal(found, own.predict(X)) and own.training
    own.eval()
    assert np.array_equal(found, own(X).to_numpy().argmax(-1))


def test_positions_of_an_image_begin_alike_where_pixels_are_near() -> None:
    model = SequenceClassifier(8, 16, 2, 25, 2, side=5, backend=FastBackend)
    table = model.position_embeddings.weights.value.to_numpy()
    products = (table @ table.T)[12]  # of the pixel in the middle
    assert products.argmax() == 12
    near, far = products[[7, 11, 13, 17]], products[[0, 4, 20, 24]]
    assert np.ptp(near) < 1e-5  # along rows as along columns
    assert near.min() > far.max()


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_sequences_have_the_logits_and_gradients_of_single_ones(recompute: bool) -> None:
    own, plain = model(recompute=recompute), model()
    lengths = np.array([5, 1, 23, 40])
    packed = ids(lengths.sum())
    parts = np.split(packed, np.cumsum(lengths)[:-1])
    factors = minitorch.from_numpy(np.random.default_rng(1).standard_normal((4, 3)), FastBackend)

    def found(own: Any, logits: Any) -> list[Any]:
        (logits * factors).sum().backward()
        return [logits.to_numpy(), *(x.value.grad.to_numpy() for x in own.parameters())]

    alone = found(plain, minitorch.cat([plain(part[None]) for part in parts], 0))
    for together, single in zip(found(own, own(packed, lengths)), alone, strict=True):
        assert_close_arrays(together, single, np.float64)


# -- of long documents -------------------------------------------------------------------------


def of_documents(**options: Any) -> DocumentClassifier:
    minitorch.manual_seed(0)
    return DocumentClassifier(
        12, 16, 2, 60, 3, 0.0, n_layer=1, middle_dim=16, backend=FastBackend, **options
    )


@at_most(10)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 99))
def test_a_packed_document_has_the_logits_that_it_has_alone(lengths: list[int], seed: int) -> None:
    own = of_documents()
    ids = np.random.default_rng(seed).integers(0, 12, sum(lengths))
    together = own(ids, np.array(lengths)).to_numpy()
    for row, part in zip(together, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        alone = own(part, np.array([len(part)])).to_numpy()[0]
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_binary_cross_entropy_of_the_logits() -> None:
    own = of_documents()
    own.head.bias.value = own.head.bias.value + 40.0  # type: ignore[union-attr]
    ids, lengths = np.arange(12) % 12, np.array([5, 7])
    targets = np.array([[1, 0, 1], [0, 0, 1]])
    z = own(ids, lengths).to_numpy().astype(np.float64)
    expected = np.logaddexp(0.0, np.where(targets == 1, -z, z)).mean()
    assert own.loss(ids, targets, lengths).item() == pytest.approx(expected, rel=1e-5)
