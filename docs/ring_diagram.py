"""The diagram of the ring: the keys that each rank has in each step, and the tiles that it computes."""

from __future__ import annotations

from kernels.common.picture import AMBER, BLUE, GREEN, PALE, Picture
from minitorch.distributed.sequence_parts import chunks, pair, segments

RANKS, CELL = 3, 20
COLUMN, ROW = 190, 175


def ring_steps() -> Picture:
    """Draw three ranks with two chunks each under a causal mask, step by step."""
    count = 2 * RANKS
    p = Picture(
        150 + COLUMN * RANKS, 70 + ROW * RANKS, "Ring attention on three ranks, step by step"
    )
    for step in range(RANKS):
        p.text(140 + COLUMN * step + CELL * count / 2, 24, f"step {step + 1}", 15)
    for rank in range(RANKS):
        own, y = [c.start for c in chunks(count, rank, RANKS, "zigzag")], 58 + ROW * rank
        p.text(12, y + 50, f"rank {rank}", 15, "start")
        p.text(12, y + 70, f"rows {own[0]} and {own[1]}", 12, "start")
        done: set[tuple[int, int]] = set()
        for step in range(RANKS):
            owner, x = (rank - step) % RANKS, 140 + COLUMN * step
            now = {
                (a.place, b.place)
                for a in segments(count, rank, RANKS, "zigzag", (0, count))
                for b in segments(count, owner, RANKS, "zigzag", (0, count))
                if pair(a, b, -1, 0) is not None
            }
            keys = {c.start for c in chunks(count, owner, RANKS, "zigzag")}
            for c in range(count):
                p.box(x + CELL * c, y - 24, CELL, 16, "", GREEN if c in keys else "white")

            def colour(r: int, c: int, own=own, now=now, done=done) -> str:  # type: ignore[no-untyped-def]
                if (r, c) in now:
                    return AMBER
                return BLUE if (r, c) in done else PALE if c > r or r not in own else "white"

            p.grid(x, y, count, count, CELL, fill=colour)
            done = done | now
            if step < RANKS - 1:
                start, end = x + CELL * count + 6, x + COLUMN - 6
                if rank < RANKS - 1:
                    p.arrow(start, y - 16, end, y + ROW - 18)
                else:
                    p.arrow(start, y - 16, end, y + 24)
                    p.text((start + end) / 2, y + 42, "to rank 0", 11)
    legend = (
        (20, GREEN, "keys and values here"),
        (190, AMBER, "computed now"),
        (320, BLUE, "merged before"),
        (450, PALE, "masked, or another rank's rows"),
    )
    for x, fill, words in legend:
        p.box(x, 44 + ROW * RANKS, 16, 16, "", fill)
        p.text(x + 24, 57 + ROW * RANKS, words, 12, "start")
    return p


PICTURES = {"ring-steps": ring_steps}
