"""Writing into tensors between the forward and the backward pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import Context, CudaBackend, FastBackend, Function, Tensor

from ...tensor_strategies import on_every_backend


class Nested(Function):
    """a * a, which saves an array in a list."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward([a.array()])
        return a * a

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        ((array,),) = ctx.saved_values
        return grad_output.wrap(array) * grad_output * 2.0


def attended(x: Tensor) -> Tensor:
    heads = x.view(1, 1, 4, 4)
    return heads.flash_attention(heads, heads)


#: A function of a (4, 4) tensor, and the one in its graph that has saved the tensor.
SAVING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a product": (lambda x: x * x, "Mul"),
    "a view": (lambda x: x.view(16) * x.view(16), "Mul"),
    "a permuted view": (lambda x: x.permute(1, 0) * 1.0 * x.permute(1, 0), "Mul"),
    "a part": (lambda x: x[2:4] * x[2:4], "Mul"),
    "a matrix product": (lambda x: x @ x, "MatMul"),
    "relu": (lambda x: x.relu(), "ReLU"),
    "a layer": (lambda x: minitorch.GELU(x), "Gelu|Mul"),
    "attention": (attended, "FlashAttention"),
    "a condition": (lambda x: (x + 0.0).where(x.detach(), x + 1.0), "Where"),
    "an array in a list": (Nested.apply, "Nested"),
    "a recomputed function": (lambda x: minitorch.checkpoint(lambda y: y * y, x), "checkpoint"),
}


def leaf(backend: Any) -> Tensor:
    numbers = np.linspace(0.5, 2.0, 16).reshape(4, 4)
    return minitorch.tensor(numbers, backend, requires_grad=True)


@on_every_backend
@pytest.mark.parametrize("name", SAVING)
def test_a_saved_tensor_that_is_written_to_is_an_error_in_backward(backend: Any, name: str) -> None:
    function, saver = SAVING[name]
    x = leaf(backend)
    before = function(x).sum()
    x[3, 2] = 7.0
    after = function(x).sum()
    with pytest.raises(RuntimeError, match=rf"the gradient of ({saver}).* in place.*copy"):
        before.backward()
    after.backward()
    fresh = minitorch.tensor(x, backend, requires_grad=True)
    function(fresh).sum().backward()
    assert x.grad is not None and fresh.grad is not None
    np.testing.assert_array_equal(x.grad.to_numpy(), fresh.grad.to_numpy())


@on_every_backend
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.detach().permute(1, 0).__setitem__((0, 0), 7.0),
        lambda x: x.detach()[2:4].__setitem__((0, 0), 7.0),
        lambda x: x._tensor.set((0, 0), 7.0),
        lambda x: x.f.neg_map(x.detach(), x),
    ],
    ids=["a permuted view", "a part", "the data", "a map"],
)
def test_views_share_what_is_written(backend: Any, write: Callable[[Tensor], Any]) -> None:
    x = leaf(backend)
    y = (x * x).sum()
    write(x)
    with pytest.raises(RuntimeError, match="gradient of Mul"):
        y.backward()


@on_every_backend
def test_a_result_that_its_function_saved_must_not_be_written_to(backend: Any) -> None:
    x = leaf(backend)
    y = x.exp()
    loss = y.sum()
    y[0, 0] = 1.0
    with pytest.raises(RuntimeError, match="gradient of Exp"):
        loss.backward()


@on_every_backend
def test_a_tensor_that_no_function_saved_may_be_written_to(backend: Any) -> None:
    x, other = leaf(backend), leaf(backend)
    y = (x + other * 2.0).sum() + (minitorch.ones((4, 4), backend) @ x).sum()
    x[0, 0] = other[0, 0] = 7.0
    y.backward()
    assert x.grad is not None and (x.grad.to_numpy() == 5.0).all()


@pytest.mark.emulated
def test_a_step_in_place_is_a_write() -> None:
    box = minitorch.Parameter(leaf(CudaBackend))
    optimizer = minitorch.AdamW([box])
    loss, old = (box.value * box.value).sum(), (box.value * box.value).sum()
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of Mul.*optimiser"):
        old.backward()
    (box.value * box.value).sum().backward()


def test_memory_that_is_used_again_is_not_taken_for_what_was_written() -> None:
    for _ in range(20):
        scratch = minitorch.zeros((64,), FastBackend)
        scratch[0] = 1.0
        del scratch
        x = minitorch.ones((64,), FastBackend, requires_grad=True)
        y = (x * x).sum()
        minitorch.zeros((64,), FastBackend)[0] = 1.0
        y.backward()


def test_a_backward_pass_compares_one_number_if_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minitorch.functions.base.check_unwritten", None)
    x = leaf(minitorch.TensorBackend(minitorch.FastOps))
    (x * x).sum().backward()


# -- copies ------------------------------------------------------------------------------------


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
