"""Conversions between float32 and packed 16-bit pairs or TF32, and functions of one instruction.

A pair is 32 bits, with the first number in the low half.  Its dtype is a name, "float16" or "bfloat16":
kernels keep 16-bit tensors as words, so that numba's own types, which would have to be linked, are not
needed.
"""

from __future__ import annotations

from typing import Any

from kernels.cuda.ptx.inline import F32, U32, instruction


def _make_pack(kind: str) -> Any:
    @instruction(f"cvt.rn.{kind}x2.f32 $result, $high, $low;", U32, is_pure=True, low=F32, high=F32)
    def pack(low, high):
        """Return two numbers as a pair of 16 bits, rounded to nearest even; cc 8.0."""

    return pack


@instruction(
    """{ .reg .b16 low, high;
    mov.b32 {low, high}, $pair;
    cvt.f32.f16 $result0, low;
    cvt.f32.f16 $result1, high; }""",
    (F32, F32), is_pure=True, pair=U32,
)  # fmt: skip
def unpack_f16(pair):
    """Return the two numbers of a pair of float16."""


@instruction(
    """{ .reg .b32 low, high;
    shl.b32 low, $pair, 16;
    and.b32 high, $pair, 0xffff0000;
    mov.b32 $result0, low;
    mov.b32 $result1, high; }""",
    (F32, F32), is_pure=True, pair=U32,
)  # fmt: skip
def unpack_bf16(pair):
    """Return the two numbers of a pair of bfloat16, the upper halves of float32."""


@instruction(
    """{ .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $x, $w;
    cvt.rn.satfinite.e4m3x2.f32 high, $z, $y;
    mov.b32 $result, {low, high}; }""",
    U32, is_pure=True, w=F32, x=F32, y=F32, z=F32,
)  # fmt: skip
def pack_e4m3(w, x, y, z):
    """Return four numbers as float8 e4m3, rounded to nearest even, with 448 for larger ones; cc 8.9.

    The first one is the lowest byte.
    """


@instruction("cvt.rna.tf32.f32 $result, $x;", U32, is_pure=True, x=F32)
def round_tf32(x):
    """Return a number as TF32, rounded to 11 significant bits, ties away from zero; cc 8.0."""


@instruction("mov.b32 $result, $number;", U32, is_pure=True, number=F32)
def bits_of(number):
    """Return the bits of a float32."""


@instruction("mov.b32 $result, $bits;", F32, is_pure=True, bits=U32)
def float_of(bits):
    """Return the float32 with the given bits."""


@instruction("ex2.approx.ftz.f32 $result, $x;", F32, is_pure=True, x=F32)
def ex2(x):
    """Return 2**x within two units in the last place; subnormal numbers become zero."""


@instruction("rcp.approx.ftz.f32 $result, $x;", F32, is_pure=True, x=F32)
def rcp(x):
    """Return 1 / x within a unit in the last place; infinity for a subnormal number."""


@instruction("fma.rn.f32 $result, $x, $y, $z;", F32, is_pure=True, x=F32, y=F32, z=F32)
def fma(x, y, z):
    """Return x · y + z, rounded once."""


@instruction("mul.rn.f32 $result, $x, $y;", F32, is_pure=True, x=F32, y=F32)
def mul_rn(x, y):
    """Return x · y, rounded also where the compiler would add to it without rounding."""


@instruction("sub.rn.f32 $result, $x, $y;", F32, is_pure=True, x=F32, y=F32)
def sub_rn(x, y):
    """Return x - y; a product x is rounded before."""


@instruction("lg2.approx.ftz.f32 $result, $x;", F32, is_pure=True, x=F32)
def lg2(x):
    """Return the base-2 logarithm; a subnormal number counts as zero.

    The error is at most 2**-22, or 2**-22 of the result if that is more.
    """


@instruction("tanh.approx.f32 $result, $x;", F32, is_pure=True, x=F32)
def tanh(x):
    """Return the hyperbolic tangent with a relative error of at most 2**-11; cc 7.5."""


#: ``pack(low, high)`` and ``unpack(pair)`` by dtype; ``PACK_POSITIVE`` has zeros for negative numbers.
PACK = {"float16": _make_pack("f16"), "bfloat16": _make_pack("bf16")}
PACK_POSITIVE = {"float16": _make_pack("relu.f16"), "bfloat16": _make_pack("relu.bf16")}
UNPACK: dict[str, Any] = {"float16": unpack_f16, "bfloat16": unpack_bf16}
