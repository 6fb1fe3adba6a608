"""Every CUDA kernel compiles to PTX on a machine without a GPU, for each generation supported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

import minitorch
from kernels import Problem, make_problem
from kernels.cuda import flash1, flash1_backward, flash2, flash2_backward, memory, naive, product
from kernels.cuda.device import Kernel
from kernels.cuda.register_tiles import pick_layout, widths
from kernels.cuda.sizes import GPU, ProductTile
from kernels.targets import compile_ptx, why_no_ptx
from minitorch import cuda_kernel_ops, cuda_kernels, cuda_loops, operators

needs_nvvm = pytest.mark.skipif(why_no_ptx() is not None, reason=why_no_ptx() or "")

GENERATIONS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
#: Every generation in float32, and float64 once.
on_every_generation = pytest.mark.parametrize(
    ("dtype", "cc"),
    [(FLOAT32, cc) for cc in GENERATIONS] + [(FLOAT64, (8, 0))],
    ids=lambda x: "cc{}{}".format(*x) if isinstance(x, tuple) else str(x),
)

MAPS = ["sigmoid", "neg", "relu", "log", "exp", "tanh", "id", "inv"]
ZIPS = ["add", "mul", "lt", "eq", "is_close", "relu_back", "log_back", "inv_back", "pow"]
FOLDS = ["add", "mul", "max"]


def _assert_no_float64(ptx: str) -> None:
    assert not re.search(r"(fma|mul|add|sub|div|cvt)\S*\.f64", ptx), "float32 computes in float64"


# -- the course ---------------------------------------------------------------------------------

SIZE = numba.int64
#: Shapes and strides as the backend passes them, and as the published launch protocol does.
TUPLE = numba.types.UniTuple(numba.int64, 3)
ARRAY = numba.int64[::1]

#: How to make each kernel, by name.
KERNELS: dict[str, Callable[[], Any]] = {
    "map sigmoid": lambda: cuda_kernels.tensor_map(operators.sigmoid),
    "zip add": lambda: cuda_kernels.tensor_zip(operators.add),
    "reduce add": lambda: cuda_kernels.tensor_reduce(operators.add),
    "matmul": lambda: cuda_kernels.tensor_matrix_multiply,
    "sum_practice": lambda: cuda_kernels.jit_sum_practice,
    "mm_practice": lambda: cuda_kernels.jit_mm_practice,
}


def _ptx(name: str, dtype: Any, cc: tuple[int, int], shape: Any = TUPLE) -> str:
    storage = numba.from_dtype(dtype)[::1]
    triple = (storage, shape, shape)
    arguments = {
        "map": (*triple, SIZE, *triple),
        "zip": (*triple, SIZE, *triple, *triple),
        "reduce": (*triple, SIZE, *triple, SIZE, numba.float64),
        "matmul": (*triple, SIZE, *triple, *triple),
        "sum_practice": (storage, storage, SIZE),
        "mm_practice": (storage, storage, storage, SIZE),
    }
    return compile_ptx(KERNELS[name](), numba.void(*arguments[name.split()[0]]), cc)


@needs_nvvm
@on_every_generation
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_the_course_compiles_for_every_generation(
    name: str, dtype: Any, cc: tuple[int, int]
) -> None:
    ptx = _ptx(name, dtype, cc)
    assert ".visible .entry" in ptx
    assert f".target sm_{cc[0]}{cc[1]}" in ptx


@needs_nvvm
@pytest.mark.parametrize("name", list(KERNELS)[:4])
def test_every_kernel_takes_shapes_as_arrays(name: str) -> None:
    assert ".visible .entry" in _ptx(name, FLOAT32, (8, 0), ARRAY)


@needs_nvvm
@pytest.mark.parametrize("name", ["map sigmoid", "zip add"])
def test_shapes_as_tuples_keep_indices_in_registers(name: str) -> None:
    assert ".local" not in _ptx(name, FLOAT32, (8, 0))


@needs_nvvm
def test_the_product_of_the_course_does_no_float64_arithmetic() -> None:
    ptx = _ptx("matmul", FLOAT32, (8, 0))
    assert "fma.rn.f32" in ptx
    _assert_no_float64(ptx)


# -- what the backend launches --------------------------------------------------------------------

#: How to make each kernel for a dtype, by name.
LOOPS: dict[str, Callable[[Any], Kernel]] = {
    "map": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, True, dtype, dtype),
    "map of rows": lambda dtype: cuda_loops.map_kernel(operators.sigmoid, False, dtype, dtype),
    "zip": lambda dtype: cuda_loops.zip_kernel(operators.add, True, dtype, dtype, dtype),
    "zip of rows": lambda dtype: cuda_loops.zip_kernel(operators.add, False, dtype, dtype, dtype),
    "fold short": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, GPU.fold_short),
    "fold long": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, GPU.fold_long),
    "fold across": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, GPU.fold_across),
    "product": lambda dtype: product.product_kernel(_tiles(dtype)[0], dtype),
}


def _tiles(dtype: Any) -> tuple[ProductTile, ...]:
    return GPU.product_tiles[dtype.itemsize]


def _loop_ptx(kernel: Kernel, cc: tuple[int, int] = (8, 0)) -> str:
    return compile_ptx(kernel.source, kernel.signature, cc)


@needs_nvvm
@on_every_generation
@pytest.mark.parametrize("name", LOOPS)
def test_every_kernel_compiles_for_every_generation_and_stays_in_registers(
    name: str, dtype: Any, cc: tuple[int, int]
) -> None:
    ptx = _loop_ptx(LOOPS[name](dtype), cc)
    assert ".visible .entry" in ptx
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert ".local" not in ptx
    if dtype == FLOAT32:
        _assert_no_float64(ptx)


@needs_nvvm
@pytest.mark.parametrize("name", MAPS)
def test_every_function_of_one_number_stays_in_float32(name: str) -> None:
    fn = getattr(operators, name)
    _assert_no_float64(_loop_ptx(cuda_loops.map_kernel(fn, True, FLOAT32, FLOAT32)))


@needs_nvvm
@pytest.mark.parametrize("name", ZIPS)
def test_every_function_of_two_numbers_stays_in_float32(name: str) -> None:
    fn = getattr(operators, name)
    _assert_no_float64(_loop_ptx(cuda_loops.zip_kernel(fn, True, FLOAT32, FLOAT32, FLOAT32)))


@needs_nvvm
@pytest.mark.parametrize("name", FOLDS)
def test_neighbours_fold_by_warp_shuffles(name: str) -> None:
    fn = getattr(operators, name)
    short, long, across = (
        _loop_ptx(cuda_loops.fold_kernel(fn, FLOAT32, shape))
        for shape in (GPU.fold_short, GPU.fold_long, GPU.fold_across)
    )
    assert "shfl.sync.down" in short and "bar.sync" not in short
    assert "shfl.sync.down" in long and len(re.findall(r"bar\.sync", long)) == 1
    assert "shfl" not in across
    assert not any("atom" in ptx for ptx in (short, long, across))


@needs_nvvm
def test_an_element_wise_kernel_reads_all_its_elements_before_it_writes_one() -> None:
    ptx = _loop_ptx(LOOPS["zip"](FLOAT32))
    before, _, after = ptx.partition("st.global")
    assert len(re.findall(r"ld\.global\.f32", before)) == 2 * GPU.flat_items
    assert not re.search(r"ld\.global\.f32", after)


@needs_nvvm
@pytest.mark.parametrize("tile", [*_tiles(FLOAT32)], ids=str)
def test_the_product_multiplies_in_registers_what_it_loads_as_vectors(tile: ProductTile) -> None:
    ptx = _loop_ptx(product.product_kernel(tile, FLOAT32), (9, 0))
    steps = product.UNROLL
    assert (
        len(re.findall(r"ld\.shared\.v4\.f32", ptx)) == steps * (tile.own_rows + tile.own_cols) // 4
    )
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == steps * tile.own_rows * tile.own_cols
    # Each barrier of a kernel stands once: one tile is multiplied while the next one arrives.
    assert len(re.findall(r"bar\.sync", ptx)) == 1


# -- attention ----------------------------------------------------------------------------------

DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
#: How to make each kernel of the attention rungs, by name, with the sizes that a GPU gets.
ATTENTION: dict[str, Callable[[Any, int, int], Kernel]] = {
    "copy": lambda dtype, *dims: memory.copy_kernel(dtype),
    "sum": lambda dtype, *dims: memory.sum_kernel(dtype),
    "naive softmax": lambda dtype, *dims: naive.softmax_kernel(GPU.row_threads, dtype),
    "naive softmax backward": lambda dtype, *dims: naive.softmax_backward_kernel(
        GPU.row_threads, dtype
    ),
    "flash1 forward": lambda dtype, *dims: flash1.forward_kernel(
        *flash1.paper_tiles(GPU.flash1_bytes // dtype.itemsize, *dims)[0],
        *dims, GPU.flash1_threads, dtype,
    ),
    "flash1 backward": lambda dtype, *dims: flash1_backward.backward_kernel(
        *flash1.paper_tiles(GPU.flash1_bytes // dtype.itemsize, *dims)[1],
        *dims, GPU.flash1_threads, dtype,
    ),
    "flash2 forward": lambda dtype, *dims: flash2.forward_kernel(
        *_layout_and_widths("forward", dtype, *dims), dtype, True
    ),
    "flash2 delta": lambda dtype, *dims: flash2_backward.delta_kernel(GPU.flat_threads, dtype),
    "flash2 dq": lambda dtype, *dims: flash2_backward.dq_kernel(
        *_layout_and_widths("dq", dtype, *dims), dtype, True
    ),
    "flash2 dkdv": lambda dtype, *dims: flash2_backward.dkdv_kernel(
        *_layout_and_widths("dkdv", dtype, *dims), dtype, True, False
    ),
    "flash2 atomic": lambda dtype, *dims: flash2_backward.dkdv_kernel(
        *_layout_and_widths("atomic", dtype, *dims), dtype, True, True
    ),
}  # fmt: skip


def _problem(dtype: Any, head_dim: int, value_dim: int) -> Problem:
    q, v = np.ones((8, head_dim), dtype), np.ones((8, value_dim), dtype)
    return make_problem(q, q, v)


def _layout_and_widths(name: str, dtype: Any, *dims: int) -> tuple[Any, int, int]:
    problem = _problem(dtype, *dims)
    return pick_layout(name, problem, None), *widths(problem)


def _attention_ptx(name: str, dtype: Any, cc: tuple[int, int], dims: tuple[int, int]) -> str:
    kernel = ATTENTION[name](dtype, *dims)
    return compile_ptx(kernel.source, kernel.signature, cc)


@needs_nvvm
@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)], ids=lambda cc: f"cc{cc[0]}{cc[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_every_rung_compiles_for_every_generation(
    name: str, dtype: Any, cc: tuple[int, int]
) -> None:
    ptx = _attention_ptx(name, dtype, cc, (64, 64))
    assert ".visible .entry" in ptx
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert ".local" not in ptx
    if dtype == np.float32:
        # The helpers of online_softmax mix float32 with Python's constants, once a row.
        assert not re.search(r"(fma|mul|add|sub)\S*\.f64", ptx), "float32 computes in float64"


@needs_nvvm
@pytest.mark.parametrize("name", ["flash2 forward", "flash2 dq", "flash2 dkdv", "flash2 atomic"])
def test_flash2_moves_whole_vectors(name: str) -> None:
    ptx = _attention_ptx(name, DTYPES[0], (9, 0), (64, 64))
    assert len(re.findall(r"ld\.shared\.v4", ptx)) >= 20
    assert len(re.findall(r"ld(\.global)?\.v4", ptx)) >= 3
    assert not re.search(r"(ld|st)\.local", ptx)


@needs_nvvm
@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (80, 33), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in ATTENTION if name.startswith("flash") and "dkdv" not in name]
)
def test_flash_compiles_for_every_width(name: str, dims: tuple[int, int]) -> None:
    assert ".visible .entry" in _attention_ptx(name, DTYPES[0], (8, 0), dims)


def test_flash1_divides_the_memory_as_the_paper_says() -> None:
    # 1: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d)
    assert flash1.paper_tile(8192, 64) == (32, 32)
    assert flash1.paper_tile(8192, 16) == (16, 128)
    assert flash1.paper_tile(8193, 256) == (9, 9)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_flash1_fits_the_shared_memory_with_every_width(itemsize: int) -> None:
    elements = GPU.flash1_bytes // itemsize
    for head_dim in range(1, 257):
        for value_dim in {1, head_dim, max(head_dim - 1, 1), 256}:
            dims = head_dim, value_dim
            tile, backward_tile = flash1.paper_tiles(elements, *dims)
            assert flash1.forward_elements(tile, *dims) <= elements, dims
            assert flash1_backward.backward_elements(backward_tile, *dims) <= elements, dims


def test_the_cuda_backend_is_there_without_a_gpu() -> None:
    assert minitorch.CudaBackend.cuda
    assert cuda_kernel_ops.CudaKernelOps is minitorch.CudaOps
