"""Attention with float8 products on a Hopper GPU: what rounding the operands gives, and its error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.targets import compute_capability, why_no_cuda

from ....support.attention.float8 import (
    PRECISIONS,
    assert_near,
    root_mean_square,
    wanted,
    with_outliers,
)
from ....support.layouts import on_device

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        why_no_cuda() is not None or compute_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
LENGTHS = st.sampled_from([1, 2, 63, 64, 127, 128, 129, 200, 385, 1000])
#: Kernels to compile: dtype, head_dim and value dim.
KINDS = st.sampled_from(
    [(FLOAT16, 64, 64), (BFLOAT16, 128, 128), (FLOAT16, 40, 24), (BFLOAT16, 72, 128)]
)


def _forward(*operands: Any, **options: Any) -> tuple[Any, Any]:
    found = kernels.flash_attention_forward(*map(to_device, operands), **options)
    return to_host(found[0]), to_host(found[1])


@given(
    seed=st.integers(0, 2**31), kind=KINDS, seq_q=LENGTHS, seq_k=LENGTHS, groups=st.integers(1, 3),
    precision=st.sampled_from(PRECISIONS), is_causal=st.booleans(), offset=st.integers(-100, 100),
)  # fmt: skip
def test_only_operands_and_probabilities_are_rounded(
    seed: int, kind: Any, seq_q: int, seq_k: int, groups: int, precision: str, is_causal: bool, offset: int
) -> None:  # fmt: skip
    (dtype, head, value), rng = kind, np.random.default_rng(seed)
    sizes = (2 * groups, seq_q, head), (2, seq_k, head), (2, seq_k, value)
    q, k, v = (rng.standard_normal((2, *size)).astype(dtype) for size in sizes)
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
    if is_causal:
        options |= {"is_causal": True, "causal_offset": offset}
    visible = np.tri(seq_q, seq_k, offset, dtype=bool) if is_causal else None
    found = _forward(q, k, v, precision=precision, **options)
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    assert_near(*found, wanted(q, k, v, precision, visible=visible), dtype)


def test_operands_have_any_strides() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 100, 3, 64)).astype(FLOAT16) for _ in range(3)]
    q, k, v = (array.transpose(0, 2, 1, 3) for array in arrays)
    operands = map(on_device, (q, k, v))
    found = kernels.flash_attention_forward(*operands, precision=PRECISIONS[3])
    assert_near(to_host(found[0]), to_host(found[1]), wanted(q, k, v, PRECISIONS[3]), FLOAT16)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_long_sequences_and_later_calls(precision: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):  # the first call records its launches, the others repeat them
        q, k, v = (rng.standard_normal((1, 2, 4000, 128)).astype(BFLOAT16) for _ in range(3))
        found = _forward(q, k, v, precision=precision, is_causal=True)
        right = wanted(q, k, v, precision, visible=np.tri(4000, dtype=bool))
        assert_near(*found, right, BFLOAT16)


def test_the_error_with_outliers_is_that_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (with_outliers(rng, 8, rows, 128).astype(FLOAT16) for rows in (1024, 4096, 4096))
    exact, _ = kernels.flash_attention_forward(*(x.astype(np.float64) for x in (q, k, v)))
    errors = [root_mean_square(_forward(q, k, v, precision=p)[0] - exact) for p in PRECISIONS]
    # FlashAttention-3, table 3; the paper does not give its lengths.
    assert errors[3] <= 9.1e-3
    assert errors[0] > 1.5 * errors[3]


def test_the_same_bits_in_every_run() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (to_device(rng.standard_normal((2, 8, 1000, 128)).astype(BFLOAT16)) for _ in range(3))
    first = None
    for _ in range(250):
        found = kernels.flash_attention_forward(q, k, v, precision=PRECISIONS[3])
        found = [to_host(x).view(np.uint8) for x in found]
        first = first or found
        assert all(np.array_equal(a, b) for a, b in zip(found, first, strict=True))


def test_the_plan_names_the_kernels() -> None:
    x = to_device(np.zeros((1, 2, 200, 64), FLOAT16))
    plan = kernels.plan(x, x, x, precision=PRECISIONS[0])
    assert plan.rung == "flash3_wgmma"
    for name in ("float8_rows", "float8_values", "flash3_float8"):
        assert name in str(plan)


def test_no_other_rung_has_float8() -> None:
    x = to_device(np.zeros((1, 2, 20, 64), FLOAT16))
    with pytest.raises(ValueError, match="no float8 products"):
        kernels.flash_attention_forward(x, x, x, precision=PRECISIONS[0], rung="flash2")
