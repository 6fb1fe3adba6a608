"""A part of an attention takes its dropout bits from the place of the part in the whole mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.problem.question import DropoutOrigin

from ..support.attention.on_cuda import Packed, forwards
from ..support.attention.strategies import Case
from ..support.examples import at_most

RATE, SEED, HEADS = 0.5, 9, 5
RUNGS = [
    ("cpu", "flash2"), ("cpu", "naive"), ("numpy", "flash2"),
    *(pytest.param("cuda", x, marks=pytest.mark.emulated) for x in ("naive", "flash1", "flash2")),
]  # fmt: skip


@dataclass(repr=False)
class Part(Case):
    """A call that is a part of a larger one."""

    origin: Any = None

    def problem(self, **more: Any) -> kernels.Problem:
        return replace(super().problem(**more), origin=self.origin)


@pytest.mark.parametrize(("target", "rung"), RUNGS)
@at_most(8)
@given(
    origin=st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9)),
)
def test_a_part_has_the_bits_of_its_place(target: str, rung: str, origin: Any, sizes: Any) -> None:
    """With q = 0 and unit vectors for v the results are the bits."""
    (first, row, col), (batch, heads, seq) = origin, sizes
    q, unit = (
        np.zeros((batch, heads, seq, 4)),
        np.broadcast_to(np.eye(seq), (batch, heads, seq, seq)),
    )
    options = {"dropout_p": RATE, "seed": SEED}
    case = Part(
        q, q, unit.copy(), unit.copy(), options, (4, 4), None, DropoutOrigin(HEADS, first, row, col)
    )
    found = case.run(launch.TARGETS[target], rung, place=forwards if target == "cuda" else None)
    flat = np.arange(batch)[:, None] * HEADS + np.arange(heads) + first
    whole = kernels.dropout_mask((flat.max() + 1, row + seq, col + seq), RATE, SEED)
    expected = whole[flat][:, :, row:, col:] / RATE / seq
    out, dv = (x if target != "cuda" else x.copy_to_host() for x in (found["out"], found["dv"]))
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(dv, expected.swapaxes(2, 3), rtol=1e-12)


def test_packed_sequences_count_on_from_the_first_of_the_call() -> None:
    lengths, heads, first = (5, 3), 2, 3
    sums, q = np.cumsum([0, *lengths]), np.zeros((heads, 8, 4))
    v = np.broadcast_to(np.concatenate([np.eye(8)[:n] for n in lengths]), (heads, 8, 8)).copy()
    case = Packed(q, q, v, None, {"dropout_p": RATE, "seed": SEED}, (4, 4), None, (sums, sums))
    problem = replace(case.problem(), origin=DropoutOrigin(HEADS, first * HEADS + 1))
    case.problem = lambda **more: problem  # type: ignore[method-assign]
    out = case.forward(launch.CPU)["out"]
    whole = kernels.dropout_mask((first + 2, HEADS, 8, 8), RATE, SEED)
    for number, length in enumerate(lengths):
        own = out[:, sums[number] : sums[number + 1], :length]
        expected = whole[first + number, 1 : 1 + heads, :length, :length] / RATE / length
        np.testing.assert_allclose(own, expected, rtol=1e-12)
