"""Addresses, 128-bit loads and stores, asynchronous copies to shared memory, additions in memory.

An address is a number of bytes, with 32 bits in shared memory and 64 in global memory.  Kernels count in
bytes, so that one loop serves both 16-bit dtypes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import F32, I32, I64, U32, address_of, instruction, reads, writes
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import types


@address_of(types.uint32, space=3)
def shared_address(array):
    """Return the address of an array in shared memory."""


@address_of(types.int64, space=0)
def global_address(array):
    """Return the address of an array in global memory."""


@device_function
def align_up(address, multiple):
    """Return the next address that is a multiple of a power of two."""
    return (address + (multiple - 1)) & -multiple


@instruction("mov.b32 $result, $x;", I32, x=I32)
def recomputed(x):
    """Return x as a value that is opaque to the compiler.

    Values that a loop computes from it, such as addresses, are then not hoisted and kept in registers.
    """


@instruction("ld.global.v4.u32 {$words}, [$address];", words=writes(U32, 4), address=I64)
def ld_global_v4(words, address):
    """Load 16 bytes, at a multiple of 16."""


@instruction("st.global.v4.u32 [$address], {$words};", address=I64, words=reads(U32, 4))
def st_global_v4(address, words):
    """Store 16 bytes, at a multiple of 16."""


@instruction("st.global.u32 [$address], $word;", address=I64, word=U32)
def st_global(address, word):
    """Store four bytes, at a multiple of four."""


@instruction("st.global.v2.f32 [$address], {$x, $y};", address=I64, x=F32, y=F32)
def st_global_v2(address, x, y):
    """Store two neighbouring float32, at a multiple of 8."""


@instruction("ld.shared.s32 $result, [$address];", I32, address=U32)
def ld_shared(address):
    """Return four bytes, a signed number, at a multiple of four."""


@instruction("ld.shared.v4.u32 {$words}, [$address];", words=writes(U32, 4), address=U32)
def ld_shared_v4(words, address):
    """Load 16 bytes, at a multiple of 16."""


@instruction("st.shared.v4.u32 [$address], {$words};", address=U32, words=reads(U32, 4))
def st_shared_v4(address, words):
    """Store 16 bytes, at a multiple of 16."""


@instruction("st.shared.v4.f32 [$address], {$values};", address=U32, values=reads(F32, 4))
def st_shared_v4_f32(address, values):
    """Store four neighbouring float32, at a multiple of 16."""


@instruction("ld.shared.v2.f32 {$result}, [$address];", (F32, F32), address=U32)
def ld_shared_v2(address):
    """Return two neighbouring float32, at a multiple of 8."""


@instruction("st.shared.u32 [$address], $word;", address=U32, word=U32)
def st_shared(address, word):
    """Store four bytes, at a multiple of four."""


@instruction(
    "cp.async.cg.shared.global [$target], [$source], 16, $bytes_;",
    target=U32, source=I64, bytes_=U32,
)  # fmt: skip
def cp_async_16(target, source, bytes_):
    """Copy 0 to 16 bytes, and fill up with zeros to 16; bypasses the L1 cache; cc 8.0.

    With 0 bytes the source is not read, but it must still be a multiple of 16.
    """


@instruction("cp.async.commit_group;")
def cp_async_commit_group():
    """Close a group of this thread's copies; it may be empty."""


@instruction("cp.async.wait_all;")
def cp_async_wait_all():
    """Wait for all of this thread's copies; after a barrier, the other threads see them."""


@cache
def make_cp_async_wait_group(pending: int) -> Any:
    """Return a function that waits until at most ``pending`` of this thread's groups are unfinished."""

    @instruction(f"cp.async.wait_group {pending};")
    def cp_async_wait_group():
        """Wait for groups of this thread's copies; after a barrier, the other threads see them."""

    return cp_async_wait_group


@instruction("red.global.add.f32 [$address], $x;", address=I64, x=F32)
def red_add(address, x):
    """Add to a float32 of global memory, atomically and in no order."""


@instruction("red.global.add.v4.f32 [$address], {$values};", address=I64, values=reads(F32, 4))
def red_add_v4(address, values):
    """Add to four neighbouring float32, at a multiple of 16, each atomically; cc 9.0."""


@instruction(
    """{ .reg .b32 bits;
    mov.b32 bits, $x;
    red.global.max.s32 [$address], bits; }""",
    address=I64, x=F32,
)  # fmt: skip
def red_max(address, x):
    """Raise a non-negative float32 in global memory to the maximum of it and x, atomically."""


@instruction("st.relaxed.gpu.global.u32 [$address], $word;", address=I64, word=U32)
def st_relaxed(address, word):
    """Store four bytes that other blocks may read at any time, at a multiple of four."""


@instruction("ld.relaxed.gpu.global.u32 $result, [$address];", U32, address=I64)
def ld_relaxed(address):
    """Return four bytes that another block may store at any time, at a multiple of four."""


@instruction("st.release.gpu.global.u32 [$address], $word;", address=I64, word=U32)
def st_release(address, word):
    """Store four bytes after all earlier reads and writes of this thread, for :func:`ld_acquire`."""


@instruction("ld.acquire.gpu.global.u32 $result, [$address];", U32, address=I64)
def ld_acquire(address):
    """Return four bytes before all later reads and writes of this thread."""
