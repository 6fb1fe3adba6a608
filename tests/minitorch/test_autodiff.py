"""Module 1: the chain rule, the order of the graph and backpropagation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import ClassVar

import pytest

from minitorch import Context, Scalar, ScalarFunction, ScalarHistory
from minitorch.autodiff import History, backpropagate

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


def test_a_leaf_can_be_its_own_result() -> None:
    x = Scalar(2.0)
    x.backward(7.0)
    assert x.derivative == 7.0


def test_passes_add_up_until_the_derivative_is_cleared() -> None:
    x = Scalar(2.0)
    (x * 3.0).backward()
    (x * 4.0).backward()
    assert x.derivative == 7.0


def test_only_a_leaf_accumulates() -> None:
    with pytest.raises(AssertionError, match="no leaf"):
        (Scalar(1.0) + 1.0).accumulate_derivative(1.0)


def test_chain_rule_of_a_leaf_is_refused() -> None:
    with pytest.raises(AssertionError, match="not computed by a function"):
        Scalar(1.0).chain_rule(1.0)


def test_a_backward_with_too_few_derivatives_is_refused() -> None:
    class Forgetful(ScalarFunction):
        @staticmethod
        def forward(ctx: Context, x: float, y: float) -> float:
            return x + y

        @staticmethod
        def backward(ctx: Context, d_output: float) -> float:
            return d_output

    with pytest.raises(AssertionError, match="1 derivatives for 2 inputs"):
        Forgetful.apply(Scalar(1.0), Scalar(2.0)).backward()


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


class Bulky:
    """A derivative that is large, as a tensor's is, and that counts how many are alive."""

    alive: ClassVar[weakref.WeakSet[Bulky]] = weakref.WeakSet()

    def __init__(self, value: int) -> None:
        self.value = value
        Bulky.alive.add(self)

    def __add__(self, other: Bulky) -> Bulky:
        return Bulky(self.value + other.value)


class Link:
    """A variable that is no Scalar: v_n = v_(n-1) + v_(n-1), or a leaf."""

    def __init__(self, unique_id: int, parent: Link | None, counts: list[int]) -> None:
        self.unique_id = unique_id
        self.parent = parent
        self.counts = counts
        self.total = 0

    __hash__ = None  # pyright: ignore[reportAssignmentType] # as for Scalar and Tensor

    @property
    def parents(self) -> Iterable[Link]:
        return () if self.parent is None else (self.parent, self.parent)

    def is_leaf(self) -> bool:
        return self.parent is None

    def is_constant(self) -> bool:
        return False

    def accumulate_derivative(self, x: Bulky) -> None:
        self.total += x.value

    def chain_rule(self, d_output: Bulky) -> Iterable[tuple[Link, Bulky]]:
        self.counts.append(len(Bulky.alive))
        assert self.parent is not None
        return [(self.parent, Bulky(d_output.value)), (self.parent, Bulky(d_output.value))]


def test_an_inner_derivative_is_freed_once_it_is_handed_on() -> None:
    """Else the derivatives of a deep network are all in memory at once."""
    counts: list[int] = []
    leaf = Link(0, None, counts)
    out = leaf
    for n in range(1, 51):
        out = Link(n, out, counts)
    backpropagate(out, Bulky(1))
    assert leaf.total == 2**50
    assert len(counts) == 50
    assert max(counts) <= 5, counts
