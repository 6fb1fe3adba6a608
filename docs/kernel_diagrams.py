"""The diagrams of the tensor-core rungs, drawn by the kernels' own maps where there are any."""

from __future__ import annotations

from kernels.common.geometry import same
from kernels.common.picture import AMBER, BLUE, GREEN, INK, PALE, RED, Picture
from kernels.cuda.ptx.fragments import PLAIN
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place


def mma_fragments() -> Picture:
    """Draw which lane and register hold each pair of numbers of mma.m16n8k16, by the kernels' own maps."""
    p = Picture(
        784, 405, "mma.m16n8k16: the lane that holds each pair of numbers, and the register"
    )
    wide, high = 30, 18  # of a pair in a row
    colours = (BLUE, GREEN, AMBER, RED)
    a_left, b_left, c_left, top = 20, 304, 524, 46
    for x, title in (
        (a_left + 4 * wide, "A: 16 × 16"),
        (b_left + 88, "B: 16 × 8"),
        (c_left + 4 * wide, "C: 16 × 8, and the next one"),
    ):
        p.text(x, 30, title)
    for lane in range(32):
        for register in range(4):
            row, col = PLAIN.a_element(lane, register, 0)
            place = a_left + col // 2 * wide, top + row * high
            p.box(*place, wide, high, str(lane), colours[register])
            row, col = PLAIN.accumulator_element(lane, 2 * register)
            place = c_left + col // 2 * wide, top + row * high
            p.box(*place, wide, high, str(lane), colours[register])
        for register in range(2):
            row, col = PLAIN.b_element(lane, register, 0)
            place = b_left + col * 22, top + row * high
            p.box(*place, 22, 2 * high, str(lane), colours[2 * register])
    p.text(282, 195, "·")
    p.text(502, 195, "=")
    p.path([(c_left + 4 * wide, top - 6), (c_left + 4 * wide, top + 16 * high + 6)], INK, 3)
    for i, (words, fill) in enumerate(
        zip(("register 0", "register 1", "register 2", "register 3"), colours, strict=True)
    ):
        p.box(20 + 110 * i, 352, 20, 18, "", fill)
        p.text(46 + 110 * i, 366, words, 12, "start")
    p.text(470, 366, "B has two: blue is 0, amber is 1", 12, "start")
    p.text(
        20, 392, "A register of A or B is two numbers of 16 bits; of C, two registers of float32 "
        "stand for one of A: two tiles of C lie as one of A.", 12, "start",
    )  # fmt: skip
    return p


def swizzle() -> Picture:
    """Draw where the pieces of eight rows of 128 bytes lie in the banks, without and with the swizzle."""
    p = Picture(640, 308, "Eight rows of 128 bytes in shared memory, without and with the swizzle")
    place, cell, column = make_tile_place(same, 8 * CHUNK), 28, 2
    for x, name, is_swizzled in ((70, "as they come", False), (385, "swizzled", True)):
        p.text(x + 4 * cell, 20, name)
        p.text(x + 4 * cell, 44, "banks, four to a square →", 12)
        for row in range(8):
            p.text(x - 8, 73 + row * cell, f"row {row}", 11, "end")
            for chunk in range(8):
                at = place(row, chunk) // CHUNK % 8 if is_swizzled else chunk
                fill = BLUE if chunk == column else "white"
                p.box(x + at * cell, 54 + row * cell, cell, cell, str(chunk), fill)
    p.text(182, 296, "one bank for all eight: eight turns", 12)
    p.text(497, 296, "eight banks: one turn", 12)
    return p


def ping_pong() -> Picture:
    """Draw two warpgroups that multiply in turns, and who copies for them, over two key tiles."""
    p = Picture(800, 335, "Two warpgroups in turns: the softmax of one, the products of the other")
    left, unit, high = 125, 80, 32
    rows = {"copy engine": 40, "warpgroup 1": 100, "tensor cores": 170, "warpgroup 2": 240}
    for name, y in rows.items():
        p.text(left - 10, y + 21, name, 13, "end")
        p.path([(left, y + high + 8), (left + 8 * unit, y + high + 8)], PALE, 1)

    def work(row: str, begin: float, end: float, text: str, fill: str) -> None:
        p.box(left + unit * begin, rows[row], unit * (end - begin), high, text, fill)

    for n, start in ((2, 0), (3, 4)):
        work("copy engine", start + 0.8, start + 2, f"V{n}", PALE)
        work("copy engine", start + 2, start + 3.2, f"K{n + 1}", PALE)
        for group, fill in ((0, BLUE), (1, GREEN)):
            begin = start + 2 * group
            work("tensor cores", begin, begin + 1, f"S{n} = Q K{n}", fill)
            work("tensor cores", begin + 1, begin + 2, f"P{n - 1} V{n - 1}", fill)
    for row, begin in (("warpgroup 1", 1), ("warpgroup 2", -1)):
        fill = BLUE if row == "warpgroup 1" else GREEN
        for n, start in enumerate((begin, begin + 4, begin + 8)):
            tile = n + (2 if begin > 0 else 1)
            soft, end = max(start, 0), min(start + 1.8, 8)
            if soft < end:
                is_cut = end - soft < 1
                work(row, soft, end, f"S{tile}" if is_cut else f"softmax S{tile}", AMBER)
            if start + 2.4 <= 8:
                work(row, start + 1.8, start + 2.4, f"O, P{tile}", fill)
                is_above = rows[row] < rows["tensor cores"]
                from_y = rows[row] + high * is_above
                to_y = rows["tensor cores"] + (-2 if is_above else high + 2)
                p.arrow(left + unit * (start + 2.4), from_y, left + unit * (start + 3) - 4, to_y)
    p.text(left + 4 * unit, 25, "time →", 13)
    p.text(
        left,
        304,
        "S2: scores of key tile 2; O, P: rescale O, round P to 16 bits",
        12,
        "start",
    )
    p.text(
        left,
        323,
        "arrows: products are asked for; the tensor cores do them in that order",
        12,
        "start",
    )
    return p
