"""Asynchronous copies by the copy engine, of rows of memory and boxes of a tensor; cc 9.0.

A copy to shared memory adds its bytes to an ``mbarrier``.  Copies from shared memory complete in groups,
for which the issuing thread waits.  A box of a tensor of four dimensions has four coordinates, the fastest
first.  Elements outside of the tensor are read as zeros and not written.

A copy sees the bytes that threads wrote to shared memory only after ``fence_proxy_async`` and a barrier.
"""

from __future__ import annotations

from kernels.cuda.ptx.inline import I32, I64, U32, Tuple, instruction


@instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$target], [$source], $bytes_, [$barrier];",
    target=U32, source=I64, bytes_=U32, barrier=U32,
)  # fmt: skip
def cp_async_bulk_load(target, source, bytes_, barrier):
    """Copy bytes, a multiple of 16 at multiples of 16, from global to shared memory."""


@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$target], [$source], $bytes_;",
    target=I64, source=U32, bytes_=U32,
)  # fmt: skip
def cp_reduce_async_bulk_add(target, source, bytes_):
    """Add float32 numbers in shared memory to global memory; each addition is atomic."""


@instruction("cp.async.bulk.commit_group;")
def cp_async_bulk_commit_group():
    """Close a group of stores and additions."""


@instruction("cp.async.bulk.wait_group.read 0;")
def wait_for_reads():
    """Wait until all of this thread's groups have read shared memory, which may then be written again."""


@instruction("cp.async.bulk.wait_group 0;")
def wait_for_writes():
    """Wait until all of this thread's groups have ended."""


@instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$target], [$tensor_map, {$coordinates}], [$barrier];",
    target=U32, tensor_map=I64, barrier=U32, coordinates=Tuple(I32, 4),
)  # fmt: skip
def tensor_load(target, tensor_map, barrier, coordinates):
    """Copy a box of a tensor to shared memory; zeros outside of the tensor count as copied bytes."""


@instruction("prefetch.tensormap [$tensor_map];", tensor_map=I64)
def prefetch_map(tensor_map):
    """Fetch a tensor map, which the first copy would wait for."""


@instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$tensor_map, {$coordinates}], [$source];",
    tensor_map=I64, coordinates=Tuple(I32, 4), source=U32,
)  # fmt: skip
def tensor_store(tensor_map, coordinates, source):
    """Copy a box of shared memory to a tensor."""
