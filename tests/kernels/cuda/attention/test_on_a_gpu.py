"""Attention on a GPU: tensor cores, long sequences, equal bits from run to run, and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.cuda.runtime.arrays import pool
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32

from ....support.attention.float8 import PRECISIONS
from ....support.attention.large_scores import NAMES, large_case
from ....support.attention.on_cuda import RUNGS, draw, run
from ....support.attention.option_examples import option_examples
from ....support.attention.option_table import TENSOR_CORES
from ....support.attention.strategies import MASK_MODS, SCORE_MODS, Case, cases
from ....support.layouts import on_device
from ....support.tolerances import assert_close_arrays

pytestmark = pytest.mark.cuda
LENGTHS = st.sampled_from([1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 385])
LEADS = st.sampled_from([[2], [2, 2]])
#: Rung, dtype, head_dim and value dim; few, for each is a kernel to compile.
KINDS = [
    ("flash3_wgmma", FLOAT16, 64, 64), ("flash3_wgmma", BFLOAT16, 128, 128),
    ("flash3_wgmma", FLOAT16, 40, 24), ("flash3_wgmma", BFLOAT16, 136, 256),
    ("flash2_mma", FLOAT16, 64, 64), ("flash2_mma", BFLOAT16, 128, 128),
    ("flash2_mma", FLOAT16, 33, 65), ("flash2_mma", BFLOAT16, 256, 1),
    ("flash2_split", FLOAT32, 64, 64), ("flash2_split", FLOAT32, 128, 128),
    ("flash2_split", FLOAT32, 33, 65), ("flash2_split", FLOAT32, 256, 1),
]  # fmt: skip
in_both_modes = pytest.mark.parametrize(
    "deterministic", [True, False], ids=["deterministic", "by atomics"]
)


@in_both_modes
@pytest.mark.parametrize(("rung", "dtype", "head_dim", "value_dim"), KINDS, ids=str)
@given(data=st.data())
def test_tensor_cores_agree_with_the_textbook(
    rung: str, dtype: Any, head_dim: int, value_dim: int, deterministic: bool, data: Any
) -> None:
    case = data.draw(cases((dtype,), LENGTHS, st.just(max(head_dim, value_dim)), LEADS))
    if rung == "flash3_wgmma":
        case.options["scale"] = abs(case.options.get("scale", 0.1))
    case.q, case.k = case.q[..., :head_dim], case.k[..., :head_dim]
    case.v, case.dout = case.v[..., :value_dim], case.dout[..., :value_dim]
    case.check(run(case, rung, deterministic=deterministic), f"by {rung}")


#: Option → what a call has of it.
OPTIONS = option_examples(2, 300, 410, FLOAT16)
_STATES = np.random.default_rng(3).integers(0, 2, (2, 3, 4))
_STATES[0, 1] = _STATES[1, :, 2] = (
    0  # rows whose keys are all masked, and keys that every row masks
)
OPTIONS["blocks of whole tiles"] = {"block_mask": kernels.BlockMask(_STATES, 300, 410, 128)}


@in_both_modes
@pytest.mark.parametrize(
    ("rung", "dtype"),
    [("flash3_wgmma", FLOAT16), ("flash2_mma", FLOAT16), ("flash2_split", FLOAT32)],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_tensor_cores_have_every_option(
    option: str, deterministic: bool, rung: str, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 2, n, 64)) for n in (300, 410, 410, 300))
    options = {"is_causal": True, "causal_offset": 110, **OPTIONS[option]}
    case = Case(q, k, v, dout, options, (16, 16)).in_dtype(dtype)
    case.check(run(case, rung, deterministic=deterministic), f"with {option}")


#: Rung, dtype and dim of calls with large scores.
LARGE = [
    ("flash2", FLOAT32, 64), ("flash2_split", FLOAT32, 64),
    *(("flash2_mma", dtype, 64) for dtype in (BFLOAT16, FLOAT16)),
    *(("flash3_wgmma", *one) for one in ((BFLOAT16, 64), (FLOAT16, 64), (FLOAT16, 128), (BFLOAT16, 256))),
]  # fmt: skip


@in_both_modes
@pytest.mark.parametrize(("rung", "dtype", "dim"), LARGE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_large_scores_have_their_probabilities(
    name: str, rung: str, dtype: Any, dim: int, deterministic: bool
) -> None:
    if (rung, name) == ("flash3_wgmma", "a negative scale"):
        pytest.skip("flash3_wgmma takes a positive scale")
    for n, keys in ((40, 40), (300, 300), (4, 1100)):
        case = large_case(name, dtype, n, keys, dim)
        spoiled = [on_device(np.full(case.v.size, np.nan)) for _ in range(8)]
        del spoiled  # results get this memory
        case.check(run(case, rung, deterministic=deterministic), f"of {n} rows and {keys} keys")


@pytest.mark.parametrize("dim", [64, 128])
def test_both_passes_compute_the_same_scores_on_hopper(dim: int) -> None:
    # Scores whose roundings, if they differed, would make e^32 of a probability.
    q, k, v, dout = draw(0, *[(2, 2, 300, dim)] * 4)
    for options in ({}, {"softcap": 1e9}, {"alibi_slopes": np.array([1e6, 3e7], np.float32)}):
        case = Case(q * 3e4, k * 3e4, v, dout, options, (16, 16)).in_dtype(BFLOAT16)
        results = run(case, "flash3_wgmma")
        # Σ_i P_ij over the keys is 1, so that no gradient of v is larger than all of dout.
        bound = np.abs(case.dout.astype(np.float64)).sum(axis=2, keepdims=True).max()
        assert np.abs(results["dv"].astype(np.float64)).max() <= bound
        assert all(np.isfinite(array.astype(np.float64)).all() for array in results.values())


def many(name: str, seq_q: int, seq_k: int, heads: int = 4) -> Case:
    """Return a call of 64 columns with many options at once: each set is compiled once."""
    kv_heads = heads // 2 if name == "masked" else heads
    q, k, v, dout, dlse, mask = draw(
        11, (heads, seq_q, 64), *[(kv_heads, seq_k, 64)] * 2, (heads, seq_q, 64), (heads, seq_q),
        (heads, 1, seq_k), dtype=np.float32,
    )  # fmt: skip
    options: dict[str, Any] = {"dropout_p": 0.2, "seed": 2**63 + 5, "is_causal": True}
    if name == "masked":
        slopes = np.linspace(0.01, 0.1, heads, dtype=np.float32)
        seen = np.random.default_rng(1).random((seq_q, seq_k)) < 0.7
        seen[:, seq_k // 3 : seq_k // 2] = False  # keys that every row masks
        more = {"attn_mask": seen, "alibi_slopes": slopes, "softcap": 20.0, "enable_gqa": True}
    elif name == "of 2022":
        more = {"attn_mask": mask, "causal_offset": 100}
    else:
        rng = np.random.default_rng(2)
        states = rng.integers(0, 4, (1, -(-seq_q // 48), -(-seq_k // 32)))
        blocks = kernels.BlockMask(states, seq_q, seq_k, (48, 32), rng.random((2, 48, 32)) < 0.5)
        mods = {"mask_mod": MASK_MODS[0], "score_mod": SCORE_MODS[1]}
        more = {"attn_mask": mask, "block_mask": blocks, "causal_offset": 100, **mods}
    return Case(q, k, v, dout, {**options, **more}, (1, 1), dlse)


#: Each rung and a set of options that it has.
MANY = [("flash2", "masked"), ("flash2", "blocks"), ("flash1", "of 2022"), ("naive", "masked")]
PLAIN = [(rung, "") for rung in (*RUNGS, *TENSOR_CORES)]


@pytest.mark.parametrize(("rung", "name"), [*PLAIN, *MANY])
def test_results_are_the_same_bits_in_every_run(rung: str, name: str) -> None:
    case = many(name, 261, 195) if name else None
    if case is None:
        arrays = draw(9, *[(2, 3, 700, 64)] * 4)
        dtype = FLOAT16 if rung in TENSOR_CORES else FLOAT32
        case = Case(*arrays, options={"is_causal": True}, tile=(1, 1)).in_dtype(dtype)
    first = run(case, rung)
    for _ in range(250):
        again = run(case, rung)
        assert all(np.array_equal(first[name], again[name]) for name in first)


def test_float8_results_are_the_same_bits_in_every_run() -> None:
    q, k, v = (on_device(x.astype(BFLOAT16)) for x in draw(0, *[(2, 8, 1000, 128)] * 3))
    results = [
        [x.copy_to_host().tobytes() for x in kernels.flash_attention_forward(q, k, v, precision=p)]
        for p in PRECISIONS[3:] * 250
    ]
    assert all(one == results[0] for one in results)


@pytest.mark.parametrize(("rung", "name"), [pair for pair in MANY if pair[0] != "naive"])
def test_no_option_takes_memory_for_all_scores(rung: str, name: str) -> None:
    memory, length, heads = pool(), 2048, 8
    assert memory is not None
    case = many(name, length, length, heads)
    held = heads * length * 64 * 4
    before = memory.reset_peak()
    run(case, rung)
    # The operands; out and gradients, of groups apart and together; and an eighth of the scores.
    assert memory.peak() - before <= 10 * held + heads * length * length * 4 // 8


def _butterfly(length: int) -> tuple[dict[str, Any], dict[Any, Any]]:
    mask = kernels.BlockMask.butterfly(length, length, 64)
    seen = {(0, row): np.flatnonzero(mask.visible(row, 1, 0, length)[0, 0]) for row in (0, 40000)}
    return {"block_mask": mask}, seen


def _causal(length: int) -> tuple[dict[str, Any], dict[Any, Any]]:
    places = ((0, 0), (3, 1000), (7, length - 1))
    return {"is_causal": True}, {(head, row): np.arange(row + 1) for head, row in places}


@pytest.mark.parametrize(
    ("make", "deterministic"), [(_causal, True), (_causal, False), (_butterfly, True)]
)
def test_memory_is_linear_in_the_length(make: Any, deterministic: bool) -> None:
    """65,536 rows and columns: S would be 128 GB; delta, lse and the gradients are a few dozen MB."""
    heads, length = 8, 65536
    q, k, v, dout = draw(10, *[(heads, length, 64)] * 4, dtype=np.float32)
    options, seen = make(length)
    memory = pool()
    assert memory is not None
    before = memory.reset_peak()
    results = run(Case(q, k, v, dout, options, (1, 1)), deterministic=deterministic)
    # The operands and results; float32 split into terms, as many bytes as q, k, v and dout; sums of dq.
    assert memory.peak() - before <= (8 + 5) * q.nbytes + (64 << 20)
    for (head, row), cols in seen.items():
        keys, values = (x[head, cols].astype(np.float64) for x in (k, v))
        scores = keys @ q[head, row] / 8
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        expected, gradient = probs @ values, dout[head, row].astype(np.float64)
        ds = probs * (values @ gradient - expected @ gradient)
        what = f"row {row} of head {head}"
        assert_close_arrays(results["out"][head, row], expected, np.float32, what)
        assert_close_arrays(results["dq"][head, row], ds @ keys / 8, np.float32, f"dq, {what}")
