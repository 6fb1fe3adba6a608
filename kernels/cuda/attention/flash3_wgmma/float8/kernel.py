"""FlashAttention-3 forward with products of float8 e4m3: twice the speed of the tensor cores.

The roles of warpgroups, the scheduler, the order of a consumer's steps and the output are those of the
16-bit kernel.  There are three differences: operands are bytes that ``quantise`` wrote, with their units; V
is transposed; and P is rounded to e4m3 in registers.
"""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash3_wgmma.float8.consumer import make_consume
from kernels.cuda.attention.flash3_wgmma.float8.quantise import Float8Units
from kernels.cuda.attention.flash3_wgmma.forward.consumer import RowResults
from kernels.cuda.attention.flash3_wgmma.forward.kernel import SCHEDULER_THREAD
from kernels.cuda.attention.flash3_wgmma.forward.producer import (
    make_produce_items,
    make_produce_tiles,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    MAPS,
    ROW_NUMBERS,
    ForwardLayout,
    KernelForm,
    Widths,
    forward_pipelines,
    tiles_of,
    work_type,
)
from kernels.cuda.attention.flash3_wgmma.tiles import make_fetch, make_fetch_tile
from kernels.cuda.device.pipeline import make_prologue, opaque
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.warpgroups import LINE, block_bytes, own_warpgroup
from kernels.cuda.ptx.bulk import tensor_load
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, types, void
from kernels.scores.program import PLAIN


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


@device_function
def _load_columns(target, source, barrier, col, item):
    """Issue the copy of a tile of V, whose rows are columns of the tensor."""
    h, b = item.h * source.by_head, item.b * source.by_batch
    tensor_load(target, source.tensor, barrier, (col, int32(0), h, b))


@cache
def forward_kernel(layout: ForwardLayout, widths: Widths, dtype: str, has_blocks: bool) -> Kernel:
    """Return the forward kernel for one layout, two widths and one dtype.

    Widths are padded to 64 or 128, and ``dtype`` is that of out.  With ``has_blocks``, q and k have a unit
    for each block of 128 rows.
    """
    form, tiles = KernelForm(layout, widths, dtype), shared_tiles(layout, widths)
    pipelines, barriers = forward_pipelines(layout, tiles)
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce_items = make_produce_items(form, pipelines, 1)
    fetch_k = make_fetch_tile(1, layout.block_k * LINE)
    fetch_v = make_fetch(_load_columns, widths.value * LINE)
    produce_tiles = make_produce_tiles(form, pipelines, fetch_k, fetch_v)
    consume = make_consume(form, has_blocks, pipelines)

    def flash3_float8(q_map, k_map, v_map, out, lse, rest, units, work):
        """Fill out, lse and its rest, tile after tile.

        Computes: out and lse for tiles of query rows of (batch, head), one after the other
        Source: FlashAttention-3, Algorithms 1 and 2, section 3.3; FlashAttention-2, Algorithm 1, for the
            numbered lines
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, the scores of 2 rows and block_k / 4 columns, and of out 2
            rows and value_dim / 4 columns, scattered as wgmma scatters them
        Shared: q_tile (block_q, 128), later out; stages of k_tile (block_k, 128) and v_tile
            (value_dim, block_k), bytes, 128-byte swizzle; barriers
        Registers: acc (value_dim / 8, 4), s (block_k / 8, 4), p (block_k / 32, 4) packed fours
        Global traffic: reads q once, k and v once per query tile; writes out and lse once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        memory = enter()  # q, k, v, barriers, numbers of items
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x == SCHEDULER_THREAD:
                produce_items(memory, q_map, work)
            if cuda.threadIdx.x == 0:
                produce_tiles(memory, k_map, v_map, work)
        else:
            take_registers()
            consume(int32(warpgroup - 1), opaque(memory), RowResults(out, lse, rest), units, work)

    units = types.NamedUniTuple(array_type(FLOAT32, 3), 3, Float8Units)
    signature = void(*[MAPS] * 4, ROW_NUMBERS, ROW_NUMBERS, units, work_type(PLAIN))
    return Kernel(flash3_float8, signature, layout.threads, block_bytes(tiles))
