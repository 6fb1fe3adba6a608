"""Extreme scores: attention is finite and right wherever composed attention is, in both passes.

A few draws through every entrance; ``make fuzz`` draws for minutes.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import launch
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from minitorch import FastBackend, SimpleBackend, Tensor, naive_attention

from ..minitorch.functions.test_flash_attention import attend
from ..support.attention.on_cuda import (
    DIMS,
    RUNGS,
    TILES,
    fitting,
    packed_cases,
    taken_by,
)
from ..support.attention.on_cuda import run as run_on_cuda
from ..support.attention.strategies import Case
from ..support.device.emulated_gpu import FUZZ_ONLY, emulated_gpu, emulated_only
from ..support.fuzzing.draws import Notes
from ..support.fuzzing.extreme import check, extreme_cases, scaled

SHORT = settings(max_examples=int(os.environ.get("MINITORCH_EXAMPLES", "15")))
FEW = settings(max_examples=max(int(os.environ.get("MINITORCH_EXAMPLES", "60")) // 20, 1))
SIZES = (
    st.sampled_from([1, 2, 3, 5, 8, 9, 20, 40, 130]),
    st.sampled_from([1, 3, 8, 16, 17, 64]),
    st.sampled_from([[], [2], [2, 2]]),
)
#: Few rows and many keys, which are divided into parts, as in decoding.
DECODING = st.sampled_from([4, 700]), SIZES[1], st.just([])
LONG = st.sampled_from([2, 8, 40, 600, 1100]), SIZES[1], st.sampled_from([[], [2]])
SMALL = st.sampled_from([1, 2, 7]), SIZES[1], SIZES[2]
WIDE, HALVES = (FLOAT32, FLOAT64), (FLOAT16, BFLOAT16)


def by(target: launch.Target, rung: str) -> Any:
    """Return a function that runs a rung on a case, with its own tile and with another."""

    def run(case: Case) -> Any:
        for tile in (None, case.tile):
            yield case.run(target, rung, tile)

    return run


def public(case: Case) -> Any:
    """Return out and lse: the gradients of arrays have no more than lse of large rows."""
    yield {name: x for name, x in case.call().items() if name in ("out", "lse")}


def tensors(attention: Any, backend: Any) -> Any:
    return lambda case: [attend(attention, case, backend)]


def emulated(rung: str) -> Any:
    """Return a function that runs a rung of tensor cores on the emulated GPU, in both modes."""

    def run(case: Case) -> Any:
        for deterministic in (True, False):
            with emulated_gpu():
                found = run_on_cuda(case, rung, deterministic=deterministic)
            yield found

    return run


#: Entrance → its cases, and the function that yields their results.
ENTRANCES: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "flash2 on the CPU": (extreme_cases(WIDE, *SIZES), by(launch.CPU, "flash2")),
    "flash2 on the CPU, long": (extreme_cases(WIDE, *LONG), by(launch.CPU, "flash2")),
    "decoding on the CPU": (extreme_cases(WIDE, *DECODING), by(launch.CPU, "flash2")),
    "naive on the CPU": (extreme_cases(WIDE, *SIZES), by(launch.CPU, "naive")),
    "flash2 of NumPy": (extreme_cases(WIDE, *SIZES), by(launch.NUMPY, "flash2")),
    "naive of NumPy": (extreme_cases(WIDE, *SIZES), by(launch.NUMPY, "naive")),
    "public functions": (extreme_cases((*WIDE, *HALVES), *LONG), public),
    "packed sequences": (scaled(packed_cases(WIDE, *SIZES[:2])), by(launch.CPU, "flash2")),
    "tensors": (extreme_cases((*WIDE, *HALVES), *LONG), tensors(Tensor.flash_attention, FastBackend)),
    "simple tensors": (extreme_cases(WIDE, *SMALL), tensors(Tensor.flash_attention, SimpleBackend)),
    "composed tensors": (extreme_cases(WIDE, *SIZES), tensors(naive_attention, FastBackend)),
}  # fmt: skip
TINY = st.sampled_from([1, 5, 17, 35]), st.sampled_from([8, 16, 24]), st.sampled_from([[], [2]])
EMULATED_CASES = {
    "flash2_mma in 16 bits": (
        extreme_cases(HALVES, *TINY),
        emulated("flash2_mma"),
    ),
    "flash2_split": (
        extreme_cases((FLOAT32,), *TINY),
        emulated("flash2_split"),
    ),
    "flash3_wgmma": (
        extreme_cases(HALVES, *TINY),
        emulated("flash3_wgmma"),
    ),
}


def _check(cases: Any, run: Any, data: st.DataObject, notes: Notes, entrance: str) -> None:
    case = data.draw(cases)
    notes.begin(f"{entrance}: {case}")
    for found in run(case):
        check(case, found, f"by {entrance}")
    notes.count("right")


@pytest.mark.fuzz
@pytest.mark.parametrize("entrance", ENTRANCES)
@given(data=st.data())
@SHORT
def test_extreme_scores_are_right(entrance: str, data: st.DataObject, notes: Notes) -> None:
    _check(*ENTRANCES[entrance], data, notes, entrance)


@pytest.mark.fuzz
@pytest.mark.emulated
@pytest.mark.parametrize("rung", RUNGS)
@given(data=st.data())
@SHORT
def test_extreme_scores_are_right_on_a_device(rung: str, data: st.DataObject, notes: Notes) -> None:
    sizes = st.integers(1, 9), DIMS, st.sampled_from([[], [2]]), TILES
    cases = extreme_cases(WIDE, *sizes, taken=partial(taken_by, rung))

    def run(case: Case) -> Any:
        yield run_on_cuda(case, rung, fitting(rung, case.tile))

    _check(cases, run, data, notes, rung)


@emulated_only
@pytest.mark.parametrize(
    "entrance", [pytest.param(name, marks=FUZZ_ONLY) for name in EMULATED_CASES]
)
@given(data=st.data())
@FEW
def test_extreme_scores_are_right_on_tensor_cores(
    entrance: str, data: st.DataObject, notes: Notes
) -> None:
    _check(*EMULATED_CASES[entrance], data, notes, entrance)
