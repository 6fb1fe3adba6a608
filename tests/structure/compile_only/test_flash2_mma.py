"""The kernels of ``flash2_mma`` without a GPU: fragments stay in registers, all products are there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kernels.cuda.attention.flash2_mma import launch as rung
from kernels.cuda.attention.flash2_mma.arithmetic import HALVES
from kernels.cuda.attention.flash2_mma.dkdv import dkdv_kernel
from kernels.cuda.attention.flash2_mma.dkdv_wide_heads import roles_kernel
from kernels.cuda.attention.flash2_mma.dq import dq_kernel
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, dq_sums
from kernels.cuda.attention.flash2_mma.forward import forward_kernel
from kernels.cuda.attention.flash2_mma.tiles import MmaLayout, MmaRoleLayout
from kernels.cuda.attention.flash2_split import launch as flash2_split
from kernels.cuda.attention.flash2_split.arithmetic import TF32, TWO_TERMS
from kernels.cuda.attention.flash2_split.products import LEFT
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import compile_ptx, launched_resources
from kernels.scores.program import Features

from ...support.device.compiling import REGISTERS, needs_nvvm, needs_ptxas
from ...support.tensor_cores.attention import layouts_for

NUMBERS = {**HALVES, "float32": TWO_TERMS, "tf32": TF32}
AMPERE, HOPPER = (8, 0), (9, 0, "a")
PRODUCT = r"mma\.sync\.aligned\.m16n8k16"


def _ptx(kernel: Kernel, cc: tuple[Any, ...] = HOPPER) -> str:
    ptx = compile_ptx(kernel.source, kernel.signature, cc, kernel.launch_bounds)
    assert not re.search(r"\b(ld|st)\.local", ptx)
    return ptx


def _assert_fits(kernel: Kernel, spilled: int, cc: tuple[Any, ...] = HOPPER) -> None:
    found = launched_resources(kernel.source, kernel.signature, cc, kernel.launch_bounds)
    assert found.spilled <= spilled
    assert found.registers * kernel.threads * kernel.resident <= REGISTERS


#: (compute capability, head width, layout, bytes that are spilled at most): what a rung would take.
FORWARD: list[tuple[tuple[Any, ...], int, MmaLayout, int]] = [
    (AMPERE, 128, MmaLayout(128, 32, 4, resident=2), 0),
    # Addresses of copies, read once for each tile.
    *(
        (HOPPER, w, layouts_for(rung.LAYOUTS.forward[0], w)[0], {64: 0, 128: 8, 256: 32}[w])
        for w in (64, 128, 256)
    ),
    (HOPPER, 256, MmaLayout(64, 32, 4), 0),
]


@needs_nvvm
@pytest.mark.parametrize(
    "features", [Features(softcap=True), Features(mask="bool"), Features(dropout=True)], ids=str
)
def test_options_leave_fragments_in_registers(features: Features) -> None:
    layout = MmaLayout(64, 64, 4, resident=2)
    _ptx(forward_kernel(layout, 64, 64, HALVES["bfloat16"], True, features))


@needs_ptxas
@pytest.mark.parametrize(("cc", "width", "layout", "spilled"), FORWARD, ids=str)
def test_fragments_stay_in_registers(
    cc: tuple[Any, ...], width: int, layout: MmaLayout, spilled: int
) -> None:
    kernel = forward_kernel(layout, width, width, HALVES["bfloat16"], True)
    ptx = _ptx(kernel, cc)
    # Of each product at least one step of its depth.
    assert len(re.findall(PRODUCT, ptx)) >= layout.row_tiles * (layout.block_k + width) // 8
    assert "cp.async.cg.shared.global" in ptx
    _assert_fits(kernel, spilled, cc)


def _backward_kernel(width: int, name: str, dtype: str) -> Kernel:
    """Return a backward kernel of the rung without options, where shared memory is large."""
    numbers, layouts = NUMBERS[dtype], (flash2_split if dtype == "float32" else rung).LAYOUTS
    if name == "by rows":
        return dq_kernel(layouts_for(layouts.by_rows[0], width)[0], width, width, numbers, True)
    layout = layouts_for(layouts.by_keys[0], width)[0]
    head = round_up(width, layout.step)
    sums: DqSums = dq_sums(layout, head // layout.parts, is_wide=True)
    if isinstance(layout, MmaRoleLayout):
        return roles_kernel(layout, head, numbers, True, sums)
    return dkdv_kernel(layout, head, head, numbers, True, sums)


@needs_ptxas
@pytest.mark.parametrize("name", ["by atomics", "by rows"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, "float16"), (128, "float16"), (256, "float16"), (64, "float32")]
)
def test_gradients_stay_in_registers(width: int, dtype: str, name: str) -> None:
    kernel = _backward_kernel(width, name, dtype)
    assert ("red.global.add.v4.f32" in _ptx(kernel)) == (name == "by atomics")
    _assert_fits(kernel, 64)  # addresses of copies, written once; no fragment


@needs_nvvm
@pytest.mark.parametrize(("width", "dtype"), [(64, "float32"), (128, "float32"), (128, "tf32")])
def test_products_of_terms_stay_in_registers(width: int, dtype: str) -> None:
    has_terms = dtype == "float32"
    layouts = (flash2_split if has_terms else rung).LAYOUTS
    layout = layouts_for(layouts.forward[0], width)[0]
    ptx = _ptx(forward_kernel(layout, width, width, NUMBERS[dtype], True))
    tiles = layout.row_tiles * (layout.block_k + width) // 8
    products = len(LEFT) if has_terms else 1  # each with each, but for the smallest
    assert len(re.findall(PRODUCT + r"\S*\.f16\.f16", ptx)) >= products * tiles
