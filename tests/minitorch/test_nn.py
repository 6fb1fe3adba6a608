"""Module 4: pooling, maxima, softmax, losses and dropout, as functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, data, integers

from minitorch import (
    FastBackend,
    SimpleBackend,
    TensorBackend,
    argmax,
    avgpool2d,
    dropout,
    from_numpy,
    grad_check,
    logsoftmax,
    maxpool2d,
    naive_attention,
    one_hot,
    softmax,
    softmax_loss,
    tensor,
)

from ..course.test_nn import few, softmax_of
from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import laid_out, lattice, on_backends

# --- losses ----------------------------------------------------------------------------------


@on_backends()
@few
@given(data())
def test_cross_entropy(backend: TensorBackend, data: DataObject) -> None:
    rows, classes = data.draw(integers(1, 4)), data.draw(integers(1, 4))
    array = data.draw(lattice((rows, classes)))
    logits = data.draw(laid_out(array, backend))
    target = np.array([data.draw(integers(0, classes - 1)) for _ in range(rows)])
    expected = -np.log(softmax_of(array, 1))[np.arange(rows), target]
    for as_given in (target, tensor(target.tolist(), backend)):
        assert_close_arrays(softmax_loss(logits, as_given), expected, np.float64, size=10.0)
    grad_check(lambda x: softmax_loss(x, target), logits)


def test_one_hot() -> None:
    coded = one_hot(tensor([[0, 2], [1, 1]]), 3)
    assert coded.is_constant()
    np.testing.assert_array_equal(coded.to_numpy(), np.eye(3)[[[0, 2], [1, 1]]])


# --- attention, composed ---------------------------------------------------------------------


@on_backends()
@pytest.mark.parametrize("is_causal", [False, True])
def test_naive_attention(is_causal: bool, backend: TensorBackend) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2)))
    scores = q @ k.swapaxes(2, 3) / 2.0
    if is_causal:
        scores[..., np.arange(5)[:, None] < np.arange(7)] = -np.inf
    expected = softmax_of(scores, 3) @ v
    operands: list[Any] = [from_numpy(x, backend) for x in (q, k, v)]
    assert_close_arrays(
        naive_attention(*operands, is_causal=is_causal), expected, np.float64, size=10.0
    )


def test_functions_stay_on_their_backend() -> None:
    for backend in (SimpleBackend, FastBackend):
        a = from_numpy(np.arange(16.0).reshape(1, 1, 4, 4), backend)
        for result in (
            maxpool2d(a, (2, 2)), avgpool2d(a, (2, 2)), softmax(a, 3), softmax(a, 0),
            logsoftmax(a, 1), argmax(a, 2), dropout(a, 0.5), one_hot(a, 16),
        ):  # fmt: skip
            assert result.backend is backend
