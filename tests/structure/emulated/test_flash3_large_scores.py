"""Hopper's kernels on the emulated GPU where scores are so large that lse has lost the sums of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import launch
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout
from kernels.problem.operands import make_operands
from kernels.runtime.dtypes import BFLOAT16

from ...support.attention.large_scores import NAMES, large_case
from ...support.emulated.hopper import FUZZ_ONLY, emulated_hopper, emulated_hopper_backward
from ...support.emulated.target import EMULATED
from ...support.tolerances import assert_close_arrays

#: A call takes seconds: the others are left to ``make fuzz-options``, and run on a GPU.
ALWAYS = ("large queries", "a row of the least number", "rows of both kinds")
TAKEN = [name for name in NAMES if name != "a negative scale"]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else FUZZ_ONLY) for name in TAKEN]
)
def test_rows_of_large_scores_have_their_probabilities(name: str, deterministic: bool) -> None:
    case = large_case(name, BFLOAT16, 5, 35)
    with emulated_hopper_backward():
        found = case.run(EMULATED, "flash3_wgmma", deterministic=deterministic)
    case.check(found, name)


@pytest.mark.parametrize("patience", [0, 2])
def test_rows_are_rescaled_to_larger_maxima_and_lse_with_its_rest_is_exact(patience: int) -> None:
    case = large_case("rows of both kinds", BFLOAT16, 6, 80)
    problem = case.problem(rung="flash3_wgmma")
    with emulated_hopper(ForwardLayout(1, 16, 2, 2, False, patience)):
        operands = make_operands(EMULATED.memory, problem, *case.operands)
        out, lse, rest = launch.forward(EMULATED, problem, operands)
    expected = case.oracle()
    assert_close_arrays(out, expected["out"], BFLOAT16, "out")
    np.testing.assert_allclose(lse.astype(np.float64) + rest, expected["lse"], 0, 1e-5)
