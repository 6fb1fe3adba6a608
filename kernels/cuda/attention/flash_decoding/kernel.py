"""Flash-Decoding on Hopper: the keys of a cache, read once for all query heads and tokens that share them.

What flash3_wgmma left on the table: a token being generated has one query row a head.  A tile of rows then
is nearly empty, each query head reads the keys of its group again, and there are fewer (batch, head) than
multiprocessors.  Here the heads of a group, times the query tokens, are the rows of one tile, and the keys
are divided among blocks.  Then only the bandwidth of memory counts.
"""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash3_wgmma.layout import MAPS
from kernels.cuda.attention.flash_decoding.consumer import make_consume
from kernels.cuda.attention.flash_decoding.layout import (
    DecodingForm,
    shared_memory,
    work_type,
)
from kernels.cuda.attention.flash_decoding.producer import make_produce
from kernels.cuda.device.pipeline import make_prologue, opaque
from kernels.cuda.device.warpgroups import block_bytes, own_warpgroup
from kernels.cuda.ptx.barriers import fence_proxy_async
from kernels.cuda.ptx.bulk import prefetch_map
from kernels.cuda.ptx.copies import global_address, st_shared_v4
from kernels.cuda.runtime.kernel import WARP, Kernel, array_type
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, uint32, void


@cache
def decoding_kernel(form: DecodingForm) -> Kernel:
    """Return the decoding kernel for a form."""
    layout, (tiles, pipelines, barriers) = form.layout, shared_memory(form)
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce, produce_values = (make_produce(form, pipelines, x) for x in (False, True))
    consume = make_consume(form, pipelines)
    q_bytes, threads, rows = tiles["k"], layout.threads, layout.rows

    def flash_decoding(q_map, k_map, v_map, out, lse, rest, work):
        """Fill out, lse and its rest for tiles of rows, against parts of the keys.

        Computes: out and lse of all query heads that share a head of the keys
        Source: Flash-Decoding (Dao et al. 2023); FlashAttention-2, Algorithm 1, for the numbered lines
        Grid: (multiprocessors,), each takes every n-th item; see ``DecodingItem``
        Block: (128 * (consumers + 1),), two warps of warpgroup 0 copy, the others multiply
        One thread does: of a consumer, the scores of 2 rows and block_k / 4 columns, and of out 2
            rows and value_dim / 4 columns, scattered as wgmma scatters them
        Shared: tiles of q (64 * consumers, head_dim); stages of k_tile (block_k, head_dim) and
            v_tile (block_k, value_dim), in panels of 64 columns, 128-byte swizzle; barriers
        Registers: acc (value_dim / 8, 4), s (block_k / 8, 4), p (block_k / 16, 4) packed pairs
        Global traffic: reads q, k and v once; writes out and lse once, of each part where keys are
            divided
        Needs: cc 9.0: wgmma, tensor copies, mbarriers
        """
        if cuda.threadIdx.x == 0:
            for tensor_map in (q_map, k_map, v_map):
                prefetch_map(global_address(tensor_map))
        memory = enter()  # q, k, v, barriers
        zeros = cuda.local.array(4, uint32)  # (4,)
        for i in range(4):
            zeros[i] = 0
        if work.shape.group * work.shape.tokens < rows:
            # Rows beyond those of the group have no query, and must not be infinite.
            for n in range(cuda.threadIdx.x * 16, q_bytes, threads * 16):
                st_shared_v4(memory + n, zeros)
        fence_proxy_async()
        cuda.syncthreads()
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            if cuda.threadIdx.x < WARP:
                produce(memory, q_map, k_map, work)
            elif cuda.threadIdx.x < 2 * WARP:
                produce_values(memory, q_map, v_map, work)
        else:
            take_registers()
            consume(int32(warpgroup - 1), opaque(memory), (out, lse, rest), work)

    of_rows = array_type(FLOAT32, 3)
    written = array_type(FLOAT32 if form.is_split else BITS, 4)
    signature = void(MAPS, MAPS, MAPS, written, of_rows, of_rows, work_type(form))
    return Kernel(flash_decoding, signature, threads, block_bytes(tiles))
