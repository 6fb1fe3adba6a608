"""Kernels of layers and of the optimiser compile without a GPU to what their headers promise."""

from __future__ import annotations

import re

import pytest

from kernels.cuda.device.row_folds import row_block
from kernels.cuda.layers.adamw import AdamForm, adam_kernel, norm_end_kernel, squares_kernel
from kernels.cuda.layers.cross_entropy import gradient_kernel, loss_kernel
from kernels.cuda.layers.layer_norm_kernels import (
    NormForm,
    norm_backward_kernel,
    norm_kernel,
    norm_sums_kernel,
)
from kernels.cuda.layers.row_registers import RowTile, row_tile
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import ptx_resources
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from ...support.device.compiling import assert_no_float64, needs_nvvm, needs_ptxas, ptx_of

pytestmark = [needs_nvvm, needs_ptxas]

#: As in GPT-2: rows of 768 with weights of float32, and of 1,600; a vocabulary of 50,304.
_WIDE = NormForm(row_tile(768, True), BFLOAT16, FLOAT32, adds=True, drops=True)
_PLAIN = NormForm(row_tile(1600, True), FLOAT32, FLOAT32)
_WORDS = RowTile(row_block(50_304), 1, True)
#: Kernel, vectors that a thread loads, and registers that it takes at the most.
KERNELS: dict[str, tuple[Kernel, int, int]] = {
    "norm, bfloat16": (norm_kernel(_WIDE), 2 + 2 + 2 * 4, 80),
    "its gradient": (norm_backward_kernel(_WIDE), 2 + 2 + 2 + 4, 168),
    "norm, float32": (norm_kernel(_PLAIN), 4 + 2 * 4, 80),
    "the gradient of that": (norm_backward_kernel(_PLAIN), 4 + 4 + 4, 168),
    "cross entropy, bfloat16": (loss_kernel(_WORDS, BFLOAT16), 1, 64),
    "the gradient of cross entropy": (gradient_kernel(_WORDS, BFLOAT16), 1, 64),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_is_read_once_in_vectors_and_lies_in_registers(name: str) -> None:
    kernel, vectors, most = KERNELS[name]
    ptx = ptx_of(kernel, (9, 0))
    assert ".local" not in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert_no_float64(ptx)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == vectors
    registers, spilled = ptx_resources(ptx, (9, 0))
    assert (spilled, registers <= most) == (0, True), f"{registers} registers, {spilled} spilled"


@pytest.mark.parametrize("cc", [(7, 5), (8, 9)], ids=["cc75", "cc89"])
def test_rows_of_no_whole_pieces_compile(cc: tuple[int, int]) -> None:
    form = NormForm(row_tile(130, False), FLOAT16, FLOAT16, adds=True)
    for kernel in (norm_kernel(form), norm_backward_kernel(form), norm_sums_kernel(FLOAT16)):
        ptx = ptx_of(kernel, cc)
        assert ".local" not in ptx
        assert_no_float64(ptx)
        assert ptx_resources(ptx, cc)[1] == 0


def test_a_list_of_tensors_is_read_and_written_as_global_memory() -> None:
    """Addresses come from a table: the compiler has to be told what kind of memory is there."""
    step = adam_kernel(AdamForm(FLOAT32, BFLOAT16, BFLOAT16))
    for kernel in (step, squares_kernel(BFLOAT16), norm_end_kernel()):
        ptx = ptx_of(kernel, (9, 0))
        assert ".local" not in ptx
        assert not re.search(r"\b(ld|st)\.(v\d\.)?[bfsu]\d", ptx), "an address of any memory"
        assert ptx_resources(ptx, (9, 0))[1] == 0
    assert_no_float64(ptx_of(step, (9, 0)), "fma|mul|add|sub|div")
    assert ptx_of(step, (9, 0)).count("sqrt") == 4, "four elements at a time"


def test_float64_computes_in_float64() -> None:
    kernels = [
        make(NormForm(row_tile(96, True), FLOAT64, FLOAT64))
        for make in (norm_kernel, norm_backward_kernel)
    ]
    kernels += [
        make(RowTile(row_block(96), 1, True), FLOAT64) for make in (loss_kernel, gradient_kernel)
    ]
    for kernel in kernels:
        ptx = ptx_of(kernel, (9, 0))
        assert not re.search(r"\b(add|sub|mul|fma|div)\S*\.f32", ptx), "float64 rounds to float32"
