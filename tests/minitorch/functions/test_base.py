"""A function of several results: one backward pass gets the gradients of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import Context, Function, Tensor
from minitorch.functions.several import Several

#: Which of the two results had a gradient, for each call of ``backward``.
CALLS: list[tuple[bool, bool]] = []


class ProductAndSum(Several):
    """a * b and a + b."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, unit: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b * unit, a + b

    @staticmethod
    def backward(
        ctx: Context, product: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_values
        CALLS.append((product is not None, total is not None))
        product, total = (a.zeros() if g is None else g for g in (product, total))
        return product * b + total, product * a + total, None


USES: dict[str, Any] = {
    "the first": (lambda p, s: p, lambda a, b: a * b, (True, False)),
    "the second": (lambda p, s: s, lambda a, b: a + b, (False, True)),
    "both": (lambda p, s: p * s, lambda a, b: a * b * (a + b), (True, True)),
    "one twice": (lambda p, s: p * p + p, lambda a, b: a * b * a * b + a * b, (True, False)),
    "one inside the other": (lambda p, s: p * s + s, lambda a, b: a * b * (a + b) + a + b, (True, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_gradients_are_those_of_the_same_in_single_results(name: str) -> None:
    use, plain, parts = USES[name]
    values = np.array([2.0, -1.0, 0.5]), np.array([3.0, 0.25, -2.0])
    gradients = []
    for several in (True, False):
        a, b = (minitorch.tensor(x, requires_grad=True) for x in values)
        CALLS.clear()
        out = use(*ProductAndSum.apply_several(a, b, 1.0)) if several else plain(a, b)
        out.sum().backward()
        assert ([parts] if several else []) == CALLS
        gradients.append([np.asarray(t.grad) for t in (a, b)])
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-12)


def test_the_context_says_which_arguments_require_a_gradient() -> None:
    seen = []

    class Watch(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor, b: Tensor, option: str) -> Tensor:
            seen.append(ctx.needs_input_grad)
            return a

    a, b = minitorch.zeros((2,)), minitorch.rand((2,), requires_grad=True)
    Watch.apply(a, b, "x")
    Watch.apply(a, a, "x")
    assert seen == [(False, True, False), (False, False, False)]
