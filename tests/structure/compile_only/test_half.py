"""The kernels of 16 bits compile to PTX without a GPU: nothing is linked, and memory moves in vectors."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from kernels.cuda.device.half import convert_kernel
from kernels.cuda.layers.merge_rows import merge_kernel
from kernels.cuda.runtime.sizes import GPU
from kernels.runtime.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_DTYPES,
    HALF_DTYPES,
    is_half,
)
from minitorch import operators
from minitorch.accelerated import cuda_loop_kernels as cuda_loops

from ...support.device.compiling import (
    GENERATIONS,
    assert_fits,
    assert_is_kernel,
    assert_no_float64,
    needs_nvvm,
    needs_ptxas,
    ptx_of,
)

on_halves = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
CONVERSIONS = [
    pytest.param(source, out, id=f"{source} to {out}")
    for source, out in product(FLOAT_DTYPES, FLOAT_DTYPES)
    if source != out and (is_half(source) or is_half(out))
]
#: How each kernel is made for a dtype; its results of 16 bits are float32 until stored.
LOOPS: dict[str, Any] = {
    "map": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, 1, dtype, dtype),
    "map of rows": lambda dtype: cuda_loops.map_kernel(operators.exp, 2, dtype, dtype),
    "zip": lambda dtype: cuda_loops.zip_kernel(operators.add, 1, dtype, dtype, dtype),
    "zip with a number": lambda dtype: cuda_loops.zip_kernel(
        operators.mul, 1, dtype, dtype, FLOAT32
    ),
    "fold": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, dtype, GPU.fold_short),
    "first of two folds": lambda dtype: cuda_loops.fold_kernel(
        operators.add, FLOAT32, dtype, GPU.fold_long
    ),
    "second of two folds": lambda dtype: cuda_loops.fold_kernel(
        operators.add, dtype, FLOAT32, GPU.fold_across
    ),
    "merge by lse": lambda dtype: merge_kernel(dtype, dtype, dtype, True),
    "first of several sums": lambda dtype: merge_kernel(dtype, dtype, FLOAT32, False),
    "last of several sums": lambda dtype: merge_kernel(FLOAT32, dtype, dtype, False),
}


@needs_nvvm
@pytest.mark.parametrize("cc", GENERATIONS, ids=str)
@pytest.mark.parametrize(("source", "out"), CONVERSIONS)
def test_a_conversion_moves_vectors_and_links_nothing(source: Any, out: Any, cc: Any) -> None:
    ptx = ptx_of(convert_kernel(source, out), cc)
    assert_is_kernel(ptx, cc)
    assert ".extern" not in ptx and ".local" not in ptx
    for access, dtype in (("ld", source), ("st", out)):
        vectors = re.findall(rf"{access}\.global\.v\d\.(\w+)", ptx)
        expected = {FLOAT32: ["f32"] * 2, FLOAT64: ["f64"] * 4}.get(dtype, ["u32"])
        assert vectors == expected, f"{access} of {dtype}"
    rounds = {FLOAT16: "cvt.rn.f16.f32"}.get(out)
    if rounds is not None:
        assert rounds in ptx
    if out == BFLOAT16:
        assert not re.search(r"cvt\S*bf16", ptx), "cc 7.5 has none, and memory is slower"


@needs_nvvm
@on_halves
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_16_bits_computes_in_float32_registers(name: str, dtype: Any) -> None:
    for cc in ((7, 5), (9, 0)):
        ptx = ptx_of(LOOPS[name](dtype), cc)
        assert_is_kernel(ptx, cc)
        assert ".extern .func" not in ptx and ".local" not in ptx
        assert_no_float64(ptx)


@needs_ptxas
@on_halves
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_16_bits_fits_the_registers(name: str, dtype: Any) -> None:
    assert_fits(LOOPS[name](dtype), GPU.flat_threads, (9, 0))
