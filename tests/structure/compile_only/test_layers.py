"""Kernels of layers and of the optimiser compile without a GPU, and keep what their headers promise.

Local memory, float64 in a kernel of float32, and loads of single elements each cost much of the speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from kernels.cuda.device.half import convert_kernel
from kernels.cuda.device.row_folds import RowBlock, row_block
from kernels.cuda.layers import elementwise, indexing, merge_rows
from kernels.cuda.layers import softmax as softmax_kernels
from kernels.cuda.layers import softmax_ladder as ladder
from kernels.cuda.layers.adamw import AdamForm, adam_kernel, norm_end_kernel, squares_kernel
from kernels.cuda.layers.cross_entropy import gradient_kernel, loss_kernel
from kernels.cuda.layers.embedding_sums import embedding_sums_kernel
from kernels.cuda.layers.layer_norm_kernels import (
    NormForm,
    norm_backward_kernel,
    norm_kernel,
    norm_sums_kernel,
)
from kernels.cuda.layers.row_registers import RowTile, row_tile
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import compile_ptx, ptx_resources
from kernels.cuda.runtime.sizes import GPU
from kernels.reference.softmax_ladder import READS
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT_DTYPES, HALF_DTYPES, is_half
from kernels.runtime.types import types
from minitorch import fast_conv, operators
from minitorch.accelerated import cuda_loop_kernels as cuda_loops

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

pytestmark = [needs_nvvm, needs_ptxas]

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


def check_float64(ptx: str) -> None:
    assert ".local" not in ptx
    assert not re.search(r"\b(add|sub|mul|fma|div|cvt)\S*\.f32", ptx), "float64 rounds to float32"


CHECKS = {FLOAT32: check_float32, FLOAT64: check_float64}


@in_both_dtypes
@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_computes_in_registers_and_in_its_own_dtype(name: str, dtype: Any) -> None:
    ptx = ptx_of(KERNELS[name](dtype), GENERATION[dtype])
    CHECKS[dtype](ptx)
    shares_rows = name.split(",")[0] in ROW_KERNELS
    assert ("shfl.sync" in ptx) == shares_rows
    assert ("bar.sync" in ptx or "barrier.sync" in ptx) == name.endswith(", block")


@pytest.mark.parametrize(
    ("kernel", "dims"), [(fast_conv.cuda_conv1d, 3), (fast_conv.cuda_conv2d, 4)], ids=["1d", "2d"]
)
def test_convolution_computes_in_registers_and_in_its_own_dtype(kernel: Any, dims: int) -> None:
    ints = types.UniTuple(types.int64, dims)
    triple = (types.float32[::1], ints, ints)
    signature = types.void(*triple, types.int64, *triple, *triple, types.boolean)
    check_float32(compile_ptx(kernel, signature))


# -- 16 bits ----------------------------------------------------------------------------------------

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
    "zip with a number": lambda dtype: cuda_loops.zip_kernel(operators.mul, 1, dtype, dtype, FLOAT32),
    "fold": lambda dtype: cuda_loops.fold_kernel(operators.add, dtype, dtype, GPU.fold_short),
    "first of two folds": lambda dtype: cuda_loops.fold_kernel(
        operators.add, FLOAT32, dtype, GPU.fold_long
    ),
    "second of two folds": lambda dtype: cuda_loops.fold_kernel(
        operators.add, dtype, FLOAT32, GPU.fold_across
    ),
    "merge by lse": lambda dtype: merge_rows.merge_kernel(dtype, dtype, dtype, True),
    "first of several sums": lambda dtype: merge_rows.merge_kernel(dtype, dtype, FLOAT32, False),
    "last of several sums": lambda dtype: merge_rows.merge_kernel(FLOAT32, dtype, dtype, False),
}  # fmt: skip


@pytest.mark.parametrize(("source", "out"), CONVERSIONS)
def test_a_conversion_moves_vectors_and_links_nothing(source: Any, out: Any) -> None:
    ptx = ptx_of(convert_kernel(source, out), OLDEST)
    assert_is_kernel(ptx, OLDEST)
    assert ".extern" not in ptx and ".local" not in ptx
    for access, dtype in (("ld", source), ("st", out)):
        vectors = re.findall(rf"{access}\.global\.v\d\.(\w+)", ptx)
        expected = {FLOAT32: ["f32"] * 2, FLOAT64: ["f64"] * 4}.get(dtype, ["u32"])
        assert vectors == expected, f"{access} of {dtype}"
    assert out != FLOAT16 or "cvt.rn.f16.f32" in ptx
    if out == BFLOAT16:
        assert not re.search(r"cvt\S*bf16", ptx), "cc 7.5 has none, and memory is slower"


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_16_bits_computes_in_float32_registers(name: str, dtype: Any) -> None:
    kernel = LOOPS[name](dtype)
    ptx = ptx_of(kernel, OLDEST)
    assert_is_kernel(ptx, OLDEST)
    assert ".extern .func" not in ptx and ".local" not in ptx
    assert_no_float64(ptx)
    assert_fits(kernel, GPU.flat_threads, OLDEST)


# -- long rows --------------------------------------------------------------------------------------


@in_both_dtypes
@pytest.mark.parametrize("step", READS)
def test_softmax_of_long_rows_loads_several_vectors_at_a_time(step: str, dtype: Any) -> None:
    block = ladder.ladder_block(2**18, dtype.itemsize)  # the widest block
    for whole in (True, False):
        kernel = ladder.ladder_kernel(step, block, whole, dtype)
        ptx = ptx_of(kernel, GENERATION[dtype])
        assert ".local" not in ptx
        if dtype == FLOAT32:
            assert_no_float64(ptx)
            assert_fits(kernel, block.threads, GENERATION[dtype])
        if whole and dtype == FLOAT32:
            loads, stores = (
                len(re.findall(rf"{x}(\.global)?\.v4\.f32", ptx)) for x in ("ld", "st")
            )
            assert loads >= READS[step] * block.ahead and stores >= block.ahead


# -- training ---------------------------------------------------------------------------------------

#: As in GPT-2: rows of 768 with weights of float32, and of 1,600; a vocabulary of 50,304.
_WIDE = NormForm(row_tile(768, True), BFLOAT16, FLOAT32, adds=True, drops=True)
_PLAIN = NormForm(row_tile(1600, True), FLOAT32, FLOAT32)
_WORDS = RowTile(row_block(50_304), 1, True)
#: Kernel, vectors that a thread loads, and registers that it takes at the most.
TRAINING: dict[str, tuple[Kernel, int, int]] = {
    "norm, bfloat16": (norm_kernel(_WIDE), 2 + 2 + 2 * 4, 80),
    "its gradient": (norm_backward_kernel(_WIDE), 2 + 2 + 2 + 4, 168),
    "norm, float32": (norm_kernel(_PLAIN), 4 + 2 * 4, 80),
    "the gradient of that": (norm_backward_kernel(_PLAIN), 4 + 4 + 4, 168),
    "cross entropy, bfloat16": (loss_kernel(_WORDS, BFLOAT16), 1, 64),
    "the gradient of cross entropy": (gradient_kernel(_WORDS, BFLOAT16), 1, 64),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_row_is_read_once_in_vectors_and_lies_in_registers(name: str) -> None:
    kernel, vectors, most = TRAINING[name]
    ptx = ptx_of(kernel, (9, 0))
    assert ".local" not in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert_no_float64(ptx)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == vectors
    registers, spilled = ptx_resources(ptx, (9, 0))
    assert (spilled, registers <= most) == (0, True), f"{registers} registers, {spilled} spilled"


def test_rows_of_no_whole_pieces_compile() -> None:
    form = NormForm(row_tile(130, False), FLOAT16, FLOAT16, adds=True)
    for kernel in (norm_kernel(form), norm_backward_kernel(form), norm_sums_kernel(FLOAT16)):
        ptx = ptx_of(kernel, OLDEST)
        assert ".local" not in ptx
        assert_no_float64(ptx)
        assert ptx_resources(ptx, OLDEST)[1] == 0


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


def test_training_in_float64_computes_in_float64() -> None:
    form, words = NormForm(row_tile(96, True), FLOAT64, FLOAT64), RowTile(row_block(96), 1, True)
    for kernel in (
        norm_kernel(form), norm_backward_kernel(form), loss_kernel(words, FLOAT64),
        gradient_kernel(words, FLOAT64),
    ):  # fmt: skip
        ptx = ptx_of(kernel, (9, 0))
        assert not re.search(r"\b(add|sub|mul|fma|div)\S*\.f32", ptx), "float64 rounds to float32"
