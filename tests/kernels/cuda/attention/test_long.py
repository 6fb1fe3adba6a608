"""Attention on a GPU: long sequences, equal bits from run to run, and memory; the simulator has neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels import launch
from kernels.cuda.runtime.arrays import pool
from kernels.problem.operands import make_operands
from kernels.runtime.targets import cuda

from ....support.attention.on_cuda import RUNGS, draw, run
from ....support.attention.strategies import MASK_MODS, SCORE_MODS, Case
from ....support.layouts import on_device
from ....support.tolerances import assert_close_arrays

pytestmark = pytest.mark.cuda


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
        seen[:, seq_k // 3 : seq_k // 2] = False  # keys that nobody sees
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


@pytest.mark.parametrize(("rung", "name"), MANY)
def test_many_options_give_equal_bits_from_run_to_run(rung: str, name: str) -> None:
    equal_bits(many(name, 261, 195), rung)


@pytest.mark.parametrize(("rung", "name"), [pair for pair in MANY if pair[0] != "naive"])
def test_no_option_takes_memory_for_all_scores(rung: str, name: str) -> None:
    memory, length, heads = pool(), 2048, 8
    assert memory is not None
    case = many(name, length, length, heads)
    arrays = {x: on_device(getattr(case, x)) for x in ("q", "k", "v", "dout", "dlse")}
    mask, dout, dlse = on_device(case.options["attn_mask"]), arrays.pop("dout"), arrays.pop("dlse")
    problem = case.problem(rung=rung)
    options = {**case.options, "attn_mask": mask}
    operands = make_operands(launch.CUDA.memory, problem, *arrays.values(), arrays=options)
    before = memory.reset_peak()
    out, lse, rest = launch.forward(launch.CUDA, problem, operands)
    operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=dout, dlse=dlse)
    launch.backward(launch.CUDA, problem, operands, with_mask=case.has_mask_gradient)
    results = 6 * heads * length * 64 * 4  # out, dq, dk and dv, of groups apart and together
    scores = heads * length * length * 4
    assert memory.peak() - before <= results + scores // 8


def equal_bits(case: Case, rung: str) -> None:
    first = run(case, rung)
    for _ in range(250):
        again = run(case, rung)
        assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("rung", RUNGS)
def test_results_are_equal_bit_for_bit_from_run_to_run(rung: str) -> None:
    q, k, v, dout = draw(9, *[(1, 4, 300, 40)] * 4, dtype=np.float32)
    equal_bits(Case(q, k, v, dout, {"is_causal": True}, (1, 1)), rung)


@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_is_linear_in_the_length(deterministic: bool) -> None:
    """65,536 rows and columns: S would be 128 GB; delta, lse and the gradients are a few dozen MB."""
    heads, length = 8, 65536
    q, k, v, dout = draw(10, *[(heads, length, 64)] * 4, dtype=np.float32)
    case = Case(q, k, v, dout, {"is_causal": True}, (1, 1))
    seen = {(head, row): np.arange(row + 1) for head, row in ((0, 0), (3, 1000), (7, length - 1))}
    linear_memory(case, seen, 4 * heads * length * 4, deterministic=deterministic)


def test_memory_of_a_block_mask_is_linear_in_the_length() -> None:
    heads, length = 8, 65536
    q, k, v, dout = draw(10, *[(heads, length, 64)] * 4, dtype=np.float32)
    mask = kernels.BlockMask.butterfly(length, length, 64)
    case = Case(q, k, v, dout, {"block_mask": mask}, (1, 1))
    seen = {(0, row): np.flatnonzero(mask.visible(row, 1, 0, length)[0, 0]) for row in (0, 40000)}
    linear_memory(case, seen, 64 << 20)


def linear_memory(case: Case, seen: dict[Any, Any], most: int, **more: Any) -> None:
    """Check the peak of memory, and some rows against the textbook.

    Args:
        case: (heads, length, dim) of float32.
        seen: (head, row) → the columns that the row sees.
        most: Bytes beside the results.
        more: Options.
    """
    memory = pool()
    assert memory is not None
    problem = case.problem(**more)
    q, k, v, dout = (cuda.to_device(x) for x in (*case.operands, case.dout))
    operands = make_operands(launch.CUDA.memory, problem, q, k, v)
    if launch.CUDA.pick(problem).name == "flash2_split":
        # Float32 is split into terms, as many bytes as q, k, v and dout; sums of dq are apart from it.
        most += (4 if problem.deterministic else 5) * case.q.nbytes
    before = memory.reset_peak()
    out, lse, rest = launch.forward(launch.CUDA, problem, operands)
    operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=dout)
    dq = launch.backward(launch.CUDA, problem, operands).dq
    assert memory.peak() - before <= 4 * case.q.nbytes + most  # out, dq, dk and dv
    outs, dqs = out.copy_to_host(), dq.copy_to_host()
    for (head, row), cols in seen.items():
        keys, values = (x[head, cols].astype(np.float64) for x in (case.k, case.v))
        scores = keys @ case.q[head, row] * problem.scale
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        expected, gradient = probs @ values, case.dout[head, row].astype(np.float64)
        ds = probs * (values @ gradient - expected @ gradient)
        what = f"row {row} of head {head}"
        assert_close_arrays(outs[head, row], expected, np.float32, what)
        assert_close_arrays(dqs[head, row], ds @ keys * problem.scale, np.float32, f"dq, {what}")
