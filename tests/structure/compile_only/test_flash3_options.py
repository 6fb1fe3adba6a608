"""Options of the Hopper rung's forward kernel without a GPU: no spills in the loop, nothing waits."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.cuda.attention.flash3_wgmma.forward.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.layout import Widths, layout_of
from kernels.cuda.runtime.resources import compile_ptx, launched_resources
from kernels.runtime.jit import fingerprint
from kernels.scores.program import Features

from ...support.attention.strategies import MASK_MODS, SCORE_MODS
from ...support.device.compiling import REGISTERS, needs_nvvm, needs_ptxas

HOPPER = (9, 0, "a")
OPTIONS = {
    "boolean mask": Features(mask="bool"),
    "floating mask": Features(mask="float"),
    "floating mask of 16 bits": Features(mask="bfloat16"),
    "dropout": Features(dropout=True),
    "softcap": Features(softcap=True),
    "alibi": Features(slopes=True),
    "sink": Features(sink=True),
    "block mask": Features(block_mask=True),
    "packed": Features(packed=True),
    "mask_mod": Features(mask_mod=MASK_MODS[0]),
    "score_mod": Features(score_mod=SCORE_MODS[0][0]),
}


@needs_nvvm
@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_of_scores_stay_in_registers(option: str) -> None:
    widths = Widths(64, 64)
    kernel = forward_kernel(layout_of(widths, True), widths, "bfloat16", OPTIONS[option])
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    # The first scores, those in the loop and the next item's, of four steps each, and eight of P V.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == 3 * 4 + 8
    assert ".local" not in ptx


def slanted(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score - 0.02 * (head + 1) * abs(row - col)


def backwards(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score + 0.5 * (col - row)


@needs_nvvm
@pytest.mark.parametrize("mod", [slanted, backwards])
def test_a_score_mod_of_distances_converts_one_place_of_a_tile(mod: Any) -> None:
    widths = Widths(64, 64)
    kernel = forward_kernel(layout_of(widths, True), widths, "bfloat16", Features(score_mod=mod))
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert "cvt.rn.f32.s64" not in ptx
    # A head and a distance in tiles that are whole, and in those at an edge; of elements there are 64.
    assert ptx.count("cvt.rn.f32.s32") + ptx.count("cvt.rn.f32.u32") <= 6
    assert ".local" not in ptx


@needs_nvvm
def test_what_was_compiled_before_changes_no_fingerprint() -> None:
    # Else a kernel with a user's function would never be found on disk.
    def kernel(dtype: str) -> Any:
        widths = Widths(64, 64)
        features = Features(score_mod=slanted)
        return forward_kernel(layout_of(widths, True), widths, dtype, features)

    before = fingerprint(kernel("float16").source)
    one = kernel("bfloat16")
    compile_ptx(one.source, one.signature, HOPPER, one.launch_bounds)
    assert fingerprint(kernel("float16").source) == before
    assert fingerprint(one.source) != before


@needs_ptxas
@pytest.mark.parametrize("widths", [Widths(128, 128), Widths(256, 256)], ids=lambda w: str(w.head))
@pytest.mark.parametrize("option", ["boolean mask", "dropout", "softcap"])
def test_options_leave_registers_enough_and_no_product_waits(option: str, widths: Widths) -> None:
    layout = layout_of(widths, True)
    kernel = forward_kernel(layout, widths, "float16", OPTIONS[option])
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled <= 224  # numbers of an item; nothing is stored in its loop
    assert kernel.threads * found.registers <= REGISTERS
