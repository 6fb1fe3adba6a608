"""Philox4x32-10 as one block of instructions: several of them overlap, and none takes long to compile.

Written in Python its rounds are inlined one by one wherever they are drawn; the compiler takes minutes for
the dozens of draws that keep a multiprocessor busy, and leaves loops of one draw in which each round waits
for the last.  It computes what ``kernels.philox`` says, which is the readable form.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.cuda.ptx.inline import U32, instruction
from kernels.philox import (
    ATTENTION,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ROUNDS,
    WEYL_0,
    WEYL_1,
)

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


@cache
def make_draw(places: tuple[int, int, int, int]) -> Any:
    """Return ``draw(b0, b1, b2, b3, threshold, seed_low, seed_high, block, row, flat)``.

    It returns the four words with a further bit each: at ``places[j]`` of word j it is 1 if attention keeps
    column ``4 · block + j`` of a row of a (batch, head); see ``philox.keep``.

    Args:
        places: From 0 to 31.
    """
    bits = "".join(
        f"""
    mov.b32 b{j}, $b{j};
    setp.ge.u32 kept, c{j}, $threshold;
    @kept or.b32 b{j}, b{j}, {1 << place};"""
        for j, place in enumerate(places)
    )
    results = "".join(f"\n    mov.b32 $result{j}, b{j};" for j in range(4))
    text = f"""{{ // philox {" ".join(map(str, places))}
    .reg .b32 c0, c1, c2, c3, k0, k1, low0, low1, high0, high1, b0, b1, b2, b3;
    .reg .b64 product;
    .reg .pred kept;
    mov.b32 c0, $block;
    mov.b32 c1, $row;
    mov.b32 c2, $flat;
    mov.b32 c3, {ATTENTION};
    mov.b32 k0, $seed_low;
    mov.b32 k1, $seed_high;{_NEXT_KEY.join([_ROUND] * ROUNDS)}{bits}{results}
    }}"""

    @instruction(
        text, (U32, U32, U32, U32), is_pure=True,
        b0=U32, b1=U32, b2=U32, b3=U32, threshold=U32, seed_low=U32, seed_high=U32,
        block=U32, row=U32, flat=U32,
    )  # fmt: skip
    def draw(b0, b1, b2, b3, threshold, seed_low, seed_high, block, row, flat):
        """Draw four words and compare them with the threshold."""

    return draw
