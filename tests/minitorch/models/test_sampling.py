"""Which tokens are drawn: those of a reference in float64, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch import FastBackend, from_numpy
from minitorch.models.sampling import Sampler, choose_tokens, settings_of

from ...tensor_strategies import on_every_backend

#: Some logits are equal, so that top-k and top-p must choose among them.
ROW = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=7, max_size=7)
OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([None, 1, 2, 5, 9]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "seed": st.integers(0, 99),
    }
)


def kept_probabilities(
    logits: Any, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray[Any, Any]:
    """Return the probability of each token, 0 for those that top-k or top-p drops."""
    order = np.lexsort((np.arange(len(logits)), -logits))  # of equal ones, the first
    if temperature == 0.0:
        top_k, temperature = 1, 1.0
    kept = order[:top_k]
    probs = np.zeros(len(logits))
    probs[kept] = np.exp((logits[kept] - logits.max()) / temperature)
    probs /= probs.sum()
    reached = np.cumsum(probs[kept]) - probs[kept] >= top_p - 1e-12
    probs[kept[reached]] = 0.0
    return probs / probs.sum()


def drawn(logits: Any, samplers: list[Sampler], backend: Any = FastBackend) -> list[int]:
    rows = from_numpy(np.asarray(logits), backend)
    tokens = choose_tokens(rows, settings_of(samplers)).to_numpy()[:, 0]
    return [sampler.accept(token) for sampler, token in zip(samplers, tokens, strict=True)]


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(rows=st.lists(st.tuples(ROW, OPTIONS), min_size=1, max_size=4))
@settings(max_examples=20)
def test_each_row_draws_the_token_of_the_reference(backend: Any, dtype: Any, rows: Any) -> None:
    logits = np.array([row for row, _ in rows], dtype)
    samplers = [Sampler(**options) for _, options in rows]
    streams = [np.random.default_rng(options["seed"]) for _, options in rows]
    for _ in range(3):
        expected = [
            streams[i].choice(
                7,
                p=kept_probabilities(logits[i], *(o[n] for n in ("temperature", "top_k", "top_p"))),
            )
            for i, (_, o) in enumerate(rows)
        ]
        assert drawn(logits, samplers, backend) == expected


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, probs),
        ({"top_k": 2}, np.array([4, 3, 0, 0]) / 7),
        ({"top_p": 0.75}, np.array([4, 3, 2, 0]) / 9),
        ({"top_k": 3, "top_p": 0.6}, np.array([4, 3, 0, 0]) / 7),  # of 4/9, 3/9 and 2/9
    ]
    for options, expected in cases:
        samplers = [Sampler(seed=i, **options) for i in range(1500)]
        tokens = drawn(np.tile(np.log(probs), (1500, 1)), samplers)
        np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 1500, expected, atol=0.04)


@on_every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_probabilities_has_no_token(backend: Any, bad: float) -> None:
    logits = from_numpy(np.array([[0.0, bad, 1.0], [0.0, 9.0, 1.0]]), backend)
    samplers = [Sampler(seed=0), Sampler(top_k=1)]
    tokens = choose_tokens(logits, settings_of(samplers)).to_numpy()
    assert tokens.tolist() == [[-1.0], [1.0]]
    with pytest.raises(ValueError, match="NaN or infinity"):
        samplers[0].accept(-1)
