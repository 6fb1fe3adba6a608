"""Cross entropy with its options, on every backend; NumPy is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import minitorch
from minitorch import TensorBackend, from_numpy

from ...tensor_strategies import Array, laid_out, lattice, on_every_backend


def expected(logits: Array, target: Array, ignored: int, reduction: str, smoothing: float) -> Any:
    rows = np.moveaxis(logits, min(logits.ndim - 1, 1), -1)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    kept = target != ignored
    chosen = np.take_along_axis(logs, np.where(kept, target, 0)[..., None], -1)[..., 0]
    loss = np.where(kept, -(1.0 - smoothing) * chosen - smoothing * logs.mean(-1), 0.0)
    if reduction == "none":
        return loss
    return [loss.sum()] if reduction == "sum" else [loss.sum() / kept.sum()]


@on_every_backend
@given(st.data())
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_cross_entropy_leaves_out_what_is_ignored(
    backend: TensorBackend, data: st.DataObject
) -> None:
    classes = data.draw(st.integers(1, 4))
    others = data.draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 2)]))
    ignored = data.draw(st.sampled_from([-100, -1, 0]))
    smoothing = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    logits = data.draw(lattice((*others[:1], classes, *others[1:])))
    choices = st.sampled_from([ignored, *range(classes)])
    target = data.draw(arrays(np.int64, others, elements=choices))
    x = data.draw(laid_out(logits, backend))
    given = data.draw(st.sampled_from([target, from_numpy(target, backend)]))
    found = minitorch.cross_entropy(x, given, ignored, reduction, smoothing)
    wanted = expected(logits, target, ignored, reduction, smoothing)
    assert found.shape == np.shape(wanted)
    np.testing.assert_allclose(found.to_numpy(), wanted, 1e-7, 1e-7)


@on_every_backend
def test_an_ignored_row_has_no_gradient(backend: TensorBackend) -> None:
    x = from_numpy(np.array([[1.0, 2.0, -np.inf], [0.5, 0.0, 3.0]]), backend, requires_grad=True)
    minitorch.cross_entropy(x, np.array([2, 1]), ignore_index=2).backward()
    alone = from_numpy(np.array([[0.5, 0.0, 3.0]]), backend, requires_grad=True)
    minitorch.softmax_loss(alone, np.array([1])).backward()
    assert x.grad is not None and alone.grad is not None
    np.testing.assert_allclose(x.grad.to_numpy(), [[0.0] * 3, alone.grad.to_numpy()[0]], 1e-12)


def test_a_loss_of_16_bit_logits_is_added_up_in_float32() -> None:
    logits = from_numpy(np.zeros((3, 2), np.float16))
    assert minitorch.cross_entropy(logits, [0, 1, 0]).dtype == np.float32
