"""FlashAttention-3 backward by key tiles: dK and dV, and optionally their contributions to dQ.

Like the forward kernel, this one has a producer warpgroup and reallocates registers, but for five products
instead of two.  It computes Sᵀ and dPᵀ rather than S and dP: each warpgroup then owns 64 keys, and Pᵀ and
dSᵀ are already in its registers as left operands of the next products.  Only dQ needs the keys of all
warpgroups, so dS goes to shared memory for it, and the copy engine adds the result to dQ.
"""

from __future__ import annotations

from functools import cache

from kernels.cuda.attention.flash3_wgmma.backward.dkdv_consumer import make_consume
from kernels.cuda.attention.flash3_wgmma.backward.dq_shares import dq_pipelines, make_send
from kernels.cuda.attention.flash3_wgmma.backward.layout import KeyGradients, KeyLayout, key_tiles
from kernels.cuda.attention.flash3_wgmma.backward.producer import (
    backward_pipelines,
    make_first_item,
    make_produce,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    MAPS,
    ROW_NUMBERS,
    KernelForm,
    Widths,
    result_type,
    work_type,
)
from kernels.cuda.device.pipeline import make_prologue, opaque
from kernels.cuda.device.warpgroups import block_bytes, own_warp, own_warpgroup
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32, types, void
from kernels.scores.program import PLAIN, Features


@cache
def dkdv_kernel(
    layout: KeyLayout, widths: Widths, dtype: str, parts: KeyGradients, features: Features = PLAIN
) -> Kernel:
    """Return the kernel by key tiles for one layout, two widths, one dtype and some gradients."""
    form = KernelForm(layout, widths, dtype, features, parts)
    pipelines, barriers = backward_pipelines(form)
    dq_path = dq_pipelines(form, barriers)
    enter, give_registers, take_registers = make_prologue(layout, barriers)
    produce, consume = make_produce(form, pipelines), make_consume(form, pipelines, dq_path)
    first_item = make_first_item(form)
    send, senders = make_send(form, dq_path.shares), dq_path.shares.stages

    def flash3_dkdv(q_map, k_map, v_map, dout_map, dk_map, dv_map, rows, work):
        """Fill dk and dv, tile after tile, and add the contribution of each tile to dq_sum.

        Computes: dk and dv for tiles of keys of (batch, head), one after the other, and their parts
            of dq / scale, in float32
        Source: FlashAttention-3, Algorithm 3; FlashAttention-2, Algorithm 2, for the numbered lines
        Grid: (multiprocessors,), one block each, that takes items in turn; see ``Schedule``
        Block: (128 * (consumers + 1),), warpgroup 0 copies and sends, the others multiply
        One thread does: of a consumer, 2 keys and block_q / 4 rows of Sᵀ and dPᵀ, 2 rows of dK and
            dV, and 2 rows of a consumer's share of dQ, scattered as wgmma scatters them
        Shared: k_tile (block_k, head_dim), v_tile (block_k, value_dim), later dk and dv; stages of
            q_tile (block_q, head_dim), dout_tile (block_q, value_dim), shifts (2, block_q), delta;
            with dq two of dSᵀ (block_k, block_q), and a tile of dq (block_q, head_dim) in float32;
            tiles of 16 bits in panels of 64 columns, 128-byte swizzle; barriers
        Registers: dk_acc (head_dim / 8, 4), dv_acc (value_dim / 8, 4), s and dp (block_q / 8, 4), p
            and ds (block_q / 16, 4) packed pairs, dq_acc
        Global traffic: reads k and v once, q, dout, shifts and delta once per key tile; writes dk and
            dv once; with dq adds to dq_sum once per key tile, and reads and writes a turn if ordered
        Needs: cc 9.0: wgmma, tensor copies, mbarriers, register reallocation
        """
        memory = enter()  # k, v, q, dout, ds, dq, shifts, delta, barriers, number of the item
        warpgroup = own_warpgroup()
        if warpgroup == 0:
            give_registers()
            warp = own_warp() if senders else 0
            if warp == 0:
                first, maps = first_item(work), (q_map, k_map, v_map, dout_map)
                if cuda.threadIdx.x == 0:
                    produce(memory, maps, rows[0], rows[1], first, work)
            elif warp <= senders and cuda.threadIdx.x % 32 == 0:
                send(int32(warp - 1), memory, rows[1], rows[2])
        else:
            take_registers()
            consume(int32(warpgroup - 1), opaque(memory), dk_map, dv_map, rows[1], work)

    gradient = result_type(features)
    rows = types.Tuple((ROW_NUMBERS, ROW_NUMBERS, types.Array(float32, 1, "C")))
    signature = void(*[MAPS] * 4, gradient, gradient, rows, work_type(features))
    return Kernel(
        flash3_dkdv, signature, layout.threads, block_bytes(key_tiles(layout, widths, parts))
    )
