"""Every CUDA kernel compiles to PTX on a machine without a GPU, for each generation supported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import pytest

import minitorch
from kernels.targets import compile_ptx, why_no_ptx
from minitorch import cuda_kernel_ops, cuda_kernels, operators

needs_nvvm = pytest.mark.skipif(why_no_ptx() is not None, reason=why_no_ptx() or "")

SIZE = numba.int64
#: Shapes and strides as the backend passes them, and as the published launch protocol does.
TUPLE = numba.types.UniTuple(numba.int64, 3)
ARRAY = numba.int64[::1]

#: How to make each kernel, by name; first one of each kind.
KERNELS: dict[str, Callable[[], Any]] = {
    "map sigmoid": lambda: cuda_kernels.tensor_map(operators.sigmoid),
    "zip add": lambda: cuda_kernels.tensor_zip(operators.add),
    "reduce add": lambda: cuda_kernels.tensor_reduce(operators.add),
    "reduce onto out": lambda: cuda_kernels.reduce_kernel(operators.add, onto_out=True),
    "matmul": lambda: cuda_kernels.tensor_matrix_multiply,
    "sum_practice": lambda: cuda_kernels.jit_sum_practice,
    "mm_practice": lambda: cuda_kernels.jit_mm_practice,
}
KINDS = list(KERNELS)
MAPS = ["neg", "relu", "log", "exp", "tanh", "id", "inv"]
ZIPS = ["mul", "lt", "eq", "is_close", "relu_back", "log_back", "inv_back", "pow"]
for _name in MAPS:
    KERNELS[f"map {_name}"] = partial(cuda_kernels.tensor_map, getattr(operators, _name))
for _name in ZIPS:
    KERNELS[f"zip {_name}"] = partial(cuda_kernels.tensor_zip, getattr(operators, _name))
for _name in ("mul", "max"):
    KERNELS[f"reduce {_name}"] = partial(cuda_kernels.tensor_reduce, getattr(operators, _name))


def _ptx(name: str, scalar: Any, cc: tuple[int, int], shape: Any = TUPLE) -> str:
    storage = scalar[::1]
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
@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)], ids=lambda cc: f"cc{cc[0]}{cc[1]}")
@pytest.mark.parametrize("scalar", [numba.float32, numba.float64], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_kernel_compiles_for_every_generation(
    name: str, scalar: Any, cc: tuple[int, int]
) -> None:
    ptx = _ptx(name, scalar, cc)
    assert ".visible .entry" in ptx
    assert f".target sm_{cc[0]}{cc[1]}" in ptx


@needs_nvvm
@pytest.mark.parametrize("name", KINDS[:5])
def test_every_kernel_takes_shapes_as_arrays(name: str) -> None:
    assert ".visible .entry" in _ptx(name, numba.float32, (8, 0), ARRAY)


@needs_nvvm
@pytest.mark.parametrize("name", ["map sigmoid", "zip add"])
def test_shapes_as_tuples_keep_indices_in_registers(name: str) -> None:
    assert ".local" not in _ptx(name, numba.float32, (8, 0))


@needs_nvvm
@pytest.mark.parametrize("scalar", [numba.float32, numba.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in KINDS])
def test_every_operator_compiles(name: str, scalar: Any) -> None:
    assert ".visible .entry" in _ptx(name, scalar, (8, 0))


@needs_nvvm
def test_a_float32_product_does_no_float64_arithmetic() -> None:
    ptx = _ptx("matmul", numba.float32, (8, 0))
    assert "fma.rn.f32" in ptx
    assert ".f64" not in ptx


def test_the_cuda_backend_is_there_without_a_gpu() -> None:
    assert minitorch.CudaBackend.cuda
    assert cuda_kernel_ops.CudaKernelOps is minitorch.CudaOps
