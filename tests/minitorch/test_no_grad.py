"""``no_grad``: nothing is recorded within it, and everything after it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import minitorch
from minitorch import Context, Function, Tensor, from_numpy


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


def test_other_threads_go_on_recording() -> None:
    found: list[bool] = []
    with minitorch.no_grad():
        thread = threading.Thread(target=lambda: found.append((leaf() * 2.0).is_constant()))
        thread.start()
        thread.join()
    assert found == [False]
