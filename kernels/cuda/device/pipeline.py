"""Pipelines of Hopper's kernels: stages of shared memory that a producer fills and consumers empty.

The producer acquires a stage, commits the bytes that its copies will bring, and issues them; a consumer
waits for the stage, reads it and releases it::

    acquire(keys, at)                       wait(keys, at)
    full = commit(keys, at, size)           ... products with tile_at(keys, at) ...
    load(tile_at(keys, at), full, ...)      release(keys, at, lane)
    at = following(keys, at)                at = following(keys, at)

Each stage has two barriers, full and empty.  Both sides walk the stages in a ring and count their rounds
modulo two, which is the phase that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cuda.device.warpgroups import ALIGNMENT, WarpRoles
from kernels.cuda.ptx.barriers import (
    fence_mbarrier_init,
    make_setmaxnreg,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from kernels.cuda.ptx.copies import align_up, recomputed, shared_address
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, uint8

#: Bytes of a barrier.
BARRIER = 8


class Pipeline(NamedTuple):
    """A ring of stages in shared memory; ``placed`` turns the byte offsets into addresses."""

    tiles: Any  # Address of the first stage's tile
    size: Any  # Distance in bytes of the tiles of consecutive stages
    full: Any  # Address of the first stage's full barrier; those of the other stages follow
    empty: Any  # Address of the first stage's empty barrier; those of the other stages follow
    stages: Any  # Number of stages


class StagePhase(NamedTuple):
    """A stage of a pipeline, and the parity of the round; both are int32."""

    stage: Any
    phase: Any


class Barriers:
    """The barriers of a block, which are consecutive in memory.

    Args:
        first: Offset of the first barrier in the block's memory.

    Attributes:
        arrivals: The number of arrivals that ends a phase of each barrier.
    """

    def __init__(self, first: int):
        self._first = first
        self.arrivals: tuple[int, ...] = ()

    def row(self, count: int, arrivals: int) -> int:
        """Add ``count`` barriers, and return the offset of the first one."""
        offset = self._first + BARRIER * len(self.arrivals)
        self.arrivals += (arrivals,) * count
        return offset

    def pipeline(
        self, tiles: int, size: int, stages: int, emptied_by: int, filled_by: int = 1
    ) -> Pipeline:
        """Return a pipeline whose tiles are ``size`` bytes apart.

        ``filled_by`` arrivals and the committed bytes make a stage full, ``emptied_by`` arrivals empty.
        """
        full, empty = self.row(stages, filled_by), self.row(stages, emptied_by)
        return Pipeline(tiles, size, full, empty, stages)


@device_function
def placed(pipeline, memory):
    """Return a pipeline whose addresses are in a block's memory at ``memory``."""
    return Pipeline(
        memory + pipeline.tiles, pipeline.size, memory + pipeline.full, memory + pipeline.empty,
        pipeline.stages,
    )  # fmt: skip


@device_function
def start():
    """Return the first place of a pipeline."""
    return StagePhase(int32(0), int32(0))


@device_function
def following(pipeline, at):
    """Return the next place; the phase flips at the end of the ring."""
    if pipeline.stages == 1:  # the compiler does not see by itself that the stage stays 0
        return StagePhase(int32(0), int32(at.phase ^ 1))
    last = at.stage == pipeline.stages - 1
    return StagePhase(int32(0 if last else at.stage + 1), int32(at.phase ^ 1 if last else at.phase))


@device_function
def preceding(pipeline, at):
    """Return the last place, the one that :func:`following` led from."""
    is_first = at.stage == 0
    stage = int32(pipeline.stages - 1 if is_first else at.stage - 1)
    return StagePhase(stage, int32(at.phase ^ 1 if is_first else at.phase))


@device_function
def tile_at(pipeline, at):
    """Return the address of a stage's tile."""
    return pipeline.tiles + at.stage * pipeline.size


@device_function
def acquire(pipeline, at):
    """Wait until a stage is empty, that is, until the consumers have released its previous tile."""
    mbarrier_wait(pipeline.empty + BARRIER * at.stage, at.phase ^ 1)


@device_function
def commit(pipeline, at, size):
    """Announce the bytes that make a stage full, and return the barrier that counts them."""
    full = pipeline.full + BARRIER * at.stage
    mbarrier_arrive_expect_tx(full, size)
    return full


@device_function
def publish(pipeline, at):
    """Declare a stage full whose contents this thread has written itself."""
    mbarrier_arrive(pipeline.full + BARRIER * at.stage)


@device_function
def wait(pipeline, at):
    """Wait until a stage is full."""
    mbarrier_wait(pipeline.full + BARRIER * at.stage, at.phase)


@device_function
def release(pipeline, at, lane):
    """Release a stage, once per warp; all lanes must have read it."""
    if lane == 0:
        release_alone(pipeline, at)


@device_function
def release_alone(pipeline, at):
    """Release a stage by the arrival of this thread."""
    mbarrier_arrive(pipeline.empty + BARRIER * at.stage)


@device_function
def opaque(memory):
    """Return the address of a block's memory in a form that is opaque to the compiler.

    The address then stays in a register.  Otherwise the compiler computes it again within the loops of
    products, which makes them up to a tenth longer; only in the producer, which has few registers, is this
    better.
    """
    return recomputed(int32(memory))


def make_prologue(
    layout: WarpRoles, barriers: Barriers
) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], None]]:
    """Return ``enter()``, ``give_registers()`` and ``take_registers()``.

    All threads of a block call the first function, which initializes the barriers and returns the address
    of the block's memory.  The producer warpgroup calls the second, and the consumers call the third.  All
    pipelines of ``barriers`` must have been made.
    """
    arrivals, first = barriers.arrivals, barriers._first
    count = len(arrivals)

    @device_function
    def enter():
        memory = align_up(shared_address(cuda.shared.array(0, uint8)), ALIGNMENT)
        if cuda.threadIdx.x == 0:
            for i in range(count):
                mbarrier_init(memory + first + BARRIER * i, arrivals[i])
            fence_mbarrier_init()  # for the copy engine
        cuda.syncthreads()  # the barriers are there
        return memory

    few, more = layout.registers
    return enter, make_setmaxnreg("dec", few), make_setmaxnreg("inc", more)
