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
from numba import float32, uint8, uint16, uint32, void

from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, make_units, scale_type
from kernels.cuda.attention.flash2_mma.products import make_products, steps_together
from kernels.cuda.attention.flash2_mma.tiles import (
    COLS,
    DEPTH,
    HALF,
    ROWS,
    WARP,
    MmaKeyLayout,
    MmaLayout,
    make_store_sums,
    make_store_tile,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.visits import make_visits
from kernels.cuda.device.one_source import batch_and_head
from kernels.cuda.ptx.copies import global_address, red_add, red_add_v4, shared_address
from kernels.cuda.ptx.fragments import DEVICE
from kernels.cuda.ptx.mma import MMA, ldmatrix_x4_trans
from kernels.cuda.ptx.swizzle import make_tile_place
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN, Features

square_place, turned_place = DEVICE.square_place, DEVICE.turned_place


class DqSums(NamedTuple):
    """The division of a tile of dQ among the warps of a block.

    Attributes:
        q_warps: Warps along its rows.
        d_warps: Warps along its columns.
        is_wide: Whether four sums are added per instruction, which needs compute capability 9.0.
    """

    q_warps: int
    d_warps: int
    is_wide: bool


def dq_sums(layout: MmaKeyLayout, own: int, is_wide: bool) -> DqSums:
    """Return the division of (block_q, own) with the least shared-memory traffic.

    Raises:
        ValueError: If the warps cannot divide it.
    """
    row_tiles, pairs = layout.block_q // ROWS, own // (2 * COLS)
    shares = [
        (row_tiles * d_warps + pairs * q_warps, q_warps, d_warps)
        for q_warps in range(1, layout.warps + 1)
        if layout.warps % q_warps == 0 and row_tiles % q_warps == 0
        for d_warps in [layout.warps // q_warps]
        if pairs % d_warps == 0
    ]
    if not shares:
        raise ValueError(f"{layout.warps} warps cannot share a tile of {layout.block_q} x {own}")
    _, q_warps, d_warps = min(shares)
    return DqSums(q_warps, d_warps, is_wide)


def slots_of(rows: int, block_q: int, sequences: int) -> int:
    """Return the number of tiles of the sums of one (batch, head).

    Args:
        rows: Rows of q.
        block_q: Query rows of a tile.
        sequences: Number of packed sequences; 1 if there are none.
    """
    return -(-rows // block_q) + sequences


@cache
def _make_slot(block_q: int) -> Callable[..., int]:
    """Return ``slot(flat, y, first_q, tile, extras)``: the index of a tile's sums among those of its head.

    Each packed sequence gets one tile more than its rows need, because tiles are not shared.
    """

    @device_function
    def slot(flat, y, first_q, tile, extras):
        return first_q // block_q + (flat - y) // extras.heads + tile

    return slot


def _make_multiply_ds(
    layout: MmaKeyLayout, width: int, dtype: str, row_tiles: int, own_tiles: int
) -> Callable[..., None]:
    """Return ``multiply(acc, ds_tile, k_tile, lane, row, chunk)``: acc = dS·K, for acc that holds zeros.

    ``acc`` is (row_tiles * own_tiles, 4) float32; rows of dS and columns of K are counted in pieces.
    """
    numbers = NUMBERS[dtype]
    mma, terms = MMA[numbers.dtype], numbers.terms
    ds_term, k_term = (HALF * layout.block_k * size for size in (layout.block_q, width))
    ds_place = make_tile_place(device_function, HALF * layout.block_q)
    k_place = make_tile_place(device_function, HALF * width)
    ds_below, k_below = DEPTH * HALF * layout.block_q, DEPTH * HALF * width
    steps = layout.block_k // DEPTH
    together = steps_together(steps)
    begin, multiply_step, add, _ = make_products(dtype, row_tiles, own_tiles)
    a_tiles, b_tiles, part_tiles = together * terms * row_tiles, 2 * terms, 2 * row_tiles

    @device_function
    def multiply(acc, ds_tile, k_tile, lane, row, chunk):
        a = cuda.local.array((row_tiles, 4), uint32)  # (16 row_tiles, 16) / 32, in pairs: dS
        b = cuda.local.array((2, 2), uint32)  # (16, 16) / 32, in pairs: K
        a_row, a_chunk = turned_place(lane)  # dS is stored by columns
        b_row, b_chunk = square_place(lane)
        for step in range(steps):
            for m in range(row_tiles):
                ds = ds_tile + ds_place(a_row, row + 2 * m + a_chunk)
                ldmatrix_x4_trans(a[m], ds + step * ds_below)
            for n in range(own_tiles // 2):
                k = k_tile + k_place(b_row, chunk + 2 * n + b_chunk)
                ldmatrix_x4_trans(b[0], k + step * k_below)
                for m in range(row_tiles):
                    mma(acc[m * own_tiles + 2 * n], a[m], b[0])
                    mma(acc[m * own_tiles + 2 * n + 1], a[m], b[1])

    @device_function
    def multiply_terms(acc, ds_tile, k_tile, lane, row, chunk):
        a = cuda.local.array((a_tiles, 4), uint32)  # of terms and steps, as above: dS
        b = cuda.local.array((b_tiles, 2), uint32)  # of terms, as above: K
        part = cuda.local.array((part_tiles, 4), float32)  # (16 row_tiles, 16) / 32: dS·K
        a_row, a_chunk = turned_place(lane)
        b_row, b_chunk = square_place(lane)
        for first in range(0, steps, together):
            for m in range(row_tiles):
                ds = ds_tile + ds_place(a_row, row + 2 * m + a_chunk)
                for i in range(together):
                    for t in range(terms):
                        at = ds + t * ds_term + (first + i) * ds_below
                        ldmatrix_x4_trans(a[(i * terms + t) * row_tiles + m], at)
            for n in range(own_tiles // 2):
                k = k_tile + k_place(b_row, chunk + 2 * n + b_chunk)
                begin(part)
                for i in range(together):
                    for t in range(terms):
                        ldmatrix_x4_trans(b[2 * t], k + t * k_term + (first + i) * k_below)
                    multiply_step(part, a, i * terms * row_tiles, b)
                add(acc, 2 * n, part)

    return multiply if terms == 1 else multiply_terms


@cache
def make_add_dq(
    layout: MmaKeyLayout, sums: DqSums, width: int, own: int, dtype: str
) -> Callable[..., None]:
    """Return the function that adds dS·K of one key tile and one query tile to the sums of dQ.

    ``add_dq(dq_sums, ds_tile, k_tile, lane, warp, flat, first_q, tile, part, chunk, extras)``: dSᵀ
    is (block_k, block_q) and K (block_k, width) in shared memory; ``own`` columns are
    multiplied, from the piece ``chunk`` on; they are part ``part`` of all columns.
    """
    q_warps, d_warps, is_wide = sums
    row_tiles = layout.block_q // (ROWS * q_warps)
    own_tiles = own // (COLS * d_warps)
    threads, count = layout.threads, row_tiles * own_tiles
    slot, zero = _make_slot(layout.block_q), np.float32(0)
    multiply = _make_multiply_ds(layout, width, dtype, row_tiles, own_tiles)
    part_bytes = FLOAT32.itemsize * layout.block_q * own

    @device_function
    def add_dq(dq_sums, ds_tile, k_tile, lane, warp, flat, first_q, tile, part, chunk, extras):
        acc = cuda.local.array((count, 4), float32)  # (block_q, own) / threads: dS·K
        for n in range(count):
            for i in range(4):
                acc[n, i] = zero
        first_row = warp % q_warps * (2 * row_tiles)  # in pieces of eight
        first_chunk = chunk + warp // q_warps * own_tiles
        multiply(acc, ds_tile, k_tile, lane, first_row, first_chunk)
        y = cuda.blockIdx.y
        address = global_address(dq_sums) + y * dq_sums.strides[0] + part * part_bytes
        address += slot(flat, y, first_q, tile, extras) * dq_sums.strides[1]
        thread = cuda.threadIdx.x
        for n in range(count):
            if is_wide:
                red_add_v4(address + (n * threads + thread) * 16, acc[n])
            else:
                for i in range(4):
                    red_add(address + ((4 * n + i) * threads + thread) * 4, acc[n, i])

    return add_dq


@cache
def dq_end_kernel(
    layout: MmaKeyLayout,
    width: int,
    dtype: str,
    vectors: bool,
    sums: DqSums,
    features: Features = PLAIN,
    parts: int = 1,
) -> Kernel:
    """Return the kernel that converts the sums to dq; its arguments are those of ``dkdv_kernel``."""
    own, block_q, threads = width // parts, layout.block_q, layout.threads
    q_warps, d_warps, is_wide = sums
    row_tiles, own_tiles = block_q // (ROWS * q_warps), own // (COLS * d_warps)
    count, part_size = row_tiles * own_tiles, block_q * own
    place, slot = make_visits(features, block_q).place, _make_slot(block_q)
    rows_of_warps = MmaLayout(block_q, COLS, q_warps)
    numbers = NUMBERS[dtype]
    terms, unit_of_dq = numbers.terms, make_units(numbers).dq
    make_store = make_store_sums if numbers.is_scaled else make_store_tile
    store = make_store(rows_of_warps, width, dtype, vectors, own // d_warps)

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
        b, h = batch_and_head(cuda.blockIdx.y, q.shape[1])
        flat, row, first_q, seq_q, _, _ = place(
            cuda.blockIdx.x, cuda.blockIdx.y, q.shape[2] // terms, k.shape[2] // terms, extras
        )
        thread, y = cuda.threadIdx.x, cuda.blockIdx.y
        lane, warp = thread % WARP, thread // WARP
        bits = cuda.shared.array(0, uint8)  # the tile
        halves = cuda.shared.array(0, uint16)  # the same memory
        memory = shared_address(bits)
        acc = cuda.local.array((count, 4), float32)  # (block_q, own) / threads: dQ
        unit = unit_of_dq(scale, b, h)
        at = slot(flat, y, first_q, row // block_q, extras)
        for part in range(parts):
            for n in range(count):
                for i in range(4):
                    if is_wide:
                        place_of_sum = part * part_size + (n * threads + thread) * 4 + i
                    else:
                        place_of_sum = part * part_size + (4 * n + i) * threads + thread
                    acc[n, i] = dq_sums[y, at, place_of_sum] * unit
            store(
                acc, dq, b, h, first_q + row, first_q + seq_q, halves, memory, memory, lane,
                warp % q_warps * (ROWS * row_tiles), part * (own // COLS) + warp // q_warps * own_tiles,
            )  # fmt: skip

    halves, rows = array_type(BITS, 4), array_type(FLOAT32, 3)
    written = array_type(FLOAT32, 4) if numbers.is_scaled else halves
    extras = extras_type(features, FLOAT32)
    signature = void(rows, halves, halves, written, scale_type(numbers, True), extras)
    return Kernel(flash2_mma_dq_end, signature, threads, HALF * block_q * width)
