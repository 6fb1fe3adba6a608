"""Tiles on tensor cores: their division among warps, and copies from and to global memory.

A block of warps works on two tiles.  Each warp owns whole rows of one tile, in tiles of 16, and reads all
rows of the other.  The more of its own rows a warp multiplies a fragment with, the less shared memory has
to deliver.  Rows in shared memory are in the order of ``ptx.swizzle``, without gaps.

A lane's elements of a 16 x 8 tile of scores are (row, col), (row, col + 1) and the same eight rows below.
``lane_row`` and ``lane_col`` return the first element of a lane; ``ROW_OF`` and ``COL_OF`` are the
distances from it, which are compile-time constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from kernels.cuda.ptx.copies import (
    cp_async_16,
    global_address,
    ld_shared_v4,
    st_global_v2,
    st_global_v4,
    st_shared,
    st_shared_v4,
)
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import PACK
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.kernel import WARP, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64, uint16, uint32

#: Rows of a tile of A, columns of a tile of accumulators, depth of one product.
ROWS, COLS, DEPTH = 16, 8, 16
#: Bytes and elements of a piece of a row that a lane copies.
HALF, PIECE = 2, CHUNK // 2
#: Row and column, from the lane's first, of each of its accumulators of a 16 x 8 tile.
ROW_OF, COL_OF = (0, 0, 8, 8), (0, 1, 0, 1)


class WarpLane(NamedTuple):
    """The number of a lane, and the first row and first column piece of its warp in a tile."""

    lane: Any
    row: Any
    chunk: Any


@dataclass(frozen=True)
class MmaLayout:
    """The layout of a flash2_mma block whose warps own query rows.

    Attributes:
        block_q: Query rows per tile: ``warps`` times a multiple of 16.
        block_k: Key columns per tile, a multiple of 16.
        warps: Warps of the block.
        resident: Blocks per multiprocessor, which bounds the registers of a thread.
        patience: The number of powers of two by which a maximum may grow before the forward kernel rescales
            the rows of a warp; at most 8, so that 16 bits hold all exponentials.  0 rescales for each
            tile.  See ``online_softmax.PATIENCE``.
        skips: Whether a warp of the forward kernel skips tiles that are fully masked for its own rows.
        parts: Blocks that share the columns of a query tile of out or dq.
    """

    block_q: int
    block_k: int
    warps: int
    resident: int = 1
    patience: int = 0
    skips: bool = False
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARP * self.warps

    @property
    def step(self) -> int:
        """head_dim and value_dim are rounded up to a multiple of this."""
        return ROWS * self.parts

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 query rows per warp."""
        return self.block_q // (ROWS * self.warps)


@dataclass(frozen=True)
class MmaKeyLayout:
    """The layout of a flash2_mma block whose warps own keys.

    Attributes:
        block_q: Query rows per tile in shared memory.
        block_k: Keys of the block: ``warps`` times a multiple of 16.
        warps: Warps of the block.
        step_q: Query rows whose scores are in registers at a time, a multiple of 16 that divides block_q.
        resident: Blocks per multiprocessor, which bounds the registers of a thread.
        step: head_dim and value_dim are rounded up to a multiple of this.
        parts: Blocks that share the columns of a key tile.
    """

    block_q: int
    block_k: int
    warps: int
    step_q: int
    resident: int = 1
    step: int = 16
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARP * self.warps

    @property
    def transposed(self) -> MmaLayout:
        """The layout of Sᵀ = K·Qᵀ, with keys in place of query rows."""
        return MmaLayout(self.block_k, self.step_q, self.warps, self.resident)


@dataclass(frozen=True)
class MmaRoleLayout(MmaKeyLayout):
    """The layout of a block in which half of the warps compute Sᵀ and dV, and the other half dPᵀ and dK.

    head_dim and value_dim are equal.  The warps of a half share the keys.  ``block_q / step_q`` warps share
    the query rows of the same keys, and the columns of dV or dK; ``step_q`` is then the number of query
    rows of a warp's scores.
    """

    @property
    def q_warps(self) -> int:
        """Warps that share the same keys."""
        return self.block_q // self.step_q

    @property
    def transposed(self) -> MmaLayout:
        """The layout of Sᵀ or dPᵀ of a half, with keys in place of query rows."""
        return MmaLayout(self.block_k, self.step_q, self.warps // (2 * self.q_warps), self.resident)


@cache
def make_copy_tile(threads: int, rows: int, width: int, vectors: bool) -> Callable[..., None]:
    """Return ``copy_tile(thread, source, span, target)``: rows, a ``HeadRows``, to shared memory.

    It copies them to the address ``target``, with zeros for rows beyond the sequence and for columns that
    the source does not have.  Elements out of bounds are never read.
    """
    chunks = width // PIECE
    count = rows * chunks
    loads = -(-count // threads)
    place = make_tile_place(device_function, HALF * width)
    # Where a round of the threads is whole rows, each of them stays in its column.
    step = threads // chunks if threads % chunks == 0 else 0

    @device_function
    def in_columns(thread, source, span, target):
        b, h, first, stop = span
        row, chunk = thread // chunks, thread % chunks
        row_bytes = source.strides[2]
        address = global_address(source) + b * source.strides[0] + h * source.strides[1]
        address += (first + row) * row_bytes + chunk * CHUNK
        length = int32(stop - first) if chunk * PIECE < source.shape[3] else int32(0)
        for i in range(loads):
            if rows % step == 0 or row + i * step < rows:
                bytes_ = CHUNK if row + i * step < length else 0
                cp_async_16(target + place(row + i * step, chunk), address, bytes_)
                address += step * row_bytes

    @device_function
    def piece_by_piece(thread, source, span, target):
        b, h, first, stop = span
        base = global_address(source) + b * source.strides[0] + h * source.strides[1]
        dim = source.shape[3]
        for i in range(loads):
            n = thread + i * threads
            row, chunk = n // chunks, n % chunks
            if count % threads == 0 or n < count:
                inside = first + row < stop and chunk * PIECE < dim
                address = base + (first + row) * source.strides[2] + chunk * CHUNK
                cp_async_16(target + place(row, chunk), address, CHUNK if inside else 0)

    @device_function
    def by_element(thread, source, span, target):
        b, h, first, stop = span
        words = cuda.local.array(4, uint32)  # (4,)
        dim = source.shape[3]
        for i in range(loads):
            n = thread + i * threads
            row, chunk = n // chunks, n % chunks
            if count % threads == 0 or n < count:
                for w in range(4):
                    low = high = uint16(0)
                    col = chunk * PIECE + 2 * w
                    if first + row < stop:
                        if col < dim:
                            low = source[b, h, first + row, col]
                        if col + 1 < dim:
                            high = source[b, h, first + row, col + 1]
                    words[w] = uint32(low) | (uint32(high) << uint32(16))
                st_shared_v4(target + place(row, chunk), words)

    asynchronous = in_columns if step else piece_by_piece
    return asynchronous if vectors else by_element


@cache
def make_keep_tile(dtype: str, layout: MmaLayout, width: int, cols: int = 0) -> Callable[..., None]:
    """Return ``keep_tile(s, tile, share)``: round the warp's numbers and store them at ``tile``.

    They are (row_tiles * cols / 8, 4) float32, for the rows and columns of the ``WarpLane`` ``share``.
    """
    pack, place = PACK[dtype], make_tile_place(device_function, HALF * width)
    row_tiles, col_tiles = layout.row_tiles, (cols or layout.block_k) // COLS

    @device_function
    def keep_tile(s, tile, share):
        own_row, own_byte = share.row + lane_row(share.lane), HALF * lane_col(share.lane)
        for m in range(row_tiles):
            for n in range(col_tiles):
                i, at = m * col_tiles + n, own_row + m * ROWS
                st_shared(tile + place(at, share.chunk + n) + own_byte, pack(s[i, 0], s[i, 1]))
                st_shared(tile + place(at + 8, share.chunk + n) + own_byte, pack(s[i, 2], s[i, 3]))

    return keep_tile


@cache
def make_store_tile(
    dtype: str, layout: MmaLayout, width: int, vectors: bool, columns: int = 0
) -> Callable[..., None]:
    """Return ``store_tile(acc, target, span, tile, share)``.

    It rounds the warp's accumulators, assembles whole rows in shared memory, and writes those of ``span``,
    a ``HeadRows``.  Each warp uses only its own rows and columns of the tile at the address ``tile``.
    """
    place, columns = make_tile_place(device_function, HALF * width), columns or width
    keep_tile, chunks = make_keep_tile(dtype, layout, width, columns), columns // PIECE
    pieces = layout.row_tiles * ROWS * chunks

    @device_function
    def store_tile(acc, target, span, tile, share):
        b, h, first, stop = span
        keep_tile(acc, tile, share)
        cuda.syncwarp()  # the warp's rows are whole
        words = cuda.local.array(4, uint32)  # (4,)
        dim = target.shape[3]
        base = global_address(target) + b * target.strides[0] + h * target.strides[1]
        for n in range(share.lane, pieces, WARP):
            at, piece = share.row + n // chunks, share.chunk + n % chunks
            if first + at < stop and piece * PIECE < dim:
                ld_shared_v4(words, tile + place(at, piece))
                if vectors:
                    offset = (first + at) * target.strides[2] + piece * CHUNK
                    st_global_v4(base + offset, words)
                else:
                    for i in range(PIECE):
                        col = piece * PIECE + i
                        if col < dim:
                            half = words[i // 2] >> uint32(16 * (i % 2))
                            target[b, h, first + at, col] = uint16(half & uint32(0xFFFF))

    return store_tile


@cache
def make_store_sums(
    layout: MmaLayout, width: int, vectors: bool, columns: int = 0
) -> Callable[..., None]:
    """Return the float32 variant of :func:`make_store_tile`, without rounding and shared memory."""
    row_tiles, own_tiles, size = layout.row_tiles, (columns or width) // COLS, FLOAT32.itemsize

    @device_function
    def store_sums(acc, target, span, tile, share):
        b, h, first, stop = span
        dim, first_col = target.shape[3], share.chunk * COLS + lane_col(share.lane)
        base = global_address(target) + b * target.strides[0] + h * target.strides[1]
        for m in range(row_tiles):
            for half in range(2):
                at = int64(first + share.row + lane_row(share.lane) + m * ROWS + 8 * half)
                address = base + at * target.strides[2] + size * int64(first_col)
                left = dim - first_col if at < stop else 0
                for n in range(own_tiles):
                    i, u = m * own_tiles + n, 2 * half
                    if vectors:
                        if n * COLS < left:
                            st_global_v2(address + size * COLS * n, acc[i, u], acc[i, u + 1])
                    else:
                        col = first_col + n * COLS
                        if n * COLS < left:
                            target[b, h, at, col] = acc[i, u]
                        if n * COLS + 1 < left:
                            target[b, h, at, col + 1] = acc[i, u + 1]

    return store_sums
