"""The Hopper rung compiled without a GPU: its products, its registers, that nothing waits in turn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernels.cuda.attention.flash3_wgmma.backward.dkdv import dkdv_kernel
from kernels.cuda.attention.flash3_wgmma.backward.dq import dq_kernel
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    KeyGradients,
    dq_share,
    key_layout,
    parts_of,
    query_layout,
)
from kernels.cuda.attention.flash3_wgmma.backward.preprocess import lanes_a_row, preprocess_kernel
from kernels.cuda.attention.flash3_wgmma.forward.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.layout import Widths, layout_of
from kernels.cuda.runtime.resources import compile_ptx, launched_resources
from kernels.scores.program import Features

from ...support.device.compiling import REGISTERS, needs_nvvm, needs_ptxas

WIDTHS = [Widths(64, 64), Widths(128, 128), Widths(192, 128), Widths(256, 256)]
HOPPER = (9, 0, "a")


def _kernel(widths: Widths, dtype: str) -> Any:
    return forward_kernel(layout_of(widths), widths, dtype)


@needs_nvvm
@pytest.mark.parametrize(
    ("widths", "dtype"), [*((one, "float16") for one in WIDTHS), (WIDTHS[0], "bfloat16")], ids=str
)
def test_products_are_made_by_wgmma_as_often_as_the_tiles_say(widths: Widths, dtype: str) -> None:
    kernel, layout = _kernel(widths, dtype), layout_of(widths)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    scores, values = (
        ptx.count(f"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{name}")
        for cols in (layout.block_k, widths.value)
        for name in [{"float16": "f16", "bfloat16": "bf16"}[dtype]]
    )
    # The first tile, those in the loop, and with room for it the next item's first.
    wanted = {layout.block_k: (2 + (layout.items > 1)) * widths.head // 16}
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
    assert found.spilled <= 96  # of the scheduler thread, which has 24 registers; nothing else
    assert kernel.threads * found.registers <= REGISTERS


# -- the backward pass ------------------------------------------------------------------------------

#: Widths and what a kernel by key tiles computes.
BY_KEYS = [
    (widths, parts) for widths in WIDTHS for adds_dq in (True, False) if max(widths) <= 128 or adds_dq
    for parts in parts_of(widths, adds_dq)
]  # fmt: skip


def _name(x: Any) -> str:
    if isinstance(x, Widths):
        return f"{x.head}-{x.value}"
    return "+".join(part for part, has in x._asdict().items() if has)


def _products(widths: Widths, parts: KeyGradients) -> int:
    """Return how many instructions the products of a kernel by key tiles take."""
    block_q, block_k = key_layout(widths, parts).block_q, key_layout(widths, parts).block_k
    scores, values = widths.head // 16, widths.value // 16
    # The first scores, and those in the loop; dPᵀ and dK; dV; dQ.
    return (
        2 * scores
        + parts.dk * (values + block_q // 16)
        + parts.dv * block_q // 16
        + parts.dq * block_k // 16
    )


@needs_nvvm
@pytest.mark.parametrize(("widths", "parts"), BY_KEYS[:2], ids=_name)
def test_the_backward_kernel_makes_each_product_once(widths: Widths, parts: KeyGradients) -> None:
    layout = key_layout(widths, parts)
    kernel = dkdv_kernel(layout, widths, "bfloat16", parts)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == _products(widths, parts)
    transposed = f"m64n{dq_share(layout, widths).cols}k16.f32.bf16.bf16"
    assert (transposed in ptx) or not parts.dq
    assert ("cp.reduce.async.bulk.global" in ptx) == parts.dq
    assert "setmaxnreg.inc" in ptx
    assert ".local" not in ptx


@needs_ptxas
@pytest.mark.parametrize(("widths", "parts"), BY_KEYS, ids=_name)
def test_no_product_of_the_backward_kernel_waits_for_the_last(
    widths: Widths, parts: KeyGradients
) -> None:
    kernel = dkdv_kernel(key_layout(widths, parts), widths, "float16", parts)
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled <= 160  # addresses and numbers of an item; nothing is stored in its loop
    assert kernel.threads * found.registers <= REGISTERS


@needs_ptxas
@pytest.mark.parametrize("widths", WIDTHS, ids=_name)
def test_no_product_of_the_kernel_of_dq_waits_for_the_last(widths: Widths) -> None:
    kernel = dq_kernel(query_layout(widths), widths, "float16")
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled == 0
    assert kernel.threads * found.registers <= REGISTERS


@needs_nvvm
@pytest.mark.parametrize("value_dim", [8, 64, 256])
def test_the_kernel_before_them_moves_16_bytes_at_a_time(value_dim: int) -> None:
    kernel = preprocess_kernel(lanes_a_row(value_dim), "bfloat16", True, False)
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert "ld.global.v4.u32" in ptx
    assert "st.global.v4.u32" in ptx
    assert ".local" not in ptx


@needs_ptxas
@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "elements"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dense"])
def test_the_kernel_before_them_spills_nothing(vectors: bool, is_packed: bool) -> None:
    kernel = preprocess_kernel(lanes_a_row(128), "float16", vectors, True, is_packed)
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.spilled == found.local == 0
    assert found.registers <= 64  # four blocks of a multiprocessor


def less_logarithm(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score - 0.3 * math.log(1.0 + abs(row - col))


def one(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.0


#: Options that take most of the registers, each with the heads for which it does.
WITH_OPTIONS = {
    "dropout": (Features(dropout=True), Widths(64, 64)),
    "mask": (Features(mask="bool"), Widths(128, 128)),
    "floating mask": (Features(mask="bfloat16"), Widths(128, 128)),
    "packed": (Features(packed=True), Widths(64, 64)),
    "softcap, packed": (Features(softcap=True, packed=True), Widths(64, 64)),
    "whole tiles": (Features(block_mask=True, whole_tiles=True), Widths(64, 64)),
    "wide whole tiles": (Features(block_mask=True, whole_tiles=True), Widths(128, 128)),
    "wide partial tiles": (Features(block_mask=True), Widths(128, 128)),
    "long function": (Features(score_mod=less_logarithm, derivative=one), Widths(128, 128)),
}


@needs_ptxas
@pytest.mark.parametrize("adds_dq", [True, False], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_no_product_waits_for_the_last_with_options(name: str, adds_dq: bool) -> None:
    features, widths = WITH_OPTIONS[name]
    for parts in parts_of(widths, adds_dq):
        layout = key_layout(widths, parts, features)
        kernel = dkdv_kernel(layout, widths, "bfloat16", parts, features)
        found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
        assert not found.warnings
        assert found.local <= found.spilled + 32  # of tiles the smallest would take 128 bytes
        # Numbers of an item, some more or less by the compiler's version; with tiles too large twice that.
        assert found.spilled <= 288
        assert kernel.threads * found.registers <= REGISTERS


@needs_ptxas
@pytest.mark.parametrize("name", ["mask", "wide partial tiles", "long function"])
def test_no_product_of_the_kernel_of_dq_waits_for_the_last_with_options(name: str) -> None:
    features, widths = WITH_OPTIONS[name]
    kernel = dq_kernel(query_layout(widths), widths, "bfloat16", features)
    found = launched_resources(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert not found.warnings
    assert found.local <= found.spilled + 32
    assert found.spilled <= 32
    assert kernel.threads * found.registers <= REGISTERS
