"""Attention on tensor cores: each rung agrees with the textbook on a GPU, and the fastest is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import launch, make_problem
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kernels.runtime.targets import compute_capability

from ....support.attention.large_scores import NAMES as LARGE_NAMES
from ....support.attention.large_scores import large_case
from ....support.attention.on_cuda import on_device
from ....support.attention.option_examples import option_examples
from ....support.attention.option_table import TENSOR_CORES
from ....support.attention.strategies import Case

LENGTHS = st.sampled_from([1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 385])
#: dtype, head_dim and value dim; few, for each is a kernel to compile.
KINDS = {
    "flash3_wgmma": [
        (FLOAT16, 64, 64),
        (BFLOAT16, 128, 128),
        (FLOAT16, 40, 24),
        (BFLOAT16, 136, 256),
    ],
    "flash2_mma": [(FLOAT16, 64, 64), (BFLOAT16, 128, 128), (FLOAT16, 33, 65), (BFLOAT16, 256, 1)],
}

#: Option → what a call has of it.
OPTIONS = option_examples(2, 300, 410, FLOAT16)


def wide_case(option: str, deterministic: bool, dim: int = 64) -> Case:
    """Return a call of one option, causal, whose lengths no tile divides."""
    rng = np.random.default_rng(0)
    shapes = (2, 2, 300, dim), (2, 2, 410, dim), (2, 2, 410, dim), (2, 2, 300, dim)
    q, k, v, dout = (rng.standard_normal(shape).astype(FLOAT16) for shape in shapes)
    options = {"is_causal": True, "causal_offset": 110, "deterministic": deterministic}
    return Case(q, k, v, dout, {**options, **OPTIONS[option]}, (16, 16))


@st.composite
def half_cases(draw: Any, kinds: list[tuple[Any, int, int]]) -> Case:
    """Draw a call of 16-bit operands with bounds and groups of heads."""
    dtype, head_dim, value_dim = draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    seq_q, seq_k = draw(LENGTHS), draw(LENGTHS)
    batch, key_heads, groups = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
    )
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
    if draw(st.booleans()):
        options["is_causal"] = True
    if draw(st.booleans()):
        options["window_size"] = (draw(st.integers(-1, 150)), draw(st.integers(-1, 150)))
    if options.keys() & {"is_causal", "window_size"}:
        options["causal_offset"] = draw(st.integers(-100, 100))
    heads = key_heads * groups
    sizes = ((heads, seq_q, head_dim), (key_heads, seq_k, head_dim), (key_heads, seq_k, value_dim))
    arrays = []
    for count, seq, dim in (*sizes, (heads, seq_q, value_dim)):
        beside = draw(st.booleans())  # heads beside the last dimension, as models have them
        shape = (batch, seq, count, dim) if beside else (batch, count, seq, dim)
        array = rng.standard_normal(shape)
        arrays.append((array.swapaxes(1, 2) if beside else array).astype(dtype))
    q, k, v, dout = arrays
    return Case(q, k, v, dout, options, (16, 16))


@pytest.mark.cuda
@pytest.mark.parametrize("rung", TENSOR_CORES)
@given(data=st.data())
def test_a_rung_of_tensor_cores_agrees_with_the_textbook(rung: str, data: Any) -> None:
    case = data.draw(half_cases(KINDS[rung]))
    case.check(_on_host(case.run(launch.CUDA, rung, place=on_device)), f"by {rung}")


#: Of float32: dtype, head_dim and value dim.
WIDE_KINDS = [(FLOAT32, 64, 64), (FLOAT32, 128, 128), (FLOAT32, 33, 65), (FLOAT32, 256, 1)]


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [True, False])
@given(data=st.data())
def test_float32_on_tensor_cores_agrees_with_the_textbook(deterministic: bool, data: Any) -> None:
    case = data.draw(half_cases(WIDE_KINDS))
    case.options["deterministic"] = deterministic
    case.check(_on_host(case.run(launch.CUDA, "flash2_split", place=on_device)), "float32, split")


@pytest.mark.cuda
@given(data=st.data())
def test_atomics_agree_with_the_textbook(data: Any) -> None:
    case = data.draw(half_cases(KINDS["flash2_mma"]))
    case.options["deterministic"] = False
    case.check(_on_host(case.run(launch.CUDA, "flash2_mma", place=on_device)), "by atomics")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rung", "dtype"),
    [("flash3_wgmma", FLOAT16), ("flash2_mma", FLOAT16), ("flash2_split", FLOAT32)],
)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_rung_has_every_option(option: str, deterministic: bool, rung: str, dtype: Any) -> None:
    case = wide_case(option, deterministic).in_dtype(dtype)
    results = _on_host(case.run(launch.CUDA, rung, place=to_device))
    case.check(results, f"with {option}")


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rung", TENSOR_CORES)
def test_blocks_of_whole_tiles_are_the_textbooks(rung: str, deterministic: bool, dim: int) -> None:
    rng = np.random.default_rng(3)
    states = rng.integers(0, 2, (2, 3, 4))
    states[0, 1] = states[1, :, 2] = 0  # rows that see nothing, keys that nobody sees
    shapes = (2, 2, 300, dim), (2, 2, 410, dim), (2, 2, 410, dim), (2, 2, 300, dim)
    q, k, v, dout = (rng.standard_normal(shape).astype(FLOAT16) for shape in shapes)
    options = {"block_mask": kernels.BlockMask(states, 300, 410, 128)}
    case = Case(q, k, v, dout, {**options, "deterministic": deterministic}, (16, 16))
    case.check(_on_host(case.run(launch.CUDA, rung, place=to_device)), "with whole blocks")


@pytest.mark.cuda
@pytest.mark.parametrize("rung", TENSOR_CORES)
def test_the_same_call_gives_the_same_bits_250_times(rung: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (to_device(rng.standard_normal((2, 3, 700, 64)).astype(FLOAT16)) for _ in range(3))
    first, *others = (_forward(q, k, v, rung) for _ in range(250))
    assert all(np.array_equal(first, other) for other in others)


def _forward(q: Any, k: Any, v: Any, rung: str) -> Any:
    call = launch_call(q, k, v, rung=rung, is_causal=True)
    return np.concatenate([to_host(x).reshape(-1).astype(np.float32) for x in call])


@pytest.mark.cuda
def test_deterministic_gradients_are_the_same_bits_50_times() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 3, 700, 64)).astype(FLOAT16) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True, "dropout_p": 0.1, "seed": 3}, (16, 16))
    first, *others = (
        _on_host(case.run(launch.CUDA, "flash2_mma", place=to_device)) for _ in range(50)
    )
    for other in others:
        for name, array in first.items():
            assert np.array_equal(array, other[name]), name


def launch_call(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Return out and lse of arrays on the device."""
    return kernels.flash_attention_forward(q, k, v, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("rung", TENSOR_CORES)
def test_a_row_that_sees_no_key_is_zero_and_scores_may_be_large(rung: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 200, 64)).astype(FLOAT16) for _ in range(3))
    options = {"rung": rung, "is_causal": True, "causal_offset": -50}
    out, lse = launch_call(*map(to_device, (q, k, v)), **options)
    assert (to_host(out)[:, :, :50] == 0).all() and np.isneginf(to_host(lse)[:, :, :50]).all()
    assert np.isfinite(to_host(out).astype(np.float32)).all()
    large = (60 * rng.standard_normal((1, 1, 130, 64))).astype(FLOAT16)  # beyond float16 in QKᵀ
    case = Case(large, large, v[:, :1, :130], v[:, :1, :130], {"scale": 1.0}, (16, 16))
    results = _on_host(case.run(launch.CUDA, rung, place=to_device))
    assert all(np.isfinite(array.astype(np.float32)).all() for array in results.values())


#: Calls of large scores on Hopper: names, dtype and dim.  Each kind of call is kernels to compile.
LARGE_CALLS = [
    *((name, dtype, 64) for name in LARGE_NAMES for dtype in (BFLOAT16, FLOAT16)),
    *(
        (name, dtype, dim)
        for name in ("large queries", "softcap", "a row of the least number", "rows of both kinds")
        for dtype, dim in ((FLOAT16, 128), (BFLOAT16, 192), (BFLOAT16, 256))
    ),
]


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
@pytest.mark.parametrize(("name", "dtype", "dim"), LARGE_CALLS, ids=str)
def test_rows_of_large_scores_have_their_probabilities_on_hopper(
    name: str, dtype: Any, dim: int, deterministic: bool
) -> None:
    if name == "a negative scale":
        pytest.skip("flash3_wgmma takes a positive scale")
    for n, keys in ((40, 40), (300, 300), (70, 1100)):
        case = large_case(name, dtype, n, keys, dim)
        spoiled = [to_device(np.full(case.v.size, np.nan)) for _ in range(8)]
        del spoiled  # results get this memory
        found = case.run(launch.CUDA, "flash3_wgmma", place=on_device, deterministic=deterministic)
        case.check(_on_host(found), f"of {n} rows and {keys} keys")


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128])
def test_both_passes_compute_the_same_scores(dim: int) -> None:
    # Scores whose roundings, if they differed, would make e^32 of a probability.
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 2, 300, dim)) for _ in range(4))
    for options in ({}, {"softcap": 1e9}, {"alibi_slopes": np.array([1e6, 3e7], np.float32)}):
        case = Case(q * 3e4, k * 3e4, v, dout, options, (16, 16)).in_dtype(BFLOAT16)
        results = _on_host(case.run(launch.CUDA, "flash3_wgmma", place=on_device))
        # Σ_i P_ij over the keys is 1, so that no gradient of v is larger than all of dout.
        bound = np.abs(case.dout.astype(np.float64)).sum(axis=2, keepdims=True).max()
        assert np.abs(results["dv"].astype(np.float64)).max() <= bound
        assert all(np.isfinite(array.astype(np.float64)).all() for array in results.values())


def _on_host(results: dict[str, Any]) -> dict[str, Any]:
    return {name: to_host(array) for name, array in results.items()}


@pytest.mark.cuda
def test_auto_takes_the_fastest_rung_of_the_device() -> None:
    best = "flash3_wgmma" if compute_capability() >= (9, 0) else "flash2_mma"
    q = np.ones((1, 2, 64, 64), FLOAT16)
    assert launch.CUDA.pick(make_problem(q, q, q)).name == best
