"""Barriers among warps and with copies, and register allocation of warpgroups.

An ``mbarrier`` is eight bytes of shared memory.  One of its phases ends when the expected number of threads
has arrived and all announced bytes have been copied.  Phases are counted modulo two, and a thread waits for
a given phase.  A new barrier is in phase 0, and waiting for its phase 1 returns at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import U32, instruction
from kernels.cuda.runtime.kernel import device_function


@instruction("mbarrier.init.shared::cta.b64 [$barrier], $count;", barrier=U32, count=U32)
def mbarrier_init(barrier, count):
    """Initialize a barrier for a number of arrivals per phase; called by one thread."""


@instruction("fence.mbarrier_init.release.cluster;")
def fence_mbarrier_init():
    """Make previously initialized barriers visible to the copy engine; cc 9.0."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [$barrier];", barrier=U32)
def mbarrier_arrive(barrier):
    """Arrive without waiting, after all earlier reads and writes of this thread; cc 9.0."""


@instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$barrier], $bytes_;", barrier=U32, bytes_=U32
)
def mbarrier_arrive_expect_tx(barrier, bytes_):
    """Arrive, and announce bytes that copies will bring before the phase may end; cc 9.0."""


@instruction(
    """{ .reg .pred ended;
    mbarrier.try_wait.parity.shared::cta.b64 ended, [$barrier], $parity;
    selp.b32 $result, 1, 0, ended; }""",
    U32, barrier=U32, parity=U32,
)  # fmt: skip
def mbarrier_try_wait(barrier, parity):
    """Wait for a limited time; return 1 if the phase of that parity has ended, or else 0; cc 9.0."""


@device_function
def mbarrier_wait(barrier, parity):
    """Wait until the phase of that parity has ended; cc 9.0."""
    while mbarrier_try_wait(barrier, parity) == 0:
        pass


@instruction("fence.proxy.async.shared::cta;")
def fence_proxy_async():
    """Make this thread's writes to shared memory visible to ``wgmma`` and bulk copies; cc 9.0."""


@instruction("fence.proxy.async.global;")
def fence_proxy_async_global():
    """Order this thread's accesses to global memory and those of bulk copies that it issues later."""


@instruction("bar.sync $barrier, $threads;", barrier=U32, threads=U32)
def bar_sync(barrier, threads):
    """Wait at one of a block's 16 named barriers for a number of threads, in whole warps.

    Number 0 is the barrier of ``cuda.syncthreads``.
    """


@instruction("bar.arrive $barrier, $threads;", barrier=U32, threads=U32)
def bar_arrive(barrier, threads):
    """Arrive at a named barrier without waiting."""


@cache
def make_setmaxnreg(action: str, registers: int) -> Any:
    """Return a function by which a warpgroup releases ("dec") or acquires ("inc") registers; cc 9.0.

    All warps of the warpgroup must call it; acquiring waits until enough registers are free.  Each role of
    the threads must be one branch of a single ``if``, and the kernel must have launch bounds; otherwise the
    compiler ignores the instruction.  ``registers`` is a multiple of eight from 24 to 256.
    """

    @instruction(f"setmaxnreg.{action}.sync.aligned.u32 {registers};")
    def setmaxnreg():
        """Change the number of registers of the threads of a warpgroup."""

    return setmaxnreg
