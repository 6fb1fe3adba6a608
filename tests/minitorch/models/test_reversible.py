"""Reversible layers compute what a plain stack computes, and keep nothing in between."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import FastBackend, ReversibleSequence, Tensor, TransformerLayer

from ...support.tolerances import assert_close_arrays

WIDTH = 8


def make_layers(depth: int, p_dropout: float = 0.0, **options: Any) -> list[TransformerLayer]:
    minitorch.manual_seed(0)
    return [
        TransformerLayer(
            WIDTH, 2, p_dropout=p_dropout, backend=FastBackend, middle_dim=16, **options
        )
        for _ in range(depth)
    ]


def plain(layers: list[TransformerLayer], x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    for layer in layers:
        y1 = x1 + layer.attention(layer.ln_1(x2))
        x1, x2 = y1, x2 + layer.ff(layer.ln_2(y1))
    return x1, x2


def inputs() -> tuple[Tensor, Tensor]:
    minitorch.manual_seed(1)
    pair = tuple(minitorch.randn((2, 5, WIDTH), backend=FastBackend) for _ in range(2))
    for x in pair:
        x.requires_grad_(True)
    return pair  # type: ignore[return-value]


def gradients(out: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Any]:
    for leaf in leaves:
        leaf.zero_grad_()
    ((out[0] * out[0]).sum() + (out[1] * 3.0).sum()).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("p_dropout", [0.0, 0.3])
@pytest.mark.parametrize("attention", ["flash", "reformer"])
def test_values_and_gradients_are_those_of_the_plain_stack(
    depth: int, p_dropout: float, attention: str
) -> None:
    layers = make_layers(depth, p_dropout, attention=attention)
    sequence, (x1, x2) = ReversibleSequence.from_layers(layers), inputs()
    leaves = [x1, x2, *(box.value for box in sequence.parameters())]
    assert len(leaves) == 2 + sum(len(layer.parameters()) for layer in layers)
    minitorch.manual_seed(2)
    expected = plain(layers, x1, x2)
    expected_grads = gradients(expected, leaves)
    minitorch.manual_seed(2)
    out = sequence(x1, x2)
    grads = gradients(out, leaves)
    for y, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(y.to_numpy(), wanted.to_numpy())
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_close_arrays(grad, wanted.to_numpy(), np.float64, size=10.0)


def test_gradients_are_added_to_those_there_are() -> None:
    sequence, (x1, x2) = ReversibleSequence.from_layers(make_layers(2)), inputs()
    weights = [box.value for box in sequence.parameters()]
    once = gradients(sequence(x1, x2), weights)
    sum(sequence(x1, x2), start=minitorch.zeros(x1.shape, FastBackend)).sum().backward()
    twice = [weight.grad for weight in weights]
    (y1, y2) = sequence(x1, x2)
    for weight in weights:
        weight.zero_grad_()
    (y1 + y2).sum().backward()
    for first, both, weight in zip(once, twice, weights, strict=True):
        assert weight.grad is not None and both is not None
        assert_close_arrays(both, (first + weight.grad).to_numpy(), np.float64, size=10.0)


def test_the_activations_that_are_kept_do_not_depend_on_the_depth() -> None:
    def kept(depth: int) -> int:
        sequence, (x1, x2) = ReversibleSequence.from_layers(make_layers(depth)), inputs()
        gc.collect()
        before = {id(t) for t in gc.get_objects() if type(t) is Tensor}
        out = sequence(x1, x2)
        gc.collect()
        made = [t for t in gc.get_objects() if type(t) is Tensor and id(t) not in before]
        assert out[0].shape == x1.shape
        return sum(t.size for t in made)

    assert kept(2) == kept(6)
