"""Extreme scores: attention is finite and right wherever composed attention is, in both passes.

A few draws; ``make fuzz`` draws for minutes.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import launch
from kernels.runtime.dtypes import BFLOAT16
from minitorch import FastBackend

from ..support.attention.strategies import Case
from ..support.fuzzing.extreme import by_tensors, check, extreme_cases

SHORT = settings(max_examples=int(os.environ.get("MINITORCH_EXAMPLES", "40")))
LENGTHS = st.sampled_from([1, 2, 3, 5, 8, 9, 20, 40, 130])
LONG = st.sampled_from([2, 8, 40, 600, 1100])
DIMS = st.sampled_from([1, 3, 8, 16, 17, 64])
LEADS = st.sampled_from([[], [2], [2, 2]])
FEW = st.sampled_from([[], [2]])
WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@pytest.mark.fuzz
@given(case=extreme_cases(WIDE, LENGTHS, DIMS, LEADS))
@SHORT
def test_kernels_are_right_where_scores_are_extreme(case: Case) -> None:
    for target, rung, tile in (
        (launch.CPU, "flash2", None),
        (launch.CPU, "flash2", (64, 64)),
        (launch.NUMPY, "flash2", (16, 8)),
    ):
        check(case, case.run(target, rung, tile), f"by {rung}")


@pytest.mark.fuzz
@given(case=extreme_cases((*WIDE, np.dtype(np.float16), BFLOAT16), LONG, DIMS, FEW))
@SHORT
def test_tensors_are_right_where_scores_are_extreme(case: Case) -> None:
    case.dlse = None
    check(case, by_tensors(case, FastBackend), "of tensors")
