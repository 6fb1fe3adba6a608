"""Asynchronous copies by the copy engine, of rows of memory and boxes of a tensor; cc 9.0.

A copy to shared memory adds its bytes to an ``mbarrier``.  Copies from shared memory complete in groups,
for which the issuing thread waits.  A box has as many coordinates as its tensor has dimensions, the fastest
first. Elements outside of the tensor are read as zeros and not written.

A copy sees the bytes that threads wrote to shared memory only after ``fence_proxy_async`` and a barrier.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import I32, I64, U32, Tuple, instruction


@instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$target], [$source], $bytes_, [$barrier];",
    target=U32, source=I64, bytes_=U32, barrier=U32,
)  # fmt: skip
def cp_async_bulk_load(target, source, bytes_, barrier):
    """Copy bytes, a multiple of 16 at multiples of 16, from global to shared memory."""


@instruction(
    "cp.async.bulk.global.shared::cta.bulk_group [$target], [$source], $bytes_;",
    target=I64, source=U32, bytes_=U32,
)  # fmt: skip
def cp_async_bulk_store(target, source, bytes_):
    """Copy bytes, a multiple of 16 at multiples of 16, from shared to global memory."""


@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$target], [$source], $bytes_;",
    target=I64, source=U32, bytes_=U32,
)  # fmt: skip
def cp_reduce_async_bulk_add(target, source, bytes_):
    """Add float32 numbers in shared memory to global memory; each addition is atomic."""


@instruction("cp.async.bulk.commit_group;")
def cp_async_bulk_commit_group():
    """Close a group of stores and additions."""


@cache
def make_cp_async_bulk_wait_group(pending: int, is_read: bool = False) -> Any:
    """Return a function that waits until at most ``pending`` of the thread's groups are unfinished.

    Args:
        pending: 0 waits for all.
        is_read: Wait only until the shared memory of the groups has been read and may be written again.
    """

    @instruction(f"cp.async.bulk.wait_group{'.read' if is_read else ''} {pending};")
    def cp_async_bulk_wait_group():
        """Wait for groups of stores and additions."""

    return cp_async_bulk_wait_group


@cache
def make_tensor_load(dims: int) -> Any:
    """Return ``load(target, tensor_map, barrier, coordinates)``: copy a box to shared memory.

    Args:
        dims: Number of dimensions of the tensor, 1 to 5: the length of ``coordinates``, a tuple.
    """

    @instruction(
        f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$target], [$tensor_map, {$coordinates}], [$barrier];",
        target=U32, tensor_map=I64, barrier=U32, coordinates=Tuple(I32, dims),
    )  # fmt: skip
    def cp_async_bulk_tensor_load(target, tensor_map, barrier, coordinates):
        """Copy a box of a tensor to shared memory; zeros outside of the tensor count as copied bytes."""

    return cp_async_bulk_tensor_load


@cache
def make_tensor_store(dims: int, is_added: bool = False) -> Any:
    """Return ``store(tensor_map, coordinates, source)``: copy a box from shared memory.

    Args:
        dims: Number of dimensions of the tensor, 1 to 5: the length of ``coordinates``, a tuple.
        is_added: Add to the tensor instead, in the dtype of the tensor map; each addition is atomic.
    """
    what = "cp.reduce.async.bulk" if is_added else "cp.async.bulk"
    how = ".add" if is_added else ""

    @instruction(
        f"{what}.tensor.{dims}d.global.shared::cta{how}.tile.bulk_group "
        "[$tensor_map, {$coordinates}], [$source];",
        tensor_map=I64, coordinates=Tuple(I32, dims), source=U32,
    )  # fmt: skip
    def cp_async_bulk_tensor_store(tensor_map, coordinates, source):
        """Copy or add a box of shared memory to a tensor."""

    return cp_async_bulk_tensor_store
