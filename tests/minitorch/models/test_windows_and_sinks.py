"""Windows, sinks and approximations of attention as options of a language model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import DecoderLM, FastBackend, MultiHeadAttention
from minitorch.distributed import spread_sequence

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


WRONG = {
    "window": (lambda: model_of(window=0), "window must be"),
    "window of an approximation": (
        lambda: model_of(attention="local", attention_options={"window": 4}, window=4),
        "need attention 'flash' or 'naive', got 'local'",
    ),
    "sinks of an approximation": (
        lambda: model_of(attention="linear", sinks=True), "need attention 'flash' or 'naive', got 'linear'",
    ),
    "both ways": (
        lambda: MultiHeadAttention(8, 2, causal=False, window=4), "build the layer with causal=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_combination_is_refused(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_a_ring_has_no_sinks() -> None:
    group: Any = None  # is not reached
    with pytest.raises(ValueError, match="ring_attention has no sinks"):
        spread_sequence(model_of(sinks=True), group)


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


@pytest.mark.parametrize("attention", ["linformer", "smyrf"])
def test_an_attention_that_cannot_be_causal_is_refused(attention: str) -> None:
    options = {"length": 32, "count": 4} if attention == "linformer" else {}
    with pytest.raises(ValueError, match="does not support is_causal"):
        language_model(attention, options)


def test_generation_needs_exact_attention() -> None:
    with pytest.raises(ValueError, match="a cache needs flash or naive attention"):
        list(language_model("local", {"window": 4}).generate([1, 2, 3], 2))
