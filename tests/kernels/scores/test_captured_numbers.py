"""Numbers that user functions capture: each call uses its own, and another number compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import event

import kernels
from kernels.runtime.jit import JIT_DISABLED

from ...support.attention.strategies import Case
from ...support.examples import at_most
from ...support.layouts import on_device
from ...support.tolerances import assert_close_arrays

IDS = np.arange(400) // 7
TABLE = (1.5, 2, 0.25)
MASKS: list[Callable[..., Any]] = [
    lambda n, x: lambda b, h, row, col: row - col <= n and col <= row,
    lambda n, x: lambda b, h, row, col, offset=n: IDS[row + offset] == IDS[col + offset],
    lambda n, x: lambda b, h, row, col: row // (n + 1) == col // (n + 1) or x * col < n,
    lambda n, x: lambda b, h, row, col: col <= row + h * n if n > 1 else col < x,
]


def polynomial(n: int, x: float) -> Any:
    def mod(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        total = 0.0
        for i in range(n):
            total += x * score / (i + 1)
        return total

    return mod


def in_an_array(n: int, x: float) -> Any:
    def mod(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        parts = np.zeros((n + 1, 2))
        parts[n, 1] = x
        return score + parts[n, 1] * parts.shape[0]

    return mod


SCORES: list[Callable[..., Any]] = [
    polynomial,
    lambda n, x: lambda s, b, h, row, col: n * math.tanh(s / n) + x * (col - row),
    lambda n, x: lambda s, b, h, row, col: s * TABLE[n - 1] + (x - col) ** n,
]
NUMBERS = st.integers(1, 3), st.floats(-2, 2, width=32)


def check(options: Any, seq: int, dtype: Any = np.float64, place: Any = None) -> None:
    """Compare attention with the textbook, which calls the functions as Python."""
    operands = np.random.default_rng(0).standard_normal((4, 1, 2, seq, 4)).astype(dtype)
    own = Case(*operands, options=options).call(place)
    wanted = Case(*operands.astype(np.float64), options=options).call(rung="naive")
    for name, right in wanted.items():
        result = own[name].copy_to_host() if place else own[name]
        own_dtype = np.float32 if name == "lse" and dtype == np.float16 else dtype
        assert_close_arrays(result, right, own_dtype, name)


@at_most(12)
@given(st.sampled_from(MASKS), st.sampled_from(SCORES), st.sampled_from([9, 140]), *NUMBERS)
def test_user_functions_compute_with_the_numbers_of_their_call(
    mask: Any, score: Any, seq: int, n: int, x: float
) -> None:
    check({"mask_mod": mask(n, x)}, seq)
    check({"score_mod": score(n, x), "mask_mod": kernels.varying(mask(n, x))}, 9)


@at_most(4)
@given(*NUMBERS)
def test_a_captured_number_may_be_a_shape(n: int, x: float) -> None:
    check({"score_mod": (in_an_array(n, x), lambda s, b, h, row, col: 1.0)}, 9)


@pytest.mark.emulated
@at_most(3)
@given(
    st.sampled_from(MASKS), st.sampled_from(SCORES), st.sampled_from([np.float32, np.float16]),
    *NUMBERS,
)  # fmt: skip
def test_kernels_of_a_gpu_compute_with_the_numbers_of_their_call(
    mask: Any, score: Any, dtype: Any, n: int, x: float
) -> None:
    check({"mask_mod": mask(n, x)}, 140, np.float32, on_device)
    check({"score_mod": score(n, x), "mask_mod": kernels.varying(mask(n, x))}, 9, dtype, on_device)


@pytest.mark.skipif(JIT_DISABLED, reason="compiles nothing")
def test_another_number_compiles_nothing() -> None:
    numbers = (1, 0.5), (2, -0.25), (3, 2.0)
    for options in (
        lambda n, x: {"mask_mod": MASKS[0](n, x)},
        lambda n, x: {"mask_mod": kernels.varying(MASKS[2](n, x)), "score_mod": polynomial(n, x)},
    ):
        check(options(*numbers[0]), 140)
        with event.install_recorder("numba:compile") as compiled:
            for own in numbers[1:]:
                check(options(*own), 140)
        assert not compiled.buffer
        q = np.zeros((1, 2, 9, 4))
        first, *others = (kernels.make_problem(q, q, q, **options(*own)) for own in numbers)
        assert all(other.features == first.features for other in others)
    kernels.BlockMask.from_mask_mod(MASKS[0](*numbers[0]), 70, 70)
    with event.install_recorder("numba:compile") as compiled:
        mask = kernels.BlockMask.from_mask_mod(MASKS[0](2, 0.5), 70, 70)
    assert not compiled.buffer and mask.dense().sum() == 3 * 70 - 3
