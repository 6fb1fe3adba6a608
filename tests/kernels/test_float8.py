"""Attention with float8 products on the CPU: the rounding of a GPU, and its error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
import minitorch
from kernels import launch
from kernels.problem.operands import make_operands
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32

from ..support.attention.float8 import PRECISIONS, root_mean_square, wanted, with_outliers
from ..support.tolerances import assert_close_arrays

DIMS = st.sampled_from([8, 40, 64, 72, 128])
LENGTHS = st.sampled_from([1, 2, 63, 128, 129, 200])


def _drawn(seed: int, lead: tuple[int, ...], *sizes: tuple[int, int], dtype: Any = FLOAT16) -> Any:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((*lead, *size)).astype(dtype) for size in sizes]


@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from([FLOAT16, BFLOAT16]), seq_q=LENGTHS,
    seq_k=LENGTHS, head=DIMS, value=DIMS, precision=st.sampled_from(PRECISIONS),
    target=st.sampled_from(["cpu", "numpy"]), is_causal=st.booleans(),
)  # fmt: skip
def test_operands_are_rounded_and_nothing_else(
    seed: int, dtype: Any, seq_q: int, seq_k: int, head: int, value: int, precision: str, target: str,
    is_causal: bool,
) -> None:  # fmt: skip
    q, k, v = _drawn(seed, (1, 2), (seq_q, head), (seq_k, head), (seq_k, value), dtype=dtype)
    q *= dtype.type(2.0 ** (seed % 9 - 4))  # other units
    own = launch.TARGETS[target]
    problem = kernels.make_problem(q, k, v, is_causal=is_causal, precision=precision)
    found = launch.forward(own, problem, make_operands(own.memory, problem, q, k, v))
    visible = np.tri(seq_q, seq_k, dtype=bool) if is_causal else None
    right = wanted(q, k, v, precision, visible=visible)
    assert_close_arrays(found[0], right.out, dtype, "out")
    # In float32 an element may fall on the other side of a midpoint.
    slack = np.abs(found[1] - right.lse)
    assert slack.max() <= (2e-2 if "hadamard" in precision else 1e-4)


@given(seed=st.integers(0, 2**31), precision=st.sampled_from(PRECISIONS))
def test_the_error_is_some_per_cent(seed: int, precision: str) -> None:
    q, k, v = _drawn(seed, (2,), (100, 64), (300, 64), (300, 64))
    out, _ = kernels.flash_attention_forward(q, k, v, precision=precision)
    exact = wanted(q, k, v, precision).exact
    # Three roundings of 2⁻⁴ at most, of which most are less than half as large.
    assert root_mean_square(out - exact) < 0.1 * root_mean_square(exact)


def test_a_random_rotation_lessens_the_error_of_outliers() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (with_outliers(rng, 4, rows, 128).astype(FLOAT16) for rows in (512, 2048, 2048))
    exact, _ = kernels.flash_attention_forward(*(x.astype(np.float64) for x in (q, k, v)))
    errors = {
        precision: root_mean_square(
            kernels.flash_attention_forward(q, k, v, precision=precision)[0] - exact
        )
        for precision in PRECISIONS
    }
    assert errors["float8_e4m3"] > 1.5 * errors["float8_e4m3+hadamard"]
    # FlashAttention-3, table 3, with both techniques; the paper does not give its lengths.
    assert errors["float8_e4m3+blocks+hadamard"] <= 9.1e-3


def test_a_block_with_large_rows_leaves_the_others_their_digits() -> None:
    q, k, v = _drawn(0, (1,), (256, 64), (256, 64), (256, 64))
    q[:, :128] *= FLOAT16.type(2.0**-14)  # below the least number of the other rows' unit
    q[:, 128:] *= FLOAT16.type(64)
    scale = 2.0**12
    exact = wanted(q, k, v, PRECISIONS[0], scale).exact[:, :128]
    errors = [
        root_mean_square(
            kernels.flash_attention_forward(q, k, v, scale=scale, precision=precision)[0][:, :128]
            - exact
        )
        for precision in PRECISIONS[:2]
    ]
    assert errors[1] < 0.2 * errors[0]


def test_heads_may_share_keys_and_bounds_mask() -> None:
    q, k, v = _drawn(1, (2, 4), (70, 64), (90, 64), (90, 64))
    k, v = k[:, :2], v[:, :2]
    out, lse = kernels.flash_attention_forward(
        q, k, v, enable_gqa=True, window_size=(20, 5), causal_offset=10, precision=PRECISIONS[1]
    )
    distance = np.arange(90) - np.arange(70)[:, None] - 10
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    right = wanted(q, k, v, PRECISIONS[1], visible=(distance >= -20) & (distance <= 5))
    assert_close_arrays(out, right.out, FLOAT16, "out")
    assert_close_arrays(lse, right.lse, FLOAT32, "lse")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(precision: str, value: float) -> None:
    q, k, v = _drawn(2, (1,), (5, 16), (130, 16), (130, 16))
    q[0, 3, 2] = value
    out, _ = kernels.flash_attention_forward(q, k, v, precision=precision)
    assert np.isnan(out[0, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=1)).all()


def test_rows_of_zeros_have_a_unit() -> None:
    q, k, v = (np.zeros((1, 4, 16), FLOAT16) for _ in range(3))
    out, lse = kernels.flash_attention_forward(q, k, v, precision=PRECISIONS[0])
    assert not out.any()
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


@pytest.mark.parametrize(
    ("operand", "options", "words"),
    [
        ((FLOAT32, 64), {}, ("operands of 16 bits", "float32", "convert")),
        ((FLOAT16, 256), {}, ("up to 128", "(256, 256)")),
        ((FLOAT16, 20), {}, ("multiples of 8", "(20, 20)")),
        ((FLOAT16, 64), {"softcap": 3.0}, ("support the options scale, is_causal",)),
        ((FLOAT16, 64), {"dropout_p": 0.5, "seed": 1}, ("support the options scale, is_causal",)),
        ((FLOAT16, 64), {"scale": -1.0}, ("positive scale", "-1.0")),
    ],
    ids=lambda x: str(x[-1]) if isinstance(x, tuple) else "",
)
def test_what_is_not_supported_is_refused(operand: Any, options: Any, words: Any) -> None:
    dtype, dim = operand
    x = np.zeros((2, 4, dim), dtype)
    with pytest.raises(ValueError, match="float8") as error:
        kernels.flash_attention_forward(x, x, x, precision=PRECISIONS[0], **options)
    assert all(word in str(error.value) for word in words)


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
