"""The Hopper rung compiled without a GPU: its products, its registers, that nothing waits in turn."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.cuda.flash3_layout import Widths, layout_of
from kernels.cuda.flash3_wgmma import forward_kernel
from kernels.targets import compile_ptx, launched_resources

from .cuda_compiling import REGISTERS, needs_nvvm, needs_ptxas

WIDTHS = [Widths(64, 64), Widths(128, 128), Widths(192, 128), Widths(256, 256)]
HOPPER = (9, 0, "a")


def _kernel(widths: Widths, dtype: str) -> Any:
    return forward_kernel(layout_of(widths), widths, dtype)


@needs_nvvm
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"{w.head}-{w.value}")
def test_products_are_made_by_wgmma_as_often_as_the_tiles_say(widths: Widths, dtype: str) -> None:
    kernel, layout = _kernel(widths, dtype), layout_of(widths)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    scores, values = (
        ptx.count(f"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{name}")
        for cols in (layout.block_k, widths.value)
        for name in [{"float16": "f16", "bfloat16": "bf16"}[dtype]]
    )
    wanted = {layout.block_k: 2 * widths.head // 16}  # the first tile, and those in the loop
    wanted[widths.value] = wanted.get(widths.value, 0) + layout.block_k // 16
    assert (scores, values) == (wanted[layout.block_k], wanted[widths.value])
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    assert "cp.async.bulk.tensor.4d.global" in ptx
    assert "setmaxnreg.inc" in ptx
    assert ".local" not in ptx


@needs_ptxas
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"{w.head}-{w.value}")
def test_nothing_of_the_loop_spills_and_no_product_waits_for_the_last(widths: Widths) -> None:
    kernel = _kernel(widths, "float16")
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled <= 32  # what an item begins with, three warpgroups; nothing in its loop
    assert kernel.threads * found.registers <= REGISTERS
