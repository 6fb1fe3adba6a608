"""Every tensor-core instruction compiles without a GPU, and its operands stay in registers."""

from __future__ import annotations

import re

import pytest

from kernels.cuda.runtime.resources import compile_ptx, launched_resources

from ...support.device.compiling import assert_no_float64, needs_ptxas
from ...support.tensor_cores.ptx_kernels import CASES, Case

#: A case of each instruction and place of its operands: other layouts are other numbers in registers.
INSTRUCTIONS = {(case.text, "registers" in case.name): case for case in CASES}


@needs_ptxas
@pytest.mark.parametrize("case", INSTRUCTIONS.values(), ids=lambda case: case.name)
def test_an_instruction_is_in_the_ptx_and_its_operands_stay_in_registers(case: Case) -> None:
    asked = case.source, case.signature, case.cc, (case.threads, 1)
    ptx, resources = compile_ptx(*asked), launched_resources(*asked)
    assert case.text in ptx
    assert f".target sm_{''.join(map(str, case.cc))}" in ptx
    assert ".extern .func" not in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    assert_no_float64(ptx)  # what numba makes of unsigned addresses
    assert resources.spilled == 0
    assert not resources.warnings  # such as that products wait for each other
