"""Attention sinks: one more logit for each head, in the softmax's denominator alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
import minitorch
from minitorch import FastBackend

from ..support.tolerances import assert_close_arrays

RUNGS = ("auto", "naive")


def with_a_column(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any, sink: Any, seen: Any
) -> dict[str, Any]:
    """Return the results in float64 by a softmax over the scores and one more column, the sinks."""
    q, k, v, dout, dlse, sink = (x.astype(np.float64) for x in (q, k, v, dout, dlse, sink))
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.where(seen, (q @ keys.swapaxes(-1, -2)) * scale, -np.inf)
    column = np.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    logits = np.concatenate([scores, column], axis=-1)
    top = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - top).sum(axis=-1, keepdims=True)
    whole = np.exp(logits - top) / total
    probs = whole[..., :-1]
    out = probs @ values
    d_logits = whole * (
        np.concatenate([dout @ values.swapaxes(-1, -2), np.zeros_like(column)], axis=-1)
        - (dout * out).sum(axis=-1, keepdims=True)
        + dlse[..., None]
    )
    ds, dsink = d_logits[..., :-1], d_logits[..., -1].sum(axis=(0, 2))

    def grouped(gradient: Any) -> Any:
        return gradient.reshape(*k.shape[:2], groups, *gradient.shape[2:]).sum(axis=2)

    return {
        "out": out, "lse": (top + np.log(total))[..., 0], "dq": ds @ keys * scale,
        "dk": grouped(ds.swapaxes(-1, -2) @ q * scale),
        "dv": grouped(probs.swapaxes(-1, -2) @ dout), "dsink": dsink,
    }  # fmt: skip


def draw(data: Any, dtype: Any, seq_q: int, seq_k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw operands, and the options of a call with a boolean mask."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch, heads, groups = (data.draw(st.integers(1, 2)) for _ in range(3))
    dim = data.draw(st.integers(1, 9))
    shapes = {
        "q": (batch, heads * groups, seq_q, dim), "k": (batch, heads, seq_k, dim),
        "v": (batch, heads, seq_k, dim + 1), "dout": (batch, heads * groups, seq_q, dim + 1),
        "dlse": (batch, heads * groups, seq_q), "sink": (heads * groups,),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    arrays["sink"] *= data.draw(st.sampled_from([1, 30]))
    seen = rng.random((seq_q, seq_k)) < data.draw(st.sampled_from([0.1, 0.7]))
    return arrays, {"attn_mask": seen, "enable_gqa": groups > 1, "sink": arrays["sink"]}


@pytest.mark.parametrize("rung", RUNGS)
@given(data=st.data(), dtype=st.sampled_from([np.float32, np.float64]))
def test_a_sink_is_one_more_column_whose_value_is_zero(rung: str, data: Any, dtype: Any) -> None:
    # The last kind is decoding whose keys are divided into parts.
    seq_q, seq_k = data.draw(st.sampled_from([(1, 1), (7, 5), (33, 70), (2, 1100)]))
    arrays, options = draw(data, dtype, seq_q, seq_k)
    q, k, v, dout, dlse, _ = arrays.values()
    out, lse = kernels.flash_attention_forward(q, k, v, **options, rung=rung)
    gradients = kernels.flash_attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, sink_gradient=True, **options, rung=rung
    )
    found = dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=True), out=out, lse=lse)
    for name, expected in with_a_column(**arrays, seen=options["attn_mask"]).items():
        size = max(1.0, float(np.abs(expected).max()))
        assert_close_arrays(found[name], expected, dtype, f"{name} of {arrays['q'].shape}", size)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_row_without_keys_has_the_sink_for_its_lse(rung: str) -> None:
    q, sink = np.ones((2, 3, 4), np.float32), np.array([-200.0, 5.0], np.float32)
    options: dict[str, Any] = {"attn_mask": np.zeros((3, 3), bool), "sink": sink, "rung": rung}
    out, lse = kernels.flash_attention_forward(q, q, q, **options)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.repeat(sink[:, None], 3, axis=1))
    *gradients, dsink = kernels.flash_attention_backward(
        q, q, q, q, out, lse, dlse=np.ones((2, 3), np.float32), sink_gradient=True, **options
    )
    assert not any(gradient.any() for gradient in gradients)
    np.testing.assert_array_equal(dsink, [3.0, 3.0])


@pytest.mark.parametrize("rung", RUNGS)
def test_minus_infinity_is_no_sink(rung: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 5, 4)).astype(np.float32) for _ in range(3))
    plain = kernels.flash_attention_forward(q, k, v, rung=rung)
    none = np.full(2, -np.inf, np.float32)
    for got, expected in zip(
        kernels.flash_attention_forward(q, k, v, sink=none, rung=rung), plain, strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_a_sink_on_another_backend_is_refused() -> None:
    q = minitorch.ones((2, 3, 4), FastBackend)
    sink = minitorch.ones((2,), minitorch.SimpleBackend)
    with pytest.raises(TypeError, match=r"sink .* must be a tensor on the backend of q, Fast"):
        q.flash_attention(q, q, sink=sink)
