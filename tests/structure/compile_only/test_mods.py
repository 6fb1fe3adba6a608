"""A user's function of a score in a kernel of float32: what numba would make float64 there, and is not."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numba import float32, float64, int64, njit, types, void
from numba.core import targetconfig
from numba.extending import intrinsic

from kernels import make_problem, score_derivative
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.mods import (
    MOST_PLACES,
    _with_rules,
    mask_function,
    score_function,
)
from kernels.cuda.runtime.resources import compile_ptx
from kernels.problem.operands import Operands
from kernels.runtime.targets import cuda

from ...support.device.compiling import FLOAT32, FLOAT64, needs_nvvm

SLOPES = np.array([0.5, 0.25, 0.125], np.float32)
RATES = (0.5, 0.25, 0.1)
WIDE_SLOPES = SLOPES.astype(np.float64)
DOCUMENTS = np.arange(100, dtype=np.int32) // 7


def literals(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return score - 0.02 * (head + 1) * abs(row - col)


def captured_array(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return score + SLOPES[head] * (col - row)


def captured_tuple(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return score + RATES[head] * (col - row)


def functions_of_math(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return 30 * math.tanh(score / 30) * math.exp(-0.1 * abs(row - col)) + math.log(row + 1)


def either_in_a_branch(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    bias = 0
    if row > col:
        bias = -0.5 * (row - col)
    return score + bias


def powers(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return min(score, 1.0) + max(0, score) + score**2 + score**0.5 + 2.0 ** (-head / 2)


def in_float64(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return score + WIDE_SLOPES[head] * (col - row)


def same_document(batch: int, head: int, row: int, col: int) -> Any:
    return DOCUMENTS[row] == DOCUMENTS[col] and 0.5 * (row - col) < 8


MODS = [
    literals, captured_array, captured_tuple, functions_of_math, either_in_a_branch, powers,
]  # fmt: skip


def ptx_of(mod: Any, dtype: Any = FLOAT32) -> str:
    """Return what a small kernel compiles to that calls a function of a score."""
    function = score_function(mod, dtype)

    def kernel(scores, batch, head, row, col):
        i = cuda.threadIdx.x
        scores[i] = function((), scores[i], batch, head, row, col, None)

    kind = float32 if dtype == FLOAT32 else float64
    return compile_ptx(kernel, void(kind[::1], int64, int64, int64, int64))


@needs_nvvm
@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
def test_a_mod_without_float64_operands_computes_in_float32(mod: Any) -> None:
    ptx = ptx_of(mod)
    assert not re.findall(r"\w\S*\.f64\S*", ptx)
    assert "cvt.rn.f32.s64" not in ptx  # of 64 bits a conversion takes several times as long


@needs_nvvm
@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
def test_the_derivatives_of_a_mod_compute_in_float32(mod: Any) -> None:
    derivative = score_derivative(mod)
    for one in (derivative, score_derivative(derivative)):
        assert not re.findall(r"\w\S*\.f64\S*", ptx_of(one))


@needs_nvvm
def test_quotients_and_tangents_have_no_branch() -> None:
    ptx = ptx_of(lambda score, batch, head, row, col: 30 * math.tanh(score / 30) / (row + 1))
    assert "rcp.approx.ftz.f32" in ptx and "div." not in ptx
    assert "bra" not in ptx


@needs_nvvm
def test_float64_that_a_mod_brings_stays_float64() -> None:
    assert "fma.rn.f64" in (ptx := ptx_of(in_float64)) or "mul.f64" in ptx
    assert "f64" in ptx_of(literals, FLOAT64)


def ptx_of_mask(mod: Any) -> str:
    """Return what a small kernel compiles to that calls a function of indices."""
    function = mask_function(mod, FLOAT32)

    def kernel(seen, batch, head, row, col):
        seen[0] = function((), batch, head, row, col)

    return compile_ptx(kernel, void(int64[::1], int64, int64, int64, int64))


@needs_nvvm
def test_a_mask_mod_computes_in_float32() -> None:
    assert ".f64" not in ptx_of_mask(same_document)


@needs_nvvm
def test_captured_arrays_are_not_in_constant_memory() -> None:
    """Which has 64 KB, and which lanes that read different elements read one after the other."""
    many = np.arange(20_000) // 7
    ptx = ptx_of_mask(lambda batch, head, row, col: many[row] == many[col])
    assert "ld.global" in ptx and ".const" not in ptx


@needs_nvvm
@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, r, c: (r - c) % 4 == 0 and c <= r,
        lambda b, h, r, c: (r - c) % 12 < 5,
        lambda b, h, r, c: abs(r - c) < 1024 or c < 64,
        lambda b, h, r, c: r // 300 == c // 300,
        lambda b, h, r, c: (r - c + 1024) // (h + 2) > c % (b + 1),
    ],
)
def test_a_mask_mod_of_sums_of_indices_computes_in_32_bits(mod: Any) -> None:
    ptx = ptx_of_mask(mod)
    # A remainder of 4 is compared in 64 bits, of which the machine code has the lower half alone.
    assert not re.findall(r"(?:setp\.[gl]|div|rem|mul|mad)\S*\.[su]64\b", ptx)


#: Arguments → what is not exact in 32 bits of them, or nearly not.
LARGE = [
    0, 1, 2, 3, 7, -1, -2, -7, 300, 2**27 - 1, 2**30 - 1, 2**30, -(2**30) - 1, 2**31 - 1, 2**31, -(2**31),
    2**32, 2**32 + 5, -(2**33), 2**40 + 7, -(2**45),
]  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: (a - b) % 4 == 0 and b <= a,
        lambda a, b, c: a // c == b // c if c != 0 else False,
        lambda a, b, c: (a % c if c != 0 else 0) < b % 16,
        lambda a, b, c: abs(a - b) < c,
        lambda a, b, c: a // 8 > b // -8 or a % -4 < b // -1,
        lambda a, b, c: (a + 2_000_000_000) % 10 > (b * 3) // 7,
        lambda a, b, c: (a * 1_000_003) % 11 >= c,
        lambda a, b, c: a // -1 != abs(b),
        lambda a, b, c: (a % 999) * (b % 777) % 7 <= c,
        lambda a, b, c: abs((a % 999) * (b % -777) - 5) // 3 != abs(c) // 100,
    ],
)
def test_whole_numbers_are_exact_whatever_their_size(function: Any) -> None:
    """The rules change what numba emits for any target, so the host's shows what they compute."""
    signature = types.boolean(*[types.int64] * 3)

    @intrinsic  # whose first argument is the compiler's
    def with_rules(typing: Any, a: Any, b: Any, c: Any) -> Any:
        def emit(context: Any, builder: Any, _: Any, values: Any) -> Any:
            flags = targetconfig.ConfigStack().top().copy()
            flags.error_model = "numpy"  # as for a GPU
            compiled = _with_rules(context).compile_subroutine(
                builder, function, signature, flags=flags, caching=False
            )
            return context.call_internal(builder, compiled.fndesc, signature, values)

        return signature, emit

    @njit
    def found(a, b, c):
        return with_rules(a, b, c)  # pyright: ignore[reportCallIssue]

    for a in LARGE:
        for b in LARGE:
            for c in LARGE:
                assert found(a, b, c) == function(a, b, c), (a, b, c)


def test_more_places_than_a_mod_is_told_of_are_refused() -> None:
    q = np.broadcast_to(np.zeros((1, 1, 1, 1), np.float32), (1, 1, 1, 8))
    k = np.broadcast_to(q, (1, 1, MOST_PLACES + 1, 8))
    problem = make_problem(q, k, k, mask_mod=same_document)
    with pytest.raises(ValueError, match=r"at most 67,108,864 rows and columns, got 67,108,865"):
        make_extras(problem, Operands(None, None, None), 16, 16)
