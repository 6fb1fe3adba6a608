"""Atomic sums of dQ in the order of the fragments, and their conversion to dQ.

A lane's accumulators are two adjacent elements in each of two rows.  In the memory order of dQ, a warp's
additions would touch many sectors.  The sums therefore have their own order: the four accumulators of a
thread are adjacent in memory, and a warp adds to 512 consecutive bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from kernels.cuda.attention.flash2_mma.pipeline import MmaVariant
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    HALF,
    ROWS,
    MmaKeyLayout,
    MmaLayout,
    WarpLane,
)
from kernels.cuda.attention.options.visits import rows_from
from kernels.cuda.attention.register_tiles import set_all
from kernels.cuda.ptx.copies import global_address, red_add, red_add_v4, shared_address
from kernels.cuda.runtime.kernel import WARP, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint8


class DqSums(NamedTuple):
    """The division of a tile of dQ among the warps of a block, along the rows and the columns.

    Four sums are added per instruction if ``is_wide``, which needs compute capability 9.0.
    """

    q_warps: int
    d_warps: int
    is_wide: bool


def dq_sums(layout: MmaKeyLayout, columns: int, is_wide: bool) -> DqSums:
    """Return the division of (block_q, columns) with the least shared-memory traffic."""
    row_tiles, pairs = layout.block_q // ROWS, columns // (2 * COLS)
    shares = [
        (row_tiles * d_warps + pairs * q_warps, q_warps, d_warps)
        for q_warps in range(1, layout.warps + 1)
        if layout.warps % q_warps == 0 and row_tiles % q_warps == 0
        for d_warps in [layout.warps // q_warps]
        if pairs % d_warps == 0
    ]
    if not shares:
        tile = f"{layout.block_q} x {columns}"
        raise ValueError(f"{layout.warps} warps cannot share a tile of {tile}")
    _, q_warps, d_warps = min(shares)
    return DqSums(q_warps, d_warps, is_wide)


def slots_of(rows: int, block_q: int, sequences: int) -> int:
    """Return the number of tiles of the sums of one (batch, head), of 1 or several packed sequences."""
    return -(-rows // block_q) + sequences


@cache
def _make_slot(block_q: int) -> Callable[..., int]:
    """Return ``slot(item, y, tile, extras)``: the index of a tile's sums among those of its head.

    Each packed sequence gets one tile more than its rows need, because tiles are not shared.
    """

    @device_function
    def slot(item, y, tile, extras):
        return item.q.first // block_q + (item.flat - y) // extras.heads + tile

    return slot


@device_function
def _add_nothing(dq_sums, ds_tile, k_tile, share, item, tile, extras):
    """Stand in for ``add_dq`` if dq has a separate kernel."""


@cache
def make_add_dq(variant: MmaVariant, sums: DqSums | None, columns: int) -> Callable[..., None]:
    """Return the function that adds dS·K of one key tile and one query tile to the sums of dQ.

    ``add_dq(dq_sums, ds_tile, k_tile, share, item, tile, extras)``: dSᵀ is (block_k, block_q) and K
    (block_k, width) in shared memory; ``columns`` of them are multiplied, the part ``share.chunk`` of all.
    ``share.row`` is the warp.  Without sums, the function does nothing.
    """
    if sums is None:
        return _add_nothing
    (layout, width, _, numbers, _, _), (q_warps, d_warps, is_wide) = variant, sums
    row_tiles = layout.block_q // (ROWS * q_warps)
    tiles_across = columns // (COLS * d_warps)
    threads, count = layout.threads, row_tiles * tiles_across
    slot, zero = _make_slot(layout.block_q), np.float32(0)
    multiply = numbers.transposed(layout, width, row_tiles, tiles_across)
    part_bytes = FLOAT32.itemsize * layout.block_q * columns

    @device_function
    def add_dq(dq_sums, ds_tile, k_tile, share, item, tile, extras):
        lane, warp, part = share
        acc = cuda.local.array((count, 4), float32)  # (block_q, columns) / threads: dS·K
        set_all(acc, zero)
        first_row = warp % q_warps * (2 * row_tiles)  # in pieces of eight
        first_chunk = part * (columns // COLS) + warp // q_warps * tiles_across
        multiply(acc, ds_tile, k_tile, WarpLane(lane, first_row, first_chunk))
        y = cuda.blockIdx.y
        address = global_address(dq_sums) + y * dq_sums.strides[0] + part * part_bytes
        address += slot(item, y, tile, extras) * dq_sums.strides[1]
        thread = cuda.threadIdx.x
        for n in range(count):
            if is_wide:
                red_add_v4(address + (n * threads + thread) * 16, acc[n])
            else:
                for i in range(4):
                    red_add(address + ((4 * n + i) * threads + thread) * 4, acc[n, i])

    return add_dq


@cache
def dq_end_kernel(variant: MmaVariant, sums: DqSums) -> Kernel:
    """Return the kernel that converts the sums to dq; its arguments are those of ``dkdv_kernel``."""
    (layout, width, _, numbers, vectors, _), (q_warps, d_warps, is_wide) = variant, sums
    parts, block_q, threads = layout.parts, layout.block_q, layout.threads
    columns = width // parts
    row_tiles, tiles_across = block_q // (ROWS * q_warps), columns // (COLS * d_warps)
    count, part_size = row_tiles * tiles_across, block_q * columns
    item_of, slot = variant.loop().item_of, _make_slot(block_q)
    rows_of_warps, units_of = MmaLayout(block_q, COLS, q_warps), numbers.gradient_units
    store = numbers.store(rows_of_warps, width, vectors, columns // d_warps)

    def flash2_mma_dq_end(dq_sums, q, k, dq, scale, extras):
        """Fill one query tile of dq.

        Computes: dQ = τ · its sums
        Source: FlashAttention-2, Algorithm 2, line 15, after the last key tile
        Grid: (num_q_tiles, batch * heads)
        Block: (32 * warps,)
        One thread does: what of the tile it would add to the sums, part after part
        Shared: the tile (block_q, head_dim), swizzled
        Registers: acc (its share of (block_q, columns) / 4, 4)
        Global traffic: reads the sums once; writes dq once
        Needs: compute capability 8.0
        """
        y = cuda.blockIdx.y
        item = item_of(cuda.blockIdx.x, y, q, k, extras)
        b, h, row = item.start.b, item.start.h, item.start.row
        thread = cuda.threadIdx.x
        lane, warp = thread % WARP, thread // WARP
        memory = shared_address(cuda.shared.array(0, uint8))  # the tile
        acc = cuda.local.array((count, 4), float32)  # (block_q, columns) / threads: dQ
        unit, _, _ = units_of(scale, b, h)
        at = slot(item, y, row // block_q, extras)
        for part in range(parts):
            for n in range(count):
                for i in range(4):
                    if is_wide:
                        place_of_sum = part * part_size + (n * threads + thread) * 4 + i
                    else:
                        place_of_sum = part * part_size + (4 * n + i) * threads + thread
                    acc[n, i] = dq_sums[y, at, place_of_sum] * unit
            chunk = part * (columns // COLS) + warp // q_warps * tiles_across
            share = WarpLane(lane, warp % q_warps * (ROWS * row_tiles), chunk)
            store(acc, dq, rows_from(item.q, row), memory, share)

    halves, result = array_type(BITS, 4), variant.result_type
    signature = variant.signature(array_type(FLOAT32, 3), halves, halves, result)
    return Kernel(numbers.named(flash2_mma_dq_end), signature, threads, HALF * block_q * width)
