"""Windows, sinks and approximations of attention as options of a language model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import DecoderLM, FastBackend

from ...support.tolerances import assert_close_arrays

IDS = np.random.default_rng(0).integers(0, 11, (2, 40))
SINKS = [3.0, -2.0]


def model_of(**options: Any) -> DecoderLM:
    minitorch.manual_seed(0)
    model = DecoderLM(
        11, 8, 2, 40, 0.0, backend=FastBackend, **{"dtype": np.float64, "n_layer": 2, **options}
    )
    for name, p in model.named_parameters():
        if name.endswith(".sink"):
            p.update(minitorch.tensor(SINKS, FastBackend, dtype=p.value.dtype))
    return model


@given(
    window=st.none() | st.integers(1, 45), sinks=st.booleans(), seq=st.integers(1, 40),
    theta=st.sampled_from([None, 100.0]), recompute=st.booleans(),
)  # fmt: skip
def test_flash_and_naive_have_the_same_loss_and_gradients(
    window: int | None, sinks: bool, seq: int, theta: float | None, recompute: bool
) -> None:
    found = []
    for attention in ("flash", "naive"):
        model = model_of(
            attention=attention, window=window, sinks=sinks, rotary_theta=theta, recompute=recompute
        )
        loss = model.loss(IDS[:, :seq], IDS[:, ::-1][:, :seq])
        loss.backward()
        gradients = [p.value.grad for p in model.parameters()]
        found.append([loss.to_numpy(), *(g.to_numpy() for g in gradients if g is not None)])
    assert len(found[0]) == len(found[1])
    for flash, naive in zip(*found, strict=True):
        assert_close_arrays(flash, naive, np.float64, size=10.0)


@given(window=st.integers(1, 12), layers=st.integers(1, 2), sinks=st.booleans())
def test_a_token_reaches_window_minus_one_further_in_each_layer(
    window: int, layers: int, sinks: bool
) -> None:
    model = model_of(window=window, n_layer=layers, sinks=sinks)
    changed = IDS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    difference = np.abs(model(IDS).to_numpy() - model(changed).to_numpy()).max(axis=(0, 2))
    reach = range(7, 7 + layers * (window - 1) + 1)
    assert [i for i, moved in enumerate(difference) if moved > 1e-9] == list(reach)


# -- approximations ----------------------------------------------------------------------------


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
