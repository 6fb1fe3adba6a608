"""Products on tensor cores compiled without a GPU: their instructions, registers, that none waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.cuda.matmul import dispatch, mma, wgmma
from kernels.cuda.matmul.layout import STEPS, TERMS, ProductForm
from kernels.cuda.matmul.operands import copy_kernel
from kernels.cuda.ptx.wgmma import KINDS

from ...support.device.compiling import REGISTERS, assert_in_registers, needs_ptxas

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
    "shared sums": (LARGE, ProductForm("bfloat16", "bfloat16", True, True, streams=True)),
}
WARP_KERNELS = {
    "bfloat16": ProductForm("bfloat16", "bfloat16", False, True),
    "float16, both turned": ProductForm("float16", "float16", True, True),
    "tf32": ProductForm("tf32", "float32"),
    "bias and GELU": WHOLE,
}


@needs_ptxas
@pytest.mark.parametrize("name", HOPPER_KERNELS)
def test_hoppers_products_are_as_many_as_the_tiles_say_and_none_waits(name: str) -> None:
    layout, form = HOPPER_KERNELS[name]
    kernel = wgmma.product_kernel(layout, form)
    ptx = assert_in_registers(kernel, HOPPER)
    kind = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}[form.dtype]
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{layout.cols}k{KINDS[form.dtype][1]}.f32.{kind}"
    )
    assert ptx.count(instruction) == STEPS * len(TERMS[form.planes])
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    assert ("cp.async.bulk.tensor.4d.global" in ptx) == (form.out != "float32")
    assert ("ex2.approx" in ptx) == form.has_gelu
    assert kernel.shared_bytes <= 227 * 1024


@needs_ptxas
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("name", WARP_KERNELS)
def test_a_multiprocessor_holds_the_blocks_of_warps(name: str, cc: Any) -> None:
    layout, form = WARPS, WARP_KERNELS[name]
    kernel = mma.product_kernel(layout, form)
    ptx = assert_in_registers(
        kernel, cc, most=REGISTERS // (layout.resident * layout.threads) // 8 * 8
    )
    tiles = layout.rows // 16 * layout.cols // 8 // (layout.row_warps * layout.col_warps)
    assert ptx.count("mma.sync.aligned") == tiles * STEPS
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == (form.a_turned or form.b_turned)
    assert "cp.async.cg.shared.global" in ptx
    assert kernel.shared_bytes <= 99 * 1024


@needs_ptxas
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "split"])
def test_copies_of_operands_keep_nothing_in_local_memory(kind: str) -> None:
    for source in (np.float32, np.uint16):
        if source is np.float32 or kind in ("float16", "bfloat16"):
            assert_in_registers(copy_kernel(kind, np.dtype(source)), (8, 0), most=64)
