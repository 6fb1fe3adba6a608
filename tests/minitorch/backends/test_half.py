"""float16 and bfloat16: stored in 16 bits, computed in float32, rounded once.

``tests/structure/cuda/test_half.py`` tests the device's conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers, sampled_from

import minitorch
from kernels.runtime.dtypes import (
    BFLOAT16,
    COMPUTE_DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_DTYPES,
    HALF_DTYPES,
    lowest,
    rounded,
)
from minitorch import FastBackend, SimpleBackend, Tensor, TensorBackend, from_numpy

from ...support.attention.on_cuda import RUNGS as CUDA_RUNGS
from ...support.attention.on_cuda import fitting, taken_by, tiny
from ...support.attention.on_cuda import run as run_on_device
from ...support.attention.strategies import Case
from ...support.half_numbers import Array, beside_the_ties, every_number, on_halves, same_bits
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import laid_out, lattice, on_every_backend

on_host = pytest.mark.parametrize(
    "backend", [pytest.param(SimpleBackend, id="simple"), pytest.param(FastBackend, id="fast")]
)


# --- conversions -----------------------------------------------------------------------------


@on_halves
@pytest.mark.parametrize("wide", COMPUTE_DTYPES, ids=str)
def test_every_number_survives_widening(dtype: Any, wide: Any) -> None:
    numbers = every_number(dtype)
    same_bits(rounded(rounded(numbers, wide), dtype), numbers)


@on_halves
def test_ties_go_to_the_even_number_and_nothing_is_rounded_twice(dtype: Any) -> None:
    numbers, nearest = beside_the_ties(dtype)
    same_bits(rounded(numbers, dtype), nearest)
    singles = numbers.astype(np.float32)
    exact = singles.astype(np.float64) == numbers
    same_bits(rounded(singles[exact], dtype), nearest[exact])


def test_what_the_libraries_round_once_is_rounded_as_they_do() -> None:
    numbers = np.random.default_rng(0).standard_normal(5000) * 10.0 ** np.arange(-25, 25).repeat(
        100
    )
    with np.errstate(over="ignore"):
        same_bits(rounded(numbers, FLOAT16), numbers.astype(np.float16))
        singles = numbers.astype(np.float32)
        same_bits(rounded(singles, BFLOAT16), singles.astype(ml_dtypes.bfloat16))


# --- tensors ---------------------------------------------------------------------------------

MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "neg": lambda a, b: -a,
    "exp": lambda a, b: a.exp(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "relu": lambda a, b: a.relu(),
    "number": lambda a, b: a + 0.1,
    "times a number": lambda a, b: a * 0.3,
    "minus a number": lambda a, b: a - 0.1,
    "over a number": lambda a, b: a / 3.0,
    "power": lambda a, b: (a * a) ** 1.5 if a.dtype == FLOAT32 else _power(a),
    "less": lambda a, b: a < 0.5,
    "sum": lambda a, b: a.sum(a.dims - 1),
    "maximum": lambda a, b: minitorch.max(a, 0),
    "copy": lambda a, b: a.contiguous(),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "equal": lambda a, b: a == b,
    "product": lambda a, b: a @ b.permute(1, 0),
}


def _power(a: Tensor) -> Tensor:
    """Return (a a)^1.5 in float32, rounded once, as one operation on 16 bits would."""
    wide = a.to(FLOAT32)
    return ((wide * wide) ** 1.5).to(a.dtype)


@on_every_backend
@on_halves
@pytest.mark.parametrize("operation", MAPS)
@given(data=data())
@settings(max_examples=4)
def test_an_operation_is_that_of_float32_rounded_once(
    operation: str, dtype: Any, backend: TensorBackend, data: DataObject
) -> None:
    shape = data.draw(integers(1, 4)), data.draw(integers(1, 9))
    arrays = [rounded(data.draw(lattice(shape)), dtype) for _ in range(2)]
    a, b = (data.draw(laid_out(array, backend)) for array in arrays)
    result = MAPS[operation](a, b)
    expected = MAPS[operation](a.to(FLOAT32), b.to(FLOAT32)).to_numpy()
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    same_bits(result.to_numpy(), rounded(expected, dtype))


@on_host
@on_halves
def test_a_sum_of_many_is_kept_in_float32(dtype: Any, backend: TensorBackend) -> None:
    """In 16 bits it would stop growing at 256 (bfloat16) or 2048 (float16)."""
    ones = minitorch.ones((5000,), backend, dtype=dtype)
    assert ones.sum().item() == float(np.array(5000.0, dtype))
    assert (ones.view(1, 5000) @ ones.view(5000, 1)).item() == float(np.array(5000.0, dtype))


@on_every_backend
@on_halves
def test_dtypes_mix_as_the_wider_one(dtype: Any, backend: TensorBackend) -> None:
    a = from_numpy(np.array([1.0, 2.0], dtype), backend, requires_grad=True)
    for wide in COMPUTE_DTYPES:
        b = from_numpy(np.array([0.1, 0.2], wide), backend, requires_grad=True)
        out = a * b
        assert out.dtype == wide
        out.sum().backward()
        assert a.grad is not None and b.grad is not None
        assert (a.grad.dtype, b.grad.dtype) == (dtype, wide)
    other = BFLOAT16 if dtype == FLOAT16 else FLOAT16
    with pytest.raises(TypeError, match=r"float16 and bfloat16 has no dtype .* convert one"):
        _ = a + a.to(other)
    # What an integer holds is not rounded before it is computed with.
    big = from_numpy(np.array([2049, 257]), backend)
    same_bits((a.detach() * 0.5 * big).to_numpy(), np.array([1024.5, 257.0], dtype))


@on_every_backend
@on_halves
@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
def test_a_conversion_and_its_gradient(dtype: Any, source: Any, backend: TensorBackend) -> None:
    array = rounded(np.random.default_rng(3).standard_normal((3, 4)), source)
    a = from_numpy(array.T, backend, requires_grad=True)
    for target in (dtype, dtype.name, dtype.type):
        b = a.to(target)
        assert b.dtype == dtype
        same_bits(b.to_numpy(), rounded(array.T, dtype))
    b = a.to(dtype)
    (b * b).sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == source
    expected = 2.0 * rounded(array.T, dtype).astype(np.float64)
    assert_close_arrays(a.grad.to_numpy().astype(dtype), expected, dtype)


@on_host
@on_halves
def test_a_row_of_minus_infinity_has_a_softmax(dtype: Any, backend: TensorBackend) -> None:
    rows = np.array([[-np.inf, -np.inf], [0.0, -np.inf], [lowest(dtype), 0.0]], dtype)
    a = from_numpy(rows, backend, requires_grad=True)
    for dim, expected in ((1, [[0, 0], [1, 0], [0, 1]]), (0, [[0, 0], [1, 0], [0, 1]])):
        out = minitorch.softmax(a, dim)
        assert out.to_numpy().tolist() == expected
        out.sum().backward()
        assert a.grad is not None and np.isfinite(a.grad.to_numpy()).all()
        a.zero_grad_()


# --- attention -------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("rung", CUDA_RUNGS)
@given(case=tiny(*HALF_DTYPES, features=("float mask", "alibi", "dlse")))
@settings(max_examples=4)
def test_every_rung_on_the_device_is_the_textbook(rung: str, case: Case) -> None:
    case = taken_by(rung, case)
    case.check(run_on_device(case, rung, fitting(rung, case.tile)), f"by {rung}")


def attended(operands: list[Array], dtype: Any, attend: Any, backend: TensorBackend) -> list[Array]:
    """Return out and the gradients of q, k and v in float64, computed in a dtype."""
    tensors = [from_numpy(x.astype(dtype), backend, requires_grad=True) for x in operands[:3]]
    out = attend(*tensors, is_causal=True)
    out.backward(from_numpy(operands[3].astype(dtype), backend))
    gradients = [t.grad for t in tensors if t.grad is not None]
    assert len(gradients) == 3 and all(gradient.dtype == dtype for gradient in gradients)
    return [x.to_numpy().astype(np.float64) for x in (out, *gradients)]


def composed_of_halves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attend, causal, by tensor operations that store scores and probabilities in 16 bits."""
    assert is_causal
    hidden = np.triu(np.full((q.shape[-2], k.shape[-2]), -np.inf), 1)
    penalty = minitorch.from_numpy(rounded(hidden, q.dtype), q.backend)
    scores = q @ k.permute(*range(k.dims - 2), k.dims - 1, k.dims - 2)
    return minitorch.softmax(scores * q.shape[-1] ** -0.5 + penalty, q.dims - 1) @ v


@on_every_backend
@on_halves
@given(seed=integers(0, 1000), scale=sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=3)
def test_attention_errs_no_more_than_its_composed_form(
    dtype: Any, backend: TensorBackend, seed: int, scale: float
) -> None:
    """Composed, scores and probabilities are rounded to 16 bits too; the sums of both are float32.

    Errors are root mean squares over several heads: the largest of few is a matter of chance, most of
    all in dq and dk where one key wins, for there the composed form subtracts a number from itself.
    """
    rng = np.random.default_rng(seed)
    shape = (4, 7, 4) if backend is not FastBackend else (2, 3, 40, 16)
    operands = [rounded(rng.standard_normal(shape) * scale, dtype) for _ in range(4)]
    exact = attended(operands, FLOAT64, minitorch.naive_attention, FastBackend)
    composed = attended(operands, dtype, composed_of_halves, backend)
    fused = attended(operands, dtype, Tensor.flash_attention, backend)
    half_unit = 2.0**-11 if dtype == FLOAT16 else 2.0**-8
    for name, got, other, wanted in zip(
        ("out", "dq", "dk", "dv"), fused, composed, exact, strict=True
    ):
        error, allowed = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (got, other))
        # By chance the composed form may round a few elements well; half a unit nobody can avoid.
        allowed = max(allowed, half_unit * np.sqrt(np.mean(wanted**2)))
        assert error <= (2 if name == "out" else 3) * allowed, f"{name}: {error} of {allowed}"


@on_every_backend
def test_scores_beyond_float16_are_right_in_both_forms(backend: TensorBackend) -> None:
    """q · k is 102,400, and the largest float16 65,504."""
    q = minitorch.from_numpy(np.full((1, 4, 64), 40, FLOAT16), backend)
    values = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(FLOAT16)
    v = minitorch.from_numpy(values, backend)
    for attend in (Tensor.flash_attention, minitorch.naive_attention):
        out, lse = attend(q, q, v, return_lse=True)
        assert (out.dtype, lse.dtype) == (FLOAT16, FLOAT32)
        mean = values.astype(np.float64).mean(axis=1)
        np.testing.assert_allclose(out.to_numpy()[0], mean.repeat(4, 0), 2e-3, 1e-3)
        np.testing.assert_allclose(lse.to_numpy(), 12800 + np.log(4), 1e-6)


@on_halves
@pytest.mark.parametrize("attend", [Tensor.flash_attention, minitorch.naive_attention])
def test_sums_of_attention_are_float32(attend: Any, dtype: Any) -> None:
    rng = np.random.default_rng(7)
    tensors = [
        from_numpy(rng.standard_normal((2, 5, 4)).astype(dtype), FastBackend, True) for _ in "qkv"
    ]
    out, lse = attend(*tensors, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, FLOAT32)
    lse.sum().backward()
    assert tensors[0].grad is not None and tensors[0].grad.dtype == dtype
