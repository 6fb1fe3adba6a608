"""Every kernel of every rung compiles to PTX without a GPU, and keeps what its header promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels import Problem, make_problem
from kernels.cuda import flash1, flash1_backward, flash2, flash2_dkdv, flash2_dq, naive
from kernels.cuda.device import Kernel
from kernels.cuda.register_tiles import pick_layout, widths
from kernels.cuda.sizes import GPU

from .cuda_compiling import (
    FLOAT32,
    assert_fits,
    assert_is_kernel,
    assert_no_float64,
    needs_nvvm,
    needs_ptxas,
    on_every_generation,
    ptx_of,
)

#: How to make each kernel of the attention rungs, by name, with the sizes that a GPU gets.
ATTENTION: dict[str, Callable[[Any, int, int], Kernel]] = {
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
    "flash2 delta": lambda dtype, *dims: flash2_dq.delta_kernel(GPU.flat_threads, dtype),
    "flash2 dq": lambda dtype, *dims: flash2_dq.dq_kernel(
        *_layout_and_widths("dq", dtype, *dims), dtype, True
    ),
    "flash2 dkdv": lambda dtype, *dims: flash2_dkdv.dkdv_kernel(
        *_layout_and_widths("dkdv", dtype, *dims), dtype, True, False
    ),
    "flash2 atomic": lambda dtype, *dims: flash2_dkdv.dkdv_kernel(
        *_layout_and_widths("atomic", dtype, *dims), dtype, True, True
    ),
}  # fmt: skip


def _problem(dtype: Any, head_dim: int, value_dim: int) -> Problem:
    q, v = np.ones((8, head_dim), dtype), np.ones((8, value_dim), dtype)
    return make_problem(q, q, v)


def _layout_and_widths(name: str, dtype: Any, *dims: int) -> tuple[Any, int, int]:
    problem = _problem(dtype, *dims)
    return pick_layout(name, problem, None), *widths(problem)


def _ptx(name: str, dtype: Any, cc: tuple[int, int], dims: tuple[int, int]) -> str:
    return ptx_of(ATTENTION[name](dtype, *dims), cc)


@needs_nvvm
@on_every_generation
@pytest.mark.parametrize("name", ATTENTION)
def test_every_rung_compiles_for_every_generation(
    name: str, dtype: Any, cc: tuple[int, int]
) -> None:
    ptx = _ptx(name, dtype, cc, (64, 64))
    assert_is_kernel(ptx, cc)
    assert ".local" not in ptx  # what the headers call registers is no local array
    if dtype == FLOAT32:
        # The helpers of online_softmax mix float32 with Python's constants, once a row.
        assert_no_float64(ptx, "fma|mul|add|sub")


#: Bytes a thread that the compiler may put aside, by kernel and width.  Three blocks a multiprocessor
#: with a few bytes of local memory are faster than two without; see docs/notes-cuda.md.
SPILLED = {("flash2 dq", 64): 16}


@needs_ptxas
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["flash2 forward", "flash2 delta", "flash2 dq", "flash2 dkdv"])
def test_a_multiprocessor_holds_the_blocks_that_the_layout_says_and_registers_suffice(
    name: str, dim: int
) -> None:
    kernel = ATTENTION[name](FLOAT32, dim, dim)
    assert_fits(kernel, kernel.threads, (9, 0), SPILLED.get((name, dim), 0))


@needs_ptxas
@pytest.mark.parametrize("name", [name for name in ATTENTION if name.startswith("naive")])
def test_the_naive_softmax_stays_in_registers(name: str) -> None:
    assert_fits(ATTENTION[name](FLOAT32, 64, 64), GPU.row_threads, (9, 0))


@needs_nvvm
@pytest.mark.parametrize("name", ["flash2 forward", "flash2 dq", "flash2 dkdv", "flash2 atomic"])
def test_flash2_moves_whole_vectors(name: str) -> None:
    ptx = _ptx(name, FLOAT32, (9, 0), (64, 64))
    assert len(re.findall(r"ld\.shared\.v4", ptx)) >= 20
    assert len(re.findall(r"ld(\.global)?\.v4", ptx)) >= 3
    assert not re.search(r"(ld|st)\.local", ptx)


@needs_nvvm
@pytest.mark.parametrize("dims", [(3, 5), (80, 33), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["flash1 forward", "flash1 backward", "flash2 forward", "flash2 dq", "flash2 atomic"],
)
def test_flash_compiles_for_every_width(name: str, dims: tuple[int, int]) -> None:
    assert ".visible .entry" in _ptx(name, FLOAT32, (8, 0), dims)


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
