"""Attention with float8 products: the rounding of a GPU on every target, and its error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
import minitorch
from kernels import launch
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.targets import compute_capability, why_no_cuda

from ..support.attention.float8 import (
    PRECISIONS,
    assert_near,
    root_mean_square,
    wanted,
    with_outliers,
)
from ..support.attention.strategies import Case
from ..support.layouts import on_device
from ..support.tolerances import assert_close_arrays

on_hopper = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        why_no_cuda() is not None or compute_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
#: Where operands are.
PLACES = ["numpy", "cpu", pytest.param("cuda", marks=on_hopper)]
LENGTHS = st.sampled_from([1, 2, 63, 128, 129, 200])
#: dtype, head_dim and value dim: on a GPU each is a kernel to compile.
KINDS = st.sampled_from(
    [
        (FLOAT16, 64, 64),
        (BFLOAT16, 128, 128),
        (FLOAT16, 40, 24),
        (BFLOAT16, 72, 128),
        (FLOAT16, 8, 8),
    ]
)


def _drawn(seed: int, lead: tuple[int, ...], *sizes: tuple[int, ...], dtype: Any = FLOAT16) -> Any:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((*lead, *size)).astype(dtype) for size in sizes]


def _forward(target: str, *operands: Any, **options: Any) -> tuple[Any, ...]:
    case = Case(*operands, dout=None, options=options, tile=(1, 1))
    place = on_device if target == "cuda" else None
    found = case.forward(launch.TARGETS[target], place=place)
    out, lse = found["out"], found["lse"]
    return (out.copy_to_host(), lse.copy_to_host()) if place else (out, lse)


@pytest.mark.parametrize("target", PLACES)
@given(
    seed=st.integers(0, 2**31), kind=KINDS, seq_q=LENGTHS, seq_k=LENGTHS, groups=st.integers(1, 3),
    precision=st.sampled_from(PRECISIONS), offset=st.none() | st.integers(-100, 100),
    beside=st.booleans(),
)  # fmt: skip
def test_operands_and_probabilities_are_rounded_and_nothing_else(
    target: str, seed: int, kind: Any, seq_q: int, seq_k: int, groups: int, precision: str,
    offset: int | None, beside: bool,
) -> None:  # fmt: skip
    dtype, head, value = kind
    sizes = (2 * groups, seq_q, head), (2, seq_k, head), (2, seq_k, value)
    q, k, v = (_drawn(seed + i, (2,), x, dtype=dtype)[0] for i, x in enumerate(sizes))
    q *= dtype.type(2.0 ** (seed % 9 - 4))  # other units
    if beside:  # heads beside the last dimension
        q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
    options |= {} if offset is None else {"is_causal": True, "causal_offset": offset}
    visible = None if offset is None else np.tri(seq_q, seq_k, offset, dtype=bool)
    found = _forward(target, q, k, v, precision=precision, **options)
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    right = wanted(q, k, v, precision, visible=visible)
    if target == "cuda":
        assert_near(found[0], found[1], right, dtype)
        return
    assert_close_arrays(found[0], right.out, dtype, "out")
    # In float32 an element may fall on the other side of a midpoint.
    with np.errstate(invalid="ignore"):
        slack = np.where(found[1] == right.lse, 0.0, np.abs(found[1] - right.lse))
    assert slack.max() <= (2e-2 if "hadamard" in precision else 1e-4)


@pytest.mark.parametrize("target", PLACES[1:])
def test_a_random_rotation_reduces_the_error_of_outliers(target: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (with_outliers(rng, 4, rows, 128).astype(FLOAT16) for rows in (512, 2048, 2048))
    exact, _ = kernels.flash_attention_forward(*(x.astype(np.float64) for x in (q, k, v)))
    errors = [
        root_mean_square(_forward(target, q, k, v, precision=p)[0] - exact) for p in PRECISIONS
    ]
    assert errors[0] > 1.5 * errors[2] and errors[0] > 1.5 * errors[3]
    # FlashAttention-3, table 3, with both techniques; the paper does not give its lengths.
    assert errors[3] <= 9.1e-3


def test_a_block_with_large_rows_leaves_the_others_their_digits() -> None:
    q, k, v = _drawn(0, (1,), (256, 64), (256, 64), (256, 64))
    q[:, :128] *= FLOAT16.type(2.0**-14)  # below the least number of the other rows' unit
    q[:, 128:] *= FLOAT16.type(64)
    scale = 2.0**12
    exact = wanted(q, k, v, PRECISIONS[0], scale).exact[:, :128]
    errors = [
        root_mean_square(_forward("cpu", q, k, v, scale=scale, precision=p)[0][:, :128] - exact)
        for p in PRECISIONS[:2]
    ]
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_nan_and_no_other_row_is(precision: str, value: float) -> None:
    q, k, v = _drawn(2, (1,), (5, 16), (130, 16), (130, 16))
    q[0, 3, 2] = value
    q[0, 1] = 0  # whose unit is that of no number
    out, _ = kernels.flash_attention_forward(q, k, v, precision=precision)
    assert np.isnan(out[0, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=1)).all()


def test_a_window_masks_keys() -> None:
    q, k, v = _drawn(1, (2, 2), (70, 64), (90, 64), (90, 64))
    options = {"window_size": (20, 5), "causal_offset": 10, "precision": PRECISIONS[1]}
    out, _ = kernels.flash_attention_forward(q, k, v, **options)
    distance = np.arange(90) - np.arange(70)[:, None] - 10
    visible = (distance >= -20) & (distance <= 5)
    assert_close_arrays(out, wanted(q, k, v, PRECISIONS[1], visible=visible).out, FLOAT16, "out")


def test_there_is_no_gradient() -> None:
    x = np.ones((2, 4, 16), FLOAT16)
    out, lse = kernels.flash_attention_forward(x, x, x, precision=PRECISIONS[0])
    with pytest.raises(ValueError, match="forward pass only"):
        kernels.flash_attention_backward(out, x, x, x, out, lse, precision=PRECISIONS[0])
    own = minitorch.from_numpy(x, minitorch.FastBackend)
    result = own.flash_attention(own, own, precision=PRECISIONS[0])
    np.testing.assert_array_equal(result.to_numpy(), out)
    own.requires_grad_(True)
    with pytest.raises(ValueError, match=r"forward pass only.*detach"):
        own.flash_attention(own, own, precision=PRECISIONS[0])


@pytest.mark.parametrize("precision", [pytest.param(p, marks=on_hopper) for p in PRECISIONS])
def test_long_sequences_and_later_calls_on_hopper(precision: str) -> None:
    for seed in range(3):  # the first call records its launches, the others repeat them
        q, k, v = _drawn(seed, (1, 2), *[(4000, 128)] * 3, dtype=BFLOAT16)
        found = kernels.flash_attention_forward(
            *map(on_device, (q, k, v)), precision=precision, is_causal=True
        )
        right = wanted(q, k, v, precision, visible=np.tri(4000, dtype=bool))
        out, lse = (x.copy_to_host() for x in found)
        assert_near(out, lse, right, BFLOAT16)
