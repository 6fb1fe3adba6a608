"""FlashAttention-3 forward with products of float8 e4m3: twice the speed of the tensor cores.

The roles of warpgroups, the scheduler, the order of a consumer's steps and the output are those of the
16-bit kernel.  What differs: operands are bytes that ``quantise`` wrote, with the factors of their units; V
comes transposed; P is rounded to e4m3 in registers.
"""

from __future__ import annotations

from functools import cache

from numba import float32, float64, int32, types, uint8, void

from kernels.cuda.attention.flash3_wgmma.float8.consumer import Results, Units, make_consume
from kernels.cuda.attention.flash3_wgmma.float8.layout import places, shared_bytes
from kernels.cuda.attention.flash3_wgmma.float8.producer import make_produce_tiles
from kernels.cuda.attention.flash3_wgmma.forward.scheduler import (
    make_produce_items,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    SHAPE,
    ForwardLayout,
    Schedule,
    Widths,
)
from kernels.cuda.attention.flash3_wgmma.tiles import (
    BARRIER,
    init_stages,
)
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.device.warpgroups import ALIGNMENT, LINE, own_warpgroup
from kernels.cuda.ptx.barriers import (
    fence_mbarrier_init,
    make_setmaxnreg,
    mbarrier_init,
)
from kernels.cuda.ptx.copies import align_up, shared_address
from kernels.cuda.runtime.kernel import Kernel, array_type
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.scores.program import PLAIN

MAPS = types.Array(uint8, 1, "C")
#: The producer warpgroup's thread that schedules items; its first thread copies keys and values.
SCHEDULER_THREAD = 32


@cache
def forward_kernel(layout: ForwardLayout, widths: Widths, dtype: str, has_blocks: bool) -> Kernel:
    """Return the forward kernel for one layout, two widths and one dtype.

    Args:
        layout: Layout of the block: key tiles of 128, two items.
        widths: Columns with padding: 64 or 128.
        dtype: "float16" or "bfloat16": of out.
        has_blocks: q and k have a unit for each block of 128 rows.
    """
    at, consumers, slots, stages = (
        places(layout, widths),
        layout.consumers,
        layout.items,
        layout.stages,
    )
    barrier_offset, number_offset = at.tiles["barriers"], at.tiles["numbers"]
    q_empty, ready, keys, values = at[:4]
    few_registers, more_registers = layout.registers
    release, claim = make_setmaxnreg("dec", few_registers), make_setmaxnreg("inc", more_registers)
    q_size = at.tiles["k"] // slots
    produce_items = make_produce_items(layout, PLAIN, 1, layout.block_q * LINE, q_size)
    produce_tiles = make_produce_tiles(layout, widths)
    consume = make_consume(layout, widths, dtype, has_blocks)

    def flash3_float8(
        q_map, k_map, v_map, out, lse, q_units, k_units, v_units, next_item, shape, scale, schedule,
        extras
    ):  # fmt: skip
        """Fill out and lse, tile after tile.

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
        shared = cuda.shared.array(0, uint8)  # q, k, v, barriers, numbers of items
        tile = align_up(shared_address(shared), ALIGNMENT)
        barriers, warpgroup = tile + barrier_offset, own_warpgroup()
        if cuda.threadIdx.x == 0:
            for i in range(slots):
                mbarrier_init(barriers + BARRIER * i, 1)
                mbarrier_init(barriers + q_empty + BARRIER * i, consumers + 1)  # and the producer
                mbarrier_init(barriers + ready + BARRIER * i, 1)
            init_stages(barriers + keys, stages, 1, 4 * consumers)
            init_stages(barriers + values, stages, 1, 4 * consumers)
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        if warpgroup == 0:
            release()
            if cuda.threadIdx.x == SCHEDULER_THREAD:
                produce_items(
                    tile, tile + number_offset, barriers, q_map, next_item, shape, schedule, extras
                )
            if cuda.threadIdx.x == 0:
                produce_tiles(tile, barriers, k_map, v_map, shape)
        else:
            claim()
            consume(
                tile, barriers, int32(warpgroup - 1), Results(out, lse),
                Units(q_units, k_units, v_units), shape, scale, extras,
            )  # fmt: skip

    units = array_type(FLOAT32, 3)
    schedule, counters = types.NamedUniTuple(int32, 3, Schedule), types.Array(int32, 1, "C")
    signature = void(
        *[MAPS] * 4, types.Array(float32, 2, "C"), *[units] * 3, counters, SHAPE, float64, schedule,
        extras_type(PLAIN, FLOAT32, by_words=True),
    )  # fmt: skip
    return Kernel(flash3_float8, signature, layout.threads, shared_bytes(layout, widths))
