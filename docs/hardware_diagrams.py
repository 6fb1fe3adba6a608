"""The diagrams of modules 3 and 4: threads and memory, convolution and softmax."""

from __future__ import annotations

import math

from kernels.common.picture import AMBER, BLUE, GREEN, INK, PALE, RED, Picture

COLOURS = (BLUE, GREEN, AMBER, RED)


def parallel_loop() -> Picture:
    """Draw which core computes which outputs of a reduction, and what it reads."""
    p = Picture(480, 230, "A parallel loop over outputs: no two cores write to the same place")
    p.text(20, 24, "input (6, 5)", 13, "start")
    p.grid(20, 35, 6, 5, 26, fill=lambda r, c: (BLUE, GREEN)[r // 3])
    p.text(258, 24, "output (6, 1)", 13)
    for r in range(6):
        p.arrow(152, 48 + 26 * r, 243, 48 + 26 * r)
        p.box(245, 35 + 26 * r, 26, 26, "", (BLUE, GREEN)[r // 3])
    p.box(310, 45, 150, 56, "core 0: rows 0 to 2", BLUE)
    p.box(310, 123, 150, 56, "core 1: rows 3 to 5", GREEN)
    p.text(
        20, 215, "Across: a serial fold. Down: prange, in any order, at the same time.", 13, "start"
    )
    return p


def thread_blocks() -> Picture:
    """Draw the threads of a launch and the elements that they compute."""
    p = Picture(480, 230, "add[2, 4]: two blocks of four threads for five elements")
    for block in range(2):
        x = 30 + 220 * block
        p.box(x, 15, 200, 90, "", PALE)
        p.text(x + 100, 34, f"block {block}", 13)
        for thread in range(4):
            i = 4 * block + thread
            fill = COLOURS[block] if i < 5 else "white"
            p.box(x + 10 + 46 * thread, 45, 42, 50, "", fill)
            p.text(x + 31 + 46 * thread, 66, f"t {thread}", 12)
            p.text(x + 31 + 46 * thread, 86, f"i = {i}", 12)
    for i in range(5):
        x = 30 + 220 * (i // 4) + 31 + 46 * (i % 4)
        p.box(120 + 46 * i, 150, 46, 34, f"out[{i}]", COLOURS[i // 4])
        p.arrow(x, 96, 143 + 46 * i, 149)
    p.text(30, 212, "i = 4 · block + t. Threads 5 to 7 find i ≥ 5 and write nothing.", 13, "start")
    return p


def memory_levels() -> Picture:
    """Draw the memories of a GPU, from the registers to global memory."""
    p = Picture(
        480, 310, "The memories of an A100: small and fast near the threads, large and slow below"
    )
    for x, name in ((15, "multiprocessor 1"), (170, "multiprocessor 2"), (325, "… 108")):
        p.box(x, 15, 140, 170, "", PALE)
        p.text(x + 70, 34, name, 12)
        p.box(x + 8, 44, 124, 44, "", AMBER)
        p.text(x + 70, 71, "registers", 13)
        p.arrow(x + 70, 112, x + 70, 90)
        p.box(x + 8, 113, 124, 60, "", GREEN)
        p.text(x + 70, 138, "shared memory", 13)
        p.text(x + 70, 158, "192 KB", 12)
        p.path([(x + 70, 185), (x + 70, 232)], INK, 1)
    p.text(94, 213, "slow", 12, "start")
    p.text(95, 106, "fast", 12, "start")
    p.box(15, 233, 450, 40, "global memory: 40 or 80 GB, 1.5 to 2.0 TB/s", BLUE)
    p.text(15, 297, "Shared memory of all multiprocessors together: about 19 TB/s.", 13, "start")
    return p


def tree_sum() -> Picture:
    """Draw the sum of eight numbers in shared memory, in three rounds."""
    p = Picture(480, 250, "A sum in shared memory: eight numbers take three rounds")
    rows = [[float(i) for i in range(8)]]
    for half in (4, 2, 1):
        rows.append([rows[-1][i] + rows[-1][i + half] for i in range(half)])
    for level, values in enumerate(rows):
        y = 10 + 58 * level
        for i, value in enumerate(values):
            fill = GREEN if level == 3 else BLUE
            p.box(20 + 40 * i, y, 40, 32, f"{value:g}", fill)
            if level:
                half = len(values)
                p.arrow(40 + 40 * i, y - 26, 40 + 40 * i, y - 1)
                p.arrow(40 + 40 * (i + half), y - 26, 48 + 40 * i, y - 1)
        if level < 3:
            p.text(470, y + 48, "barrier", 12, "end")
            p.path([(360, y + 44), (415, y + 44)], INK, 1)
    p.text(20, 240, "half = 4, 2, 1: thread t < half adds partial[t + half].", 13, "start")
    return p


def bank_conflicts() -> Picture:
    """Draw where a column of a tile lies in the banks, with and without a spare column."""
    p = Picture(
        480, 300, "A column of an 8 by 8 tile: in one bank, or in eight with a spare column"
    )
    for x, pitch, words in ((30, 8, "eight turns"), (265, 9, "one turn")):
        p.text(x + 92, 20, f"{pitch} numbers a row", 13)
        for bank in range(8):
            p.text(x + 11 + 23 * bank, 40, str(bank), 11)
        for at in range(8 * pitch):
            row, col = divmod(at, pitch)
            if at // 8 < 9:
                fill = AMBER if col == 2 else PALE if col == 8 else "white"
                text = str(row) if col == 2 else ""
                p.box(x + 23 * (at % 8), 46 + 23 * (at // 8), 23, 23, "", fill)
                if text:
                    p.text(x + 11 + 23 * (at % 8), 62 + 23 * (at // 8), text, 11)
        p.text(x + 92, 272, words, 13)
    p.text(
        15,
        293,
        "Across: 8 banks. Amber: column 2, read by threads 0 to 7. Grey: spare.",
        12,
        "start",
    )
    return p


def window() -> Picture:
    """Draw the window of a convolution in two dimensions."""
    p = Picture(480, 220, "One output is the sum of a window of the input times the kernel")
    row, col, cell = 1, 2, 30
    inside = lambda r, c: row <= r < row + 3 and col <= c < col + 3  # noqa: E731
    p.text(90, 22, "input", 13)
    p.grid(15, 32, 5, 5, cell, fill=lambda r, c: BLUE if inside(r, c) else "white")
    p.text(182, 112, "·", 20)
    p.text(240, 52, "kernel", 13)
    p.grid(195, 62, 3, 3, cell, fill=lambda r, c: GREEN)
    p.text(300, 112, "=", 16)
    p.text(390, 22, "output", 13)
    p.grid(315, 32, 5, 5, cell, fill=lambda r, c: AMBER if (r, c) == (row, col) else "white")
    p.text(
        15,
        208,
        "out[1, 2]: nine products, rows 1 to 3 and columns 2 to 4, of each channel.",
        12,
        "start",
    )
    return p


def pooling() -> Picture:
    """Draw pooling as a view, a permutation and a reduction."""
    p = Picture(480, 220, "Pooling: view, permute, join, then reduce the last dimension")
    tile = lambda r, c: COLOURS[2 * (r // 2) + c // 2]  # noqa: E731
    p.text(71, 22, "(4, 4)", 13)
    p.grid(15, 32, 4, 4, 28, lambda r, c: str(4 * r + c), tile)
    p.arrow(132, 88, 192, 88)
    p.text(162, 78, "(2, 2, 4)", 12)
    for t in range(4):
        for n in range(4):
            r, c = 2 * (t // 2) + n // 2, 2 * (t % 2) + n % 2
            p.box(200 + 28 * n, 32 + 30 * t, 28, 24, str(4 * r + c), COLOURS[t])
    p.arrow(317, 88, 372, 88)
    p.text(344, 78, "mean", 12)
    p.grid(
        380,
        48,
        2,
        2,
        44,
        lambda r, c: str(8.0 * r + 2.0 * c + 2.5),
        lambda r, c: tile(2 * r, 2 * c),
    )
    p.text(15, 180, "(h, w) → (h/p, p, w/q, q) → (h/p, w/q, p, q) → (h/p, w/q, p q)", 13, "start")
    p.text(15, 202, "Here h = w = 4 and p = q = 2; a mean gives (2, 2).", 13, "start")
    return p


def softmax_shift() -> Picture:
    """Draw a softmax with and without the shift by the maximum."""
    p = Picture(480, 235, "Subtracting the maximum changes no probability and avoids overflow")
    x = [1000.0, 1001.0, 1002.0]
    powers = [math.exp(value - max(x)) for value in x]
    rows = (
        ("x", [f"{value:g}" for value in x], BLUE),
        ("eˣ", ["overflow"] * 3, RED),
        ("x − max x", [f"{value - max(x):g}".replace("-", "−") for value in x], BLUE),
        ("e to that", [f"{value:.3f}" for value in powers], AMBER),
        ("softmax", [f"{value / sum(powers):.3f}" for value in powers], GREEN),
    )
    for i, (name, values, fill) in enumerate(rows):
        y = 12 + 43 * i
        p.text(105, y + 22, name, 13, "end")
        for j, value in enumerate(values):
            p.box(120 + 85 * j, y, 80, 33, value, fill)
    p.text(385, 163, f"sum {sum(powers):.3f}", 13, "start")
    p.text(385, 206, "sum 1", 13, "start")
    return p


def split_keys() -> Picture:
    """Draw the keys of a sequence, split into parts that are merged."""
    p = Picture(560, 210, "The keys of one query, split into parts at fixed positions, and merged")
    p.text(20, 30, "pages of the cache", 13, "start")
    for at, page in enumerate((7, 2, 9, 0, 4, 5)):
        p.box(20 + 85 * at, 40, 85, 26, f"page {page}", "white" if at < 5 else PALE)
    for part in range(3):
        x = 20 + 170 * part
        p.box(x, 84, 170 if part < 2 else 110, 28, f"part {part}", AMBER)
        p.arrow(x + 85 if part < 2 else x + 55, 112, 170 + 85 * part, 142)
    p.text(478, 103, "never read", 12, "start")
    p.box(120, 144, 270, 30, "merge by (maximum, sum), in order", GREEN)
    p.text(
        20,
        200,
        "A part begins at a fixed position of the sequence, whatever the batch.",
        12,
        "start",
    )
    return p


PICTURES = {
    "split-keys": split_keys,
    "parallel-loop": parallel_loop,
    "thread-blocks": thread_blocks,
    "memory-levels": memory_levels,
    "tree-sum": tree_sum,
    "bank-conflicts": bank_conflicts,
    "window": window,
    "pooling": pooling,
    "softmax-shift": softmax_shift,
}
