"""Every kernel of every rung compiles to PTX without a GPU, and keeps what its header promises."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import Problem, make_problem
from kernels.common.philox import MULTIPLIER_0, MULTIPLIER_1
from kernels.cuda.attention import flash1, naive, split_keys
from kernels.cuda.attention.flash2 import backward as flash2_backward
from kernels.cuda.attention.flash2 import dkdv as flash2_dkdv
from kernels.cuda.attention.flash2 import dq as flash2_dq
from kernels.cuda.attention.flash2 import forward as flash2
from kernels.cuda.attention.flash2 import mask_gradient as flash2_mask_gradient
from kernels.cuda.attention.register_tiles import Variant, pick_layout, widths
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.sizes import GPU
from kernels.scores.mods import ScoreMod
from kernels.scores.program import PLAIN, Features

from ...support.device.compiling import (
    FLOAT32,
    FLOAT64,
    GENERATIONS,
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
    "flash1 backward": lambda dtype, *dims: flash1.backward_kernel(
        *flash1.paper_tiles(GPU.flash1_bytes // dtype.itemsize, *dims)[1],
        *dims, GPU.flash1_threads, dtype,
    ),
    "flash2 forward": lambda dtype, *dims: flash2.forward_kernel(
        _variant("forward", dtype, *dims)
    ),
    "flash2 delta": lambda dtype, *dims: flash2_dq.delta_kernel(GPU.flat_threads, dtype),
    "flash2 dq": lambda dtype, *dims: flash2_dq.dq_kernel(_variant("dq", dtype, *dims)),
    "flash2 dkdv": lambda dtype, *dims: flash2_dkdv.dkdv_kernel(
        _variant("dkdv", dtype, *dims), False
    ),
    "flash2 atomic": lambda dtype, *dims: flash2_dkdv.dkdv_kernel(
        _variant("atomic", dtype, *dims), True
    ),
    "flash2 few rows": lambda dtype, *dims: flash2.forward_kernel(
        _variant("few", dtype, *dims), True
    ),
    "flash2 merge": lambda dtype, *dims: split_keys.merge_kernel(dtype, dtype, PLAIN),
    "flash2 merge with a sink": lambda dtype, *dims: split_keys.merge_kernel(
        dtype, dtype, Features(sink=True)
    ),
}  # fmt: skip


def _visible(batch: int, head: int, row: int, col: int) -> bool:
    return (row + col) % 3 != 0


def _score(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * 1.5


def _slope(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.5


#: Everything at once that a call can ask.
EVERYTHING = Features(True, True, "float", True, True, True, _visible, _score, _slope)

#: flash2's kernels with options.
WITH_OPTIONS: dict[str, Callable[[Any, Features], Kernel]] = {
    "forward": lambda dtype, features: flash2.forward_kernel(
        _variant_with("forward", dtype, features)
    ),
    "dq": lambda dtype, features: flash2_dq.dq_kernel(_variant_with("dq", dtype, features)),
    "dkdv": lambda dtype, features: flash2_dkdv.dkdv_kernel(
        _variant_with("dkdv", dtype, features), False
    ),
    "atomic": lambda dtype, features: flash2_dkdv.dkdv_kernel(
        _variant_with("atomic", dtype, features), True
    ),
    "own rows": lambda dtype, features: flash2.own_rows_kernel(
        _variant_with("forward", dtype, features)
    ),
    "dmask": lambda dtype, features: flash2_mask_gradient.dmask_kernel(
        _variant_with("dq", dtype, features)
    ),
}


def _problem(dtype: Any, head_dim: int, value_dim: int) -> Problem:
    q, v = np.ones((64, head_dim), dtype), np.ones((64, value_dim), dtype)
    return make_problem(q, q, v)


def _variant_with(name: str, dtype: Any, features: Features) -> Variant:
    """Return the variant for heads of 64, as a call with the features gets it."""
    problem = replace(
        _problem(dtype, 64, 64),
        softcap=float(features.softcap),
        slopes=features.slopes,
        mask=features.mask,
        score_mod=features.score_mod and ScoreMod(features.score_mod),
    )
    return Variant(pick_layout(name, problem, None), *widths(problem), dtype, True, features)


def _variant(name: str, dtype: Any, *dims: int) -> Variant:
    """Return the variant of a kernel, which for few rows has the forward kernel's layout."""
    problem = _problem(dtype, *dims)
    if name == "few":
        name, problem = "forward", replace(problem, seq_q=1)
    return Variant(pick_layout(name, problem, None), *widths(problem), dtype, True)


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
SPILLED = {("flash2 dq", 64): 16, ("flash2 dkdv", 64): 16}


@needs_ptxas
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name",
    [
        "naive softmax", "naive softmax backward", "flash2 forward", "flash2 delta", "flash2 dq",
        "flash2 dkdv",
    ],
)  # fmt: skip
def test_a_multiprocessor_holds_the_blocks_that_the_layout_says_and_registers_suffice(
    name: str, dim: int
) -> None:
    kernel = ATTENTION[name](FLOAT32, dim, dim)
    assert_fits(kernel, kernel.threads, (9, 0), SPILLED.get((name, dim), 0))


@needs_nvvm
@pytest.mark.parametrize(
    ("name", "dtype", "cc"),
    [("forward", FLOAT32, cc) for cc in GENERATIONS] + [("forward", FLOAT64, (8, 0))]
    + [(name, FLOAT32, (9, 0)) for name in WITH_OPTIONS if name != "forward"],
    ids=str,
)  # fmt: skip
def test_flash2_compiles_with_every_option_at_once(
    name: str, dtype: Any, cc: tuple[int, int]
) -> None:
    ptx = ptx_of(WITH_OPTIONS[name](dtype, EVERYTHING), cc)
    assert_is_kernel(ptx, cc)
    assert not re.search(r"(ld|st)\.local", ptx)
    if dtype == FLOAT32:
        # A user's constants too are numbers of the dtype.
        assert_no_float64(ptx, "fma|mul|add|sub")


@needs_nvvm
@pytest.mark.parametrize("name", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize(
    "features",
    [
        Features(mask="bool"),
        Features(dropout=True),
        Features(dropout=True, moved=True),
        Features(block_mask=True),
    ],
    ids=["boolean mask", "dropout", "dropout of a part", "block mask"],
)
def test_an_option_leaves_the_tiles_in_registers(name: str, features: Features) -> None:
    ptx = ptx_of(WITH_OPTIONS[name](FLOAT32, features), (9, 0))
    assert not re.search(r"(ld|st)\.local", ptx)
    assert len(re.findall(r"ld\.shared\.v4", ptx)) >= 20


@needs_nvvm
def test_dropout_draws_its_bits_with_words_of_32_bits() -> None:
    ptx = ptx_of(WITH_OPTIONS["forward"](FLOAT32, Features(dropout=True)), (9, 0))
    # 7 rounds of two products, once for eight columns.
    assert len(re.findall(r"mul\.hi\.u32", ptx)) == 14
    assert not re.search(rf"mul\.lo\.s64.*({MULTIPLIER_0}|{MULTIPLIER_1})", ptx)


@needs_nvvm
@pytest.mark.parametrize("name", ["flash2 forward", "flash2 dq", "flash2 dkdv", "flash2 atomic"])
def test_flash2_moves_whole_vectors(name: str) -> None:
    ptx = _ptx(name, FLOAT32, (9, 0), (64, 64))
    assert len(re.findall(r"ld\.shared\.v4", ptx)) >= 20
    assert len(re.findall(r"ld(\.global)?\.v4", ptx)) >= 3
    assert not re.search(r"(ld|st)\.local", ptx)


@needs_nvvm
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        *itertools.product(("flash1 forward", "flash1 backward"), ((3, 5), (256, 256))),
        *itertools.product(
            ("flash2 forward", "flash2 dq", "flash2 atomic"), ((80, 33), (256, 256))
        ),
    ],
    ids=str,
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
            assert flash1.backward_elements(backward_tile, *dims) <= elements, dims


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("name", ["forward", "dq", "atomic"])
def test_a_call_without_a_tile_gets_the_layout_of_the_table(
    name: str, dtype: Any, dims: tuple[int, int]
) -> None:
    """A tile of another kernel's would cost registers or blocks; nothing but time would show it."""
    problem = replace(_problem(dtype, *dims), deterministic=name != "atomic")
    tile = flash2.tile(problem) if name == "forward" else flash2_backward.tile(problem)
    assert pick_layout(name, problem, tile) == pick_layout(name, problem, None)
