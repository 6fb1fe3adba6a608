"""Hopper's forward rung: roles of a block's warpgroups, shared memory, and the order of work items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kernels.common.geometry import ceil_div
from kernels.common.online_softmax import PATIENCE
from kernels.cuda.attention.flash3_wgmma.packed_mask import words_type
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.pipeline import BARRIER, Barriers, Pipeline
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.warpgroups import LINE, PANEL, WARPGROUP, WarpRoles
from kernels.cuda.runtime.kernel import WORD, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.types import float32, float64, int32, types, uint8, uint32
from kernels.scores.program import PLAIN, Features

#: Named barriers of the forward kernel: the order of the consumers' products, and the output tile of a
#: consumer.  These are the numbers of the first consumer; the others follow.  0 is ``cuda.syncthreads``.
PING_PONG, OUT_BARRIER = 1, 4
#: Named barriers of the backward kernels: all consumers, and the first consumer; those of the others
#: follow.
CONSUMERS_BARRIER, WARPGROUP_BARRIER = 1, 2
#: The barrier of all consumers' threads behind ``clear_rows``, forward and backward.
CLEAR_BARRIER = 7
#: Numbers of a ``tile_walk.WorkItem``.
ITEM_NUMBERS = 13
#: Numba's types of a tensor map, and of numbers of rows.
MAPS, ROW_NUMBERS = types.Array(uint8, 1, "C"), types.Array(float32, 2, "C")
#: Rows of shifts and delta are padded to a multiple of this, which every number of rows of a query tile
#: divides.
PADDING = 128
#: Bytes of a listed tile in shared memory: its number and the number of its words.
LISTED = 2 * WORD


@dataclass(frozen=True)
class ForwardLayout(WarpRoles):
    """The warpgroups that share a query tile, and the number of key tiles in flight."""

    #: Warpgroups that multiply, each with 64 query rows; a further one is the producer.
    consumers: int
    block_k: int  # Key columns of a tile, a multiple of 16
    stages: int  # Tiles of keys, and of values, that shared memory holds at a time
    #: Query tiles that it holds; with two, the next one is there when the current one is finished.
    items: int
    ping_pong: bool  # Whether one consumer computes its softmax while another multiplies
    #: The number of powers of two by which a maximum may grow before rows are rescaled; at most 8, so that
    #: 16 bits hold all exponentials.  0 rescales for each tile. See ``online_softmax.PATIENCE``.
    patience: int = 0

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.rows


class Widths(NamedTuple):
    """The column counts for which a kernel is compiled; those of the operands may be smaller."""

    head: int  # Columns of q and k, a multiple of 16
    value: int  # Columns of v and out, a multiple of 16

    @property
    def head_panels(self) -> int:
        """Panels of a tile of q or k."""
        return ceil_div(self.head, PANEL)

    @property
    def value_panels(self) -> int:
        """Panels of a tile of v."""
        return ceil_div(self.value, PANEL)


def layout_of(widths: Widths, has_options: bool = False) -> ForwardLayout:
    """Return the layout for heads of some widths that fits into registers and shared memory.

    Options other than bounds take registers, and the blocks of masks often have 128 rows.
    """
    width = max(widths)
    if width <= 64:
        return ForwardLayout(2 if has_options else 3, 128, 2, 2, True, PATIENCE)
    if width <= 128:
        return ForwardLayout(2, 128, 2, 2, False, PATIENCE)
    if width <= 192:
        return ForwardLayout(2, 96, 2, 1, True, PATIENCE)
    return ForwardLayout(2, 80, 2, 1, False, PATIENCE)


def shared_tiles(layout: ForwardLayout, widths: Widths, features: Features = PLAIN) -> SharedTiles:
    """Return the byte offsets of a block's tiles in shared memory, from its first aligned address.

    The tile of out takes the place of the tile of q, which is no longer needed then.  With a list of tiles,
    the numbers of the tiles in flight are stored too.
    """
    q_panels, k_panel = max(widths.head_panels, widths.value_panels), layout.block_k * LINE
    return tiles_of(
        layout, q_panels * layout.block_q * LINE, widths.head_panels * k_panel,
        widths.value_panels * k_panel, features.block_mask,
    )  # fmt: skip


def tiles_of(
    layout: ForwardLayout, q_bytes: int, k_bytes: int, v_bytes: int, is_listed: bool = False
) -> SharedTiles:
    """Return the byte offsets of a block's tiles, given the bytes of a tile of q, of k and of v."""
    return SharedTiles(
        q=layout.items * q_bytes,
        k=layout.stages * k_bytes,
        v=layout.stages * v_bytes,
        barriers=BARRIER * 4 * (layout.items + layout.stages),
        numbers=item_bytes(layout) * layout.items,
        listed=LISTED * layout.stages * is_listed,
    )


def item_bytes(layout: ForwardLayout) -> int:
    """Return the bytes of a ``tile_walk.WorkItem`` with a skip count per consumer."""
    return WORD * (ITEM_NUMBERS + layout.consumers)


class ForwardPipelines(NamedTuple):
    """The pipelines of a forward block."""

    queries: Pipeline  # Tiles of q, and later of out; full when q has arrived
    #: Numbers of the items; full when they are published.  An item and its q are at the same place.
    items: Pipeline
    keys: Pipeline  # Tiles of k
    values: Pipeline  # Tiles of v
    listed: int  # Address of the listed tiles of a block mask, one for each stage of keys


def forward_pipelines(
    layout: ForwardLayout, tiles: SharedTiles
) -> tuple[ForwardPipelines, Barriers]:
    """Return the pipelines of a forward block, and all its barriers; ``tiles`` are of :func:`tiles_of`."""
    slots, stages, warps = layout.items, layout.stages, 4 * layout.consumers
    barriers = Barriers(tiles["barriers"])
    queries = barriers.pipeline(tiles["q"], tiles["k"] // slots, slots, layout.consumers)
    # Each thread of the consumers reads the numbers, and the one that produces keys and values.
    items = barriers.pipeline(
        tiles["numbers"], item_bytes(layout), slots, WARPGROUP * layout.consumers + 1
    )
    k_bytes, v_bytes = (
        (tiles[after] - tiles[name]) // stages for name, after in (("k", "v"), ("v", "barriers"))
    )
    keys = barriers.pipeline(tiles["k"], k_bytes, stages, warps)
    values = barriers.pipeline(tiles["v"], v_bytes, stages, warps)
    return ForwardPipelines(queries, items, keys, values, tiles["listed"]), barriers


class Shape(NamedTuple):
    """The sizes and index factors of one call of a flash3_wgmma kernel.

    The factors of head and batch indices are 1, or 0 where an operand repeats.
    """

    rows: int  # Rows of q
    cols: int  # Columns of k
    heads: int  # Number of heads of q
    q_by_head: int  # Factor of the head index in q
    q_by_batch: int  # Factor of the batch index in q
    k_by_head: int  # Factor of the head index in k
    k_by_batch: int  # Factor of the batch index in k
    v_by_head: int  # Factor of the head index in v
    v_by_batch: int  # Factor of the batch index in v
    dout_by_head: int = 0  # Factor of the head index in dout, in backward kernels
    dout_by_batch: int = 0  # Factor of the batch index in dout, in backward kernels


class Schedule(NamedTuple):
    """The order of the query tiles of all heads.

    A block that has finished an item takes the next one.  Heads are divided into groups whose keys and
    values fit into the L2 cache.  Within a group the longest tiles come first (under a causal mask, the
    last query tiles), so that all blocks end at about the same time.
    """

    tiles: int  # Query tiles of a head
    heads: int  # Batch times heads
    group: int  # Heads of a group


class KernelWork(NamedTuple):
    """The arguments that all flash3_wgmma kernels take in addition to operands and results."""

    #: (2,) int32, the counters of the items and of the blocks that have ended; initially 0.
    next_item: Any
    shape: Any  # The shape of the call
    scale: Any  # Factor of the scores
    schedule: Any  # The order of the items
    mask_words: Any  # Words of the mask, see ``packed_mask``; 0 without them
    extras: Any  # Arguments of the options


def work_type(features: Features) -> Any:
    """Return numba's type of :class:`KernelWork`."""
    shape, schedule = (
        types.NamedUniTuple(int32, len(kind._fields), kind) for kind in (Shape, Schedule)
    )
    counters, extras = types.Array(int32, 1, "C"), extras_type(features, FLOAT32, by_words=True)
    kinds = counters, shape, float64, schedule, words_type(features), extras
    return types.NamedTuple(kinds, KernelWork)


def result_type(features: Features) -> Any:
    """Return numba's type of a 16-bit result: a tensor map, or the array if sequences are packed."""
    return array_type(BITS, 4) if features.packed else MAPS


class KernelForm(NamedTuple):
    """The compile-time parameters of a flash3_wgmma kernel."""

    layout: Any  # Layout of the block
    widths: Widths  # Widths of the operands
    dtype: str  # "float16" or "bfloat16": of the operands and the results
    features: Features = PLAIN  # Options of the call
    parts: Any = None  # The gradients that it computes, if it works by key tiles

    @property
    def by_keys(self) -> bool:
        """Whether its items are tiles of keys."""
        return self.parts is not None

    @property
    def sides(self) -> tuple[int, int]:
        """Rows of an item's tile, and of the tiles that it visits: the rows and columns of scores."""
        sides = self.layout.block_q, self.layout.block_k
        return sides[::-1] if self.by_keys else sides

    @property
    def waits_first(self) -> bool:
        """Whether the forward pass waits for the last P V before it looks for maxima.

        With options and 64 columns this takes 2 to 8 % less time; with masks, which are loaded, 2 % more.
        """
        layout = self.layout
        is_few = layout.items > 1 and layout.ping_pong and layout.consumers == 2
        return is_few and not self.features.mask

    @property
    def panels(self) -> tuple[int, int]:
        """Panels of a tile of q or k, and of v, out or dout."""
        return self.widths.head_panels, self.widths.value_panels


@device_function
def item_of(item, schedule):
    """Return the number of the query tile, and that of the (batch, head), of an item."""
    # Unsigned, for a division of 64 bits takes several times as long as one of 32.
    size, number = uint32(schedule.group * schedule.tiles), uint32(item)
    first, rest = uint32(number // size) * schedule.group, uint32(number % size)
    heads = uint32(min(schedule.group, schedule.heads - first))  # the last group may be smaller
    return int32(schedule.tiles - 1 - rest // heads), int32(first + rest % heads)


@lru_cache(maxsize=1024)
def schedule_of(tiles: int, heads: int, bytes_a_head: int, cache_bytes: int) -> Schedule:
    """Return the schedule of a call.

    The keys and values of a head have ``bytes_a_head``, and those of a group may fill ``cache_bytes``.
    """
    return Schedule(tiles, heads, max(min(cache_bytes // max(bytes_a_head, 1), heads), 1))
