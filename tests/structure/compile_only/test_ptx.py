"""Every tensor-core instruction compiles without a GPU, and its operands stay in registers."""

from __future__ import annotations

import re

import pytest

from kernels.cuda.attention import naive
from kernels.cuda.runtime.resources import compile_ptx, launched_resources
from kernels.cuda.runtime.sizes import GPU

from ...support.device.compiling import (
    FLOAT32,
    FLOAT64,
    assert_no_float64,
    needs_nvvm,
    needs_ptxas,
    nothing_shared,
)
from ...support.tensor_cores.ptx_cases import Case
from ...support.tensor_cores.ptx_kernels import CASES as OF_A_WARP
from ...support.tensor_cores.ptx_kernels_hopper import CASES as OF_A_BLOCK

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


def _without_names(ptx: str) -> str:
    """Return PTX without the names that numba counts up."""
    return re.sub(r"(_ZN\w+|_cudapy_\w+)", "name", ptx)


@needs_ptxas
def test_generations_that_share_llvms_code_get_what_each_would_get_alone() -> None:
    for dtype in (FLOAT32, FLOAT64):
        kernel = naive.softmax_kernel(GPU.row_threads, dtype)
        question = kernel.source, kernel.signature
        for cc in ((7, 5), (9, 0, "a")):
            shared = compile_ptx(*question, cc, kernel.launch_bounds)
            resources = launched_resources(*question, cc, kernel.launch_bounds)
            with nothing_shared():
                alone = compile_ptx(*question, cc, kernel.launch_bounds)
                assert launched_resources(*question, cc, kernel.launch_bounds) == resources
            assert alone != shared, "nothing was compiled again"  # names are counted
            assert _without_names(alone) == _without_names(shared)
