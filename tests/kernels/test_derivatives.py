"""The JVP and the double backward of attention: central differences, and every rung that has them."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.rungs import Tangents
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.targets import EMULATED

from ..support.attention import on_cuda
from ..support.attention.strategies import (
    FEATURES,
    TANGENTS,
    Case,
    bowl,
    cases,
    operand,
    slope_of_bowl,
    wide_cases,
)
from ..support.device.emulated_gpu import emulated_gpu
from ..support.examples import at_most
from ..support.tolerances import assert_close_arrays

#: The size of a step along a direction, and the error that differences of five points leave.
STEP, ERROR = 1e-4, 1e-6
SMALL = st.integers(1, 7)
RUNGS = [
    pytest.param(name, rung.name, marks=pytest.mark.emulated if name == "cuda" else ())
    for name, target in launch.TARGETS.items()
    for rung in target.rungs
    if rung.tangents.jvp is not Tangents().jvp
]
#: What tensor cores, emulated thread by thread, finish in a second.
SMALL_HALVES = {"lengths": st.integers(1, 20), "dims": st.integers(1, 20), "leads": st.just([2])}


@st.composite
def directions(draw: Any, case: Case, dtype: Any = np.float64) -> list[Any]:
    """Draw a tangent for q, k and v, laid out in memory in any way."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [draw(operand(x.shape, dtype, rng)) for x in case.operands]


def central(function: Any, direction: Any = None) -> Any:
    """Return the derivative of a function of a number at 0, by five points."""
    with np.errstate(invalid="ignore"):  # lse of a row that sees no key
        one, two = (function(s * STEP) - function(-s * STEP) for s in (1, 2))
        return (8 * one - two) / (12 * STEP)


def moved(case: Case, tangents: Any, step: float) -> Case:
    """Return a case with q, k and v moved along tangents."""
    q, k, v = (x + step * t for x, t in zip(case.operands, tangents, strict=True))
    return replace(case, q=q, k=k, v=v)


def assert_near(got: Any, wanted: Any, what: str) -> None:
    wanted = np.where(np.isfinite(wanted), wanted, 0.0)
    error = np.abs(got - wanted).max(initial=0.0)
    assert error <= ERROR * max(1.0, np.abs(wanted).max(initial=0.0)), f"{what}: off by {error}"


@at_most(60)
@given(data=st.data())
def test_the_jvp_is_the_central_difference_of_attention(data: Any) -> None:
    case = data.draw(cases((np.float64,), SMALL, SMALL, features=FEATURES))
    tangents = data.draw(directions(case))
    found = case.derive(tangents, launch.NUMPY, "naive")
    for name in ("out", "lse"):
        wanted = central(
            lambda step, name=name: moved(case, tangents, step).forward(launch.NUMPY, "naive")[name]
        )
        assert_near(found[f"{name}_tangent"], wanted, f"the tangent of {name} in {case}")


@at_most(60)
@given(data=st.data())
def test_the_double_backward_is_the_gradient_of_the_backward_pass(data: Any) -> None:
    case = data.draw(cases((np.float64,), SMALL, SMALL, features=FEATURES))
    tangents = data.draw(directions(case))
    case.dlse = data.draw(operand(case.problem().lse_shape, np.float64, np.random.default_rng(1)))
    options = {**case.options, "rung": "naive"}

    def total(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> float:
        """Return the sum of dq, dk and dv times the tangents, of a forward and a backward pass."""
        out, lse = kernels.flash_attention_forward(q, k, v, **options)
        back = kernels.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        return sum(float((x * t).sum()) for x, t in zip(back, tangents, strict=True))

    given = [np.array(x) for x in (*case.operands, case.dout, case.dlse)]
    found = kernels.flash_attention_double_backward(
        *tangents, case.dout, *case.operands, dlse=case.dlse, **options
    )
    rng = np.random.default_rng(0)
    for place, gradient in enumerate(found):
        assert gradient.shape == given[place].shape
        direction = rng.standard_normal(gradient.shape)

        def along(step: float, place: int = place, direction: Any = direction) -> float:
            there = [*given[:place], given[place] + step * direction, *given[place + 1 :]]
            return total(*there)

        wanted = central(along)
        size = max(1.0, float(np.abs(gradient * direction).sum()), abs(total(*given)))
        assert abs(float((gradient * direction).sum()) - wanted) <= ERROR * size, (place, case)


def derive(case: Case, tangents: Any, target: str, rung: str) -> dict[str, Any]:
    """Run the derivatives of a rung, on a device that has it."""
    if target != "cuda":
        return case.derive(tangents, launch.TARGETS[target], rung, case.tile)
    on_tensor_cores = rung in on_cuda.HALVES and EMULATED
    with emulated_gpu() if on_tensor_cores else nullcontext():
        if (reason := kernels.available_rungs()[rung]) is not None:
            pytest.skip(reason)
        tile = on_cuda.fitting(rung, case.tile)
        found = case.derive(tangents, launch.CUDA, rung, tile, on_cuda.forwards)
        return {name: x.copy_to_host() for name, x in found.items()}


def check(case: Case, tangents: Any, target: str, rung: str) -> None:
    """Compare a rung with the textbook in float64, in any dtype of the case."""
    found = derive(case, tangents, target, rung)
    wide = [None if t is None else t.astype(np.float64) for t in tangents]
    wanted = case.in_dtype(np.dtype(np.float64)).derive(wide, launch.NUMPY, "naive")
    for name, expected in wanted.items():
        got = found[name]
        finite = np.abs(expected[np.isfinite(expected)])
        size = 10 * case.steepest() * max(1.0, float(finite.max(initial=0.0)))
        of_sums = case.problem().acc_dtype if name.startswith("lse") else case.q.dtype
        assert_close_arrays(got, expected, of_sums, f"{name} of {case} by {rung}", size)


@pytest.mark.fuzz
@pytest.mark.parametrize(("target", "rung"), RUNGS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["", "packed"])
@at_most(30)
@given(data=st.data())
def test_every_rung_has_the_derivatives_of_the_textbook(
    target: str, rung: str, is_packed: bool, data: Any
) -> None:
    dtypes, on_a_device = (np.float32, np.float64), target == "cuda"
    is_half = on_a_device and rung in on_cuda.HALVES
    if is_half:
        dtypes = (FLOAT16, BFLOAT16)
    if is_packed:
        lengths = st.integers(1, 4) if on_a_device else st.integers(1, 40)
        case = data.draw(on_cuda.packed_cases(dtypes, lengths, on_cuda.DIMS))
    elif is_half:
        case = data.draw(cases(dtypes, **SMALL_HALVES, features=FEATURES))
    elif data.draw(st.booleans(), "wide heads"):
        # In float64, the smallest tiles of the widest heads need more memory than many GPUs have.
        case = data.draw(wide_cases((np.float32,), SMALL, FEATURES))
    elif on_a_device:
        case = data.draw(on_cuda.tiny(*dtypes, features=FEATURES))
    else:
        case = data.draw(cases(dtypes, features=FEATURES))
    tangents = data.draw(directions(case, case.q.dtype))
    if data.draw(st.booleans()):
        tangents[data.draw(st.integers(0, 2))] = None
    check(case, tangents, target, rung)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
def test_a_row_that_sees_no_key_has_derivatives_of_zero(target: str, rung: str) -> None:
    rng = np.random.default_rng(1)
    shapes = (1, 7, 3), (1, 6, 3), (1, 6, 4), (1, 7, 4), (1, 7), (1, 7, 3), (1, 6, 3), (1, 6, 4)
    *arrays, dlse, q, k, v = (rng.standard_normal(shape) for shape in shapes)
    options = {"is_causal": True, "causal_offset": -2}
    case, tangents = Case(*arrays, options=options, tile=(3, 4), dlse=dlse), (q, k, v)
    if target == "cuda" and rung in on_cuda.HALVES:
        case, tangents = case.in_dtype(FLOAT16), [x.astype(FLOAT16) for x in tangents]
    check(case, tangents, target, rung)
    found = derive(case, tangents, target, rung)
    for name in ("out_tangent", "lse_tangent", "dq"):
        assert not np.any(found[name][:, :2]), name


def test_the_public_functions_return_the_derivatives_in_the_shapes_of_the_operands() -> None:
    rng = np.random.default_rng(2)
    q, k, v, dout, *tangents = (
        rng.standard_normal((2, heads, seq, 8), np.float32)
        for heads, seq in ((4, 9), (1, 11), (1, 11), (4, 9), (4, 9), (1, 11), (1, 11))
    )
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": True}
    jvp = kernels.flash_attention_jvp(q, k, v, *tangents, **options)
    twice = kernels.flash_attention_double_backward(*tangents, dout, q, k, v, **options)
    case = Case(q, k, v, dout, options, (8, 8))
    wanted = case.in_dtype(np.dtype(np.float64)).derive(
        [t.astype(np.float64) for t in tangents], launch.NUMPY, "naive"
    )
    names = ("out", "out_tangent", "lse", "lse_tangent")
    of_twice = ("dq", "dk", "dv", "out_tangent", "lse_tangent")
    for got, name in zip((*jvp, *twice), (*names, *of_twice), strict=True):
        size = max(1.0, float(np.abs(wanted[name]).max()))
        assert_close_arrays(got, wanted[name], np.float32, name, size)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_later_calls_of_the_same_layout_read_their_own_operands(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    for _ in range(3):
        q, k, v, *tangents = rng.standard_normal((6, 2, 9, 8)).astype(dtype)
        found = kernels.flash_attention_jvp(q, k, v, *tangents, is_causal=True)
        wide = (x.astype(np.float64) for x in (q, k, v, *tangents))
        wanted = kernels.flash_attention_jvp(*wide, is_causal=True, rung="naive")
        for got, right in zip(found, wanted, strict=True):
            size = max(1.0, float(np.abs(right).max()))
            assert_close_arrays(got, right, got.dtype, size=size)


def test_missing_tangents_are_zeros() -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout, tangent = (rng.standard_normal((2, 5, 4)) for _ in range(5))
    zero = np.zeros_like(k)
    short = kernels.flash_attention_jvp(q, k, v, tangent, None, None, is_causal=True)
    long = kernels.flash_attention_jvp(q, k, v, tangent, zero, zero, is_causal=True)
    short += kernels.flash_attention_double_backward(None, tangent, None, dout, q, k, v)
    long += kernels.flash_attention_double_backward(zero, tangent, zero, dout, q, k, v)
    for one, other in zip(short, long, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=10)
@given(st.sampled_from(TANGENTS), st.booleans())
def test_a_tangent_of_another_shape_or_dtype_is_refused(name: str, of_dtype: bool) -> None:
    x = np.ones((2, 5, 4), np.float32)
    wrong = x.astype(np.float64) if of_dtype else x[:, 1:]
    tangents: dict[str, Any] = {**dict.fromkeys(TANGENTS), name: wrong}
    for function, further in (
        (kernels.flash_attention_jvp, ()),
        (kernels.flash_attention_double_backward, (x,)),
    ):
        operands = (
            (x, x, x, *tangents.values()) if not further else (*tangents.values(), x, x, x, x)
        )
        with pytest.raises(TypeError if of_dtype else ValueError, match=name):
            function(*operands)


def test_second_derivatives_need_that_of_the_score_mod() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 4))

    def read_slope(score: float, *place: int) -> float:
        return float(repr(slope_of_bowl(score, *place)))  # which no rule differentiates

    pair = bowl, read_slope
    kernels.flash_attention_jvp(x, x, x, x, x, x, score_mod=pair, rung="naive")
    with pytest.raises(ValueError, match="second derivative"):
        kernels.flash_attention_double_backward(x, x, x, x, x, x, x, score_mod=pair, rung="naive")
    kernels.flash_attention_double_backward(x, x, x, x, x, x, x, score_mod=bowl, rung="naive")


def test_the_jvp_takes_twice_the_memory_of_the_forward_pass() -> None:
    q, k, v, *tangents = np.random.default_rng(0).standard_normal((6, 2, 1024, 64))

    def most(function: Any, *operands: Any) -> int:
        """Return the largest size of the arrays that a warm call holds at a time."""
        function(*operands)
        tracemalloc.start()
        try:
            function(*operands)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    forward = most(kernels.flash_attention_forward, q, k, v)
    assert most(kernels.flash_attention_jvp, q, k, v, *tangents) <= 2 * forward
