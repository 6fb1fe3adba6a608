"""A part of an attention takes its dropout bits from the place of the part in the whole mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.problem.operands import Operands
from kernels.problem.packed_sequences import Sequences
from kernels.problem.question import DropoutOrigin

from ..support.layouts import on_device

RATE, SEED, HEADS, SEQ = 0.5, 9, 5, 24
HOST = [("cpu", "flash2"), ("cpu", "naive"), ("numpy", "flash2")]
DEVICE = [("cuda", "naive"), ("cuda", "flash1"), ("cuda", "flash2")]
ORIGINS = st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9))
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


def check_bits(target: str, rung: str, origin: Any, sizes: Any, bring: Any, back: Any) -> None:
    """Compare with ``dropout_mask``: with q = 0 and v = 1 the results are the bits."""
    (first, row, col), (batch, heads, seq_q, seq_k) = origin, sizes
    q = np.zeros((batch, heads, seq_q, 4))
    k = np.zeros((batch, heads, seq_k, 4))
    v, dout = (np.broadcast_to(np.eye(n), (batch, heads, n, n)).copy() for n in (seq_k, seq_q))
    problem = kernels.make_problem(q, k, v, dropout_p=RATE, seed=SEED, rung=rung)
    problem = replace(problem, origin=DropoutOrigin(HEADS, first, row, col))
    operands = Operands(*map(bring, (q, k, v)))
    place = launch.TARGETS[target]
    out, lse, rest = launch.forward(place, problem, operands)
    given = operands.having(out=out, lse=lse, lse_rest=rest, dout=bring(dout))
    flat = np.arange(batch)[:, None] * HEADS + np.arange(heads) + first
    whole = kernels.dropout_mask((flat.max() + 1, row + seq_q, col + seq_k), RATE, SEED)
    expected = whole[flat][:, :, row:, col:] / RATE / seq_k
    np.testing.assert_allclose(back(out), expected, rtol=1e-12)
    if seq_q == seq_k:  # dout has the width of v
        gradients = launch.backward(place, problem, given)
        np.testing.assert_allclose(back(gradients.dv), expected.swapaxes(2, 3), rtol=1e-12)


@pytest.mark.parametrize(("target", "rung"), HOST)
@given(origin=ORIGINS, sizes=SIZES)
def test_a_part_has_the_bits_of_its_place(target: str, rung: str, origin: Any, sizes: Any) -> None:
    check_bits(target, rung, origin, sizes, np.asarray, np.asarray)


@pytest.mark.simulator
@pytest.mark.usefixtures("quick_barriers")
@pytest.mark.parametrize(("target", "rung"), DEVICE)
@settings(max_examples=5)
@given(origin=ORIGINS, sizes=SIZES)
def test_a_part_has_the_bits_of_its_place_on_a_device(
    target: str, rung: str, origin: Any, sizes: Any
) -> None:
    check_bits(target, rung, origin, sizes, on_device, lambda x: x.copy_to_host())


def test_packed_sequences_count_on_from_the_first_of_the_call() -> None:
    lengths, heads, first = (5, 3), 2, 3
    cu = np.cumsum([0, *lengths])
    q = np.zeros((heads, 8, 4))
    v = np.broadcast_to(np.concatenate([np.eye(8)[:n] for n in lengths]), (heads, 8, 8)).copy()
    problem = replace(
        kernels.make_problem(q, q, v, dropout_p=RATE, seed=SEED),
        sequences=Sequences(cu, cu, 8, 8),
        origin=DropoutOrigin(HEADS, first * HEADS + 1),
    )
    operands = Operands(q, q, v)
    out, *_ = launch.forward(launch.CPU, problem, operands)
    whole = kernels.dropout_mask((first + 2, HEADS, 8, 8), RATE, SEED)
    for number, length in enumerate(lengths):
        own = out[:, cu[number] : cu[number + 1], :length]
        expected = whole[first + number, 1 : 1 + heads, :length, :length] / RATE / length
        np.testing.assert_allclose(own, expected, rtol=1e-12)
