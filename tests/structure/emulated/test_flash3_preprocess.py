"""The kernel before Hopper's backward kernels, on the emulated GPU: lse, delta and zeros for sums of dQ."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels import make_problem
from kernels.common.online_softmax import LARGE
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.backward.layout import BOTH_WIDTH
from kernels.cuda.attention.flash3_wgmma.backward.score_options import delta_factor
from kernels.cuda.attention.flash3_wgmma.layout import PADDING
from kernels.cuda.ptx.emulated.numbers import from_bits, to_bits
from kernels.cuda.ptx.wgmma import ROWS
from kernels.problem.operands import Operands
from kernels.problem.packed_sequences import Sequences
from kernels.problem.question import Problem
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.emulated.hopper import emulated_hopper_backward
from ...support.examples import at_most
from ...support.layouts import laid, layouts


def _preprocessed(problem: Problem, operands: Operands) -> Any:
    """Run the kernel; what it writes is NaN before."""
    with emulated_hopper_backward():
        plan = flash3_wgmma_backward._plan(problem.unseeded, 0)
        return flash3_wgmma_backward._preprocessed(plan, problem, operands)


def _operands(data: Any, shape: tuple[int, ...], head_dim: int, dtype: str) -> Operands:
    """Draw the operands of a call of shape (batch, heads, seq_q, value_dim), each in a layout of its own.

    Some rows see nothing; of these, out is NaN.  Some are large.
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    values = [rng.standard_normal(shape) for _ in range(2)]
    dout, out = (laid(to_bits(x, dtype), data.draw(layouts(4))) for x in values)
    lse, rest, dlse = (rng.standard_normal(shape[:3]).astype(np.float32) for _ in range(3))
    lse[rng.random(lse.shape) < 0.2] = -np.inf
    lse = lse * rng.choice(np.array([1, -1e4, np.finfo(np.float32).max / 9], np.float32), lse.shape)
    lse = np.where(lse == np.inf, -lse, lse)
    lse, rest, dlse = (laid(x, data.draw(layouts(3))) for x in (lse, rest, dlse))
    if 0 not in out.strides[:3]:
        out[np.isneginf(lse)] = 0xFFFF
    q = np.zeros((*shape[:3], head_dim), np.uint16)
    has_dlse = data.draw(st.booleans(), "has_dlse")
    given = {"lse": lse, "lse_rest": rest, "dout": dout, "dlse": dlse if has_dlse else None}
    return Operands(q, q, q, out=out, **given)


def _expected(operands: Operands, dtype: str) -> tuple[Any, ...]:
    """Return shifts, tops and D in float64; of rows that see nothing infinity, 0 and 0."""
    dout, out = (from_bits(x, dtype).astype(np.float64) for x in (operands.dout, operands.out))
    delta = (dout * out).sum(axis=-1)
    if operands.dlse is not None:
        delta -= operands.dlse
    sees_none = np.isneginf(operands.lse)
    near = np.where(sees_none, 0.0, operands.lse)
    is_large = np.abs(near) * np.log2(np.e) > LARGE
    shift = np.where(is_large, operands.lse_rest, near) * np.log2(np.e)
    shift = np.where(sees_none, np.inf, shift)
    return shift, np.where(is_large, near, 0.0), np.where(sees_none, 0.0, delta)


def _check(call: Any, operands: Operands, dtype: str, places: list[tuple[int, slice]]) -> None:
    """Compare what the kernel wrote with float64.

    Args:
        call: What the kernel prepared.
        operands: Of the call.
        dtype: Of dout and out.
        places: Of each sequence, its first padded row and its rows.
    """
    factor = delta_factor(call.plan.features, call.plan.keep_scale)
    shift, top, delta = _expected(operands, dtype)
    heads = delta.shape[0] * delta.shape[1]
    shift, top, delta = (x.reshape(heads, -1) for x in (shift, top, factor * delta))
    # Of 64 rows the shifts, and then the tops.
    pairs = call.shifts.reshape(heads, -1, 2, ROWS)
    found, found_top = (pairs[:, :, i].reshape(heads, -1) for i in range(2))
    for first, rows in places:
        stop = first + rows.stop - rows.start
        np.testing.assert_allclose(found[:, first:stop], shift[:, rows], 1e-6)
        np.testing.assert_array_equal(found_top[:, first:stop], top[:, rows])
        np.testing.assert_allclose(call.delta[:, first:stop], delta[:, rows], 1e-5, 1e-5)
        end = -(-stop // PADDING) * PADDING
        assert np.isposinf(found[:, stop:end]).all()
        assert (found_top[:, stop:end] == 0).all()
        assert (call.delta[:, stop:end] == 0).all()
    problem = call.problem
    if problem.deterministic or max(problem.head_dim, problem.value_dim) > BOTH_WIDTH:
        assert call.sums.size == 1  # which stands for none
    else:
        assert call.sums.size >= heads * call.plan.rows * problem.head_dim
        assert not call.sums.any()


WIDTHS = st.sampled_from([8, 24, 40, 64, 72, 128, 136, 256])


@at_most(12)
@given(st.data())
def test_lse_and_delta_are_laid_out_with_padding(data: Any) -> None:
    lead = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]), "batch and heads")
    seq_q = data.draw(st.sampled_from([1, 75, 128, 130]), "seq_q")
    head_dim, value_dim = data.draw(WIDTHS, "head_dim"), data.draw(WIDTHS, "value_dim")
    dtype = data.draw(st.sampled_from(["float16", "bfloat16"]), "dtype")
    operands = _operands(data, (*lead, seq_q, value_dim), head_dim, dtype)
    q, k, v = (
        np.zeros((*lead, *x), FLOAT16) for x in ((seq_q, head_dim), (5, head_dim), (5, value_dim))
    )
    is_ordered, dropout_p = (
        data.draw(st.booleans(), "deterministic"),
        data.draw(st.sampled_from([0, 0.2])),
    )
    problem = make_problem(q, k, v, deterministic=is_ordered, dropout_p=dropout_p, seed=3)
    if dtype == "bfloat16":
        problem = replace(problem, dtype=BFLOAT16)
    call = _preprocessed(problem, operands)
    _check(call, operands, dtype, [(0, slice(0, seq_q))])


@at_most(8)
@given(st.data())
def test_packed_sequences_begin_with_a_tile_of_their_own(data: Any) -> None:
    heads, width = data.draw(st.integers(1, 2), "heads"), data.draw(WIDTHS, "value_dim")
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 17, 128, 140]), min_size=1, max_size=4))
    ends = np.cumsum([0, *lengths])
    seq_q, count = max(int(ends[-1]), 1), len(lengths)
    ends[-1] = seq_q
    operands = _operands(data, (1, heads, seq_q, width), 64, "float16")
    q, k, v = (np.zeros((heads, *x), FLOAT16) for x in ((seq_q, 64), (count, 64), (count, width)))
    problem = make_problem(q, k, v, deterministic=data.draw(st.booleans(), "deterministic"))
    sequences = Sequences(ends, np.arange(count + 1), seq_q, count)
    call = _preprocessed(replace(problem, sequences=sequences), operands)
    places = [
        ((start // PADDING + i) * PADDING, slice(start, stop))
        for i, (start, stop) in enumerate(pairwise(ends)) if stop > start
    ]  # fmt: skip
    _check(call, operands, "float16", places)
