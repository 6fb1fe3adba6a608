"""Every tensor-core instruction compiles without a GPU, and its operands stay in registers."""

from __future__ import annotations

import re

import pytest

from kernels.targets import compile_ptx, launched_resources

from .cuda_compiling import assert_no_float64, needs_nvvm, needs_ptxas
from .ptx_cases import Case
from .ptx_kernels import CASES as OF_A_WARP
from .ptx_kernels_hopper import CASES as OF_A_BLOCK

CASES = OF_A_WARP + OF_A_BLOCK


def _ptx(case: Case) -> str:
    return compile_ptx(case.source, case.signature, case.cc, (case.threads, 1))


@needs_nvvm
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_instruction_is_in_the_ptx_and_nothing_has_to_be_linked(case: Case) -> None:
    ptx = _ptx(case)
    assert case.text in ptx
    assert f".target sm_{''.join(map(str, case.cc))}" in ptx
    assert ".extern .func" not in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    assert_no_float64(ptx)  # what numba makes of unsigned addresses


@needs_ptxas
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ptxas_takes_it_and_spills_nothing(case: Case) -> None:
    resources = launched_resources(case.source, case.signature, case.cc, (case.threads, 1))
    assert resources.spilled == 0
    assert not resources.warnings  # such as that products wait for each other
