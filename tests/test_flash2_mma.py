"""FlashAttention-2 on tensor cores without a GPU: its source on an emulated one, its machine code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.cuda.flash2_mma import forward_kernel
from kernels.cuda.mma_tiles import MmaLayout
from kernels.targets import compile_ptx, launched_resources

from .cuda_compiling import REGISTERS, needs_nvvm, needs_ptxas
from .emulated_gpu import launch
from .mma_attention import LARGE, OPTIONS, TINY, check, operands, run


@pytest.mark.parametrize("name", [*TINY, *OPTIONS])
def test_the_kernels_own_source_computes_attention(name: str) -> None:
    call = {**TINY, **OPTIONS}[name]
    arrays = operands(call, np.random.default_rng(0))
    launch(call.kernel, call.grid, *arrays, call.scale, call.extras)
    check(call, *arrays)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*TINY, *OPTIONS, *LARGE])
def test_the_kernel_computes_attention_on_a_gpu(name: str) -> None:
    run({**TINY, **OPTIONS, **LARGE}[name], np.random.default_rng())


# -- compile only ---------------------------------------------------------------------------------

#: (compute capability, head width, layout): what a rung would take.
LAYOUTS: list[tuple[tuple[Any, ...], int, MmaLayout]] = [
    ((8, 0), 64, MmaLayout(128, 64, 4, resident=2)),
    ((8, 0), 128, MmaLayout(128, 32, 4, resident=2)),
    ((9, 0, "a"), 64, MmaLayout(128, 64, 4, resident=2)),
    ((9, 0, "a"), 128, MmaLayout(128, 64, 4, resident=2)),
    ((9, 0, "a"), 256, MmaLayout(64, 32, 4)),
]


@needs_nvvm
@pytest.mark.parametrize("name", OPTIONS)
def test_options_leave_fragments_in_registers(name: str) -> None:
    kernel = forward_kernel(
        MmaLayout(64, 64, 4, resident=2), 64, 64, "bfloat16", True, OPTIONS[name].features
    )
    ptx = compile_ptx(kernel.source, kernel.signature, (9, 0), kernel.launch_bounds)
    assert not re.search(r"\b(ld|st)\.local", ptx)


@needs_ptxas
@pytest.mark.parametrize(("cc", "width", "layout"), LAYOUTS, ids=str)
def test_fragments_stay_in_registers(cc: tuple[Any, ...], width: int, layout: MmaLayout) -> None:
    kernel = forward_kernel(layout, width, width, "bfloat16", True)
    ptx = compile_ptx(kernel.source, kernel.signature, cc, kernel.launch_bounds)
    assert not re.search(r"\b(ld|st)\.local", ptx)
    # Of each product at least one step of its depth.
    tiles = layout.row_tiles * (layout.block_k + width) // 8
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16", ptx)) >= tiles
    assert "cp.async.cg.shared.global" in ptx
    resources = launched_resources(kernel.source, kernel.signature, cc, kernel.launch_bounds)
    assert resources.spilled == 0
    assert resources.registers * layout.threads * layout.resident <= REGISTERS
