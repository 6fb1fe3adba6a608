"""Module 3: every operation, on every backend, through the same tests; NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitorch import (
    TensorBackend,
    fast_ops,
    from_numpy,
    operators,
)
from minitorch.tensor_ops import TensorOps


@pytest.mark.parametrize(
    ("kernel", "fn"),
    [
        (fast_ops.tensor_map, operators.neg),
        (fast_ops.tensor_zip, operators.add),
        (fast_ops.tensor_reduce, operators.add),
    ],
)
def test_a_loop_is_compiled_once_for_each_function(
    kernel: Callable[..., Any], fn: Callable[..., float]
) -> None:
    assert kernel(fn) is kernel(fn)


# --- a backend of one's own ------------------------------------------------------------------


def test_a_backend_supplies_loops_and_nothing_else() -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a loop ran when the backend was made")

    class Counting(TensorOps):
        make_map = staticmethod(lambda fn: never)
        make_zip = staticmethod(lambda fn: never)

        @classmethod
        def reduce_loop(cls, fn: Any) -> Any:
            return lambda out, a, dim: np.sum(
                a.to_array(), axis=dim, keepdims=True, out=out.to_array()
            )

    a = from_numpy(np.arange(6.0).reshape(2, 3), TensorBackend(Counting))
    assert a.sum(0).to_numpy().tolist() == [[3.0, 5.0, 7.0]]
    with pytest.raises(AssertionError, match="a loop ran"):
        _ = -a
