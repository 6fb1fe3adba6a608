"""``copy`` and ``pickle`` of tensors and modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import CudaBackend, FastBackend, SimpleBackend

on_every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(SimpleBackend, id="simple"),
        pytest.param(FastBackend, id="fast"),
        pytest.param(CudaBackend, id="cuda", marks=pytest.mark.simulator),
    ],
)
on_every_duplicate = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "pickle"],
)


@on_every_backend
@on_every_duplicate
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_copy_of_a_tensor_is_another_variable(backend: Any, duplicate: Any, dtype: str) -> None:
    x = minitorch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], backend, False, dtype).permute(1, 0)
    twin = duplicate(x)
    assert (twin.backend, twin.dtype, twin.is_constant()) == (backend, x.dtype, True)
    np.testing.assert_array_equal(twin.to_numpy(), x.to_numpy())
    x[0, 0] = 7.0
    assert twin[0, 0] == 1.0
    if dtype == "float32":
        x.requires_grad_(True)
        (x * x).sum().backward()
        first, second = duplicate([x, x])
        assert first is second and first.unique_id != x.unique_id
        np.testing.assert_array_equal(first.grad.to_numpy(), x.grad.to_numpy())  # type: ignore[union-attr]
        first.zero_grad_()
        (x * first * first).sum().backward()
        np.testing.assert_array_equal(first.grad.to_numpy(), 2.0 * (x * x).to_numpy())


@on_every_duplicate
def test_a_result_of_a_recorded_function_is_not_copied(duplicate: Any) -> None:
    x = minitorch.tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"only leaves and constants.*detach\(\)"):
        duplicate(x * x)


@on_every_duplicate
@pytest.mark.parametrize("attention", ["flash", "naive", "linear", "performer", "reformer"])
def test_a_copy_of_a_model_computes_the_same_with_its_own_parameters(
    duplicate: Any, attention: str
) -> None:
    layer = minitorch.MultiHeadAttention(8, 2, backend=FastBackend, attention=attention)
    optimizer = minitorch.Adam(layer.parameters())
    twin, its_optimizer = duplicate((layer, optimizer))
    x = minitorch.from_numpy(np.random.default_rng(0).standard_normal((1, 16, 8)))
    for model in (layer, twin):
        model.eval()
    results = []
    for model in (layer, twin, layer):
        minitorch.manual_seed(0)
        out = model(x)
        results.append(out.to_numpy())
        if model is twin:
            out.sum().backward()
            its_optimizer.step()
    assert all(np.array_equal(results[0], other) for other in results)
