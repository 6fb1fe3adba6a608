"""The texts of backends, caches, optimisers and plans."""

from __future__ import annotations

import numpy as np

import kernels
import minitorch
from minitorch import FastBackend, KVCache, Linear, SimpleBackend


def test_a_backend_shows_its_operations() -> None:
    assert repr(FastBackend) == "TensorBackend(FastOps)"


def test_a_cache_shows_how_full_it_is() -> None:
    text = repr(KVCache(2, 1, 4, 16, 8, FastBackend, "float32"))
    assert text == (
        "KVCache(layers=2, batch=1, heads=4, length=0, capacity=16, head_dim=8, dtype=float32, "
        "backend=FastOps)"
    )


def test_an_optimiser_shows_its_rates_and_how_many_parameters_it_has() -> None:
    parameters = Linear(2, 3, True, SimpleBackend).parameters()
    assert repr(minitorch.SGD(parameters, lr=0.5)) == "SGD(lr=0.5, parameters=2)"
    assert "beta1=0.9" in repr(minitorch.AdamW(parameters))


def test_layers_show_their_sizes() -> None:
    layer = minitorch.TransformerLayer(8, 2, backend=FastBackend)
    text = repr(layer)
    assert "in_size=8" in text and "weights=(8, 8)" in text and "p_dropout=0.1" in text


def test_a_plan_shows_itself_as_a_table() -> None:
    q = np.zeros((1, 1, 4, 8), np.float32)
    plan = kernels.plan(q, q, q)
    assert repr(plan) == str(plan) and "forward on cpu by flash2" in repr(plan)
