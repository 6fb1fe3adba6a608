"""The Hopper rung compiled without a GPU: its products, its registers, that nothing waits in turn.

A spilled tile or a product that waits for the last one costs a large part of the speed.
"""

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
from kernels.cuda.attention.flash3_wgmma.float8 import layout as float8_layout
from kernels.cuda.attention.flash3_wgmma.float8 import quantise
from kernels.cuda.attention.flash3_wgmma.float8.kernel import forward_kernel as float8_kernel
from kernels.cuda.attention.flash3_wgmma.forward.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.layout import Widths, layout_of
from kernels.cuda.runtime.resources import compile_ptx
from kernels.runtime.jit import fingerprint
from kernels.scores.program import Features

from ...support.attention.strategies import MASK_MODS, SCORE_MODS
from ...support.device.compiling import assert_in_registers, needs_nvvm, needs_ptxas

WIDTHS = [Widths(64, 64), Widths(128, 128), Widths(192, 128), Widths(256, 256)]
HOPPER = (9, 0, "a")
#: Bytes of shared memory that a block may have.
MOST_SHARED = 227 * 1024


def _name(x: Any) -> str:
    if isinstance(x, Widths):
        return f"{x.head}-{x.value}"
    return (
        "+".join(part for part, has in x._asdict().items() if has)
        if hasattr(x, "_asdict")
        else str(x)
    )


@needs_ptxas
@pytest.mark.parametrize("widths", WIDTHS, ids=_name)
def test_forward_products_are_as_many_as_the_tiles_say_and_no_tile_spills(widths: Widths) -> None:
    dtype, name = ("bfloat16", "bf16") if widths == WIDTHS[0] else ("float16", "f16")
    layout = layout_of(widths)
    # Spilled are numbers of the scheduler thread, which has 24 registers; nothing else.
    ptx = assert_in_registers(forward_kernel(layout, widths, dtype), HOPPER, 96)
    scores, values = (
        ptx.count(f"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{name}")
        for cols in (layout.block_k, widths.value)
    )
    # The first tile, those in the loop, and with room for it the next item's first.
    wanted = {layout.block_k: (2 + (layout.items > 1)) * widths.head // 16}
    wanted[widths.value] = wanted.get(widths.value, 0) + layout.block_k // 16
    assert (scores, values) == (wanted[layout.block_k], wanted[widths.value])
    for text in ("bulk.tensor.4d.shared", "bulk.tensor.4d.global", "setmaxnreg.inc"):
        assert text in ptx


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


@needs_ptxas
@pytest.mark.parametrize(
    ("option", "widths"),
    [
        *((option, WIDTHS[0]) for option in OPTIONS),
        *((o, w) for o in ("boolean mask", "dropout", "softcap") for w in WIDTHS[1::2]),
    ],
    ids=_name,
)
def test_options_leave_tiles_of_scores_in_registers(option: str, widths: Widths) -> None:
    kernel = forward_kernel(layout_of(widths, True), widths, "bfloat16", OPTIONS[option])
    ptx = assert_in_registers(
        kernel, HOPPER, 224
    )  # numbers of an item; nothing is stored in its loop
    if widths == WIDTHS[0]:
        # The first scores, those in the loop and the next item's, of four steps each, and eight of P V.
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == 3 * 4 + 8


def slanted(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score - 0.02 * (head + 1) * abs(row - col)


def backwards(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score + 0.5 * (col - row)


@needs_nvvm
@pytest.mark.parametrize("mod", [slanted, backwards])
def test_a_score_mod_of_distances_converts_one_place_of_a_tile(mod: Any) -> None:
    widths = WIDTHS[0]
    kernel = forward_kernel(layout_of(widths, True), widths, "bfloat16", Features(score_mod=mod))
    ptx = compile_ptx(kernel.source, kernel.signature, HOPPER, kernel.launch_bounds)
    assert "cvt.rn.f32.s64" not in ptx
    # A head and a distance in tiles that are whole, and in those at an edge; of elements there are 64.
    assert ptx.count("cvt.rn.f32.s32") + ptx.count("cvt.rn.f32.u32") <= 6


@needs_nvvm
def test_what_was_compiled_before_changes_no_fingerprint() -> None:
    """Otherwise a kernel with a user's function would never be found on disk."""

    def kernel(dtype: str) -> Any:
        widths = WIDTHS[0]
        return forward_kernel(layout_of(widths, True), widths, dtype, Features(score_mod=slanted))

    before = fingerprint(kernel("float16").source)
    one = kernel("bfloat16")
    compile_ptx(one.source, one.signature, HOPPER, one.launch_bounds)
    assert fingerprint(kernel("float16").source) == before
    assert fingerprint(one.source) != before


# -- the backward pass ------------------------------------------------------------------------------

#: Widths and what a kernel by key tiles computes.
BY_KEYS = [
    (widths, parts) for widths in WIDTHS for adds_dq in (True, False) if max(widths) <= 128 or adds_dq
    for parts in parts_of(widths, adds_dq)
]  # fmt: skip


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


@needs_ptxas
@pytest.mark.parametrize(("widths", "parts"), BY_KEYS, ids=_name)
def test_no_product_of_the_backward_kernel_waits_for_the_last(
    widths: Widths, parts: KeyGradients
) -> None:
    layout = key_layout(widths, parts)
    # Spilled are addresses and numbers of an item; nothing is stored in its loop.
    ptx = assert_in_registers(dkdv_kernel(layout, widths, "bfloat16", parts), HOPPER, 160, 32)
    if (widths, parts) in BY_KEYS[:2]:
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == _products(widths, parts)
    transposed = f"m64n{dq_share(layout, widths).cols}k16.f32.bf16.bf16"
    assert (transposed in ptx) or not parts.dq
    assert ("cp.reduce.async.bulk.global" in ptx) == parts.dq
    assert "setmaxnreg.inc" in ptx


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
        # Of tiles in local memory the smallest would take 128 bytes.  Spilled are numbers of an item, some
        # more or less by the compiler's version; with tiles too large twice that.
        kernel = dkdv_kernel(layout, widths, "bfloat16", parts, features)
        assert_in_registers(kernel, HOPPER, 288, 32)


@needs_ptxas
@pytest.mark.parametrize(
    ("features", "widths"),
    [(Features(), w) for w in WIDTHS]
    + [WITH_OPTIONS[name] for name in ("mask", "wide partial tiles", "long function")],
)
def test_no_product_of_the_kernel_of_dq_waits_for_the_last(
    features: Features, widths: Widths
) -> None:
    kernel = dq_kernel(query_layout(widths), widths, "bfloat16", features)
    assert_in_registers(kernel, HOPPER, 32 if features != Features() else 0, 32)


@needs_ptxas
@pytest.mark.parametrize("value_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dense"])
def test_the_kernel_before_them_moves_16_bytes_at_a_time(is_packed: bool, value_dim: int) -> None:
    lanes = lanes_a_row(value_dim)
    ptx = assert_in_registers(
        preprocess_kernel(lanes, "bfloat16", True, False, is_packed), HOPPER, most=64
    )
    assert "ld.global.v4.u32" in ptx and "st.global.v4.u32" in ptx
    # Four blocks of a multiprocessor.
    elements = preprocess_kernel(lanes, "float16", False, True, is_packed)
    assert_in_registers(elements, HOPPER, most=64)


# -- float8 -----------------------------------------------------------------------------------------


@needs_ptxas
@pytest.mark.parametrize("has_blocks", [True, False], ids=["blocks", "heads"])
@pytest.mark.parametrize("widths", [*WIDTHS[:2], Widths(64, 128)], ids=_name)
def test_both_products_are_of_float8_and_no_tile_spills(widths: Widths, has_blocks: bool) -> None:
    layout = float8_layout.layout_of(widths)
    kernel = float8_kernel(layout, widths, "bfloat16", has_blocks)
    # Spilled are numbers of the scheduler thread, which has 24 registers; nothing else.
    ptx = assert_in_registers(kernel, HOPPER, 96)
    scores, values = (
        ptx.count(f"wgmma.mma_async.sync.aligned.m64n{cols}k32.f32.e4m3.e4m3")
        for cols in (layout.block_k, widths.value)
    )
    # Scores of the first tile, in the loop, and of the next item's first; values in the loop and after it.
    wanted = {layout.block_k: 3 * widths.head // 32}
    wanted[widths.value] = wanted.get(widths.value, 0) + 2 * layout.block_k // 32
    assert (scores, values) == (wanted[layout.block_k], wanted[widths.value])
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "setmaxnreg.inc" in ptx
    assert kernel.shared_bytes <= MOST_SHARED


@needs_ptxas
@pytest.mark.parametrize("width", [64, 128])
def test_rounding_spills_nothing_and_reads_16_bytes_at_a_time(width: int) -> None:
    for kernel in (
        quantise.rows_kernel(2, width, "float16", True, True),
        quantise.rows_kernel(2, width, "bfloat16", False, False),
        quantise.values_kernel(width, "bfloat16"),
    ):
        most = 65536 // (2 * kernel.threads)  # two blocks of a multiprocessor
        assert "ld.global.v4.u32" in assert_in_registers(kernel, HOPPER, most=most)
