"""Operations remember how a kind of call runs: never that of another kind, and not without bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from kernels.runtime import known_calls
from minitorch import TensorBackend, fast_ops
from minitorch.functions.base import Function


@given(st.data())
def test_a_kind_is_shapes_strides_and_dtypes(data: st.DataObject) -> None:
    """Calls that follow one another on the same backend, in any order of kinds."""
    backend = TensorBackend(fast_ops.FastOps)
    for _ in range(6):
        dtype = np.dtype(data.draw(st.sampled_from(["float16", "float32", "float64"])))
        rows = data.draw(st.integers(1, 3))
        a, b = (np.arange(2.0 * rows, dtype=dtype).reshape(rows, 2) / 4 for _ in range(2))
        if data.draw(st.booleans()):
            a = np.asfortranarray(a)
        x, y = (minitorch.from_numpy(array, backend) for array in (a, b))
        for found, expected in (
            (x + y, a + b), (x.sum(0), a.sum(0, keepdims=True)), (-x, -a), (x * 2.0, a * 2),
            (x @ y.permute(1, 0), a @ b.T),
        ):  # fmt: skip
            assert found.dtype == dtype
            np.testing.assert_allclose(found.to_numpy(), expected, rtol=1e-2, atol=1e-2)


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST_CALLS", 4)
    kinds = known_calls.KnownCalls()
    for kind in range(10):
        kinds.keep(kind, None)
        assert kind in kinds
        assert len(kinds) <= 4


class _Same(Function):
    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        return a


def test_a_result_is_never_the_argument_itself() -> None:
    a = minitorch.from_numpy(np.ones(3))
    result = _Same.apply(a)
    result.requires_grad_(True)
    assert a.is_constant()
