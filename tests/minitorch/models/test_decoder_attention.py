"""A language model with an approximation of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch


def language_model(attention: str, options: dict[str, Any]) -> minitorch.DecoderLM:
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        11, 16, 2, 32, 0.0, backend=minitorch.FastBackend, attention=attention,
        attention_options=options,
    )  # fmt: skip
    model.eval()
    return model


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("local", {"window": 4}),
        ("linear", {}),
        ("performer", {"num_features": 8, "seed": 0}),
        ("block_sparse", {"block_size": 16}),
    ],
)
def test_later_tokens_change_no_earlier_logits(attention: str, options: dict[str, Any]) -> None:
    model = language_model(attention, options)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 32))
    others = tokens.copy()
    others[:, 20:] = (others[:, 20:] + 1) % 11
    difference = np.abs(model(tokens).to_numpy() - model(others).to_numpy())
    assert difference[:, :20].max() < 1e-6 < difference[:, 20:].max()


def test_options_reach_the_layers() -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (1, 32))
    exact = language_model("flash", {})(tokens).to_numpy()
    for window, is_exact in ((31, True), (1, False)):
        own = language_model("local", {"window": window})(tokens).to_numpy()
        assert np.allclose(own, exact, atol=1e-5) == is_exact


@pytest.mark.parametrize("attention", ["linformer", "smyrf"])
def test_an_attention_that_cannot_be_causal_is_refused(attention: str) -> None:
    options = {"length": 32, "count": 4} if attention == "linformer" else {}
    with pytest.raises(ValueError, match="does not support is_causal"):
        language_model(attention, options)


def test_generation_needs_exact_attention() -> None:
    with pytest.raises(ValueError, match="a cache needs flash or naive attention"):
        list(language_model("local", {"window": 4}).generate([1, 2, 3], 2))
