"""Module 1: the chain rule, the order of the graph and backpropagation."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import minitorch
from minitorch import (
    Context,
    Function,
    Scalar,
    ScalarHistory,
    Tensor,
    TensorData,
    from_numpy,
    tensor,
)
from minitorch.autodiff import History

from ..course.test_autodiff import Bend


def test_derivatives_of_constants_are_not_even_added_up() -> None:
    """So a function may give None for an input that cannot vary."""

    class Scale(Bend):
        @staticmethod
        def backward(ctx: Context, d_output: float) -> tuple[float, float]:
            d_x, _ = Bend.backward(ctx, d_output)
            return d_x, None  # pyright: ignore[reportReturnType]

    x, constant = Scalar(2.0), Scalar(3.0, None)
    Scale.apply(Scale.apply(x, constant), constant).backward()
    assert x.derivative == 16.0


def test_a_context_saves_only_what_backward_will_need() -> None:
    ctx = Context()
    assert ctx.saved_values == ()
    ctx.save_for_backward(1.0, 2.0)
    assert ctx.saved_values == ctx.saved_tensors == (1.0, 2.0)
    ctx.save_for_backward(3.0)
    assert ctx.saved_values == (3.0,)

    without = Context(no_grad=True)
    without.save_for_backward(1.0)
    assert without.saved_values == ()


def test_an_empty_history_marks_a_leaf() -> None:
    assert ScalarHistory is History
    assert History() == History(last_fn=None, ctx=None, inputs=())


def test_an_inner_derivative_is_freed_once_it_is_handed_on() -> None:
    """Else the derivatives of a deep network are all in memory at once."""
    alive: weakref.WeakSet[TensorData] = weakref.WeakSet()
    counts = []

    class Doubled(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor) -> Tensor:
            return a

        @staticmethod
        def backward(ctx: Context, grad_output: Tensor) -> Tensor:
            counts.append(len(alive))
            result = grad_output * 1.0
            alive.add(result._tensor)
            return result

    out = leaf = tensor([1.0], requires_grad=True)
    for _ in range(50):
        out = Doubled.apply(out)
    out.backward()
    assert leaf.grad is not None and len(counts) == 50 and max(counts) <= 3, counts


# -- no_grad -----------------------------------------------------------------------------------


def leaf() -> Tensor:
    return from_numpy(np.arange(6.0).reshape(2, 3), requires_grad=True)


def test_results_within_it_are_constants() -> None:
    a = leaf()
    with minitorch.no_grad():
        assert (a * a + a.view(2, 3)).is_constant()
        assert minitorch.softmax(a, 1).is_constant()
        out, lse = a.view(1, 2, 3).flash_attention(
            a.view(1, 2, 3), a.view(1, 2, 3), return_lse=True
        )
        assert out.is_constant() and lse.is_constant()
    assert a.is_leaf()
    assert not (a * a).is_constant()


def test_nothing_is_kept_for_a_backward_pass() -> None:
    seen: list[Context] = []

    class Same(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            seen.append(ctx)
            return a

    with minitorch.no_grad():
        a = leaf()
        result = Same.apply(a)
    assert result is not a and result.is_constant()
    assert seen[0].no_grad and seen[0].saved_values == ()
    assert seen[0].needs_input_grad == (False,)


def test_it_ends_with_an_error_and_nests() -> None:
    context = minitorch.no_grad()
    with pytest.raises(ZeroDivisionError), context:
        with context, minitorch.no_grad():
            pass
        assert (leaf() * 2.0).is_constant()
        raise ZeroDivisionError
    assert not (leaf() * 2.0).is_constant()


def test_it_decorates_a_function() -> None:
    @minitorch.no_grad()
    def asked(depth: int) -> Tensor:
        return asked(depth - 1) if depth else leaf() * 2.0

    assert asked(2).is_constant()
    assert not (leaf() * 2.0).is_constant()
