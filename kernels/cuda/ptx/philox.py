"""Philox4x32-7 as one block of PTX, so that many draws overlap and compile fast.

If Philox is written in Python, its rounds are inlined one by one at every use.  The compiler takes minutes
for the dozens of draws that keep a multiprocessor busy, and in a loop of single draws each round waits for
the last. ``kernels.common.philox`` is the readable form of the same computation.

Draws of one block share the products that depend only on the row or only on the column, three or four of
fourteen; the assembler finds these by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kernels.common.philox import (
    ATTENTION,
    ATTENTION_ROUNDS,
    MULTIPLIER_0,
    MULTIPLIER_1,
    WEYL_0,
    WEYL_1,
)
from kernels.cuda.ptx.inline import U32, instruction

#: Masks of the highest bits of both halves of a word, and of its four bytes.
HALVES, BYTES = 0x80008000, 0x80808080

_ROUND = f"""
    mul.wide.u32 product, c0, {MULTIPLIER_0};
    mov.b64 {{low0, high0}}, product;
    mul.wide.u32 product, c2, {MULTIPLIER_1};
    mov.b64 {{low1, high1}}, product;
    lop3.b32 c0, high1, c1, k0, 0x96;
    lop3.b32 c2, high0, c3, k1, 0x96;
    mov.b32 c1, low1;
    mov.b32 c3, low0;"""
_NEXT_KEY = f"""
    add.u32 k0, k0, {WEYL_0};
    add.u32 k1, k1, {WEYL_1};"""
# Both halves at a time: with the highest bit of x set and that of the threshold t not, that of x - t tells
# whether the other bits of x reach those of t; then it, the bit of x and the absent one of t vote.  Of a
# threshold of 2^16, which no half reaches, the bit counts as there twice: once to be subtracted.
_THRESHOLD = f"""
    shl.b32 flags, $threshold, 16;
    or.b32 rest, $threshold, flags;
    and.b32 rest, rest, {~HALVES & 0xFFFFFFFF};
    setp.lt.u32 is_low, $threshold, 0x8000;
    selp.b32 absent, {HALVES}, 0, is_low;
    setp.gt.u32 is_low, $threshold, 0xFFFF;
    selp.b32 rest, {HALVES}, rest, is_low;"""


class Draw(NamedTuple):
    """One Philox counter of a block of draws, and the places to which its random bits go."""

    row: int  # Added to the row
    block: int  # Added to the number of the column block
    #: (word, shift) for the bits of columns 0 to 3: the index of the result, and the distance of each bit
    #: from the highest bit of its byte; each column has one byte.
    first: tuple[int, int]
    last: tuple[int, int]  # (word, shift) for the bits of columns 4 to 7


@cache
def make_draw(draws: tuple[Draw, ...]) -> Any:
    """Return ``draw(threshold, seed_low, seed_high, block, row, flat)``: the dropout bits of attention.

    It returns two words.  For each draw, byte c of the word in ``first`` has the bit of column c of its
    block, and byte c of the word in ``last`` the bit of column 4 + c: 1 if attention keeps it; see
    ``philox.keep``.  There is at least one draw, and their bits must not overlap.
    """
    spec = " ".join(",".join(map(str, (*one[:2], *one.first, *one.last))) for one in draws)
    text = f"""{{ // philox {spec};
    .reg .b32 c0, c1, c2, c3, k0, k1, low0, low1, high0, high1, flags, rest, absent, out0, out1;
    .reg .b64 product;
    .reg .pred is_low;{_THRESHOLD}
    mov.b32 out0, 0;
    mov.b32 out1, 0;{"".join(map(_draw_text, draws))}
    mov.b32 $result0, out0;
    mov.b32 $result1, out1;
    }}"""

    @instruction(
        text, (U32, U32), is_pure=True,
        threshold=U32, seed_low=U32, seed_high=U32, block=U32, row=U32, flat=U32,
    )  # fmt: skip
    def draw(threshold, seed_low, seed_high, block, row, flat):
        """Draw words and compare their halves with the threshold."""

    return draw


def _draw_text(one: Draw) -> str:
    """Return the instructions of one draw."""
    compare = "".join(
        f"""
    or.b32 flags, c{j}, {HALVES};
    sub.u32 flags, flags, rest;
    lop3.b32 c{j}, c{j}, flags, absent, 0xE8;"""
        for j in range(4)
    )
    # The highest byte of each half of two words.
    gather = "".join(
        f"""
    prmt.b32 flags, c{2 * pair}, c{2 * pair + 1}, 0x7531;
    shr.u32 flags, flags, {shift};
    lop3.b32 out{word}, flags, {BYTES >> shift}, out{word}, 0xEA;"""
        for pair, (word, shift) in enumerate((one.first, one.last))
    )
    return f"""
    add.u32 c0, $block, {one.block};
    add.u32 c1, $row, {one.row};
    mov.b32 c2, $flat;
    mov.b32 c3, {ATTENTION};
    mov.b32 k0, $seed_low;
    mov.b32 k1, $seed_high;{_NEXT_KEY.join([_ROUND] * ATTENTION_ROUNDS)}{compare}{gather}"""
