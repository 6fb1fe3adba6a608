"""Reversible layers: a stack that recomputes its activations from its outputs instead of storing them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kernels.common.arguments import listed

from ..autodiff import Context
from ..functions.base import check_tensor
from ..functions.several import Several
from ..module import Module
from ..scalars.modes import no_grad, recording
from ..tensor import Tensor
from ..transformer import TransformerLayer


class _Branch(Module):
    """A layer norm and what follows it, as one half of a block.

    Args:
        norm: The layer norm.
        inner: Attention or feed-forward.
    """

    def __init__(self, norm: Module, inner: Module):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        """Return inner(norm(x))."""
        return self.inner(self.norm(x))


class ReversibleSequence(Module):
    """Blocks y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁), whose inputs can be computed from their outputs.

    The backward pass starts from the outputs of the last block and computes x₂ = y₂ - g(y₁) and
    x₁ = y₁ - f(x₂), block by block.  Only one block's activations are in memory, whatever the depth, and f
    and g are computed twice.  Dropout draws the same numbers again.  Gradients are those of the plain
    stack up to rounding; 16-bit activations lose more at each subtraction, so float32 is advised.

    Args:
        blocks: Pairs (f, g) of modules, each of which maps a tensor to one of the same shape.

    Raises:
        TypeError: If an entry is not a pair of modules.
        ValueError: If there is no block.

    Source: Gomez, Ren, Urtasun and Grosse, The reversible residual network (2017), section 3.1;
    Kitaev, Kaiser and Levskaya, Reformer (2020), section 3.
    """

    def __init__(self, blocks: Iterable[tuple[Module, Module]]):
        super().__init__()
        self.halves: list[Module] = []
        for number, block in enumerate(listed("blocks", blocks)):
            pair: Any = block if isinstance(block, (tuple, list)) else (block,)
            if len(pair) != 2 or not all(isinstance(half, Module) for half in pair):
                kinds = ", ".join(type(half).__name__ for half in pair)
                raise TypeError(f"a block is a pair (f, g) of modules, got ({kinds})")
            for name, half in zip("fg", pair, strict=True):
                setattr(self, f"{name}_{number}", half)
                self.halves.append(half)
        if not self.halves:
            raise ValueError(
                "ReversibleSequence needs one block or more, got none; pass pairs (f, g)"
            )

    @classmethod
    def from_layers(cls, layers: Sequence[TransformerLayer]) -> ReversibleSequence:
        """Return transformer layers as blocks: f is attention behind its layer norm, g the feed-forward."""
        return cls(
            (_Branch(layer.ln_1, layer.attention), _Branch(layer.ln_2, layer.ff))
            for layer in layers
        )

    def forward(self, x1: Tensor, x2: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (y₁, y₂), each of the shape of x₁.

        Args:
            x1: The first stream.
            x2: The second stream; x₁ when None, as in Reformer.

        Raises:
            TypeError: If a stream is not a tensor.
            ValueError: If the shapes differ.
        """
        x2 = x1 if x2 is None else x2
        for name, x in (("x1", x1), ("x2", x2)):
            check_tensor(name, x)
        if x1.shape != x2.shape:
            raise ValueError(
                f"x1 and x2 must be of one shape, got {x1.shape} and {x2.shape}: each is added to what is "
                "computed from the other"
            )
        weights = [box.value for box in self.parameters()]
        y1, y2 = _Reversible.apply_several(self.halves, weights, x1, x2, *weights)
        return y1, y2


#: The state of the generators that dropout and hashing draw from.
State = tuple[Any, Any]


class _Reversible(Several):
    """The blocks of a :class:`ReversibleSequence`; only the outputs of the last are kept."""

    checks_itself = True

    @staticmethod
    def forward(
        ctx: Context, halves: list[Callable[..., Tensor]], weights: list[Tensor], x1: Tensor,
        x2: Tensor, *_: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run all blocks without recording."""
        states: list[State] = []
        with no_grad():
            for half in halves:
                states.append((random.getstate(), np.random.get_state()))
                # y₁ = x₁ + f(x₂), and then y₂ = x₂ + g(y₁): the streams change places.
                x1, x2 = x2, x1 + half(x2)
        ctx.save_for_backward(halves, states, weights, x1, x2)
        return x1, x2

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        """Recompute the blocks from the last to the first, and each one's gradients on the way."""
        halves, states, weights, y1, y2 = ctx.saved_values
        d1, d2 = (
            y.zeros() if d is None else d for y, d in zip((y1, y2), grad_outputs, strict=True)
        )
        before = [weight.grad for weight in weights]
        now = random.getstate(), np.random.get_state()
        try:
            for weight in weights:
                weight.grad = None
            for half, state in zip(reversed(halves), reversed(states), strict=True):
                random.setstate(state[0])
                np.random.set_state(state[1])
                # y₂ = x₁ + half(y₁), where y₁ is x₂.
                added, gradient = _with_gradient(half, y1, d2)
                y1, y2 = y2 - added, y1
                d1, d2 = d2, d1 if gradient is None else d1 + gradient
            found = [weight.grad for weight in weights]
        finally:
            random.setstate(now[0])
            np.random.set_state(now[1])
            for weight, grad in zip(weights, before, strict=True):
                weight.grad = grad
        return None, None, d1, d2, *found


def _with_gradient(
    half: Callable[..., Tensor], x: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return half(x), and the gradient of x given that of the result; weights collect theirs."""
    leaf = x.detach()
    leaf.requires_grad_(True)
    with recording():
        out = half(leaf)
    if out.requires_grad():
        out.backward(d_out)
    return out.detach(), leaf.grad
