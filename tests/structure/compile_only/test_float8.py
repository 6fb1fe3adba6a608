"""Hopper's float8 kernels compiled without a GPU: their products, registers and memory accesses."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.cuda.attention.flash3_wgmma.float8 import quantise
from kernels.cuda.attention.flash3_wgmma.float8.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.float8.layout import layout_of
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.runtime.resources import compile_ptx, launched_resources

from ...support.device.compiling import REGISTERS, needs_nvvm, needs_ptxas

HOPPER = (9, 0, "a")
WIDTHS = [Widths(64, 64), Widths(128, 128), Widths(64, 128)]
#: Bytes of shared memory that a block may have.
MOST_SHARED = 227 * 1024


def _name(widths: Widths) -> str:
    return f"{widths.head}-{widths.value}"


@needs_nvvm
@pytest.mark.parametrize("widths", WIDTHS, ids=_name)
def test_both_products_are_of_float8(widths: Widths) -> None:
    layout = layout_of(widths)
    kernel = forward_kernel(layout, widths, "bfloat16", True)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    scores, values = (
        ptx.count(f"wgmma.mma_async.sync.aligned.m64n{cols}k32.f32.e4m3.e4m3")
        for cols in (layout.block_k, widths.value)
    )
    # Scores of the first tile, in the loop, and of the next item's first; values in the loop and after it.
    wanted = {layout.block_k: 3 * widths.head // 32}
    wanted[widths.value] = wanted.get(widths.value, 0) + 2 * layout.block_k // 32
    assert (scores, values) == (wanted[layout.block_k], wanted[widths.value])
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "setmaxnreg.inc" in ptx
    assert ".local" not in ptx
    assert kernel.shared_bytes <= MOST_SHARED


@needs_ptxas
@pytest.mark.parametrize("has_blocks", [True, False], ids=["blocks", "heads"])
@pytest.mark.parametrize("widths", WIDTHS, ids=_name)
def test_nothing_of_the_loop_spills_and_no_product_waits_for_the_last(
    widths: Widths, has_blocks: bool
) -> None:
    kernel = forward_kernel(layout_of(widths), widths, "float16", has_blocks)
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled <= 96  # of the scheduler thread, which has 24 registers; nothing else
    assert kernel.threads * found.registers <= REGISTERS


def _kernels(width: int) -> dict[str, Any]:
    return {
        "rows": quantise.rows_kernel(2, width, "float16", True, True),
        "plain rows": quantise.rows_kernel(2, width, "bfloat16", False, False),
        "values": quantise.values_kernel(width, "bfloat16"),
    }


@needs_ptxas
@pytest.mark.parametrize("width", [64, 128])
def test_rounding_spills_nothing_and_reads_16_bytes_at_a_time(width: int) -> None:
    for name, kernel in _kernels(width).items():
        ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
        assert "ld.global.v4.u32" in ptx, name
        found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
        assert not found.warnings, name
        assert found.spilled == found.local == 0, name
        # Two blocks of a multiprocessor.
        assert 2 * kernel.threads * found.registers <= REGISTERS, name
