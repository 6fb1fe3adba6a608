"""Hopper's backward rung: the kernels of a call, the roles of their warpgroups, their shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernels.cuda.attention.flash3_wgmma.layout import KernelForm, Widths
from kernels.cuda.device.shared_tiles import SharedTiles, round_up
from kernels.cuda.device.warpgroups import LINE, PANEL, WarpRoles
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.types import int32
from kernels.scores.program import PLAIN, Features

#: The widest heads whose dK and dV one warpgroup keeps in registers together.
BOTH_WIDTH = 128
#: Tiles of dSᵀ that shared memory holds at a time.
DS_STAGES = 2


class KeyGradients(NamedTuple):
    """The gradients that a flash3_wgmma kernel with key tiles as work items computes."""

    dk: bool  # Whether it computes dk
    dv: bool  # Whether it computes dv
    dq: bool  # Whether it adds the contributions of its keys to dq
    ordered: bool = False  # Whether it adds them in the order of the keys, else in any order


def parts_of(
    widths: Widths, deterministic: bool = True, is_listed: bool = False
) -> tuple[KeyGradients, ...]:
    """Return the kernels by key tiles of a call, each described by the gradients that it computes.

    ``is_listed`` tells whether a block mask lists the tiles: no one then knows how many key tiles precede
    one of a query tile.
    """
    if max(widths) <= BOTH_WIDTH:
        adds_dq = not (deterministic and is_listed)
        return (KeyGradients(True, True, adds_dq, deterministic and adds_dq),)
    # A warpgroup cannot hold both: S is computed twice.
    return KeyGradients(False, True, False), KeyGradients(True, False, False)


@dataclass(frozen=True)
class KeyLayout(WarpRoles):
    """The warpgroups that share a key tile, and the number of query tiles in flight."""

    block_q: int  # Rows of a query tile: one or two times 64
    q_stages: int  # Tiles of q, with their rows of shifts, that shared memory holds at a time
    dout_stages: int  # Tiles of dout, with their rows of delta, that shared memory holds at a time
    consumers: int = 2  # Warpgroups that multiply, each with 64 keys; a further one is the producer
    #: Whether dQ is multiplied a tile later than dS, so that no consumer waits for the others' part of dS.
    lags: bool = False

    @property
    def block_k(self) -> int:
        """Keys of a tile."""
        return self.rows


def makes_elements(features: Features) -> bool:
    """Tell whether options act on single elements, apart from bounds and the ends of sequences."""
    return not features.whole_tiles and features._replace(packed=False) != PLAIN


def key_layout(widths: Widths, parts: KeyGradients, features: Features = PLAIN) -> KeyLayout:
    """Return the layout of a kernel by key tiles that fits in registers and shared memory.

    Options that act on single elements take registers.
    """
    width = max(widths)
    if width <= 64:
        # What dropout keeps takes few registers, two words of bits, but too many where dS is not stored.
        dropout = features.dropout and not parts.dq
        has_more = features.packed or makes_elements(features._replace(dropout=dropout))
        return KeyLayout(64 if has_more else 128, 2, 2, lags=True)
    # Tiles of dout are done with before those of q where dV is not computed: one is enough.
    return KeyLayout(64, 2, 1 if width > 192 and not parts.dv else 2)


class DqShare(NamedTuple):
    """The part of a tile of dQ = dS K that one consumer computes: 64 rows and ``cols`` columns."""

    cols: int  # Number of columns
    by_rows: bool  # Whether the consumers divide the rows of the tile; else they divide its columns
    step: int  # Distance in bytes of the columns of consecutive consumers in the tile of keys


def dq_share(layout: KeyLayout, widths: Widths) -> DqShare:
    """Return the division of a tile of dQ among the consumers."""
    if layout.block_q > ROWS:
        return DqShare(round_up(widths.head, 16), True, 0)
    if widths.head <= PANEL:
        return DqShare(PANEL // 2, False, LINE // 2)
    return DqShare(PANEL, False, layout.block_k * LINE)


def dq_bytes(layout: KeyLayout, widths: Widths) -> int:
    """Return the bytes of one consumer's share of a tile of dQ, in float32."""
    return ROWS * dq_share(layout, widths).cols * WORD


def key_tiles(layout: KeyLayout, widths: Widths, parts: KeyGradients) -> SharedTiles:
    """Return the byte offsets of the tiles of a kernel by key tiles, from the first aligned address.

    At the end, dK takes the place of K, and dV that of V, or of K if V is not needed.
    """
    k_panels, v_panels = widths.head_panels, widths.value_panels
    shares = layout.consumers * parts.dq
    if not parts.dk:
        k_panels, v_panels = max(k_panels, v_panels), 0
    q_bytes, dout_bytes = (
        layout.block_q * LINE * panels for panels in (widths.head_panels, widths.value_panels)
    )
    ds_bytes = 2 * layout.block_q * layout.block_k
    return SharedTiles(
        k=k_panels * layout.block_k * LINE,
        v=v_panels * layout.block_k * LINE,
        q=layout.q_stages * q_bytes,
        dout=layout.dout_stages * dout_bytes,
        # Two, for dQ is multiplied a tile later, or while a consumer writes the next.
        ds=DS_STAGES * ds_bytes if parts.dq else 0,
        dq=shares * dq_bytes(layout, widths),
        shifts=layout.q_stages * 2 * layout.block_q * WORD,
        delta=layout.dout_stages * layout.block_q * WORD,
        barriers=8
        * (2 + 2 * (layout.q_stages + layout.dout_stages + shares + DS_STAGES * parts.dq)),
        number=WORD,
        shares=shares * 2 * WORD,
    )


@dataclass(frozen=True)
class QueryLayout(WarpRoles):
    """The warpgroups that share a query tile of dQ, and the number of key tiles in flight."""

    block_k: int  # Keys of a tile, a multiple of 16
    k_stages: int  # Tiles of keys that shared memory holds at a time
    v_stages: int  # Tiles of values
    #: Warpgroups that multiply, each with 64 query rows; a further one is the producer.
    consumers: int = 2

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.rows


def query_layout(widths: Widths) -> QueryLayout:
    """Return the layout of the kernel by query tiles that fits in registers and shared memory.

    A tile of keys is needed for S and, one step later, for the product with dS.  With three stages the next
    tile is there in time.  A tile of values is released early.
    """
    width = max(widths)
    if width <= 128:
        return QueryLayout(128 if width <= 64 else 112, 3, 2)
    return QueryLayout(64, 3, 2) if width <= 192 else QueryLayout(48, 3, 1)


def tiles_of(form: KernelForm) -> SharedTiles:
    """Return the byte offsets of the tiles of a kernel, by keys or by queries."""
    if form.by_keys:
        return key_tiles(form.layout, form.widths, form.parts)
    return query_tiles(form.layout, form.widths)


def query_tiles(layout: QueryLayout, widths: Widths) -> SharedTiles:
    """Return the byte offsets of the tiles of the kernel by query tiles; dQ replaces q at the end."""
    return SharedTiles(
        q=widths.head_panels * layout.block_q * LINE,
        dout=widths.value_panels * layout.block_q * LINE,
        k=layout.k_stages * widths.head_panels * layout.block_k * LINE,
        v=layout.v_stages * widths.value_panels * layout.block_k * LINE,
        barriers=8 * (2 + 2 * layout.k_stages + 2 * layout.v_stages),
        number=WORD,
    )


@device_function
def shift_place(row):
    """Return the place of a row's shift in the shifts of its line; that of its top is ROWS further.

    So that a tile of rows has its shifts and tops in one piece, those of 64 rows lie together.
    """
    return int32(row + row // ROWS * ROWS)
