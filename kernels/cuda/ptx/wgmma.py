"""Products of a warpgroup: 64 rows at a time, operands in shared memory, asynchronous; cc 9.0a.

The right operand, and the left one unless it is in registers, is given by a *descriptor*: 64 bits with the
start and the layout of its pieces.  A piece is eight consecutive lines of 16, 32, 64 or 128 bytes, the
width of the swizzle.  For an operand whose lines run along the depth of the product (A by rows, B by
columns: "K-major"), ``stride`` is the distance between groups of eight lines.  For a transposed operand,
whose lines run along the rows of A or the columns of B, ``stride`` is the distance between groups of eight
along the depth, and ``leading`` the distance between widths.  Without a swizzle, both are distances of 8 x
16-byte matrices; ``emulated.wgmma.operand_offsets`` has a formula for each case.

A step of 16 along the depth moves the start by 32 bytes within the width, or, if transposed, by two
strides.

Before the threads may use an accumulator, they must call, in this order: ``wgmma_fence``, the products,
``wgmma_commit_group``, and a wait.  Until then its registers belong to the tensor cores.

Source: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate operation"; the strides of
transposed operands as in the comments of CUTLASS's ``mma_sm90_desc``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import F32, I64, U32, instruction, reads, updates, writes
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import int64, uint64

#: Rows of A, and of the accumulators, of a warpgroup.
ROWS = 64
#: dtype → its name in PTX, and the depth of one instruction: 32 bytes.
KINDS = {
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
    "tf32": ("tf32", 8),
    "float8_e4m3": ("e4m3", 32),
}
#: The depth of dtypes whose operands in shared memory may be transposed.
_TURNED_DEPTH = 16
#: Width of the swizzle → its code in a descriptor.
_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor_layout(swizzle: int, leading: int, stride: int) -> int:
    """Return a descriptor without its start: the part that is known when a kernel is compiled.

    ``swizzle`` is the number of bytes of a line: 32, 64, 128, or 0 for none.  The distances in bytes are
    multiples of 16 below 2**18; an unused one may have any value.
    """
    return _CODES[swizzle] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16


@device_function
def descriptor(layout, address):
    """Return the descriptor of an operand at a shared address; ``+ (bytes >> 4)`` moves it."""
    return int64(uint64(layout) | uint64((address & 0x3FFFF) >> 4))


@instruction("wgmma.fence.sync.aligned;")
def wgmma_fence():
    """Make the accumulators, and A in registers, available to the tensor cores."""


@cache
def make_wgmma_fence(registers: int) -> Any:
    """Return ``fence(pairs)``: :func:`wgmma_fence` for products whose A is in these registers.

    The compiler may move the rounding of A behind a fence that does not name it, between the products.
    ``ptxas`` then makes each product a group of its own, of which ``wait_group`` waits for too many.
    """

    @instruction("wgmma.fence.sync.aligned;", pairs=updates(U32, registers))
    def fence(pairs):
        """Make the accumulators, and A in registers, available to the tensor cores."""

    return fence


@instruction("wgmma.commit_group.sync.aligned;")
def wgmma_commit_group():
    """Close a group of products."""


@cache
def make_wgmma_wait_group(pending: int) -> Any:
    """Return a function that waits until at most ``pending`` groups are unfinished."""

    @instruction(f"wgmma.wait_group.sync.aligned {pending};")
    def wgmma_wait_group():
        """Wait for groups of products."""

    return wgmma_wait_group


@cache
def make_wgmma(
    cols: int,
    dtype: str,
    a_in_registers: bool = False,
    a_transposed: bool = False,
    b_transposed: bool = False,
    begins: bool = False,
) -> Any:
    """Return ``wgmma(acc, a, b, accumulate)``: acc = A·B, or acc += A·B where the flag is not 0.

    With ``begins``, the function is ``wgmma(acc, a, b)``: acc = A·B.  An ``accumulate`` of 0 has the same
    effect, but the compiler assumes that the accumulators are read, and cannot use their registers for
    anything else before.

    ``acc`` is a local array of float32, for example (cols / 8, 4), with the layout of ``mma``; warp w has
    the rows from 16 w on.  ``a`` is a descriptor, or the four registers of each warp's 16 rows; ``b`` is a
    descriptor.  B has 8 to 256 columns, a multiple of eight, and a dtype of :data:`KINDS`.  A transposed
    operand, of 16 bits and in shared memory, has lines along the rows of A or the columns of B.
    """
    name, depth = KINDS[dtype]
    # Nothing is negated; then which operands are transposed, of those that could be.
    flags = ([] if a_in_registers else [a_transposed]) + [b_transposed]
    turned = "".join(f", {int(flag)}" for flag in flags) if depth == _TURNED_DEPTH else ""
    left, a = (reads(U32, 4), "{$a}") if a_in_registers else (I64, "$a")

    def text(flag: str) -> str:
        return (
            "{ .reg .pred accumulate;\n"
            f"setp.ne.b32 accumulate, {flag}, 0;\n"
            f"wgmma.mma_async.sync.aligned.m{ROWS}n{cols}k{depth}.f32.{name}.{name} "
            f"{{$acc}}, {a}, $b, accumulate, 1, 1{turned}; }}"
        )

    if begins:

        @instruction(text("0"), acc=writes(F32, cols // 2), a=left, b=I64)
        def wgmma_begin(acc, a, b):
            """Multiply 64 rows; asynchronous."""

        return wgmma_begin

    @instruction(text("$accumulate"), acc=updates(F32, cols // 2), a=left, b=I64, accumulate=U32)
    def wgmma(acc, a, b, accumulate):
        """Multiply, or multiply and add, 64 rows; asynchronous."""

    return wgmma
