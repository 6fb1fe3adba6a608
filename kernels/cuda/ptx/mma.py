"""Tensor cores of one warp: fragments from and to shared memory, and their product; cc 8.0.

``fragments`` defines the elements that each lane holds.  Accumulators are a local array of float32, (tiles,
4), and the registers of an operand are a local array of uint32: ``mma(acc[i], a[k], b[j])``.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda.ptx.inline import F32, U32, instruction, reads, updates, writes


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$fragment}, [$address];",
    fragment=writes(U32, 4), address=U32,
)  # fmt: skip
def ldmatrix_x4(fragment, address):
    """Load four 8 x 8 matrices of 16-bit elements, one per register.

    Lane 8 i + r passes the address of row r of matrix i.
    """


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$fragment}, [$address];",
    fragment=writes(U32, 4), address=U32,
)  # fmt: skip
def ldmatrix_x4_trans(fragment, address):
    """Load four matrices as :func:`ldmatrix_x4` does, each transposed."""


@instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$address], {$fragment};",
    address=U32, fragment=reads(U32, 4),
)  # fmt: skip
def stmatrix_x4(address, fragment):
    """Store four 8 x 8 matrices of 16-bit elements, the reverse of :func:`ldmatrix_x4`; cc 9.0."""


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$acc}, {$a}, {$b}, {$acc};",
    is_pure=True, acc=updates(F32, 4), a=reads(U32, 4), b=reads(U32, 2),
)  # fmt: skip
def mma_f16(acc, a, b):
    """Add A·B, (16, 16) and (16, 8) of float16, to a 16 x 8 tile of accumulators; cc 8.0."""


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$acc}, {$a}, {$b}, {$acc};",
    is_pure=True, acc=updates(F32, 4), a=reads(U32, 4), b=reads(U32, 2),
)  # fmt: skip
def mma_bf16(acc, a, b):
    """Add A·B, (16, 16) and (16, 8) of bfloat16, to a 16 x 8 tile of accumulators; cc 8.0."""


@instruction(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$acc}, {$a}, {$b}, {$acc};",
    is_pure=True, acc=updates(F32, 4), a=reads(U32, 4), b=reads(U32, 2),
)  # fmt: skip
def mma_tf32(acc, a, b):
    """Add A·B, (16, 8) and (8, 8) of TF32, to a 16 x 8 tile of accumulators; cc 8.0.

    If float32 bits have not been rounded before, it reads only the upper 19.
    """


#: ``mma(acc, a, b)`` of depth 16, by dtype.
MMA: dict[str, Any] = {"float16": mma_f16, "bfloat16": mma_bf16}
