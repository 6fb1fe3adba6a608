"""The kernels of the layers on CUDA compile to PTX without a GPU, and keep what their headers promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import pytest

from kernels.cuda.device.row_folds import RowBlock
from kernels.cuda.layers import elementwise, indexing, merge_rows, put_rows
from kernels.cuda.layers import softmax as softmax_kernels
from kernels.cuda.layers.embedding_sums import embedding_sums_kernel
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import compile_ptx
from minitorch import fast_conv

from ...support.device.compiling import FLOAT32, FLOAT64, GENERATIONS, needs_nvvm, ptx_of

pytestmark = needs_nvvm

on_generations = pytest.mark.parametrize("cc", GENERATIONS, ids=lambda cc: f"cc{cc[0]}{cc[1]}")

#: A row for each warp, and a row for a whole block.
BLOCKS = {"warp": RowBlock(32, 4), "block": RowBlock(256, 1)}
ROW_KERNELS = {
    "softmax": softmax_kernels.softmax_kernel,
    "softmax backward": softmax_kernels.softmax_backward_kernel,
}
KERNELS: dict[str, Callable[[Any], Kernel]] = {
    "gelu": elementwise.gelu_kernel,
    "gelu backward": elementwise.gelu_backward_kernel,
    "embedding": elementwise.embedding_kernel,
    "embedding backward": elementwise.embedding_backward_kernel,
    "embedding sums": embedding_sums_kernel,
    "dropout": elementwise.dropout_kernel,
    "adam": elementwise.adam_kernel,
    "sgd": elementwise.sgd_kernel,
    "gather": indexing.gather_kernel,
    "scatter-add": indexing.scatter_add_kernel,
    "cumulative sum": indexing.cumsum_kernel,
    "put": put_rows.put_kernel,
    "merge by lse, block": lambda dtype: merge_rows.merge_kernel(dtype, dtype, dtype, True),
    "add": lambda dtype: merge_rows.merge_kernel(dtype, dtype, dtype, False),
    "inverse": lambda dtype: indexing.invert_kernel(),
    "sort, fill": indexing.sort_fill_kernel,
    "sort, tile, block": lambda dtype: indexing.sort_tile_kernel(dtype, 1024),
    "sort, pass": indexing.sort_pass_kernel,
    "sort, crop": indexing.sort_crop_kernel,
}
for _name, _make in ROW_KERNELS.items():
    for _share, _block in BLOCKS.items():
        KERNELS[f"{_name}, {_share}"] = partial(_make, _block)


def check_float32(ptx: str) -> None:
    """Assert that a kernel has no local memory, no float64 and no atomics."""
    assert ".visible .entry" in ptx
    assert ".local" not in ptx
    assert not re.search(r"\.f64", ptx), "float32 computes in float64"
    assert not re.search(r"\b(atom|red)\.", ptx)


@on_generations
@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_computes_in_registers_and_in_its_own_dtype(name: str, cc: tuple[int, int]) -> None:
    ptx = ptx_of(KERNELS[name](FLOAT32), cc)
    check_float32(ptx)
    shares_rows = name.split(",")[0] in ROW_KERNELS
    assert ("shfl.sync" in ptx) == shares_rows
    assert ("bar.sync" in ptx or "barrier.sync" in ptx) == name.endswith(", block")


@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_compiles_in_float64(name: str) -> None:
    ptx = ptx_of(KERNELS[name](FLOAT64), (9, 0))
    assert ".local" not in ptx
    assert not re.search(r"\b(add|sub|mul|fma|div|cvt)\S*\.f32", ptx), "float64 rounds to float32"


@on_generations
@pytest.mark.parametrize(
    ("kernel", "dims"), [(fast_conv.cuda_conv1d, 3), (fast_conv.cuda_conv2d, 4)], ids=["1d", "2d"]
)
def test_convolution_computes_in_registers_and_in_its_own_dtype(
    kernel: Any, dims: int, cc: tuple[int, int]
) -> None:
    ints = numba.types.UniTuple(numba.int64, dims)
    triple = (numba.float32[::1], ints, ints)
    signature = numba.void(*triple, numba.int64, *triple, *triple, numba.boolean)
    check_float32(compile_ptx(kernel, signature, cc))
