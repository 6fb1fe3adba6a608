"""The encoder classifier: what it computes, what padding does, that it learns, and wrong calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import FastBackend, SequenceClassifier
from minitorch.models.config import ATTENTIONS

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


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bfloat16_computes_what_float32_does(attention: str) -> None:
    X = ids(4, 37)
    exact, rounded = (
        model(attention, pad_id=0, precision=name)(X).to_numpy().astype(np.float64)
        for name in ("float32", "bfloat16")
    )
    difference = float(np.abs(exact - rounded).max())
    # Hashes of rounded numbers differ.
    allowed = 1.0 if attention in ("reformer", "smyrf") else 0.05
    assert 0.0 < difference <= allowed * np.abs(exact).max()


@pytest.mark.parametrize("attention", ["naive", "flash", "performer", "linear"])
def test_padding_does_not_change_the_logits(attention: str) -> None:
    own = model(attention, pad_id=0)
    X = ids(2, 20)
    padded = np.concatenate([X, np.zeros((2, 13), int)], 1)
    assert_close_arrays(own(padded), own(X).to_numpy(), own(X).dtype, attention, size=4.0)


def test_without_a_pad_id_every_token_counts() -> None:
    own = model()
    X = ids(2, 20, low=0)
    padded = np.concatenate([X, np.zeros((2, 13), int)], 1)
    assert not np.allclose(own(padded).to_numpy(), own(X).to_numpy())


def test_a_sequence_of_padding_alone_gets_finite_logits() -> None:
    assert np.isfinite(model(pad_id=0)(np.zeros((1, 5), int)).to_numpy()).all()


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


def test_it_learns_which_token_is_there() -> None:
    own = model(pad_id=0)
    random = np.random.default_rng(0)
    y = random.integers(3, size=24)
    X = random.integers(4, 9, (24, 12))
    X[np.arange(24), random.integers(12, size=24)] = y + 1
    optimizer = minitorch.AdamW(own.parameters(), lr=1e-2)
    loss = own.loss(X, y)
    for _ in range(40):
        optimizer.zero_grad()
        loss = own.loss(X, y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    assert (own.predict(X) == y).mean() > 0.9


def test_positions_of_an_image_begin_alike_where_pixels_are_near() -> None:
    model = SequenceClassifier(8, 16, 2, 25, 2, side=5, backend=FastBackend)
    table = model.position_embeddings.weights.value.to_numpy()
    products = (table @ table.T)[12]  # of the pixel in the middle
    assert products.argmax() == 12
    near, far = products[[7, 11, 13, 17]], products[[0, 4, 20, 24]]
    assert np.ptp(near) < 1e-5  # along rows as along columns
    assert near.min() > far.max()
    with pytest.raises(ValueError, match="side of 4 has 16 pixels, and n_positions is 25"):
        SequenceClassifier(8, 16, 2, 25, 2, side=4)
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        SequenceClassifier(8, 6, 2, 25, 2, side=5)


def test_recomputed_layers_have_the_same_gradients_bit_for_bit() -> None:
    found = []
    for recompute in (False, True):
        own = model(pad_id=0, attention_dropout=0.2, recompute=recompute)
        minitorch.manual_seed(6)
        loss = own.loss(ids(3, 17, low=0), np.array([0, 2, 1]))
        loss.backward()
        found.append([loss.to_numpy(), *(x.value.grad.to_numpy() for x in own.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, recomputed)


def test_embedding_then_pooling_is_the_encoder() -> None:
    own = model()
    own.eval()
    x = own.embed(ids(2, 7))
    np.testing.assert_array_equal(own.pool(x).to_numpy(), own.encode(ids(2, 7)).to_numpy())


def test_wrong_calls_say_what_is_expected() -> None:
    own = model(pad_id=0)
    with pytest.raises(ValueError, match=r"1 to 40 tokens, got shape \(2, 41\); cut longer"):
        own(ids(2, 41))
    with pytest.raises(ValueError, match=r"got shape \(5,\)"):
        own(ids(5))
    with pytest.raises(ValueError, match=r"got shape \(2, 0\)"):
        own(ids(2, 0))
    with pytest.raises(ValueError, match="token ids must be from 0 to 8"):
        own(ids(2, 5) + 9)
    with pytest.raises(ValueError, match="targets must be from 0 to 2"):
        own.loss(ids(2, 5), np.array([0, 3]))
    with pytest.raises(ValueError, match=r"\(batch, 2, seq\), got \(2, 5\); stack the two"):
        model(documents=2)(ids(2, 5))
    with pytest.raises(ValueError, match="documents must be 1, or 2"):
        model(documents=3)
    with pytest.raises(ValueError, match="determines the dtype"):
        model(precision="bfloat16", dtype=np.float32)


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_sequences_have_the_logits_and_gradients_of_single_ones(recompute: bool) -> None:
    own = model(recompute=recompute)
    lengths = np.array([5, 1, 23, 40])
    packed = ids(lengths.sum())
    parts = np.split(packed, np.cumsum(lengths)[:-1])
    factors = minitorch.from_numpy(np.random.default_rng(1).standard_normal((4, 3)), FastBackend)

    def found(logits: Any) -> list[Any]:
        for x in own.parameters():
            x.value.zero_grad_()
        (logits * factors).sum().backward()
        return [logits.to_numpy(), *(x.value.grad.to_numpy() for x in own.parameters())]

    def alone(packed: Any) -> Any:
        return minitorch.cat([own(part[None]) for part in parts], 0)

    for together, single in zip(found(own(packed, lengths)), found(alone(packed)), strict=True):
        assert_close_arrays(together, single, np.float64)


def test_packed_sequences_that_do_not_fit_are_refused() -> None:
    own = model()
    for shape, lengths in (((7,), [3, 3]), ((7,), [7, 0]), ((41,), [41]), ((1, 7), [7])):
        with pytest.raises(ValueError, match="from 1 to 40 that sum to total, got ids of shape"):
            own(ids(*shape), np.array(lengths))
    with pytest.raises(ValueError, match="no padding, and this model masks token 0"):
        model(pad_id=0)(ids(7), np.array([7]))
    with pytest.raises(ValueError, match="cannot be packed"):
        model(documents=2)(ids(7), np.array([7]))
    with pytest.raises(ValueError, match="need flash attention"):
        model("naive")(ids(7), np.array([7]))
