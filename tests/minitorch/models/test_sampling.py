"""Sampling: which tokens top-k and top-p allow, and how often each is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitorch import DecoderLM, FastBackend
from minitorch.models.sampling import make_sampler

LOGITS = st.lists(st.floats(-5, 5), min_size=1, max_size=12).map(np.array)
TEMPERATURES = st.floats(0.2, 3.0)


def draws(logits: Any, count: int = 40, **options: Any) -> list[int]:
    sample = make_sampler(seed=0, **options)
    return [sample(logits) for _ in range(count)]


@given(logits=LOGITS, temperature=TEMPERATURES, top_k=st.integers(1, 14))
def test_top_k_allows_only_the_k_most_likely(
    logits: Any, temperature: float, top_k: int
) -> None:  # fmt: skip
    least = np.sort(logits)[::-1][: min(top_k, len(logits))].min()
    drawn = set(draws(logits, temperature=temperature, top_k=top_k))
    assert len(drawn) <= top_k and all(logits[i] >= least for i in drawn)


@given(logits=LOGITS, temperature=TEMPERATURES, top_p=st.floats(0.01, 1.0))
def test_top_p_allows_only_the_fewest_that_reach_it(
    logits: Any, temperature: float, top_p: float
) -> None:
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    for i in draws(logits, temperature=temperature, top_p=top_p):
        assert probs[probs > probs[i]].sum() < top_p + 1e-12


@given(logits=LOGITS)
def test_without_a_choice_the_most_likely_is_drawn(logits: Any) -> None:
    best = logits.max()
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}):
        assert all(logits[i] == best for i in draws(logits, 5, **options))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probs)
    for options, expected in (
        ({}, probs),
        ({"top_k": 2}, np.array([4, 3, 0, 0]) / 7),
        ({"top_p": 0.75}, np.array([4, 3, 2, 0]) / 9),
        ({"top_k": 3, "top_p": 0.6}, np.array([4, 3, 0, 0]) / 7),  # of 4/9, 3/9 and 2/9
    ):
        counts = np.bincount(draws(logits, 4000, **options), minlength=4) / 4000
        np.testing.assert_allclose(counts, expected, atol=0.03)


def test_a_model_takes_the_options() -> None:
    model = DecoderLM(7, 8, 2, 9, n_layer=1, backend=FastBackend)
    greedy = model.generate([1, 2], 6, temperature=0)
    assert model.generate([1, 2], 6, seed=0, top_k=1) == greedy
    assert list(model.continuation([1, 2], 6, seed=0, top_p=1e-9)) == greedy[2:]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.1}, ValueError, "top_p"),
        ({"top_p": "x"}, TypeError, "top_p"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        make_sampler(**options)
