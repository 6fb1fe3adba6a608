"""Every CUDA kernel of the tensors compiles to PTX on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kernels.cuda.device import memory
from kernels.cuda.matmul import cuda_cores
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import compile_ptx
from kernels.cuda.runtime.sizes import GPU, ProductTile
from kernels.runtime import numba_patches
from kernels.runtime.types import from_dtype, types
from minitorch import cuda_ops as course_kernels
from minitorch import operators
from minitorch.accelerated import cuda_loop_kernels as cuda_loops
from minitorch.backends import more_operators

from ...support.device.compiling import (
    FLOAT32,
    FLOAT64,
    GENERATION,
    OLDEST,
    assert_fits,
    assert_is_kernel,
    assert_no_float64,
    in_both_dtypes,
    needs_nvvm,
    needs_ptxas,
    ptx_of,
)

#: Compiles a small kernel by numba-cuda as the project changes it, or as it is.
COMPILE = """
import re, sys
from importlib import metadata
version = metadata.version
if sys.argv[1] == "as it is":  # in an unknown version nothing is changed
    metadata.version = lambda name: "0.99" if name == "numba-cuda" else version(name)
from kernels.cuda.layers.layer_norm_kernels import NormForm, norm_backward_kernel
from kernels.cuda.layers.row_registers import row_tile
from kernels.cuda.runtime.resources import compile_ptx
from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.targets import cuda
own = norm_backward_kernel(NormForm(row_tile(768, True), BFLOAT16, BFLOAT16, adds=True, drops=True))
ptx = compile_ptx(own.source, own.signature, (8, 0), own.launch_bounds)
print(cuda.core.postproc.PostProcessor.run.__module__)
print(re.sub(r"\\b(_Z|_cudapy_)\\w+", "", ptx))  # names are numbered as they are made
"""


@needs_nvvm
def test_compiling_in_less_time_changes_no_code() -> None:
    changed, own = (
        subprocess.run(
            [sys.executable, "-c", COMPILE, numba], check=True, capture_output=True, text=True
        ).stdout.partition("\n")
        for numba in ("as the project changes it", "as it is")
    )
    assert changed[0] == numba_patches.__name__ != own[0]
    assert changed[2] == own[2]


MAPS = ["sigmoid", "neg", "relu", "log", "exp", "tanh", "id", "inv"]
ZIPS = ["add", "mul", "lt", "eq", "is_close", "relu_back", "log_back", "inv_back", "pow"]
FOLDS = ["add", "mul", "max"]

# -- the course ---------------------------------------------------------------------------------

SIZE = types.int64
#: Shapes and strides as the backend passes them, and as the published launch protocol does.
TUPLE = types.UniTuple(types.int64, 3)
ARRAY = types.int64[::1]

#: How to make each kernel, by name.
KERNELS: dict[str, Callable[[], Any]] = {
    "map sigmoid": lambda: course_kernels.tensor_map(operators.sigmoid),
    "zip add": lambda: course_kernels.tensor_zip(operators.add),
    "reduce add": lambda: course_kernels.tensor_reduce(operators.add),
    "matmul": lambda: course_kernels.tensor_matrix_multiply,
    "sum_practice": lambda: course_kernels.jit_sum_practice,
    "mm_practice": lambda: course_kernels.jit_mm_practice,
}


def _ptx(name: str, dtype: Any, cc: tuple[int, int], shape: Any = TUPLE) -> str:
    storage = from_dtype(dtype)[::1]
    triple = (storage, shape, shape)
    arguments = {
        "map": (*triple, SIZE, *triple),
        "zip": (*triple, SIZE, *triple, *triple),
        "reduce": (*triple, SIZE, *triple, SIZE, types.float64),
        "matmul": (*triple, SIZE, *triple, *triple),
        "sum_practice": (storage, storage, SIZE),
        "mm_practice": (storage, storage, storage, SIZE),
    }
    return compile_ptx(KERNELS[name](), types.void(*arguments[name.split()[0]]), cc)


@needs_nvvm
@in_both_dtypes
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_the_course_compiles(name: str, dtype: Any) -> None:
    assert_is_kernel(_ptx(name, dtype, GENERATION[dtype]), GENERATION[dtype])


@needs_nvvm
@pytest.mark.parametrize("name", list(KERNELS)[:4])
def test_every_kernel_of_the_course_takes_shapes_as_arrays_and_as_tuples(name: str) -> None:
    assert ".visible .entry" in _ptx(name, FLOAT32, OLDEST, ARRAY)
    ptx = _ptx(name, FLOAT32, OLDEST)
    if name in ("map sigmoid", "zip add"):  # whose indices stay in registers
        assert ".local" not in ptx
    if name == "matmul":
        assert "fma.rn.f32" in ptx
        assert_no_float64(ptx)


# -- what the backend launches --------------------------------------------------------------------

#: How to make each kernel for a dtype, by name.
LOOPS: dict[str, Callable[[Any], Kernel]] = {
    "map": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, 1, dtype, dtype),
    "map of rows": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, 2, dtype, dtype),
    "map of planes": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, 3, dtype, dtype),
    "map elu": lambda dtype: cuda_loops.map_kernel(more_operators.elu, 1, dtype, dtype),
    "zip elu_back": lambda dtype: cuda_loops.zip_kernel(
        more_operators.elu_back, 1, dtype, dtype, dtype
    ),
    "zip keep": lambda dtype: cuda_loops.zip_kernel(more_operators.keep, 1, dtype, dtype, dtype),
    "zip": lambda dtype: cuda_loops.zip_kernel(operators.add, 1, dtype, dtype, dtype),
    "zip of rows": lambda dtype: cuda_loops.zip_kernel(operators.add, 2, dtype, dtype, dtype),
    "zip of planes": lambda dtype: cuda_loops.zip_kernel(operators.add, 3, dtype, dtype, dtype),
    "fold short": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, dtype, GPU.fold_short),
    "fold long": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, dtype, GPU.fold_long),
    "fold across": lambda dtype: cuda_loops.fold_kernel(
        operators.add, dtype, dtype, GPU.fold_across
    ),
    "product": lambda dtype: cuda_cores.product_kernel(_tiles(dtype)[0], dtype),
    "copy": memory.copy_kernel,
    "sum": memory.sum_kernel,
    "fill": memory.fill_kernel,
}


def _tiles(dtype: Any) -> tuple[ProductTile, ...]:
    return GPU.product_tiles[dtype.itemsize]


@needs_ptxas
@in_both_dtypes
@pytest.mark.parametrize("name", LOOPS)
def test_every_kernel_compiles_and_stays_in_registers(name: str, dtype: Any) -> None:
    kernel, cc = LOOPS[name](dtype), GENERATION[dtype]
    ptx = ptx_of(kernel, cc)
    assert_is_kernel(ptx, cc)
    assert ".local" not in ptx
    if dtype == FLOAT32:
        assert_no_float64(ptx)
    if name != "product":  # whose tiles have a test of their own
        assert_fits(kernel, GPU.flat_threads, cc)


@needs_nvvm
@pytest.mark.parametrize("name", [*MAPS, *ZIPS])
def test_every_function_of_numbers_stays_in_float32(name: str) -> None:
    fn = getattr(operators, name)
    if name in MAPS:
        kernel = cuda_loops.map_kernel(fn, 1, FLOAT32, FLOAT32)
    else:
        kernel = cuda_loops.zip_kernel(fn, 1, FLOAT32, FLOAT32, FLOAT32)
    assert_no_float64(ptx_of(kernel, OLDEST))


@needs_nvvm
@pytest.mark.parametrize("name", FOLDS)
def test_neighbours_fold_by_warp_shuffles(name: str) -> None:
    fn = getattr(operators, name)
    short, long, across = (
        ptx_of(cuda_loops.fold_kernel(fn, FLOAT32, FLOAT32, shape), OLDEST)
        for shape in (GPU.fold_short, GPU.fold_long, GPU.fold_across)
    )
    assert "shfl.sync.down" in short and "bar.sync" not in short
    assert "shfl.sync.down" in long and len(re.findall(r"bar\.sync", long)) == 1
    assert "shfl" not in across
    assert not any("atom" in ptx for ptx in (short, long, across))


@needs_nvvm
def test_an_element_wise_kernel_reads_all_its_elements_before_it_writes_one() -> None:
    ptx = ptx_of(LOOPS["zip"](FLOAT32), OLDEST)
    before, _, after = ptx.partition("st.global")
    assert len(re.findall(r"ld\.global\.f32", before)) == 2 * GPU.flat_items
    assert not re.search(r"ld\.global\.f32", after)


@needs_nvvm
@pytest.mark.parametrize("tile", [*_tiles(FLOAT32)], ids=str)
def test_the_product_multiplies_in_registers_what_it_loads_as_vectors(tile: ProductTile) -> None:
    ptx = ptx_of(cuda_cores.product_kernel(tile, FLOAT32), (9, 0))
    steps = cuda_cores.UNROLL
    assert (
        len(re.findall(r"ld\.shared\.v4\.f32", ptx)) == steps * (tile.own_rows + tile.own_cols) // 4
    )
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == steps * tile.own_rows * tile.own_cols
    # Each barrier of a kernel stands once: one tile is multiplied while the next one arrives.
    assert len(re.findall(r"bar\.sync", ptx)) == 1


#: Bytes a thread that ptxas puts aside at the most: the blocks that share a multiprocessor leave a
#: thread of the product just the registers for its sums, its factors and the elements on their way.
PRODUCT_SPILLS = 192


@needs_ptxas
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_a_multiprocessor_holds_the_blocks_of_the_product_that_the_table_says(dtype: Any) -> None:
    for tile in _tiles(dtype):
        for is_guarded in (False, True):
            kernel = cuda_cores.product_kernel(tile, dtype, is_guarded)
            assert_fits(kernel, tile.threads, (9, 0), PRODUCT_SPILLS)


@needs_nvvm
def test_a_product_of_float32_computes_nothing_in_float64_after_one_of_float64() -> None:
    cuda_cores.product_kernel.cache_clear()
    cuda_cores._make_copy.cache_clear()
    for tile in _tiles(FLOAT64):
        cuda_cores.product_kernel(tile, FLOAT64)
    for tile in _tiles(FLOAT32):
        assert_no_float64(ptx_of(cuda_cores.product_kernel(tile, FLOAT32), (9, 0)))
