"""The float8 forward kernel's block: roles of warpgroups, and its tiles and barriers in shared memory."""

from __future__ import annotations

from typing import NamedTuple

from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Widths, item_bytes
from kernels.cuda.attention.flash3_wgmma.tiles import BARRIER
from kernels.cuda.device.shared_tiles import SharedTiles, round_up
from kernels.cuda.device.warpgroups import ALIGNMENT, LINE


def layout_of(widths: Widths) -> ForwardLayout:
    """Return the layout for heads of some widths.

    Args:
        widths: Columns with padding: 64 or 128.
    """
    if max(widths) <= 64:
        return ForwardLayout(3, 128, 3, 2, True, 2)
    return ForwardLayout(2, 128, 3, 2, True, 2)


def shared_tiles(layout: ForwardLayout, widths: Widths) -> SharedTiles:
    """Return the byte offsets of a block's tiles in shared memory, from its first aligned address.

    A line has 128 columns of q and k, or 128 keys of v.  Out, of 16 bits, takes the place of q.
    """
    return SharedTiles(
        q=layout.items * widths.value_panels * layout.block_q * LINE,
        k=layout.stages * layout.block_k * LINE,
        v=layout.stages * widths.value * LINE,
        barriers=BARRIER * (3 * layout.items + 4 * layout.stages),
        numbers=item_bytes(layout) * layout.items,
    )


def shared_bytes(layout: ForwardLayout, widths: Widths) -> int:
    """Return the dynamic shared memory of a block, including its alignment."""
    return round_up(shared_tiles(layout, widths).elements, 16) + ALIGNMENT


class Places(NamedTuple):
    """Offsets of barriers and tiles of a block that roles of its threads share.

    Attributes:
        q_empty: Barriers of free slots of items, behind those of arrived q.
        ready: Barriers of published items.
        keys: Barriers of the stages of k, see ``init_stages``.
        values: Those of v.
        empty: From the barrier of a full stage to that of the empty one.
        tiles: Offsets of tiles.
        k_size: Bytes of a tile of keys.
        v_size: Bytes of a tile of values.
    """

    q_empty: int
    ready: int
    keys: int
    values: int
    empty: int
    tiles: SharedTiles
    k_size: int
    v_size: int


def places(layout: ForwardLayout, widths: Widths) -> Places:
    """Return the offsets for a layout and widths."""
    slots, stages = BARRIER * layout.items, BARRIER * layout.stages
    return Places(
        slots, 2 * slots, 3 * slots, 3 * slots + 2 * stages, stages, shared_tiles(layout, widths),
        layout.block_k * LINE, widths.value * LINE,
    )  # fmt: skip
