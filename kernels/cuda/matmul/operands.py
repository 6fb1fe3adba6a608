"""Operands of products on tensor cores: read in place, or copied once, rounded or split."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div as host_ceil_div
from kernels.cuda.device.half import as_bits, convert_flat
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.ptx.numbers import PACK, UNPACK, bits_of, float_of, round_tf32
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.arrays import device_pointer, device_view, empty_device, to_device
from kernels.cuda.runtime.kernel import Kernel, device_function
from kernels.runtime.dtypes import BFLOAT16, BITS, FLOAT16, FLOAT32
from kernels.runtime.memory import is_dense
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, int64, types, uint16, uint32, uint64, void

Ints = tuple[int, ...]

#: Side of the square that a block copies, and its number of rows of threads.
SIDE, ROWS_OF_THREADS = 64, 4
#: Name of a format in the kernels → dtype of its storage.
STORED = {"float16": FLOAT16, "bfloat16": BFLOAT16, "tf32": FLOAT32}


class Operand(NamedTuple):
    """A stack of matrices in memory, each (lines, depth); a line is a row of a, or a column of b."""

    array: Any  # The array, flat, on the device
    shape: Ints  # (batch, heads, lines, depth)
    steps: Ints  # Strides in elements; 0 repeats

    @property
    def is_turned(self) -> bool:
        """Tell whether the contiguous dimension is not the depth."""
        return _stored(self.shape, self.steps)[0]

    @property
    def stored(self) -> tuple[Ints, Ints]:
        """Shape and steps, with the contiguous dimension last.

        A dimension of size 1 has a step of 0.
        """
        return _stored(self.shape, self.steps)[1:]

    def lies_well(self, kind: str) -> bool:
        """Tell whether kernels can read it in place: its dtype fits, and pieces of 16 bytes are contiguous.

        TF32 cannot be read across the depth.
        """
        dtype = self.array.dtype
        return (
            dtype == STORED[kind]
            and _lies_in_pieces(self.shape, self.steps, dtype.itemsize, kind != "tf32")
            and device_pointer(self.array) % CHUNK == 0
        )


@lru_cache(maxsize=4096)
def _stored(shape: Ints, steps: Ints) -> tuple[bool, Ints, Ints]:
    """Return whether an operand is turned, and its shape and steps in storage order."""
    (_, _, lines, depth), (_, _, line_step, depth_step) = shape, steps
    is_turned = line_step == 1 and lines > 1 and (depth_step != 1 or depth == 1)
    if is_turned:
        shape, steps = turned(shape), turned(steps)
    lead = (0 if n == 1 else step for n, step in zip(shape[:3], steps, strict=False))
    return is_turned, shape, (*lead, 1 if shape[3] == 1 else steps[3])


@lru_cache(maxsize=4096)
def _lies_in_pieces(shape: Ints, steps: Ints, size: int, can_be_turned: bool) -> bool:
    is_turned, shape, steps = _stored(shape, steps)
    return (
        (can_be_turned or not is_turned)
        and steps[3] == 1
        and (steps[2] != 0 or shape[2] == 1)
        and all(step * size % CHUNK == 0 for step in steps[:3])
    )


def turned(ints: Ints) -> Ints:
    """Return the numbers with lines and depth exchanged."""
    return (*ints[:2], ints[3], ints[2])


def _make_store(kind: str, source: Any) -> Callable[..., None]:
    """Return ``store(out, at, apart, x, flag, ticket)``, which writes the representation of a number.

    If it is three planes, a number that is not finite sets the flag to the ticket.
    """
    if source is not float32:  # 16 bits are only moved

        @device_function
        def move(out, at, apart, x, flag, ticket):
            out[at] = x

        return move
    if kind == "tf32":

        @device_function
        def store_tf32(out, at, apart, x, flag, ticket):
            out[at] = float_of(round_tf32(x))

        return store_tf32
    if kind == "split":
        pack, unpack = PACK["bfloat16"], UNPACK["bfloat16"]

        @device_function
        def store_split(out, at, apart, x, flag, ticket):
            # The first is cut off, not rounded: the largest numbers would become infinite.
            high = uint32(bits_of(x) & uint32(0xFFFF0000))
            rest = x - float_of(high)
            if rest != rest:  # x is not finite
                flag[0] = ticket
            middle = pack(rest, rest)
            _, number = unpack(middle)
            low = rest - number
            out[at] = uint16(high >> uint32(16))
            out[at + apart] = uint16(middle & uint32(0xFFFF))
            out[at + 2 * apart] = uint16(pack(low, low) & uint32(0xFFFF))

        return store_split
    pack = PACK[kind]

    @device_function
    def store_rounded(out, at, apart, x, flag, ticket):
        out[at] = uint16(pack(x, x) & uint32(0xFFFF))

    return store_rounded


@cache
def copy_kernel(kind: str, source: np.dtype[Any]) -> Kernel:
    """Return the kernel that copies matrices, and rounds or splits their numbers on the way.

    Numbers of uint16 are copied unchanged.  The kind "split" is three planes of bfloat16.
    """
    read = uint16 if source == BITS else float32
    written = float32 if kind == "tf32" else uint16
    store, zero, stride = _make_store(kind, read), source.type(0), SIDE + 1

    def copy_operand(source, steps, out, out_steps, shape, apart, flag, ticket):
        """Copy matrices of rows and columns.

        Computes: out[i, j] = source[i, j], zeros for rows and columns that the source does not have
        Grid: (batch · heads · ceil(rows / 64) · ceil(columns / 64),)
        Block: (256,), four rows of 64
        One thread does: 16 elements, four rows apart
        Shared: (64, 65), where the square is turned if the source's neighbours lie in columns
        Global traffic: each element read once and written once, planes each once
        Needs: cc 8.0 for numbers of bfloat16
        """
        square = cuda.shared.array((SIDE, stride), read)  # (64, 65)
        heads, rows, cols, filled_rows, filled, turns = shape
        x, y = int32(cuda.threadIdx.x % SIDE), int32(cuda.threadIdx.x // SIDE)
        col_tiles, row_tiles = int32(ceil_div(filled, SIDE)), int32(ceil_div(filled_rows, SIDE))
        tile = int32(cuda.blockIdx.x % (col_tiles * row_tiles))
        number = int32(cuda.blockIdx.x // (col_tiles * row_tiles))
        row, col = tile // col_tiles * SIDE, tile % col_tiles * SIDE
        # Threads of a warp read neighbours, along the columns or along the rows.
        r, c = (row + x, col + y) if turns else (row + y, col + x)
        at = number // heads * steps[0] + number % heads * steps[1] + r * steps[2] + c * steps[3]
        jump = ROWS_OF_THREADS * (steps[3] if turns else steps[2])
        room = (cols - c if r < rows else 0) if turns else (rows - r if c < cols else 0)
        for i in range(0, SIDE, ROWS_OF_THREADS):
            value = zero
            if i < room:
                value = source[uint64(at)]
            if turns:
                square[x, y + i] = value
            else:
                square[y + i, x] = value
            at += jump
        cuda.syncthreads()  # the square is complete
        r, c = row + y, col + x
        at = number // heads * out_steps[0] + number % heads * out_steps[1] + r * out_steps[2] + c
        room = filled_rows - r if c < filled else 0
        for i in range(0, SIDE, ROWS_OF_THREADS):
            if i < room:
                store(out, uint64(at), uint64(apart), square[y + i, x], flag, ticket)
            at += ROWS_OF_THREADS * out_steps[2]

    steps, out_steps, shape = (types.UniTuple(int64, count) for count in (4, 3, 6))
    signature = void(
        types.Array(read, 1, "C"), steps, types.Array(written, 1, "C"), out_steps, shape, int64,
        types.Array(int64, 1, "C"), int64,
    )  # fmt: skip
    return Kernel(copy_operand, signature, SIDE * ROWS_OF_THREADS)


@cache
def flag() -> Any:
    """Return one integer on the device: the ticket of the last split that met an infinity or NaN."""
    return to_device(np.zeros(1, np.int64))


def copy(
    source: Any, steps: Ints, shape: Ints, kind: str, out: Any, out_steps: Ints,
    filled: tuple[int, int], *, apart: int = 0, ticket: int = 0,
) -> None:  # fmt: skip
    """Launch :func:`copy_kernel`.

    It writes the ``filled`` rows and columns, zeros beyond those of ``shape``, and planes ``apart``
    elements apart.  Steps are strides in elements.  :func:`flag` becomes the ticket if a split number is
    not finite.
    """
    batch, heads, rows, cols = shape
    blocks = batch * heads * host_ceil_div(filled[0], SIDE) * host_ceil_div(filled[1], SIDE)
    source, out = as_bits(source), as_bits(out)
    turns = int(steps[2] < steps[3])
    copy_kernel(kind, source.dtype)[blocks, SIDE * ROWS_OF_THREADS](
        source, steps, out, out_steps, (heads, rows, cols, *filled, turns), apart, flag(), ticket
    )


def placed(operand: Operand, kind: str) -> Operand:
    """Return an operand that kernels can read in place: itself, or a copy.

    It is float32, or has the dtype that ``kind`` names.
    """
    if operand.lies_well(kind):
        return operand
    if kind != "tf32" and operand.array.dtype == FLOAT32:
        # In its own order, eight at a time, where the copy would lie well.
        shape, steps = operand.stored
        own = tuple(1 if step == 0 else n for n, step in zip(shape, steps, strict=True))
        array = empty_device((math.prod(own),), STORED[kind])
        converted = operand._replace(array=array)
        if is_dense(own, steps) and converted.lies_well(kind):
            convert_flat(device_view(operand.array, (math.prod(own),), (1,)), array)  # it is dense
            return converted
    return _copied(operand, kind, 1, 0)[0]


def split(operand: Operand, tile: int, ticket: int) -> tuple[Operand, int]:
    """Return an operand of float32 as three planes of bfloat16, one after the other in the depth.

    Each plane is padded with zeros to a multiple of ``tile``.  :func:`flag` becomes the ticket if a number
    is not finite.  The result has the shape of the first plane; it is returned with their distance.
    """
    return _copied(operand, "split", tile, ticket)


def _copied(operand: Operand, kind: str, tile: int, ticket: int) -> tuple[Operand, int]:
    """Return a copy, and the depth of a plane."""
    dtype, planes = (BFLOAT16, 3) if kind == "split" else (STORED[kind], 1)
    piece = CHUNK // dtype.itemsize
    # A copy keeps its order; only numbers of 32 bits must lie along the depth.
    turns = operand.is_turned and kind != "tf32"
    shape, steps = operand.stored if turns else (operand.shape, operand.steps)
    # Matrices that repeat are copied once.
    batch, heads = (1 if step == 0 else size for step, size in zip(steps[:2], shape, strict=False))
    depth = round_up(operand.shape[3], tile if kind == "split" else piece)
    if turns:
        rows, row_step = (depth if kind == "split" else shape[2]), round_up(shape[3], piece)
        filled, apart, matrix = (rows, row_step), rows * row_step, planes * rows * row_step
    else:
        rows, row_step = shape[2], planes * depth
        filled, apart, matrix = (rows, depth), depth, rows * row_step
    out = empty_device((batch * heads * matrix,), dtype)
    own = (batch, heads, *shape[2:])
    copy(
        operand.array, steps, own, kind, out, (heads * matrix, matrix, row_step), filled,
        apart=apart, ticket=ticket,
    )  # fmt: skip
    lead = (0 if steps[0] == 0 else heads * matrix, 0 if steps[1] == 0 else matrix)
    lines = (*lead, row_step, 1)
    return Operand(out, operand.shape, turned(lines) if turns else lines), depth
