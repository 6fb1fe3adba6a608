"""What a decoding kernel is compiled for, its shared memory, and the items that its blocks work on.

The query heads that share a head of the keys, times the query tokens, are the rows of one tile: row r is
token r % tokens of head r // tokens.  The keys are divided into parts of a fixed number of tiles, counted
from the first key, so that what is summed together depends on the position of a key alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.one_source import (
    first_full_tile,
    first_tile,
    full_tiles_stop,
    tiles_stop,
)
from kernels.cuda.device.pipeline import BARRIER, Barriers, Pipeline
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.warpgroups import ALIGNMENT, LINE, WarpRoles
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float64, int32, types, uint32
from kernels.scores.program import PLAIN, Features

#: Shared memory of a block on Hopper.
BLOCK_BYTES = 227 << 10
#: Bytes for barriers behind the tiles.
_SMALL = 256


@dataclass(frozen=True)
class DecodingLayout(WarpRoles):
    """The layout of a decoding block: warpgroups with 64 query rows each, and tiles in shared memory."""

    consumers: int
    block_k: int  # Keys of a tile
    stages: int  # Tiles of keys, and of values, in shared memory
    queries: int  # Tiles of q, the next of which is there when the current item ends

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that copies and of one that multiplies."""
        return {1: (56, 256), 2: (40, 232)}[self.consumers]


def _tile_bytes(rows: int, block_k: int, widths: Widths) -> tuple[int, int, int]:
    """Return the bytes of a tile of q, of k and of v."""
    q, k, v = widths.head_panels * rows, widths.head_panels * block_k, widths.value_panels * block_k
    return q * LINE, k * LINE, v * LINE


def layout_of(widths: Widths, rows: int) -> DecodingLayout:
    """Return the layout for the widths of the operands and a number of rows, at most 128."""
    consumers = 1 if rows <= ROWS else 2
    block_k = 128 if max(widths) <= 128 else 64
    q_bytes, *stage = _tile_bytes(ROWS * consumers, block_k, widths)
    left = BLOCK_BYTES - ALIGNMENT - _SMALL
    queries = 2 if left - 2 * q_bytes >= 3 * sum(stage) else 1
    stages = min((left - queries * q_bytes) // sum(stage), 6)
    return DecodingLayout(consumers, block_k, stages, queries)


class DecodingForm(NamedTuple):
    """The parameters for which a decoding kernel is compiled."""

    layout: DecodingLayout
    widths: Widths
    dtype: str  # "float16" or "bfloat16"
    features: Features  # Options of the call, which is one on a cache
    is_positive: bool  # Whether the scale is
    is_split: bool  # Whether results are those of parts of the keys, which another kernel merges

    @property
    def is_folded(self) -> bool:
        """Whether the scale is a factor within the exponent, for no option needs the scores."""
        return self.features.of_elements == PLAIN and self.is_positive


class DecodingPipelines(NamedTuple):
    """The pipelines of a thread block of the decoding kernel."""

    queries: Pipeline
    keys: Pipeline
    values: Pipeline


def shared_memory(form: DecodingForm) -> tuple[SharedTiles, DecodingPipelines, Barriers]:
    """Return the byte offsets of a block's tiles in shared memory, its pipelines, and its barriers."""
    layout = form.layout
    sizes = _tile_bytes(layout.rows, layout.block_k, form.widths)
    counts = layout.queries, layout.stages, layout.stages
    q, k, v = (count * size for count, size in zip(counts, sizes, strict=True))
    tiles = SharedTiles(q=q, k=k, v=v, barriers=BARRIER * 2 * sum(counts))
    *places, first_barrier = tiles
    barriers, rings = Barriers(first_barrier), zip(places, sizes, counts, strict=True)
    pipelines = [barriers.pipeline(*ring, 4 * layout.consumers) for ring in rings]
    return tiles, DecodingPipelines(*pipelines), barriers


class DecodingShape(NamedTuple):
    """The sizes and index factors of one call of the decoding kernel, all int32.

    The factors of head and batch indices are 1, or 0 where an operand repeats.
    """

    seq_q: int  # Query tokens
    group: int  # Query heads that share a head of the keys
    key_heads: int  # Heads of the keys
    tokens: int  # Tokens of a tile of rows
    row_tiles: int  # Tiles of rows of a (batch, key head)
    piece: int  # Key tiles of a part
    parts: int  # Parts of the keys that a tile of rows sees at most
    items: int  # batch · key_heads · parts · row_tiles
    page: int  # Keys of a page, or of a tile where there are no pages
    copied: int  # Keys that one copy brings: a divisor of a page and of a tile
    by_position: int  # 1 if rows are positions in the sequence, 0 if the first token is row 0
    q_by_head: int
    q_by_batch: int
    k_by_head: int
    k_by_batch: int
    v_by_head: int
    v_by_batch: int


class DecodingWork(NamedTuple):
    """The arguments of the decoding kernel other than its operands and results."""

    shape: Any  # A :class:`DecodingShape`
    scale: Any  # Factor of the scores
    extras: Any


def work_type(form: DecodingForm) -> Any:
    """Return numba's type of :class:`DecodingWork`."""
    shape = types.NamedUniTuple(int32, len(DecodingShape._fields), DecodingShape)
    return types.NamedTuple([shape, float64, extras_type(form.features, FLOAT32)], DecodingWork)


class DecodingItem(NamedTuple):
    """A work item of the decoding kernel: a tile of query rows and a part of the keys, all int32."""

    part: Any
    b: Any  # Batch index
    key_head: Any
    token: Any  # First token of the tile
    length: Any  # Keys of the sequence
    first_row: Any  # Row of the sequence's first token
    begin: Any  # First visited key tile
    stop: Any  # One past the last one
    full: Any  # First key tile that no bound masks
    full_stop: Any  # One past the last one


def make_item_of(block_k: int) -> Any:
    """Return ``item_of(number, work)``: the :class:`DecodingItem` of a number."""

    @device_function
    def uniform(number):
        """Return a number from one lane, so that the compiler knows that it is uniform in a warp."""
        return int32(cuda.shfl_sync(ALL_LANES, int32(number), 0))

    @device_function
    def item_of(number, work):
        shape, extras = work.shape, work.extras
        # Unsigned, for a division of 64 bits takes several times as long as one of 32.
        row_tiles, parts, heads = (
            uint32(shape.row_tiles),
            uint32(shape.parts),
            uint32(shape.key_heads),
        )
        row_tile, rest = uint32(number) % row_tiles, uint32(uint32(number) // row_tiles)
        part, line = int32(rest % parts), uint32(rest // parts)
        b, token = int32(line // heads), int32(row_tile * uint32(shape.tokens))
        length = int32(extras.tiles.lengths[b] + extras.tiles.added)
        first_row = int32((length - shape.seq_q) * shape.by_position)
        row, lower, upper = int32(first_row + token), extras.lower, extras.upper
        row_stop = int32(first_row + min(token + shape.tokens, shape.seq_q))
        first = int32(first_tile(row, block_k, length, lower))
        stop = int32(tiles_stop(row_stop, block_k, length, upper))
        # Parts begin at the same keys whatever the rows see.
        start = int32((int32(uint32(first) // uint32(shape.piece)) + part) * shape.piece)
        return DecodingItem(
            part, b, int32(line % heads), token, length, first_row,
            uniform(max(first, start)), uniform(min(stop, start + shape.piece)),
            int32(first_full_tile(row_stop, block_k, lower)),
            int32(full_tiles_stop(row, block_k, length, upper)),
        )  # fmt: skip

    return item_of
