"""``wgmma`` on NumPy arrays: operands are given by descriptors, accumulators are those of four warps.

Fragments are (4, 32, registers): warp, lane, register.
"""

from __future__ import annotations

import numpy as np

from kernels.cuda.ptx.emulated.numbers import E4M3, Array, from_bits, read_tf32
from kernels.cuda.ptx.emulated.warp import (
    WARP,
    gather_accumulators,
    scatter_a,
    scatter_accumulators,
)
from kernels.cuda.ptx.fragments import PLAIN
from kernels.cuda.ptx.swizzle import CHUNK, swizzled
from kernels.cuda.ptx.wgmma import KINDS, ROWS

#: Rows of A and of the accumulators of one warp; warps of a warpgroup.
WARP_ROWS, WARPS = 16, 4
#: Width of the swizzle in bytes, by its code in a descriptor.
_WIDTHS = (0, 128, 64, 32)


def fields(descriptor: int) -> tuple[int, int, int, int]:
    """Return the start, the leading distance, the stride and the width of the swizzle, in bytes."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return start, leading, stride, _WIDTHS[descriptor >> 62]


def operand_offsets(
    lines: int, depth: int, size: int, swizzle: int, leading: int, stride: int, is_transposed: bool
) -> Array:
    """Return the byte offset of each element of an operand before the swizzle, (lines, depth).

    Args:
        lines: Rows of A, or columns of B.
        depth: Depth of the product.
        size: Bytes of an element.
        swizzle: Bytes of a line, 0 for none.
        leading: Leading distance in bytes, see ``wgmma``.
        stride: Stride in bytes, see ``wgmma``.
        is_transposed: Whether lines run along the rows of A or the columns of B.
    """
    line, step = np.ogrid[:lines, :depth]
    width = (swizzle or CHUNK) // size  # elements
    if not is_transposed:
        along = step * size
        if not swizzle:
            along = step // width * leading + step % width * size
        return line // 8 * stride + line % 8 * (swizzle or CHUNK) + along
    # Without a swizzle the two strides change their parts.
    across, along = (leading, stride) if swizzle else (stride, leading)
    in_piece = line % width * size + step % 8 * (swizzle or CHUNK)
    return line // width * across + step // 8 * along + in_piece


def read_operand(
    shared: Array, descriptor: int, lines: int, dtype: str, is_transposed: bool = False
) -> Array:
    """Return the operand that a descriptor describes, (lines, depth) float32.

    Args:
        shared: Bytes.
        descriptor: 64 bits.
        lines: Rows of A, or columns of B.
        dtype: One of ``KINDS``.
        is_transposed: Whether lines run along the rows of A or the columns of B.
    """
    start, leading, stride, swizzle = fields(descriptor)
    depth = KINDS[dtype][1]
    size = 32 // depth
    offsets = operand_offsets(lines, depth, size, swizzle, leading, stride, is_transposed)
    places = swizzled(start + offsets[..., None] + np.arange(size), swizzle)
    words = np.ascontiguousarray(shared[places])
    if dtype == "tf32":
        return read_tf32(words.view(np.uint32)[..., 0])
    return from_bits(words.view(f"uint{8 * size}")[..., 0], dtype)


def gather_rows(tile: Array) -> Array:
    """Return the accumulators of a warpgroup for a tile (64, columns)."""
    return np.stack([gather_accumulators(rows) for rows in np.split(np.asarray(tile), WARPS)])


def scatter_rows(fragment: Array) -> Array:
    """Return the tile (64, columns) that the accumulators of a warpgroup hold."""
    return np.concatenate([scatter_accumulators(rows) for rows in fragment])


def read_registers(fragment: Array, dtype: str) -> Array:
    """Return the left operand that the registers of a warpgroup hold: (64, depth) float32."""
    if dtype in ("float16", "bfloat16"):
        return from_bits(np.concatenate([scatter_a(rows) for rows in fragment]), dtype)
    tile = np.zeros((WARPS, WARP_ROWS, KINDS[dtype][1]), np.float32)
    lane, register, byte = np.ogrid[:WARP, : fragment.shape[2], :4]
    if dtype == E4M3:
        eights = np.ascontiguousarray(fragment)[..., None].view(np.uint8)
        row, column = PLAIN.a_element_8(lane, register, byte)
        tile[:, row, column] = from_bits(eights, dtype)
    else:
        row, column = PLAIN.a_element_tf32(lane[..., 0], register[..., 0])
        tile[:, row, column] = read_tf32(fragment)
    return tile.reshape(ROWS, -1)


def wgmma(
    shared: Array,
    acc: Array,
    a: Array | int,
    b: int,
    dtype: str,
    a_transposed: bool = False,
    b_transposed: bool = False,
    accumulate: bool = True,
) -> Array:
    """Return the accumulators after one product, as ``make_wgmma``'s function leaves them.

    Args:
        shared: Bytes.
        acc: (4, 32, columns / 2) float32.
        a: A descriptor, or registers (4, 32, 4).
        b: A descriptor.
        dtype: One of ``KINDS``.
        a_transposed: Whether the lines of A run along its rows.
        b_transposed: Whether the lines of B run along its columns.
        accumulate: Whether to add to ``acc``; otherwise its numbers are ignored.
    """
    if isinstance(a, int):
        left = read_operand(shared, a, ROWS, dtype, a_transposed)
    else:
        left = read_registers(a, dtype)
    right = read_operand(shared, b, 2 * acc.shape[2], dtype, b_transposed)
    total = left.astype(np.float64) @ right.astype(np.float64).T
    return gather_rows(scatter_rows(acc) + total if accumulate else total)
