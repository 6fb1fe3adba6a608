"""Products on tensor cores: the roles of a block's warps, shared memory, and the order of work items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.warpgroups import LINE, WarpRoles
from kernels.cuda.ptx.wgmma import KINDS, ROWS
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64, uint32

#: Number of products per step of the depth, a line of 128 bytes, of which an instruction reads 32.
STEPS = 4
#: The pairs of planes of a and b that are multiplied, the smallest products first.  If a number is the sum
#: of three bfloat16, these six products omit terms of at most 2**-24 of the largest.
TERMS = {1: ((0, 0),), 3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}


class ProductForm(NamedTuple):
    """The compile-time parameters of a matrix product on tensor cores."""

    dtype: str  # Dtype of the products: "float16", "bfloat16" or "tf32"
    out: str  # Dtype of the result: that of the products, or "float32"
    a_turned: bool = False  # Whether a is contiguous along its rows, not along the depth
    b_turned: bool = False  # Whether b is contiguous along its columns, not along the depth
    planes: int = 1  # Number of terms of a number, 1 or 3; planes are consecutive along the depth
    has_bias: bool = False  # Whether one number per column is added
    has_gelu: bool = False  # Whether GELU is applied after that
    keeps_input: bool = False  # Whether the input of GELU is written too, for the backward pass
    streams: bool = False  # Whether blocks divide the sums of some tiles among them; see ``Stream``

    @property
    def depth(self) -> int:
        """Elements of a line: the depth of a tile."""
        return STEPS * KINDS[self.dtype][1]


@dataclass(frozen=True)
class ProductLayout(WarpRoles):
    """The warpgroups that share a tile of the result, and the number of operand tiles in flight."""

    consumers: int  # Warpgroups that multiply 64 rows each; a further warpgroup copies
    cols: int  # Columns of a tile, a multiple of 64, 256 at most
    stages: int  # Tiles of each operand that shared memory holds at a time
    #: Panels of 64 columns that a consumer rounds and stores at a time, for a 16-bit result.
    panels: int

    @property
    def a_bytes(self) -> int:
        """Bytes of a tile of a."""
        return self.rows * LINE

    @property
    def b_bytes(self) -> int:
        """Bytes of a tile of b."""
        return self.cols * LINE


@dataclass(frozen=True)
class WarpLayout:
    """The layout of a product block: the warps that share a tile of the result, and the stages."""

    rows: int  # Rows of a tile: ``row_warps`` times a multiple of 16
    cols: int  # Columns of a tile: ``col_warps`` times a multiple of 16
    row_warps: int  # Number of warps along the rows
    col_warps: int  # Number of warps along the columns
    stages: int  # Tiles of each operand that shared memory holds at a time
    resident: int = 1  # Blocks per multiprocessor, which bounds the registers of a thread

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.col_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: lines of 128 bytes of both operands."""
        return self.stages * (self.rows + self.cols) * LINE


def shared_tiles(layout: ProductLayout, form: ProductForm) -> SharedTiles:
    """Return the byte offsets of a block's tiles in shared memory, from its first aligned address."""
    is_half = form.out != "float32"
    return SharedTiles(
        a=layout.stages * form.planes * layout.a_bytes,
        b=layout.stages * form.planes * layout.b_bytes,
        out=is_half * layout.consumers * layout.panels * ROWS * LINE,
        barriers=16 * layout.stages,
    )


class Order(NamedTuple):
    """The order of the tiles of the results.

    Blocks that run at the same time should share few rows of a and few columns of b, so that the L2 cache
    serves repeated reads.  Tiles are therefore processed column by column in bands of rows.
    """

    row_tiles: int  # Row tiles of a matrix
    col_tiles: int  # Column tiles of a matrix
    band: int  # Tiles of rows of a band
    matrices: int  # Matrices of the result

    @property
    def items(self) -> int:
        """Tiles of all matrices."""
        return self.row_tiles * self.col_tiles * self.matrices


@device_function
def place_of(item, order):
    """Return the row tile, the column tile, and the matrix of an item."""
    # Unsigned, for a division of 64 bits takes several times as long as one of 32.
    tiles, columns = uint32(order.row_tiles * order.col_tiles), uint32(order.band * order.col_tiles)
    matrix, rest = uint32(item) // tiles, uint32(item) % tiles
    first = uint32(rest // columns) * uint32(order.band)
    rows = uint32(min(order.band, order.row_tiles - first))  # the last band may be smaller
    rest = uint32(rest % columns)
    return int32(first + rest % rows), int32(rest // rows), int32(matrix)


class Item(NamedTuple):
    """A work item of a matrix product: a tile of the result and a part of the depth, all int32."""

    row: Any  # First row of the tile
    col: Any  # First column of the tile
    h: Any  # Head index
    b: Any  # Batch index
    part: Any  # Index of the part
    first: Any  # First step of the part's depth
    stop: Any  # One past its last step


@cache
def make_find(layout: ProductLayout | WarpLayout) -> Callable[..., Item]:
    """Return ``find(number, shape, order)``, the item of a number.

    ``shape`` begins with rows, columns, steps of the depth, steps per part, parts, and heads.
    """
    rows, cols = layout.rows, layout.cols

    @device_function
    def find(number, shape, order):
        row_tile, col_tile, matrix = place_of(number, order)
        parts, heads = shape[4], shape[5]
        part, pair = int32(matrix % parts), int32(matrix // parts)
        first = int32(part * shape[3])
        return Item(
            int32(row_tile * rows), int32(col_tile * cols), int32(pair % heads), int32(pair // heads),
            part, first, int32(min(first + shape[3], shape[2])),
        )  # fmt: skip

    return find


class Stream(NamedTuple):
    """The output tiles whose steps of the depth are divided equally among all blocks (stream-K).

    A block goes backwards through its share.  What it has of a tile that the next block completes comes
    first, and lies in a slot of the block; it completes others with the slots of the blocks before.
    """

    whole: Any  # Number of items that are computed by one block each, before the others
    ticket: Any  # Number of the launch, larger than those before
    slots: Any  # (blocks * consumers * 128 * numbers of a thread,) float32
    flags: Any  # (blocks * consumers,) int64: the launch that has filled a slot last


@cache
def make_shares(layout: ProductLayout, streams: bool) -> tuple[Any, Any, Any]:
    """Return ``own_share(…)``, ``is_left(share, …)`` and ``take(share, …)`` of a block's work.

    They take the stream, the shape and the order; ``take`` returns an item and the share that is left.
    """
    find = make_find(layout)

    @device_function
    def own_number(stream, shape, order):
        return int32(cuda.blockIdx.x)

    @device_function
    def is_number(number, stream, shape, order):
        return number < int32(order.row_tiles * order.col_tiles * order.matrices)

    @device_function
    def take_number(number, stream, shape, order):
        return find(number, shape, order), int32(number + cuda.gridDim.x)

    @device_function
    def own_share(stream, shape, order):
        block = int32(cuda.blockIdx.x)
        first = first_step(block, stream, shape, order)
        return block, first, first_step(int32(block + 1), stream, shape, order)

    @device_function
    def is_left(share, stream, shape, order):
        return share[0] < stream.whole or share[1] < share[2]

    @device_function
    def take(share, stream, shape, order):
        number, first, stop = share
        tile = int32(int32(stop - 1) // shape[2])
        is_streamed = number >= stream.whole
        item = find(int32(stream.whole + tile) if is_streamed else number, shape, order)
        if not is_streamed:
            return item, (int32(number + cuda.gridDim.x), first, stop)
        start = int32(tile * shape[2])
        begin = max(first, start)
        own = int32(begin - start), int32(stop - start)
        return Item(*item[:5], *own), (number, first, begin)

    return (own_share, is_left, take) if streams else (own_number, is_number, take_number)


@device_function
def first_step(block, stream, shape, order):
    """Return the first step of a block's share of the steps of all streamed tiles."""
    tiles = int32(order.row_tiles * order.col_tiles * order.matrices - stream.whole)
    return int32(int64(tiles) * shape[2] * block // cuda.gridDim.x)
