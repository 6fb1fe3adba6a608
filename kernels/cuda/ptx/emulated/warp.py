"""The instructions of a warp on NumPy arrays: a register of a warp is an array over its 32 lanes.

Fragments are (32, registers), with uint32 words and float32 accumulators.  Shared memory is a vector of
bytes, and an address is an index into it.  Products are summed in float64 and rounded once, whereas tensor
cores round in their own order: the results agree to float32 accuracy, but not bitwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cuda.ptx.emulated.numbers import Array, from_bits, halves, read_tf32
from kernels.cuda.ptx.fragments import PLAIN
from kernels.cuda.ptx.swizzle import CHUNK, swizzled

WARP = 32
LANES = np.arange(WARP)


def _grid(*sizes: int) -> list[Array]:
    """Return the lanes, and the numbers below each size, as arrays that broadcast with each other."""
    return list(np.ix_(LANES, *map(np.arange, sizes)))


def _pairs(bits: Array) -> Array:
    low, high = bits[..., 0].astype(np.uint32), bits[..., 1].astype(np.uint32)
    return low | (high << 16)


def scatter_a(fragment: Array) -> Array:
    """Return the tile of 16-bit patterns that a left operand's registers hold, (16, 8 or 16)."""
    registers = fragment.shape[1]
    tile = np.zeros((16, 4 * registers), np.uint16)
    tile[PLAIN.a_element(*_grid(registers, 2))] = halves(fragment)
    return tile


def scatter_b(fragment: Array) -> Array:
    """Return the tile of 16-bit patterns that a right operand's registers hold, (8 or 16, 8)."""
    registers = fragment.shape[1]
    tile = np.zeros((8 * registers, 8), np.uint16)
    tile[PLAIN.b_element(*_grid(registers, 2))] = halves(fragment)
    return tile


def gather_accumulators(tile: Any) -> Array:
    """Return the accumulators' registers, (32, 4 · tiles), for a tile (16, 8 · tiles)."""
    tile = np.asarray(tile, np.float32)
    return tile[PLAIN.accumulator_element(*_grid(tile.shape[1] // 2))]


def scatter_accumulators(fragment: Array) -> Array:
    """Return the tile, (16, 8 · tiles), that accumulators hold."""
    tile = np.zeros((16, 2 * fragment.shape[1]), np.float32)
    tile[PLAIN.accumulator_element(*_grid(fragment.shape[1]))] = fragment
    return tile


def mma(acc: Array, a: Array, b: Array, dtype: str) -> Array:
    """Return acc + A·B as ``mma_f16``, ``mma_bf16`` do, and ``mma_f16_k8`` where A has two registers."""
    left = from_bits(scatter_a(a), dtype)
    right = from_bits(scatter_b(b), dtype)
    return _multiply(acc, left, right)


def mma_tf32(acc: Array, a: Array, b: Array) -> Array:
    """Return acc + A·B as ``mma_tf32`` does."""
    left, right = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    left[PLAIN.a_element_tf32(*_grid(4))] = read_tf32(a)
    right[PLAIN.b_element_tf32(*_grid(2))] = read_tf32(b)
    return _multiply(acc, left, right)


def _multiply(acc: Array, left: Array, right: Array) -> Array:
    total = scatter_accumulators(acc) + left.astype(np.float64) @ right.astype(np.float64)
    return gather_accumulators(total)


def ldmatrix(shared: Array, addresses: Array, count: int, is_transposed: bool = False) -> Array:
    """Return ``count`` registers as ``ldmatrix`` loads them.

    Args:
        shared: Bytes.
        addresses: (32,), of which those of the first 8 · count lanes are used.
        count: 1, 2 or 4 matrices.
        is_transposed: ``.trans``.
    """
    matrices = _matrices(shared, addresses, count)
    row, column = PLAIN.matrix_element(*_grid(2))
    row, column = (column, row) if is_transposed else (row, column)
    return np.stack([_pairs(matrix[row, column]) for matrix in matrices], axis=1)


def stmatrix(shared: Array, addresses: Array, fragment: Array) -> None:
    """Write registers to shared memory as ``stmatrix`` does."""
    matrices = _matrices(shared, addresses, fragment.shape[1])
    row, column = PLAIN.matrix_element(*_grid(2))
    for i, matrix in enumerate(matrices):
        matrix[row, column] = halves(fragment[:, i])
    _write_matrices(shared, addresses, matrices)


def _places(addresses: Array, count: int) -> Array:
    """Return the addresses of the bytes of ``count`` matrices: (matrices, rows, 16)."""
    lanes = np.zeros((count, 8), int)
    matrix, row = PLAIN.matrix_row(LANES[: 8 * count])
    lanes[matrix, row] = LANES[: 8 * count]
    starts = np.asarray(addresses)[lanes]
    if np.any(starts % CHUNK):
        raise ValueError(f"rows of matrices begin at multiples of {CHUNK} bytes, got {starts}")
    return starts[..., None] + np.arange(CHUNK)


def _matrices(shared: Array, addresses: Array, count: int) -> Array:
    return np.ascontiguousarray(shared[_places(addresses, count)]).view(np.uint16)


def _write_matrices(shared: Array, addresses: Array, matrices: Array) -> None:
    shared[_places(addresses, len(matrices))] = matrices.view(np.uint8)


def box_places(box: tuple[int, ...], size: int, swizzle: int) -> Array:
    """Return the offsets of the bytes of a box in shared memory, (*box, size), from its start.

    Args:
        box: Size along each dimension, the fastest last.
        size: Bytes of an element.
        swizzle: Bytes of a row, 0 for no swizzle.
    """
    offsets = np.arange(int(np.prod(box)) * size).reshape(*box, size)
    return swizzled(offsets, swizzle)


def inside(
    box: tuple[int, ...], start: Any, shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the part of a box inside a tensor, as slices of the box and of the tensor.

    Args:
        box: Size along each dimension, the fastest last.
        start: First index along each dimension, the fastest *first*, as for the instruction.
        shape: Shape of the tensor.
    """
    of_box, of_tensor = [], []
    for first, places, length in zip(reversed(tuple(start)), box, shape, strict=True):
        at = max(int(first), 0)
        stop = max(min(int(first) + places, length), at)
        of_box.append(slice(at - int(first), stop - int(first)))
        of_tensor.append(slice(at, stop))
    return tuple(of_box), tuple(of_tensor)


def tensor_load(
    shared: Array, target: int, tensor: Array, box: tuple[int, ...], start: Any, swizzle: int
) -> None:
    """Copy a box of a tensor to shared memory, with zeros outside of the tensor.

    Args:
        shared: Bytes.
        target: A multiple of 128, or of the period of the swizzle, 8 times its width.
        tensor: Any array.
        box: Size along each dimension, the fastest last.
        start: First index along each dimension, the fastest *first*, as for the instruction.
        swizzle: Swizzle of the tensor map.
    """
    values = np.zeros(box, tensor.dtype)
    of_box, of_tensor = inside(box, start, tensor.shape)
    values[of_box] = tensor[of_tensor]
    size = tensor.dtype.itemsize
    places = target + box_places(box, size, swizzle)
    shared[places] = values.view(np.uint8).reshape(*box, size)
