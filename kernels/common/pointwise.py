"""GELU and Adam for one element, with one source for every compiler.

The caller passes constants in the dtype of the elements, because a Python float would promote float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .online_softmax import LOG2_E

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715

#: The ``constants`` of ``Gelu``: 0, 1, 3, the cubic factor, 2 sqrt(2/pi), and that times log2(e).
GELU_CONSTANTS = (
    0.0,
    1.0,
    3.0,
    GELU_CUBIC,
    2.0 * SQRT_2_OVER_PI,
    2.0 * SQRT_2_OVER_PI * LOG2_E,
)


class Gelu(NamedTuple):
    """GELU and its gradient; both functions take the constants ``GELU_CONSTANTS`` as last argument."""

    value: Callable[[Any, Any], Any]
    gradient: Callable[[Any, Any, Any], Any]


def make_gelu(compile_: Callable[[Any], Any], exp2: Callable[[Any], Any]) -> Gelu:
    """Return GELU in its tanh form, and its gradient, for one compiler; ``exp2`` is 2**x for x <= 0."""

    @compile_
    def gate(x, constants):
        """Return sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³): GELU's tanh form is x sigmoid(2u)."""
        zero, one, _, cubic, _, factor = constants
        z = factor * (x + cubic * x * x * x)
        # exp2 must not get positive arguments: sigmoid(z) = 1 - sigmoid(-z).
        small = exp2(-abs(z))
        large = one / (one + small)
        return large if z >= zero else small * large

    @compile_
    def value(x, constants):
        return x * gate(x, constants)

    @compile_
    def gradient(dout, x, constants):
        # y = x s, s = sigmoid(2u): dy/dx = s + x s (1 - s) 2 du/dx
        _, one, three, cubic, inner, _ = constants
        s = gate(x, constants)
        slope = inner * (one + three * cubic * x * x)
        return dout * (s + x * s * (one - s) * slope)

    return Gelu(value, gradient)


def make_adam(compile_: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """Return one element's step of Adam for one compiler.

    Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2.
    """

    @compile_
    def adam(value, grad, m, v, one, constants):
        """Return the new m, v and value; ``constants`` are those of :func:`adam_constants`."""
        size, beta1, beta2, eps, root, keep = constants
        m = beta1 * m + (one - beta1) * grad
        v = beta2 * v + (one - beta2) * grad * grad
        return m, v, keep * value - size * m / (math.sqrt(v) * root + eps)

    return adam


def adam_constants(
    lr: float, beta1: float, beta2: float, eps: float, step: int, weight_decay: float
) -> tuple[float, ...]:
    """Return the constants of a step, which are counted from 1; they are the same for every element.

    They are the step size lr / (1 - beta1^step), beta1, beta2, eps, the factor 1 / sqrt(1 -
    beta2^step) of the root, and the factor of the value after decoupled weight decay, as in AdamW.
    """
    size, root = lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)
    return size, beta1, beta2, eps, root, 1.0 - lr * weight_decay
