"""Float32 on tensor cores without a GPU: what splitting keeps of a number, and attention with that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda.attention.flash2_split.operands import Split, split_operands
from kernels.cuda.ptx.emulated.numbers import from_bits
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import FLOAT32

from ...support.attention.on_cuda import forward, run
from ...support.attention.strategies import Case
from ...support.device.emulated_gpu import emulated_gpu, emulated_only
from ...support.layouts import on_device
from ...support.tensor_cores.sums import cut_sum, sums_cut_off
from ...support.tolerances import assert_close_arrays

#: Precision → terms of a number.
TERMS = {"float32": 2, "tf32": 1}


def _split(array: Any, width: int, precision: str) -> tuple[Any, Any]:
    """Return the terms as float64, (batch, heads, terms, seq, width), and the units."""
    batch, heads, seq, _ = array.shape
    with emulated_gpu():
        found = split_operands((on_device(array),), (width,), TERMS[precision], has_norms=True)
    one = Split(*map(to_host, found[0]))
    terms = from_bits(one.bits, "float16").astype(np.float64)
    return terms.reshape(batch, heads, -1, seq, width), one


@emulated_only
@settings(max_examples=12)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 3, 5), (2, 7, 16), (1, 40, 24), (1, 500, 4)]),
    st.floats(-30, 30),
    st.sampled_from(sorted(TERMS)),
)
def test_terms_add_up_to_the_number(
    seed: int, shape: tuple[int, int, int], magnitude: float, precision: str
) -> None:
    rng = np.random.default_rng(seed)
    # Of any size, and of sizes far apart.
    array = rng.standard_normal((1, *shape)) * 10.0 ** (magnitude + rng.uniform(-6, 0, (1, *shape)))
    array = array.astype(np.float32)
    width = 16 * -(-shape[-1] // 16)
    terms, one = _split(array, width, precision)
    assert not terms[..., shape[-1] :].any()
    unit = one.unit.astype(np.float64)[..., None, None]
    assert (np.frexp(unit)[0] == 0.5).all()  # a power of two
    largest = np.abs(array).max(axis=(-1, -2), keepdims=True)
    assert (np.frexp(largest / unit)[1] == 15).all()  # from 2**14 up to 2**15
    off = np.abs(unit * terms.sum(axis=2)[..., : shape[-1]] - array)
    bits, floor = (22, 39) if precision == "float32" else (11, 38)
    assert (off <= 2.0**-bits * np.abs(array) + 2.0**-floor * largest).all()
    norm = np.linalg.norm(array.astype(np.float64), axis=-1).max(axis=-1)
    np.testing.assert_allclose(one.norm * one.unit, norm, 1e-3 if precision == "tf32" else 1e-5)


@emulated_only
def test_non_finite_numbers_are_in_the_first_term_and_do_not_set_the_scale() -> None:
    array = np.array([[[[np.inf, 1.5, -np.inf, np.nan, -3e38]]]], np.float32)
    terms, one = _split(array, 16, "float32")
    np.testing.assert_array_equal(
        terms[0, 0, 0, 0, :4] * one.unit[0, 0], [np.inf, 0, -np.inf, np.nan]
    )
    assert not terms[0, 0, 1, 0, [0, 2, 3]].any()
    assert np.isfinite(one.norm).all()


@emulated_only
def test_what_tensor_cores_cut_off_costs_a_score_no_more_than_rounding() -> None:
    width, scale = 128, 128**-0.5
    rng = np.random.default_rng(0)
    # Of one sign: whatever is cut off is lost on the same side.
    q, k, v = (rng.uniform(0.5, 1, (1, 1, rows, width)) for rows in (16, 1, 1))
    case = Case(q, k, v, q, {}, (4, 4)).in_dtype(FLOAT32)
    q, k = (x[0, 0].astype(np.float64) for x in case.operands[:2])
    with emulated_gpu(), sums_cut_off():
        lse = forward(case, "flash2_split")["lse"]
    exact = (q @ k.T)[:, 0] * scale  # of one key
    unit = 2.0**-23 * exact.max()
    assert np.abs(lse[0, 0] - exact).max() <= 3 * unit
    # The same products, all in one sum.
    (q_high, q_low), (k_high, k_low) = (
        (high, (x - high).astype(np.float16)) for x in (q, k) for high in [x.astype(np.float16)]
    )
    chain = np.zeros((16, 1), np.float32)
    for i in range(0, width, 16):
        for x, y in ((q_low, k_high), (q_high, k_low), (q_high, k_high)):
            chain = cut_sum(chain, x[:, i : i + 16], y[:, i : i + 16].T)
    assert np.abs(chain[:, 0] * scale - exact).max() >= 6 * unit


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_what_was_summed_weighs_the_same_after_each_new_maximum(width: int) -> None:
    """What the compiler makes of a product and a difference, one rounding or two, only a GPU shows."""
    rng = np.random.default_rng(width)
    q, k, v = (rng.standard_normal((1, 2, 1024, width)) for _ in range(3))
    case = Case(q, k, v, q, {}, (4, 4)).in_dtype(FLOAT32)
    lse = run(case, "flash2_split")["lse"]
    wanted = case.oracle()["lse"]
    assert np.abs(lse - wanted).max() <= 2.0**-22 * np.abs(wanted).max()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4, 16, 512, 64), (1, 1, 16400, 64), (1, 2, 2000, 200)])
def test_blocks_of_a_gpu_agree_on_the_largest_number_of_a_head(
    shape: tuple[int, int, int, int],
) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, (*shape[:2], 1, 1))
    array = array.astype(np.float32)
    largest, operand = np.abs(array).max(axis=(-1, -2)), to_device(array)
    width, first = 16 * -(-shape[-1] // 16), None
    for _ in range(20):  # blocks come in another order each time
        splits = split_operands((operand, operand), (width, width), 2)
        for one in splits:
            bits, unit = to_host(one.bits), to_host(one.unit)
            assert (np.frexp(largest / unit)[1] == 15).all()  # from 2**14 up to 2**15
            first = bits if first is None else first
            np.testing.assert_array_equal(bits, first)


@emulated_only
def test_a_head_that_is_repeated_is_split_once() -> None:
    array = np.ones((2, 1, 3, 8), np.float32)
    repeated = np.ndarray((2, 4, 3, 8), np.float32, array, 0, (96, 0, 32, 4))
    with emulated_gpu():
        (one,) = split_operands((on_device(repeated),), (16,), 2)
    assert one.bits.shape == (2, 4, 6, 16)
    assert one.bits.strides[1] == one.unit.strides[1] == 0


def _case(options: dict[str, Any], scales: tuple[float, ...] = (1, 1, 1, 1)) -> Case:
    """Return a call whose lengths and widths no tile divides."""
    rng = np.random.default_rng(0)
    shapes = (1, 2, 21, 13), (1, 2, 35, 13), (1, 2, 35, 24), (1, 2, 21, 24)
    arrays = [
        rng.standard_normal(shape) * scale for shape, scale in zip(shapes, scales, strict=True)
    ]
    return Case(*arrays, options, (4, 4)).in_dtype(FLOAT32)  # type: ignore[arg-type]


@emulated_only
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
@pytest.mark.parametrize("precision", TERMS)
def test_attention_of_float32_is_the_textbooks(precision: str, deterministic: bool) -> None:
    case = _case({"is_causal": True, "causal_offset": 14})
    with emulated_gpu():
        found = run(case, "flash2_split", precision=precision, deterministic=deterministic)
    if precision == "float32":
        case.check(found, "float32")
        return
    for name, wanted in case.oracle().items():  # as close as TF32: eight roundings to 11 bits
        size = np.abs(wanted).max()
        np.testing.assert_allclose(found[name] / size, wanted / size, 0, 8 * 2.0**-11, err_msg=name)


@emulated_only
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_numbers_of_any_size_are_the_textbooks(deterministic: bool) -> None:
    case = _case({"deterministic": deterministic}, (1e-11, 1e12, 1e-16, 1e20))
    with emulated_gpu():
        found = run(case, "flash2_split")
    for name, wanted in case.oracle().items():
        size = np.abs(wanted).max()
        np.testing.assert_allclose(found[name] / size, wanted / size, 0, 1e-5, err_msg=name)


@emulated_only
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_options_bend_hide_and_drop_in_float32(deterministic: bool) -> None:
    rng = np.random.default_rng(3)
    options = {
        "softcap": 2.0,
        "alibi_slopes": np.array([0.5, 0.1]),
        "attn_mask": rng.standard_normal((2, 1, 35)),
        "dropout_p": 0.6,
        "seed": 7,
        "mask_mod": lambda batch, head, row, col: (row + 2 * col + head) % 5 != 0,
        "deterministic": deterministic,
    }
    case = replace(_case(options), dlse=rng.standard_normal((1, 2, 21)).astype(np.float32))
    with emulated_gpu():
        case.check(run(case, "flash2_split"), "options")


@emulated_only
def test_keys_beyond_the_bounds_do_not_set_the_scale() -> None:
    case = _case({"is_causal": True, "causal_offset": 4, "window_size": (7, 0)})
    clean = case.oracle()
    for array in (case.k, case.v):  # such as a cache's room for what is to come
        array[..., 25:, :] = 1e30
    with emulated_gpu():
        found = run(case, "flash2_split")
    for name, wanted in clean.items():
        assert_close_arrays(found[name], wanted, FLOAT32, what=name, size=8.0)
