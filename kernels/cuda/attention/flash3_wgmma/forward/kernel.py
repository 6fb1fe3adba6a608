"""FlashAttention-3 forward on Hopper: copies, products and softmax at the same time.

What flash2_mma left on the table: a warp that loads cannot multiply, and a warp that multiplies cannot
compute exponentials; and ``mma.sync`` cannot use the full speed of Hopper's tensor cores.
Here one warpgroup only issues copies of tiles, which arrive while the others compute.  ``wgmma`` multiplies
64 rows at a time from shared memory while its warpgroup goes on: the next scores are computed during the
previous product with the values, and the softmax of one warpgroup overlaps the products of another.
"""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash3_wgmma.forward.consumer import RowResults, make_consume
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
    result_type,
    shared_tiles,
    work_type,
)
from kernels.cuda.attention.flash3_wgmma.tiles import make_fetch_tile
from kernels.cuda.device.pipeline import make_prologue, opaque
from kernels.cuda.device.warpgroups import LINE, block_bytes, own_warpgroup
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, void
from kernels.scores.program import PLAIN, Features

#: The producer warpgroup's thread that schedules items; its first thread copies keys and values.
SCHEDULER_THREAD = 32


@cache
def forward_kernel(
    layout: ForwardLayout, widths: Widths, dtype: str, features: Features = PLAIN
) -> Kernel:
    """Return the forward kernel for one layout, two widths, one dtype and some options."""
    form = KernelForm(layout, widths, dtype, features)
    tiles = shared_tiles(layout, widths, features)
    pipelines, barriers = forward_pipelines(layout, tiles)
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce_items = make_produce_items(form, pipelines, widths.head_panels)
    fetch_k, fetch_v = (make_fetch_tile(panels, layout.block_k * LINE) for panels in form.panels)
    produce_tiles = make_produce_tiles(form, pipelines, fetch_k, fetch_v)
    consume = make_consume(form, pipelines)

    # Out is a tensor map, or the array where sequences are packed.
    def flash3_forward(q_map, k_map, v_map, out, lse, rest, work):
        """Fill out, lse and its rest, tile after tile.

        Computes: out and lse for tiles of query rows of (batch, head), one after the other
        Source: FlashAttention-3, Algorithms 1 (consumer and producer) and 2
            (overlap within a warpgroup); FlashAttention-2, Algorithm 1, for the numbered lines
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies, the others multiply
        One thread does: of a consumer, the scores of 2 rows and block_k / 4 columns, and of out 2
            rows and value_dim / 4 columns, scattered as wgmma scatters them
        Shared: q_tile (block_q, head_dim), later out; stages of k_tile (block_k, head_dim) and
            v_tile (block_k, value_dim), in panels of 64 columns, 128-byte swizzle; barriers
        Registers: acc (value_dim / 8, 4), s (block_k / 8, 4), p (block_k / 16, 4) packed pairs
        Global traffic: reads q once, k and v once per query tile; writes out and lse once
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        memory = enter()  # q, k, v, barriers, numbers of items, listed
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x == SCHEDULER_THREAD:
                produce_items(memory, q_map, work)
            if cuda.threadIdx.x == 0:
                produce_tiles(memory, k_map, v_map, work)
        else:
            take_registers()
            consume(int32(warpgroup - 1), opaque(memory), RowResults(out, lse, rest), work)

    signature = void(
        *[MAPS] * 3, result_type(features), ROW_NUMBERS, ROW_NUMBERS, work_type(features)
    )
    return Kernel(flash3_forward, signature, layout.threads, block_bytes(tiles))
