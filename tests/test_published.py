"""What published courses, their tests and their scripts import and call is there."""

from __future__ import annotations

import importlib
from types import FunctionType, ModuleType

import numpy as np
import pytest

import minitorch
from minitorch import Tensor, from_numpy, naive_attention, operators, tensor

from .tensor_strategies import on_backends
from .tolerances import assert_close_arrays

NAMES = """
Module Parameter MathTest MathTestVariable Scalar ScalarHistory ScalarFunction derivative_check
Context central_difference topological_sort backpropagate Tensor TensorData TensorBackend
UserIndex UserShape IndexingError shape_broadcast prod tensor rand grad_check SimpleOps FastOps
CudaOps SimpleBackend sum_practice mm_practice Conv1dFun Conv2dFun conv1d conv2d avgpool2d
maxpool2d softmax logsoftmax dropout max argmax tile SGD zeros datasets index_to_position
to_index broadcast_index History Embedding Dropout Linear LayerNorm1d LayerNorm1dFused
MultiHeadAttention FeedForward TransformerLayer DecoderLM GELU logsumexp one_hot softmax_loss
Adam CudaKernelOps tensor_from_numpy ones zeros_tensor_from_numpy ones_tensor_from_numpy
Function Add Mul Neg Inv Log Exp Sigmoid ReLU LT EQ IsClose All Sum Permute View Copy MatMul
PowerScalar Tanh version
"""
OPERATORS = """
add addLists eq id inv inv_back log_back lt max mul neg negList prod relu relu_back sigmoid sum
exp is_close log map reduce zipWith
"""
MODULES = """
operators scalar scalar_functions tensor_data tensor_functions fast_ops cuda_ops nn testing
cuda_kernel_ops modules_basic transformer modules_transfomer autodiff module optim datasets
tensor tensor_ops fast_conv
"""


def test_names_resolve() -> None:
    assert [name for name in NAMES.split() if not hasattr(minitorch, name)] == []
    assert [name for name in OPERATORS.split() if not hasattr(operators, name)] == []
    assert all(importlib.import_module(f"minitorch.{name}") for name in MODULES.split())


def test_names_that_collide_mean_what_they_should() -> None:
    assert isinstance(minitorch.tensor, FunctionType)
    assert isinstance(minitorch.datasets, dict)
    assert minitorch.max.__module__ == "minitorch.nn"
    assert minitorch.Add.__module__ == "minitorch.tensor_functions"
    assert minitorch.scalar_functions.Add.__module__ == "minitorch.scalar_functions"
    assert isinstance(minitorch.to_index, FunctionType)  # no CUDA device function
    for submodule in (minitorch.operators, minitorch.fast_ops, minitorch.nn, minitorch.scalar):
        assert isinstance(submodule, ModuleType)
    for factory in ("zeros", "rand", "tensor", "grad_check"):
        assert getattr(minitorch.tensor_functions, factory) is getattr(minitorch, factory)


@on_backends()
def test_attention_has_its_three_published_names(backend: minitorch.TensorBackend) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (from_numpy(rng.standard_normal((1, 2, 5, 3)), backend) for _ in range(3))
    for causal in (False, True):
        expected = naive_attention(q, k, v, is_causal=causal).to_numpy()
        for name in ("flash_attn", "flash_attn2", "flash_attn_causal"):
            attend = getattr(q, name)
            assert_close_arrays(attend(k, v, causal), expected, np.float64, name)
            assert_close_arrays(attend(k, v, causal_mask=causal), expected, np.float64, name)


@on_backends()
def test_softmax_and_layer_norm_are_methods_too(backend: minitorch.TensorBackend) -> None:
    rng = np.random.default_rng(0)
    scores, mask = rng.standard_normal((2, 1, 3, 4)), np.zeros((2, 1, 1, 4))
    mask[0, ..., 2:] = -np.inf
    powers = np.exp(scores + mask)
    a = from_numpy(scores, backend)
    probs = a.attn_softmax(from_numpy(mask, backend))  # pyright: ignore[reportAttributeAccessIssue]
    assert_close_arrays(probs, powers / powers.sum(-1, keepdims=True), np.float64)
    rows, gamma, beta = (from_numpy(rng.standard_normal(s), backend) for s in ((3, 4), 4, 4))
    x = rows.to_numpy()
    normal = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    out = rows.layernorm(gamma, beta)  # pyright: ignore[reportAttributeAccessIssue]
    assert_close_arrays(out, normal * gamma.to_numpy() + beta.to_numpy(), np.float64, size=1e4)


def test_options_may_travel_as_tensors() -> None:
    a = tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    total = minitorch.Sum.apply(a, tensor(0))
    turned = minitorch.Permute.apply(a, tensor([1, 0]))
    flat = minitorch.View.apply(a, tensor([4]))
    assert (total.shape, turned[0, 1], flat.shape) == ((1, 2), 3.0, (4,))
    (total.sum() + turned.contiguous().sum() + flat.sum()).backward()
    assert_close_arrays(a.grad, np.full((2, 2), 3.0), np.float64)


def test_grad_check_takes_the_step() -> None:
    seen: list[float] = []

    def f(x: Tensor) -> Tensor:
        seen.append(x.item())
        return x * x

    minitorch.grad_check(f, tensor([3.0]), epsilon=0.5, tol=1e-9)
    assert seen == [3.0, 3.5, 2.5]


@pytest.mark.parametrize("size", [2, 3])
def test_a_power_may_be_a_tensor(size: int) -> None:
    a = tensor([2.0] * size, requires_grad=True)
    out = minitorch.PowerScalar.apply(a, tensor([3.0]))
    assert out.to_numpy().tolist() == [8.0] * size
    out.sum().backward()
    assert_close_arrays(a.grad, np.full(size, 12.0), np.float64)
