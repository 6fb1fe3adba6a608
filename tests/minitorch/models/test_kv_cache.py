"""A cache of keys and values: writing with it is recomputing everything, and costs a step a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from minitorch import (
    CudaBackend,
    DecoderLM,
    FastBackend,
    SimpleBackend,
    from_numpy,
)
from minitorch.models.kv_cache import LayerCache

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import on_every_backend

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}
CHUNKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


#: Llama's structure: keys in the cache are turned by their positions, and serve groups of heads.
LLAMA = {
    "rotary_theta": 100.0, "norm": "rms", "feed_forward": "swiglu", "head_dim": 6, "n_kv_head": 1,
    "bias": False,
}  # fmt: skip
#: Queries that see the last keys of the cache only, and a sink for each head.
LONG = {"window": 3, "sinks": True, "rotary_theta": 100.0}
STRUCTURES = [
    pytest.param({}, id="gpt2"),
    pytest.param(LLAMA, id="llama"),
    pytest.param(LONG, id="window and sinks"),
]


def model_of(backend: Any = FastBackend, **options: Any) -> DecoderLM:
    minitorch.manual_seed(1)
    settings = {"n_layer": 2, "middle_dim": 16, "dtype": np.float64, **options}
    model = DecoderLM(11, 12, 3, 9, 0.0, backend=backend, **settings)
    for name, p in model.named_parameters():
        if name.endswith(".sink"):  # they begin as zeros
            p.update(minitorch.tensor([2.0, -1.0, 0.5], backend, dtype=p.value.dtype))
    return model


# -- the cache itself --------------------------------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_appended_is_all_there(backend: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    cache = LayerCache(2, 3, 9, 4, backend, dtype)
    parts = [rng.standard_normal((2, 2, 3, n, 4)).astype(dtype) for n in (1, 4, 0, 2)]
    for number, part in enumerate(parts):
        # Keys come as they leave the heads of a layer: permuted.
        turned = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in part]
        filled = cache.append(*(from_numpy(x, backend) for x in turned))
        for got, *sofar in zip(filled, *parts[: number + 1], strict=True):
            assert got.history is None and got.dtype == dtype
            np.testing.assert_array_equal(got.to_numpy(), np.concatenate(sofar, axis=2))
    assert cache.length == 7


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_nothing_is_copied_but_what_is_new(backend: Any) -> None:
    cache = LayerCache(2, 3, 5, 4, backend, np.float64)
    x = minitorch.rand((2, 3, 2, 4), backend)
    first, _ = cache.append(x, x)
    before = first.to_numpy()
    before[:] = -1.0  # written through: the tensor is a view, and the next append leaves it alone
    second, _ = cache.append(x, x)
    assert np.shares_memory(second.to_numpy(), before)
    assert (second.to_numpy()[:, :, :2] == -1.0).all()
    np.testing.assert_array_equal(second.to_numpy()[:, :, 2:], x.to_numpy())


# -- in a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@given(chunks=CHUNKS)
@settings(max_examples=5)
def test_logits_of_chunks_are_those_of_the_whole(
    backend: Any, attention: str, structure: Any, chunks: list[int]
) -> None:
    model = model_of(backend, attention=attention, n_layer=1, **structure)
    ids = np.random.default_rng(3).integers(0, 11, (2, sum(chunks)))[:, :9]
    cache = model.make_cache(batch=2)
    expected = model(ids).to_numpy()
    pieces = np.split(ids, np.cumsum(chunks)[:-1], axis=1)
    parts = [model(piece, cache) for piece in pieces if piece.size]
    assert all(part.history is None for part in parts)
    got = np.concatenate([part.to_numpy() for part in parts], axis=1)
    assert_close_arrays(got, expected, np.float64, size=10.0)
    assert cache.length == ids.shape[1]


def recomputed(model: DecoderLM, ids: list[int], count: int, temperature: float, seed: int) -> Any:
    """Write as the model did before it had a cache."""
    rng = np.random.default_rng(seed)
    model.eval()
    for _ in range(count):
        logits = model(np.array([ids[-9:]])).to_numpy()[0, -1]
        scaled = (logits - logits.max()) / (temperature or 1.0)
        probs = np.exp(scaled) / np.exp(scaled).sum()
        ids = [*ids, int(rng.choice(11, p=probs) if temperature else logits.argmax())]
    return ids


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_text_is_that_of_recomputing(
    backend: Any, attention: str, temperature: float, structure: Any
) -> None:
    model = model_of(backend, attention=attention, n_layer=1, **structure)
    for length, count in [(4, 3), (1, 14), (11, 2)]:  # within the context, beyond it
        prompt = np.random.default_rng(length).integers(0, 11, length).tolist()
        expected = recomputed(model, prompt, count, temperature, seed=4)
        assert model.generate(prompt, count, temperature, seed=4) == expected


@pytest.mark.emulated
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_text_on_a_device_is_that_of_the_host(structure: Any) -> None:
    host, device = (
        DecoderLM(5, 4, 2, 4, 0.0, backend=backend, n_layer=1, middle_dim=4, **structure)
        for backend in (FastBackend, CudaBackend)
    )
    for p, own in zip(host.parameters(), device.parameters(), strict=True):
        own.update(p.value.detach().cuda())
    assert device.generate([1, 2], 2, 0.0) == host.generate([1, 2], 2, 0.0)


def test_a_token_costs_one_position_until_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = model_of(), []
    layer = model.t_layer_1.attention
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: (seen.append(x.shape[1]), forward(x))[1])
    model.generate([1, 2, 3], 8, seed=1)
    assert seen == [3, 1, 1, 1, 1, 1, 1, 9]


def test_a_cache_can_be_rewound() -> None:
    model = model_of()
    cache = model.make_cache()
    first = model(np.array([[1, 2, 3]]), cache).to_numpy()
    model(np.array([[4, 5]]), cache)
    cache.truncate(1)
    again = model(np.array([[2, 3]]), cache).to_numpy()
    assert_close_arrays(again, first[:, 1:], np.float64)
    cache.truncate(0)
    np.testing.assert_array_equal(model(np.array([[1, 2, 3]]), cache).to_numpy(), first)


@on_every_backend
@pytest.mark.parametrize("length", [0, 3])
def test_a_repeated_cache_continues_each_text_several_times(backend: Any, length: int) -> None:
    sizes: Any = {"n_layer": 1, "middle_dim": 4, "dtype": np.float64}
    model = DecoderLM(5, 4, 2, 4, 0.0, backend=backend, **sizes)
    texts, ends = np.array([[1, 2, 3], [4, 0, 1]])[:, :length], np.array([[0], [2], [4], [3]])
    cache = model.make_cache(batch=2)
    if length:
        model(texts, cache)
    copy = cache.repeated(2)
    got = model(ends, copy).to_numpy()[:, -1]
    whole = np.concatenate([np.repeat(texts, 2, axis=0), ends], axis=1)
    assert_close_arrays(got, model(whole).to_numpy()[:, -1], np.float64, size=10.0)
    assert (cache.length, copy.length, copy.capacity) == (length, length + 1, cache.capacity)


def test_a_step_that_fails_halfway_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    cache = model.make_cache()
    model(np.array([[1, 2]]), cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.t_layer_2, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(np.array([[3]]), cache)
    assert cache.length == 2
    got = model(np.array([[3]]), cache).to_numpy()
    assert_close_arrays(got, model(np.array([[1, 2, 3]])).to_numpy()[:, 2:], np.float64)
