"""Windows and sinks as options of the attention of a language model."""

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


def test_a_window_of_the_whole_context_is_none_and_a_sink_is_not() -> None:
    plain = model_of()(IDS).to_numpy()
    assert_close_arrays(model_of(window=40)(IDS).to_numpy(), plain, np.float64, size=10.0)
    assert np.abs(model_of(sinks=True)(IDS).to_numpy() - plain).max() > 1e-3


def test_sinks_begin_as_zeros_and_change_no_other_weight() -> None:
    minitorch.manual_seed(0)
    weights = {n: p.value.to_numpy() for n, p in DecoderLM(5, 4, 2, 6).named_parameters()}
    minitorch.manual_seed(0)
    for name, p in DecoderLM(5, 4, 2, 6, sinks=True).named_parameters():
        expected = np.zeros(2) if name.endswith(".sink") else weights[name]
        np.testing.assert_array_equal(p.value.to_numpy(), expected)


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


@pytest.mark.parametrize("options", [{"window": 4}, {"sinks": True}])
def test_no_layout_of_transformers_has_windows_and_sinks(options: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="build the model without window and sinks"):
        model_of(tie_weights=True, **options).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
