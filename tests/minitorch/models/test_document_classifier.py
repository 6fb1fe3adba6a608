"""The classifier of long documents: packed as alone, a stable loss, and a few tokens that decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import FastBackend
from minitorch.models.document_classifier import DocumentClassifier

from ...support.examples import at_most


def model(**options: Any) -> DocumentClassifier:
    minitorch.manual_seed(0)
    return DocumentClassifier(
        12, 16, 2, 60, 3, 0.0, n_layer=1, middle_dim=16, backend=FastBackend, **options
    )


@at_most(10)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 99))
def test_a_packed_document_has_the_logits_that_it_has_alone(lengths: list[int], seed: int) -> None:
    own = model()
    ids = np.random.default_rng(seed).integers(0, 12, sum(lengths))
    together = own(ids, np.array(lengths)).to_numpy()
    for row, part in zip(together, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        alone = own(part, np.array([len(part)])).to_numpy()[0]
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_binary_cross_entropy_of_the_logits() -> None:
    own = model()
    own.head.bias.value = own.head.bias.value + 40.0  # type: ignore[union-attr]
    ids, lengths = np.arange(12) % 12, np.array([5, 7])
    targets = np.array([[1, 0, 1], [0, 0, 1]])
    z = own(ids, lengths).to_numpy().astype(np.float64)
    expected = np.logaddexp(0.0, np.where(targets == 1, -z, z)).mean()
    assert own.loss(ids, targets, lengths).item() == pytest.approx(expected, rel=1e-5)


def test_it_learns_which_tokens_occur_in_long_documents() -> None:
    own = model(precision="float32")
    random = np.random.default_rng(0)
    optimizer = minitorch.AdamW(own.parameters(), lr=1e-2)

    def batch(count: int) -> tuple[Any, Any, Any]:
        lengths = random.integers(20, 61, count)
        parts = [random.integers(3, 12, length) for length in lengths]
        targets = random.integers(0, 2, (count, 3))
        for part, wanted in zip(parts, targets, strict=True):
            places = random.permutation(len(part))[:3]
            part[places[wanted == 1]] = np.flatnonzero(wanted)  # token i occurs once for label i
        return np.concatenate(parts), targets, lengths

    for _ in range(150):
        optimizer.zero_grad()
        own.loss(*batch(16)).backward()
        optimizer.step()
    ids, targets, lengths = batch(64)
    assert (own.predict(ids, lengths) == targets).mean() > 0.95


def test_wrong_calls_say_what_is_expected() -> None:
    own = model()
    with pytest.raises(ValueError, match=r"pass ids of shape \(total,\) and the lengths"):
        own(np.arange(5))
    with pytest.raises(ValueError, match=r"shape of the logits, \(1, 3\), got \(3,\)"):
        own.loss(np.arange(5), np.ones(3), np.array([5]))
    with pytest.raises(ValueError, match="from 1 to 60 that sum to total"):
        own(np.arange(5), np.array([4]))
