"""Time by the fraction of tiles that a block mask lists: random tiles, and the butterfly.

Published: the time of block-sparse FlashAttention is proportional to the fraction of nonzero blocks.  The
ideal line is the time of the dense call multiplied by that fraction.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from bench.contestants import DIRECTIONS, Call, directions, random_call
from bench.kit import Case, Measurement, Panel, Record, Run, markdown, ratio, spread, timed_cell

from kernels import BlockMask

#: Rows and columns of a block: a multiple of every kernel's tile.
BLOCK, HEAD_DIM, DENSE = 128, 64, "dense"
#: Blocks that each row of blocks visits, of all of them.
PARTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


def masks(length: int) -> dict[str, BlockMask]:
    """Return the masks by name, the sparsest first: each row of blocks visits some, drawn at random."""
    count = -(-length // BLOCK)
    order = np.random.default_rng(0).random((count, count)).argsort(axis=1)
    found = {
        f"random, {visited / count:.3g}": BlockMask(order < visited, length, length, BLOCK)
        for visited in sorted({max(1, round(part * count)) for part in PARTS})
    }
    found["butterfly"] = BlockMask.butterfly(length, length, BLOCK)
    return dict(sorted(found.items(), key=lambda item: item[1].density))


def cases(run: Run) -> Iterator[Case]:
    """Time the dense call, and then each mask in the same rounds as the dense call again."""
    run.note(block=BLOCK, head_dim=HEAD_DIM, length=run.length, heads=run.heads)
    dense, found = random_call(run.device, run.heads, run.length), masks(run.length)
    for name in (DENSE, *found):
        yield {"mask": name}, partial(timed, run, dense, name, found.get(name))


def timed(run: Run, dense: Call, name: str, mask: BlockMask | None) -> Record:
    calls = {DENSE: dense}
    if mask is not None:
        calls[name] = random_call(run.device, run.heads, run.length, block_mask=mask)
    times = run.timed(directions(calls))
    row: Record = {"density": 1.0 if mask is None else mask.density}
    for way in DIRECTIONS:
        row[way] = spread(times[name, way], 1e3)
        row[f"{way}_part"] = ratio(times[name, way], times[DENSE, way])
    return row


def table(record: Record) -> str:
    head = ["mask", "tiles visited"]
    head += [x for way in DIRECTIONS for x in (f"{way}, ms", "share of dense")]
    lines = (
        [row["mask"], f"{row['density']:.1%}",
         *(x for way in DIRECTIONS
           for x in (timed_cell(row[way]), f"{row[f'{way}_part']['median']:.1%}"))]
        for row in sorted(record["rows"], key=lambda row: row["density"])
    )  # fmt: skip
    return markdown(head, lines)


def draw(record: Record) -> list[Panel]:
    lines, rows = Record(), sorted(record["rows"], key=lambda row: row["density"])
    for way in DIRECTIONS:
        dense = next(row for row in rows if row["mask"] == DENSE)[way]["median"]
        for row in rows:
            label = f"{way}, butterfly" if row["mask"] == "butterfly" else way
            lines.setdefault(label, []).append((row["density"], row[way]["median"]))
        ends = rows[0]["density"], 1.0
        lines[f"{way}, dense × fraction"] = [(end, dense * end) for end in ends]
    title = (
        f"time of a call: heads {record['heads']}, {record['length']:,} keys,\nhead_dim "
        f"{record['head_dim']}, blocks of {record['block']}, float32"
    )
    return [Panel(title, "fraction of tiles visited", "ms", lines, log="xy")]


MEASUREMENT = Measurement(
    "sparsity", "Is time proportional to the fraction of tiles that a block mask lists?", cases,
    {"cpu": {"quick": {"length": 1024, "seconds": 0.1},
             "normal": {"length": 8192, "heads": 1, "seconds": 4.0}},
     "cuda": {"quick": {"length": 4096, "heads": 8, "seconds": 0.3},
              "normal": {"length": 16384, "heads": 16, "seconds": 1.5}}},
    table=table, draw=draw, minutes={"cpu": 1, "cuda": 1}, paths=("kernels",),
    caption="Time by the fraction of tiles that a block mask lists, on logarithmic axes. The dotted lines "
    "show the time of the dense call multiplied by that fraction.",
)  # fmt: skip
