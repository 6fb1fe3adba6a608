"""Blocks of a cluster: they run at a time, arrive at each other's barriers, share what a copy brings; cc 9.0.

A cluster is two or more neighbouring blocks of the grid, on multiprocessors that reach each other's shared
memory.  An address there is the block's own address with the block's rank put into it by ``mapa``; a copy
that is multicast goes to the same address of each block and brings its bytes to each one's barrier.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import I32, I64, U32, Tuple, instruction


@instruction(
    """{ .reg .b32 remote;
    mapa.shared::cluster.u32 remote, $barrier, $rank;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }""",
    barrier=U32, rank=U32,
)  # fmt: skip
def mbarrier_arrive_at(barrier, rank):
    """Arrive at the barrier at the same address of a block of the cluster, without waiting."""


@instruction(
    """{ .reg .pred ended;
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [$barrier], $parity;
    selp.b32 $result, 1, 0, ended; }""",
    U32, barrier=U32, parity=U32,
)  # fmt: skip
def mbarrier_try_wait_cluster(barrier, parity):
    """Wait a while, as ``mbarrier_try_wait``; what all blocks did before they arrived is done."""


@instruction("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;")
def cluster_sync():
    """Wait until all threads of the cluster have come."""


@cache
def make_tensor_multicast(dims: int) -> Any:
    """Return ``load(target, tensor_map, barrier, coordinates, blocks)``: a box into several blocks.

    Args:
        dims: Of the tensor, 1 to 5: the length of ``coordinates``, a tuple.
    """

    @instruction(
        "{ .reg .b16 ranks;\n"
        "cvt.u16.u32 ranks, $blocks;\n"
        f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [$target], [$tensor_map, {$coordinates}], [$barrier], ranks; }",
        target=U32, tensor_map=I64, barrier=U32, coordinates=Tuple(I32, dims), blocks=U32,
    )  # fmt: skip
    def cp_async_bulk_tensor_multicast(target, tensor_map, barrier, coordinates, blocks):
        """Copy a box of a tensor to shared memory of the blocks whose ranks are bits of ``blocks``."""

    return cp_async_bulk_tensor_multicast
