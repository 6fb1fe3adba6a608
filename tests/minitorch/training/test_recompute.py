"""``checkpoint``: the gradients of a function whose results on the way are computed again, bit for bit."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import FastBackend, SimpleBackend, Tensor, TensorBackend, checkpoint

on_backends = pytest.mark.parametrize(
    "backend", [SimpleBackend, FastBackend], ids=["simple", "fast"]
)


def plain(fn: Callable[..., Any], *inputs: Any) -> Any:
    """Call without a checkpoint."""
    return fn(*inputs)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [t.to_numpy().tobytes() for t in tensors]


def drawn(
    seed: int, *shapes: tuple[int, ...], backend: TensorBackend = FastBackend
) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    tensors = [minitorch.from_numpy(rng.standard_normal(shape), backend) for shape in shapes]
    for t in tensors:
        t.requires_grad_(True)
    return tensors


def grads(leaves: list[Tensor]) -> list[bytes]:
    assert all(leaf.grad is not None for leaf in leaves)
    return bits([leaf.grad for leaf in leaves if leaf.grad is not None])


def ran(program: Callable[..., Tensor], call: Any, *shapes: tuple[int, ...], **more: Any) -> Any:
    """Return the value of a program and the gradients of its leaves, as bits, twice added up."""
    minitorch.manual_seed(7)
    leaves = drawn(3, *shapes, **more)
    outs = []
    for _ in range(2):  # as where gradients are accumulated
        outs.append(program(call, *leaves))
        outs[-1].backward()
    return bits(outs), grads(leaves), random.getstate(), np.random.random()


# -- programs: each takes what calls, and leaves ------------------------------------------------------


def chain(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Three calls one after the other, with a parameter that each takes from around it."""
    for _ in range(3):
        x = call(lambda y: (y * w).tanh() + y * y, x)
    return x.sum() + (w * w * w).sum()


def many_uses(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """An input and a captured leaf used several times, within the call, before it and after it."""
    early = (x * w * 3.0).sigmoid()
    a, b = call(lambda y, z: [y * z + z.exp() * w + y, (y + z).sum(0) * y], x, early)
    late = a * b + x * w - early
    return (late * a).sum() + (x * x).sum()


def nested(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Calls within calls, with dropout in both, and a result that both hand on."""

    def inner(y: Tensor) -> tuple[Tensor, Tensor]:
        z = minitorch.Dropout(0.5)(y * w)
        return z, z.tanh() * y

    def outer(y: Tensor) -> Tensor:
        a, b = call(inner, minitorch.Dropout(0.25)(y))
        c, _ = call(inner, b + a)
        return a * c + minitorch.rand(y.shape, y.backend) * b

    return call(outer, call(outer, x)).sum()


def without_gradients(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """A function that asks in between without recording, and returns what it was given, and a constant."""

    def step(y: Tensor, scale: float, none: None) -> Any:
        with minitorch.no_grad():
            mean = (y * w).mean()
        return y - mean * scale, y, mean, "text", none

    a, same, constant, text, none = call(step, x * 2.0, 0.5, None)
    assert text == "text" and none is None and constant.history is None
    return (a * same * constant * w).sum()


PROGRAMS = [chain, many_uses, nested, without_gradients]


@on_backends
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_without_it_bit_for_bit(
    program: Callable[..., Tensor], backend: TensorBackend
) -> None:
    shapes = (2, 3), (2, 3)
    assert ran(program, checkpoint, *shapes, backend=backend) == ran(
        program, plain, *shapes, backend=backend
    )


# -- a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_a_transformer_of_checkpointed_layers(attention: str) -> None:
    """Dropout everywhere; the tied table is used before and after the layers."""
    ids = np.arange(12).reshape(2, 6)

    def gradients(call: Any) -> list[bytes]:
        minitorch.manual_seed(0)
        model = minitorch.DecoderLM(
            13, 8, 2, 6, 0.2, backend=FastBackend, n_layer=2, middle_dim=16, tie_weights=True,
            attention=attention, attention_dropout=0.1, dtype=np.float32,
        )  # fmt: skip
        x = model.token_embeddings(ids) + model.position_embeddings(np.arange(6))
        for name in model.layer_names:
            x = call(getattr(model, name), x)
        logits = model.score(model.ln(x)).view(12, 13)
        minitorch.softmax_loss(logits, (ids.reshape(-1) + 1) % 13).mean().backward()
        return grads([p.value for p in model.parameters()])

    assert gradients(checkpoint) == gradients(plain)


# -- what stays in memory ------------------------------------------------------------------------------


class Watched:
    """Counts the results of tanh that are alive."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Any]] = []

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.tanh()
            self.alive.append(weakref.ref(x._tensor))
        return x * 1.0

    @property
    def count(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.alive)


def test_nothing_stays_after_the_forward_pass_nor_after_the_backward() -> None:
    (x,) = drawn(0, (4, 4))
    watched, counts = Watched(), []

    def looked_at(y: Tensor) -> Tensor:
        counts.append(watched.count)
        return watched(y)

    out = checkpoint(looked_at, x)
    out = checkpoint(looked_at, out)
    loss = out.sum()
    assert watched.count == 0 and len(watched.alive) == 6
    with minitorch.no_grad():
        assert checkpoint(lambda y: y.exp(), x).history is None
    loss.backward()
    assert watched.count == 0 and len(watched.alive) == 12
    assert counts == [0, 0, 0, 0]  # the second call of one begins when those of the other are gone
    gradient = x.grad
    assert gradient is not None
    loss.backward()  # it may be asked again, and computes again
    assert len(watched.alive) == 18 and x.grad is not None
    assert bits([x.grad]) == bits([gradient + gradient])


# -- when the second call is another -------------------------------------------------------------------


def test_another_second_call_is_an_error() -> None:
    x, w = drawn(0, (3,), (3,))
    p = minitorch.Parameter(w)
    out = checkpoint(lambda y: y * p.value, x)
    p.update(w.detach() * 2.0)
    with pytest.raises(RuntimeError, match="differed from the first call"):
        out.sum().backward()
    layers = iter([Tensor.exp, Tensor.tanh])
    out = checkpoint(lambda y: next(layers)(y), x)
    with pytest.raises(RuntimeError, match="lambda"):
        out.sum().backward()
