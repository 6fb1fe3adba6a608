"""Linear layers with bias and GELU in one kernel: in blocks or row by row, they are the composed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, booleans, data, integers

import minitorch
from kernels.cpu.layers import linear as kernel
from kernels.cpu.matmul import blas
from kernels.runtime.dtypes import BFLOAT16, FLOAT32, FLOAT64, FLOAT_DTYPES, acc_dtype, rounded
from kernels.runtime.targets import EMULATED
from minitorch import (
    CudaBackend,
    FastBackend,
    SimpleBackend,
    Tensor,
    TensorBackend,
    from_numpy,
    linear,
    no_grad,
)
from minitorch.layers.linear_cross_entropy import linear_cross_entropy

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out

SIZES = st.integers(1, 9)


@given(st.data(), SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradients_are_those_of_the_composed_form(
    dtype: type, data: st.DataObject, rows: int, in_size: int, out_size: int, bias: bool,
    has_gelu: bool, in_blocks: bool,
) -> None:  # fmt: skip
    """Of rows in two dimensions, in any layout; a few at once on one thread or all, or blocks of two."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = [(2, rows, in_size), (in_size, out_size), (out_size,)][: 2 + bias]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    dout = from_numpy(rng.standard_normal((2, rows, out_size)).astype(dtype))

    def computed(function: object) -> list[Tensor]:
        leaves = [from_numpy(array.copy(), requires_grad=True) for array in arrays]
        x, weights, *shift = leaves
        order = (1, 0, 2)
        seen = x.permute(*order).contiguous().permute(*order)  # the same numbers in another layout
        flat = seen if function is linear else seen.contiguous().view(2 * rows, in_size)
        out = function(flat, weights, shift[0] if shift else None, has_gelu)  # type: ignore[operator]
        out = out.view(2, rows, out_size)
        out.backward(dout)
        return [out, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    with pytest.MonkeyPatch.context() as patch:
        if in_blocks:
            patch.setattr(blas, "PARALLEL_FROM", 1)
            patch.setattr(blas, "BLOCK_ROWS", 2)
            patch.setattr(kernel, "FEW_ROWS", 0)
        elif data.draw(st.booleans()):
            patch.setattr(kernel, "SHARED_FROM", 0)
        found = computed(linear)
    for name, one, wanted in zip(
        ("out", "dx", "dweights", "dbias"),
        found,
        computed(minitorch.plain()(minitorch.linear)),
        strict=False,
    ):
        assert_close_arrays(one.to_numpy(), wanted.to_numpy(), dtype, name)


@pytest.mark.parametrize("rows", [3, 20], ids=["short queries in parts", "tiles"])
def test_attention_lies_in_memory_as_its_operands(rows: int) -> None:
    """So that heads that were split by a view and a permutation are joined by a view again."""
    rng = np.random.default_rng(0)
    q, k = (
        from_numpy(rng.standard_normal((2, n, 2, 4)), FastBackend, requires_grad=True)
        for n in (rows, 1100)
    )
    split = [t.permute(0, 2, 1, 3) for t in (q, k)]
    out = split[0].flash_attention(split[1], split[1])
    assert isinstance(out, Tensor) and out.permute(0, 2, 1, 3)._tensor.is_contiguous()
    whole = [t.contiguous() for t in split]
    wanted = whole[0].flash_attention(whole[1], whole[1])
    assert isinstance(wanted, Tensor)
    assert_close_arrays(out.to_numpy(), wanted.to_numpy(), np.float64, "out")
    found = []
    for result in (out, wanted):
        q.zero_grad_()
        k.zero_grad_()
        (result * result).sum().backward()
        assert q.grad is not None and k.grad is not None
        found.append((q.grad.to_numpy(), k.grad.to_numpy()))
    for name, one, other in zip(("dq", "dk"), *found, strict=True):
        assert_close_arrays(one, other, np.float64, name)


# -- with the cross entropy --------------------------------------------------------------------


in_every_storage = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
on_backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(SimpleBackend, id="simple"),
        pytest.param(FastBackend, id="fast"),
        pytest.param(CudaBackend, id="cuda", marks=pytest.mark.emulated),
    ],
)


def textbook(x: Array, weights: Array, bias: Array, targets: Array) -> tuple[Any, ...]:
    """Return the loss and the gradients of x, weights and bias in float64."""
    logits = x @ weights + bias
    shifted = logits - logits.max(-1, keepdims=True)
    lse = np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = np.arange(len(x))
    loss = (lse[:, 0] - shifted[rows, targets]).mean()
    dlogits = np.exp(shifted - lse)
    dlogits[rows, targets] -= 1.0
    dlogits /= len(x)
    return loss, dlogits @ weights.T, x.T @ dlogits, dlogits.sum(0)


def drawn(data: DataObject, dtype: np.dtype[Any]) -> tuple[list[Array], Array]:
    """Draw x, weights and bias, and targets."""
    n, width, classes = (data.draw(integers(1, most)) for most in (7, 4, 9))
    rng = np.random.default_rng(data.draw(integers(0, 2**32 - 1)))
    shapes = (n, width), (width, classes), (classes,)
    arrays = [rounded(rng.standard_normal(shape), dtype) for shape in shapes]
    return arrays, rng.integers(0, classes, n)


@on_backends
@in_every_storage
@settings(max_examples=4 if EMULATED else 15)
@given(data=data(), has_bias=booleans())
def test_the_loss_and_its_gradients_are_the_textbooks(
    backend: TensorBackend, dtype: np.dtype[Any], data: DataObject, has_bias: bool
) -> None:
    arrays, targets = drawn(data, dtype)
    arrays[2] *= has_bias
    operands: list[Any] = [data.draw(laid_out(array, backend)) for array in arrays]
    x, weights, bias = operands
    for t in operands:
        t.requires_grad_(True)
    rows = data.draw(integers(1, len(targets)))
    loss = linear_cross_entropy(x, weights, targets, bias if has_bias else None, rows)
    (loss * 3.0).sum().backward()
    wide_x, wide_weights, wide_bias = (array.astype(np.float64) for array in arrays)
    expected, *gradients = textbook(wide_x, wide_weights, wide_bias, targets)
    # Logits of 16 bits are rounded before their exponentials are taken.
    assert_close_arrays(
        np.asarray(loss.to_numpy()).astype(dtype), np.array([expected]), dtype, "loss", 5.0
    )
    assert loss.dtype == acc_dtype(dtype)
    found = zip(("x", "weights", "bias"), operands[: 2 + has_bias], gradients, strict=False)
    for name, t, gradient in found:
        assert_close_arrays(t.grad, 3.0 * gradient, dtype, f"gradient of {name}", 5.0)


def test_without_a_gradient_nothing_is_multiplied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, weights = (from_numpy(rng.standard_normal(s), FastBackend, True) for s in ((5, 2), (2, 4)))
    products = []
    multiply = FastBackend.matrix_multiply
    monkeypatch.setattr(
        FastBackend, "matrix_multiply", lambda a, b: products.append(a.shape) or multiply(a, b)
    )
    with no_grad():
        linear_cross_entropy(x, weights, np.zeros(5, int), rows=2)
    assert products == [(2, 2), (2, 2), (1, 2)]


def test_a_tied_table_is_read_as_it_lies() -> None:
    rng = np.random.default_rng(0)
    rows, table = rng.standard_normal((5, 3)), rng.standard_normal((7, 3))
    targets = np.array([0, 6, 2, 2, 5])
    t = from_numpy(table, FastBackend, True)
    loss = linear_cross_entropy(from_numpy(rows), t.permute(1, 0), targets, rows=2)
    loss.backward()
    expected, _, dweights, _ = textbook(rows, table.T, np.zeros(7), targets)
    assert loss.item() == pytest.approx(expected)
    assert_close_arrays(t.grad, dweights.T, FLOAT64, "gradient of the table", 5.0)


# -- what only a GPU runs ----------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("classes", [50_304, 50_257], ids=str)
def test_a_vocabulary(dtype: np.dtype[Any], classes: int) -> None:
    rng = np.random.default_rng(0)
    x = rounded(rng.standard_normal((300, 64)), dtype)
    weights = rounded(rng.standard_normal((64, classes)) * 0.1, dtype)
    targets = rng.integers(0, classes, 300)
    operands = [from_numpy(array, CudaBackend, True) for array in (x, weights)]
    loss = linear_cross_entropy(operands[0], operands[1], targets, rows=128)
    loss.backward()
    expected, dx, dweights, _ = textbook(
        x.astype(np.float64), weights.astype(np.float64), np.zeros(classes), targets
    )
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    for t, gradient in zip(operands, (dx, dweights), strict=True):
        size = np.abs(gradient).max()
        assert_close_arrays(t.grad, gradient, dtype, "gradient", float(size))
