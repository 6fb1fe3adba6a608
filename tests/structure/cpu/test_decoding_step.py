"""The kernel of a layer's decoding step agrees with the layer's modules, or it is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from kernels.cpu.layers import decoding_step as kernel
from kernels.cpu.layers import linear
from kernels.problem.rungs import RUNG_VARIABLE
from minitorch import FastBackend, Linear, Tensor, TransformerLayer, from_numpy
from minitorch.accelerated.decoding_step import step
from minitorch.models.kv_cache import LayerCache

from ...support.tolerances import assert_close_arrays

HEADS, DIM = 2, 4
WIDTH = HEADS * DIM


def layer_of(dtype: Any = np.float64, **options: Any) -> TransformerLayer:
    minitorch.manual_seed(0)
    layer = TransformerLayer(
        WIDTH, HEADS, 0.0, middle_dim=12, backend=FastBackend, dtype=dtype, **options
    )
    layer.eval()
    return layer


def cache_of(batch: int = 1, dtype: Any = np.float64, capacity: int = 20) -> LayerCache:
    return LayerCache(batch, HEADS, capacity, DIM, FastBackend, dtype)


def some(batch: int, count: int, dtype: Any = np.float64) -> Tensor:
    return from_numpy(
        np.random.default_rng(count).standard_normal((batch, count, WIDTH)).astype(dtype)
    )


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25)
def test_steps_are_those_of_the_modules(
    batch: int, chunks: list[int], dtype: Any, bias: bool, shared: bool
) -> None:
    """In one kernel, or in some that all threads share."""
    layer, fused, composed = (
        layer_of(dtype, bias=bias),
        cache_of(batch, dtype),
        cache_of(batch, dtype),
    )
    for count in chunks:
        x = some(batch, count, dtype)
        with pytest.MonkeyPatch.context() as patch:
            if shared and batch * count <= kernel.FEW_ROWS:
                patch.setattr(kernel, "PARALLEL_FROM", 0)
                patch.setattr(kernel, "PARALLEL_ATTENTION_FROM", 40)
                patch.setattr(linear, "SHARED_FROM", 0)
            out = step(layer, x, fused)
            assert out is not None and out.is_constant()
            patch.setattr(kernel, "pays", lambda *_: False)
            wanted = layer(x, composed)
        assert_close_arrays(out.to_numpy(), wanted.to_numpy(), dtype, "a step")
        assert fused.length == composed.length
        for own, other in ((fused.keys, composed.keys), (fused.values, composed.values)):
            found, wanted = (x.to_numpy()[:, :, : fused.length] for x in (own, other))
            assert_close_arrays(found, wanted, dtype, "the cache")


def test_a_step_takes_the_weights_of_the_moment() -> None:
    layer, x = layer_of(), some(1, 1)
    before = layer(x, cache_of()).to_numpy().copy()
    cache = cache_of()
    layer(x, cache)
    cache.truncate(0)
    box = layer.ff.linear_out.bias
    assert box is not None
    box.update(box.value.detach() + 1.0)
    np.testing.assert_allclose(layer(x, cache).to_numpy(), before + 1.0)
    cache.truncate(0)
    layer.ff.linear_out = Linear(12, WIDTH, True, FastBackend)
    assert_close_arrays(
        layer(x, cache).to_numpy(), layer(x, cache_of()).to_numpy(), np.float64, "a new module"
    )


def changed(name: str, layer: TransformerLayer, patch: pytest.MonkeyPatch) -> None:
    """Make a layer one that the kernel does not compute."""
    if name == "training":
        layer.train()
    elif name == "another forward":
        patch.setattr(layer.attention, "forward", layer.attention.forward)
    elif name == "another module":
        layer.ff.linear_in = type("Own", (Linear,), {})(WIDTH, 12, True, FastBackend)
    elif name == "another attention":
        layer.attention.attend = minitorch.naive_attention
    elif name == "another epsilon":
        layer.ln_2.eps = 0.1
    else:
        patch.setenv(RUNG_VARIABLE, "naive")


@pytest.mark.parametrize(
    "name",
    [
        "training",
        "another forward",
        "another module",
        "another attention",
        "another epsilon",
        "a rung",
    ],
)
@pytest.mark.parametrize("is_known", [False, True], ids=["at first", "after a step"])
def test_what_the_kernel_does_not_compute_the_modules_do(
    name: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, cache, x = layer_of(), cache_of(), some(1, 1)
    if is_known:
        assert step(layer, x, cache) is not None
    changed(name, layer, monkeypatch)
    length = cache.length
    assert step(layer, x, cache) is None
    assert cache.length == length
