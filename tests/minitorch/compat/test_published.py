"""What published courses, their tests and their scripts import and call is there."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import (
    FastBackend,
    SimpleBackend,
    Tensor,
    TensorBackend,
    from_numpy,
    naive_attention,
    operators,
    tensor,
)

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import on_every_backend

ROOT = Path(__file__).parents[3]
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
PowerScalar Tanh version Attn_Softmax LayerNorm Flash_Attn Flash_Attn_Causal Flash_Attn2
"""
OPERATORS = """
add addLists eq id inv inv_back log_back lt max mul neg negList prod relu relu_back sigmoid sum
exp is_close log map reduce zipWith
"""
MODULES = """
operators scalar scalar_functions tensor_data tensor_functions fast_ops cuda_ops nn testing
cuda_kernel_ops modules_basic transformer modules_transfomer autodiff module optim datasets
tensor tensor_ops fast_conv cuda_conv scalar_modules modules compat
"""
TENSOR_FUNCTIONS = """
zeros ones rand tensor _tensor tensor_from_numpy zeros_tensor_from_numpy ones_tensor_from_numpy
grad_check grad_central_difference PowerScalar Tanh
Attn_Softmax LayerNorm Flash_Attn Flash_Attn_Causal Flash_Attn2
"""
OF_A_BACKEND = """
tanh_map pow_scalar_zip attn_softmax_fw attn_softmax_bw layernorm_fw layernorm_bw flash_attn_fw
flash_attn_bw flash_attn2_fw flash_attn2_bw flash_attn_causal_fw flash_attn_causal_bw
"""


def test_names_resolve() -> None:
    assert [name for name in NAMES.split() if not hasattr(minitorch, name)] == []
    assert [name for name in OPERATORS.split() if not hasattr(operators, name)] == []
    assert all(importlib.import_module(f"minitorch.{name}") for name in MODULES.split())
    homes = (minitorch.tensor_functions, TENSOR_FUNCTIONS), (FastBackend, OF_A_BACKEND)
    for home, names in homes:
        assert [name for name in names.split() if not hasattr(home, name)] == []


def test_names_that_collide_mean_what_they_should() -> None:
    assert isinstance(minitorch.tensor, FunctionType)
    assert isinstance(minitorch.datasets, dict)
    assert minitorch.max.__module__ == "minitorch.nn"
    assert minitorch.Add.__module__ == "minitorch.tensor_functions"
    assert minitorch.scalar_functions.Add.__module__ == "minitorch.scalar_functions"
    assert isinstance(minitorch.to_index, FunctionType)  # no CUDA device function
    module = importlib.import_module("minitorch.cuda_conv")
    assert (module.conv1d, module.conv2d) == (minitorch.conv1d, minitorch.conv2d)
    for submodule in (minitorch.operators, minitorch.fast_ops, minitorch.nn, minitorch.scalar):
        assert isinstance(submodule, ModuleType)
    for name in TENSOR_FUNCTIONS.split():
        if not name.startswith("_") and name != "grad_central_difference":
            assert getattr(minitorch.tensor_functions, name) is getattr(minitorch, name)
    flat: Any = minitorch.tensor_functions
    assert flat._tensor([1.0, 2.0], (2, 1)).to_numpy().tolist() == [[1.0], [2.0]]


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


# -- fused kernels of the transformer course ------------------------------------------------------


def normal(backend: TensorBackend, *shape: int) -> Tensor:
    return from_numpy(np.random.standard_normal(shape), backend, requires_grad=True)


def gradients(out: Tensor, out_grad: Tensor, *inputs: Tensor) -> list[Any]:
    """Return the gradients that ``backward`` finds, and forget them."""
    out.backward(out_grad)
    found = [t.grad.to_numpy() for t in inputs if t.grad is not None]
    for t in inputs:
        t.zero_grad_()
    return found


def assert_all_close(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_close_arrays(a, b, np.float64, size=100.0)


@on_every_backend
def test_fused_softmax_has_its_function_and_operations(backend: TensorBackend) -> None:
    minitorch.manual_seed(0)
    f: Any = backend
    scores, grad = normal(backend, 1, 2, 3, 4), normal(backend, 1, 2, 3, 4).detach()
    mask = from_numpy(np.array([0.0, -1.0, -np.inf, 0.5]).reshape(1, 1, 1, 4), backend)
    method: Any = scores.attn_softmax  # pyright: ignore[reportAttributeAccessIssue]
    (expected,) = gradients(method(mask), grad, scores)
    soft = f.attn_softmax_fw(scores, mask)
    assert soft.is_constant()
    assert_close_arrays(soft, method(mask).to_numpy(), np.float64)
    assert_close_arrays(f.attn_softmax_bw(grad, soft), expected, np.float64)
    mask.requires_grad_(True)
    out = minitorch.Attn_Softmax.apply(scores, mask)
    assert_all_close(gradients(out, grad, scores, mask), (expected, np.zeros(mask.shape)))


@on_every_backend
def test_fused_layer_norm_has_its_function_and_operations(backend: TensorBackend) -> None:
    minitorch.manual_seed(0)
    f: Any = backend
    inputs = normal(backend, 3, 4), normal(backend, 4), normal(backend, 4)
    rows, grad = inputs[0].to_numpy(), normal(backend, 3, 4).detach()
    method: Any = inputs[0].layernorm  # pyright: ignore[reportAttributeAccessIssue]
    expected = gradients(method(*inputs[1:]), grad, *inputs)
    out, var, mean = f.layernorm_fw(*inputs)
    assert_all_close((out, var, mean), (method(*inputs[1:]), rows.var(1), rows.mean(1)))
    assert_all_close(f.layernorm_bw(grad, *inputs, var, mean), expected)
    out = minitorch.LayerNorm.apply(*inputs)
    assert_all_close(gradients(out, grad, *inputs), expected)


@on_every_backend
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_causal", "flash_attn2"])
def test_fused_attention_has_its_function_and_operations(
    name: str, causal: bool, backend: TensorBackend
) -> None:
    minitorch.manual_seed(0)
    f: Any = backend
    q, k, v = inputs = [normal(backend, 1, 2, 5, 3) for _ in range(3)]
    grad = normal(backend, 1, 2, 5, 3).detach()
    expected = gradients(naive_attention(q, k, v, is_causal=causal), grad, *inputs)
    method: Any = getattr(q, name)
    scores = q.to_numpy() @ k.to_numpy().swapaxes(-1, -2) / math.sqrt(3)
    scores = np.where(np.tri(5) if causal else True, scores, -np.inf)
    maximum = scores.max(-1)
    sums = np.exp(scores - maximum[..., None]).sum(-1)

    out, l_, m = getattr(f, f"{name}_fw")(q, k, v, causal)
    assert out.is_constant()
    rows = maximum + np.log(sums) if name == "flash_attn2" else sums
    exact = np.exp(scores - maximum[..., None]) / sums[..., None] @ v.to_numpy()
    assert_all_close((out, l_, m, method(k, v, causal)), (exact, rows, maximum, exact))
    *found, flag = getattr(f, f"{name}_bw")(q, k, v, out, grad, l_, m, causal)
    assert flag is causal
    assert_all_close(found, expected)

    function = getattr(minitorch, {"flash_attn2": "Flash_Attn2"}.get(name, name.title()))
    flags = causal, from_numpy(np.array(float(causal)), backend, requires_grad=True)
    for flag in flags:
        out = function.apply(q, k, v, flag)
        assert_close_arrays(out, exact, np.float64)
        assert_all_close(gradients(out, grad, *inputs), expected)


# -- leaves by default -------------------------------------------------------------------------------


def test_published_tensors_collect_gradients_without_being_asked() -> None:
    flat: Any = minitorch.tensor_functions
    for make in (
        lambda **options: tensor([1.0, 2.0], **options),
        lambda **options: minitorch.rand((2,), **options),
        lambda **options: flat._tensor([1.0], (1,), **options),
    ):
        with minitorch.compat.published():
            leaf = make()
            assert make(requires_grad=False).is_constant()
            with minitorch.compat.published(False):
                assert make().is_constant()
            assert make().is_leaf()
        assert make().is_constant() and make(requires_grad=True).is_leaf()
        (leaf * 3.0).sum().backward()
        assert leaf.grad is not None and set(leaf.grad.to_numpy().tolist()) == {3.0}


@pytest.mark.parametrize("backend", [SimpleBackend, FastBackend], ids=["simple", "fast"])
def test_the_library_makes_its_own_constants(backend: TensorBackend) -> None:
    """What a layer makes of constants is one, so it made no leaf within."""
    q = from_numpy(np.random.standard_normal((1, 2, 4, 3)), backend)
    slopes, seen = np.array([0.5, 0.25]), np.tri(4, dtype=bool)
    drops = {"dropout_p": 0.5, "seed": 1}
    with minitorch.compat.published():
        results = (
            minitorch.one_hot(from_numpy(np.array([0, 2]), backend), 3),
            minitorch.dropout(q, 0.5),
            minitorch.Dropout(0.5)(q),
            naive_attention(q, q, q, is_causal=True, alibi_slopes=slopes, **drops),
            naive_attention(q, q, q, attn_mask=seen),
            tensor([1, 2], dtype=np.int64),
            minitorch.zeros((2,)),
            minitorch.ones((2,)),
            minitorch.tensor_from_numpy(np.ones(2)),
            from_numpy(np.ones(2)),
        )
    assert [result.is_constant() for result in results] == [True] * len(results)  # type: ignore[union-attr]


def test_the_environment_switches_the_published_default_on() -> None:
    for value, answer in (("1", "True"), ("0", "False")):
        done = subprocess.run(
            [sys.executable, "-c", "import minitorch; print(minitorch.rand((2,)).requires_grad())"],
            env={**os.environ, "MINITORCH_PUBLISHED": value},
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == answer


def test_backward_of_a_constant_names_both_ways_out() -> None:
    message = r"pass requires_grad=True, or call minitorch\.compat\.published\(\)"
    with pytest.raises(RuntimeError, match=message) as raised:
        (tensor([1.0, 2.0]) * 2.0).sum().backward()
    guide = ROOT / "docs" / "guides" / "teaching.md"
    assert str(raised.value) in " ".join(guide.read_text(encoding="utf-8").split())
