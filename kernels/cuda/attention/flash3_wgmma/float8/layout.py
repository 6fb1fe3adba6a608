"""The float8 forward kernel's block: roles of warpgroups, and its tiles in shared memory."""

from __future__ import annotations

from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Widths, tiles_of
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.warpgroups import LINE


def layout_of(widths: Widths) -> ForwardLayout:
    """Return the layout for heads that are padded to 64 or 128 columns."""
    if max(widths) <= 64:
        return ForwardLayout(3, 128, 3, 2, True, 2)
    return ForwardLayout(2, 128, 3, 2, True, 2)


def shared_tiles(layout: ForwardLayout, widths: Widths) -> SharedTiles:
    """Return the byte offsets of a block's tiles in shared memory, from its first aligned address.

    A line has 128 columns of q and k, or 128 keys of v.  Out, of 16 bits, takes the place of q.
    """
    q_bytes, k_bytes = (n * LINE for n in (widths.value_panels * layout.block_q, layout.block_k))
    return tiles_of(layout, q_bytes, k_bytes, widths.value * LINE)
