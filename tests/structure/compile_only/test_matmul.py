"""Products on tensor cores compiled without a GPU: their instructions, registers, that none waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.cuda.matmul import dispatch, mma, wgmma
from kernels.cuda.matmul.layout import STEPS, TERMS, ProductForm, ProductLayout
from kernels.cuda.matmul.operands import copy_kernel
from kernels.cuda.ptx.wgmma import KINDS
from kernels.cuda.runtime.resources import compile_ptx, launched_resources

from ...support.device.compiling import REGISTERS, needs_nvvm, needs_ptxas, ptx_of

HOPPER = (9, 0, "a")
(LARGE, *_), (SMALL, *_) = dispatch._HOPPER[1]
((SPLIT, *_),), ((WARPS, *_),) = dispatch._HOPPER[3], dispatch._WARPS
WHOLE = ProductForm("bfloat16", "bfloat16", False, True, 1, True, True, True)
HOPPER_KERNELS = {
    "bfloat16": (LARGE, ProductForm("bfloat16", "bfloat16", False, True)),
    "float16, small tiles": (SMALL, ProductForm("float16", "float16", True, False)),
    "tf32": (LARGE, ProductForm("tf32", "float32")),
    "split": (SPLIT, ProductForm("bfloat16", "float32", True, True, planes=3)),
    "bias and GELU": (LARGE, WHOLE),
}
WARP_KERNELS = {
    "bfloat16": ProductForm("bfloat16", "bfloat16", False, True),
    "float16, both turned": ProductForm("float16", "float16", True, True),
    "tf32": ProductForm("tf32", "float32"),
    "bias and GELU": WHOLE,
}


@needs_nvvm
@pytest.mark.parametrize("name", HOPPER_KERNELS)
def test_hoppers_products_are_as_many_as_the_tiles_say(name: str) -> None:
    layout, form = HOPPER_KERNELS[name]
    kernel = wgmma.product_kernel(layout, form)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    kind = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}[form.dtype]
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{layout.cols}k{KINDS[form.dtype][1]}.f32.{kind}"
    )
    assert ptx.count(instruction) == STEPS * len(TERMS[form.planes])
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    assert ("cp.async.bulk.tensor.4d.global" in ptx) == (form.out != "float32")
    assert ("ex2.approx" in ptx) == form.has_gelu
    assert ".local" not in ptx


@needs_ptxas
@pytest.mark.parametrize("name", HOPPER_KERNELS)
def test_nothing_spills_and_no_product_waits_for_the_last(name: str) -> None:
    layout, form = HOPPER_KERNELS[name]
    kernel = wgmma.product_kernel(layout, form)
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled == 0
    assert kernel.threads * found.registers <= REGISTERS
    assert kernel.shared_bytes <= 227 * 1024


@needs_nvvm
@pytest.mark.parametrize("name", WARP_KERNELS)
def test_a_warps_products_are_as_many_as_the_tiles_say(name: str) -> None:
    layout, form = WARPS, WARP_KERNELS[name]
    ptx = ptx_of(mma.product_kernel(layout, form), (8, 0))
    warps = layout.row_warps * layout.col_warps
    tiles = layout.rows // 16 * layout.cols // 8 // warps
    assert ptx.count("mma.sync.aligned") == tiles * STEPS
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == (form.a_turned or form.b_turned)
    assert "cp.async.cg.shared.global" in ptx
    assert ".local" not in ptx


@needs_ptxas
@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (9, 0)], ids=str)
@pytest.mark.parametrize("name", WARP_KERNELS)
def test_a_multiprocessor_holds_the_blocks_of_warps(name: str, cc: Any) -> None:
    layout = WARPS
    kernel = mma.product_kernel(layout, WARP_KERNELS[name])
    found = launched_resources(kernel.source, kernel.signature, cc, kernel.launch_bounds)
    assert found.spilled == 0
    assert layout.resident * layout.threads * -(-found.registers // 8) * 8 <= REGISTERS
    assert kernel.shared_bytes <= 99 * 1024


@needs_ptxas
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "split"])
def test_copies_of_operands_keep_nothing_in_local_memory(kind: str) -> None:
    for source in (np.float32, np.uint16):
        if source is np.float32 or kind in ("float16", "bfloat16"):
            kernel = copy_kernel(kind, np.dtype(source))
            found = launched_resources(
                kernel.source, kernel.signature, (8, 0), kernel.launch_bounds
            )
            assert found.spilled == 0
            assert found.registers <= 64


def test_layouts_of_hopper_are_whole_warpgroups() -> None:
    for layout in (LARGE, SMALL, SPLIT):
        assert isinstance(layout, ProductLayout)
        assert layout.rows % 64 == 0
        assert layout.cols % (64 * layout.panels) == 0
