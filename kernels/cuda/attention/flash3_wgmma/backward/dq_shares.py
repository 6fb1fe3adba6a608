"""The path of dQ out of Hopper's kernel by key tiles: from the consumers to sums in global memory.

Each consumer computes a share of the tile dS K and puts it in shared memory.  It may do so a tile later
than dS (``KeyLayout.lags``), so that one can take exponentials while another one multiplies.  A thread
of the producer warpgroup, one for each consumer, makes the copy engine add the share to the sums, so that
no consumer waits for its own additions.  The two sides meet at a stage of a pipeline; ``StagePhase.stage``
is the number of the consumer.

In an ordered kernel, a share of the sums has a *turn*: the number of key tiles that were added to it.  A
sender waits for its turn.  Items are drawn in the order of the key tiles, so that those before it have been
drawn by blocks that run, and no block waits for one that has not started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    DS_STAGES,
    dq_bytes,
    dq_share,
    tiles_of,
)
from kernels.cuda.attention.flash3_wgmma.layout import KernelForm
from kernels.cuda.attention.flash3_wgmma.tiles import make_multiply_dq
from kernels.cuda.device.pipeline import (
    Barriers,
    Pipeline,
    StagePhase,
    acquire,
    placed,
    publish,
    release_alone,
    tile_at,
    wait,
)
from kernels.cuda.device.warpgroups import LINE, WARPGROUP, store_pairs
from kernels.cuda.ptx.barriers import fence_proxy_async, fence_proxy_async_global
from kernels.cuda.ptx.bulk import (
    cp_async_bulk_commit_group,
    cp_reduce_async_bulk_add,
    wait_for_reads,
    wait_for_writes,
)
from kernels.cuda.ptx.copies import (
    global_address,
    ld_acquire,
    ld_shared,
    st_release,
    st_shared,
    st_shared_v4_f32,
)
from kernels.cuda.ptx.fragments import square_place
from kernels.cuda.ptx.wgmma import (
    ROWS,
    descriptor,
    descriptor_layout,
    wgmma_commit_group,
    wgmma_fence,
)
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, int64


class DqPipelines(NamedTuple):
    """The pipelines for dS and for the shares of dQ; they have no stages in a kernel without dQ."""

    slopes: Pipeline  # Tiles of dSᵀ, which all consumers fill and read
    shares: Pipeline  # The shares of dQ, a stage for each consumer


def dq_pipelines(form: KernelForm, barriers: Barriers) -> DqPipelines:
    """Return the pipelines on the path of dQ."""
    layout, tiles, adds_dq, warps = form.layout, tiles_of(form), form.parts.dq, WARPGROUP // 32
    ds_size, all_warps = 2 * layout.block_q * layout.block_k, warps * layout.consumers
    slopes = barriers.pipeline(tiles["ds"], ds_size, DS_STAGES * adds_dq, all_warps, all_warps)
    size, count = dq_bytes(layout, form.widths), layout.consumers * adds_dq
    return DqPipelines(slopes, barriers.pipeline(tiles["dq"], size, count, 1, warps))


def make_issue_dq(form: KernelForm) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``store_ds(ds, slopes, at, own)`` and ``issue_dq(dq, memory, ds_tile, own)``.

    The first stores this consumer's part of dS for all consumers, and the second issues the product for its
    share of dQ.
    """
    layout, widths, dtype, *_ = form
    block_k, k_panel = layout.block_k, layout.block_k * LINE
    share, depth_steps = dq_share(layout, widths), layout.block_q // 16
    ds_step, k_step = (k_panel, 0) if share.by_rows else (0, share.step)
    multiply_dq = make_multiply_dq(share.cols, dtype, block_k)
    across_keys = descriptor_layout(LINE, k_panel, 8 * LINE)

    @device_function
    def store_ds(ds, slopes, at, own):
        r, c = square_place(own.lane)
        line = own.me * ROWS + own.warp * 16 + r  # of dSᵀ, that this lane gives stmatrix
        acquire(slopes, at)  # the products with the last tile of this stage are done
        for t in range(depth_steps):
            store_pairs(tile_at(slopes, at), line, c, t, k_panel, ds[t])
        fence_proxy_async()  # products see what was stored
        cuda.syncwarp()  # the warp's part of dS is whole
        if own.lane == 0:
            publish(slopes, at)

    @device_function
    def issue_dq(dq, memory, ds_tile, own):
        wgmma_fence()
        ds_desc = descriptor(across_keys, ds_tile + own.me * ds_step)
        k_desc = descriptor(across_keys, memory + own.me * k_step)
        multiply_dq(dq, ds_desc, k_desc)
        wgmma_commit_group()

    return store_ds, issue_dq


def make_hand_over(
    form: KernelForm, pipeline: Pipeline
) -> tuple[Callable[..., StagePhase], Callable[..., None]]:
    """Return ``hand_over(memory, at, dq_acc, number, turn, own)`` and ``end_sums(memory, at, own)``.

    The first puts a consumer's share, the ``number``-th of the sums, where its sender finds it, and returns
    the next place; ``turn`` is the number of key tiles before.  The second ends the sender.
    """
    pieces, numbers = dq_share(form.layout, form.widths).cols // 8, tiles_of(form)["shares"]
    is_ordered = form.parts.ordered

    @device_function
    def announce(memory, shares, at, number, turn, own):
        if own.thread == 0:
            st_shared(memory + numbers + 2 * WORD * own.me, number)
            if is_ordered:
                st_shared(memory + numbers + 2 * WORD * own.me + WORD, turn)
        fence_proxy_async()  # the copy engine sees what was stored
        cuda.syncwarp()  # the warp's part of the share is whole
        if own.lane == 0:
            publish(shares, at)

    @device_function
    def hand_over(memory, at, dq_acc, number, turn, own):
        shares = placed(pipeline, memory)
        acquire(shares, at)  # the last share was read
        for t in range(pieces):
            to = tile_at(shares, at) + 16 * (t * WARPGROUP + own.thread)
            st_shared_v4_f32(to, dq_acc[t])
        announce(memory, shares, at, number, turn, own)
        return StagePhase(at.stage, int32(at.phase ^ 1))

    @device_function
    def end_sums(memory, at, own):
        shares = placed(pipeline, memory)
        acquire(shares, at)  # the last number was read
        announce(memory, shares, at, int32(-1), int32(0), own)

    return hand_over, end_sums


def make_send(form: KernelForm, pipeline: Pipeline) -> Callable[..., None]:
    """Return ``send(me, memory, delta, dq_sum)``, with which a thread adds the shares of consumer ``me``.

    Behind the sums there are the turns of the shares, a word each.
    """
    size, numbers = dq_bytes(form.layout, form.widths), tiles_of(form)["shares"]
    is_ordered, block_q, consumers = form.parts.ordered, form.layout.block_q, form.layout.consumers

    @device_function
    def send(me, memory, delta, dq_sum):
        shares, at, number = placed(pipeline, memory), StagePhase(me, int32(0)), int32(0)
        sums, own_number = global_address(dq_sum), memory + numbers + 2 * WORD * me
        turns = sums + delta.shape[0] * (delta.shape[1] // block_q) * consumers * int64(size)
        while number >= 0:
            wait(shares, at)  # the share is whole
            number = ld_shared(own_number)
            turn, own_turn = ld_shared(own_number + WORD), turns + int64(number) * WORD
            if number >= 0:
                if is_ordered:
                    while ld_acquire(own_turn) != turn:
                        pass
                    fence_proxy_async_global()  # the copy engine sees what others added
                cp_reduce_async_bulk_add(sums + int64(number) * size, tile_at(shares, at), size)
                cp_async_bulk_commit_group()
                wait_for_reads()
            release_alone(shares, at)
            at = StagePhase(me, int32(at.phase ^ 1))
            if is_ordered and number >= 0:
                wait_for_writes()
                st_release(own_turn, turn + 1)
        wait_for_writes()

    return send
