"""Time against the fraction of tiles that a block mask lets be visited: random tiles, and the butterfly.

    python project/experiments/sparsity.py                  on the CPU
    python project/experiments/sparsity.py --device cuda    on a GPU

Published: the time of block-sparse FlashAttention is proportional to the fraction of nonzero blocks.  The
ideal line is the dense call's time multiplied by that fraction.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
from harness import (
    Experiment,
    Record,
    Report,
    Result,
    colour_of,
    headline,
    legend,
    markdown,
    panels,
    run,
    timed_cell,
)

# isort: split
from bench.contestants import ArrayCall
from bench.measuring import interleaved, ratio, spread, timing_note

from kernels import BlockMask

#: Rows and columns of a block: a multiple of every kernel's tile.
BLOCK = 128
HEAD_DIM = 64
#: Blocks that each row of blocks visits, of all of them.
PARTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
DENSE = "dense"
DIRECTIONS = ("forward", "backward")


class Size(NamedTuple):
    """Of one device.

    Attributes:
        length: Queries and keys.
        heads: Of them.
        seconds: To spend on each mask.
    """

    length: int
    heads: int
    seconds: float


SIZES = {
    "cpu": {
        "quick": Size(1024, 1, 0.2), "normal": Size(8192, 1, 4.0), "full": Size(16384, 1, 15.0)
    },
    "cuda": {
        "quick": Size(4096, 8, 0.3), "normal": Size(16384, 16, 1.5), "full": Size(16384, 16, 5.0)
    },
}  # fmt: skip


def kept_of(part: float, count: int) -> int:
    """Return how many of so many blocks a part of them is; one at least."""
    return max(1, round(part * count))


def random_tiles(length: int, part: float, seed: int = 0) -> BlockMask:
    """Return a mask of which each row of blocks visits so many, drawn at random; one at least."""
    count = -(-length // BLOCK)
    kept = kept_of(part, count)
    order = np.random.default_rng(seed).random((count, count)).argsort(axis=1)  # (count, count)
    return BlockMask(order < kept, length, length, BLOCK)


def masks(length: int) -> dict[str, BlockMask]:
    """Return the masks by name, the sparsest first; parts of as many blocks are one mask."""
    count = -(-length // BLOCK)
    parts = sorted({kept_of(part, count) / count for part in PARTS})
    drawn = {f"random, {part:.3g}": random_tiles(length, part) for part in parts}
    found = {**drawn, "butterfly": BlockMask.butterfly(length, length, BLOCK)}
    return dict(sorted(found.items(), key=lambda item: item[1].density))


def measure(args: argparse.Namespace, report: Report) -> None:
    """Time the dense call, and then each mask in the same rounds as the dense one again."""
    size = SIZES[args.device][args.size]
    found = masks(size.length)
    dense = ArrayCall(args.device, size.heads, size.length)
    report.note(
        timing=timing_note(args.device), block=BLOCK, head_dim=HEAD_DIM, length=size.length,
        heads=size.heads,
    )  # fmt: skip
    for name in report.progress((DENSE, *found), "mask"):
        calls = {DENSE: dense}
        if name in found:
            calls[name] = ArrayCall(args.device, size.heads, size.length, block_mask=found[name])
        steps = {
            (each, way): getattr(call, way) for way in DIRECTIONS for each, call in calls.items()
        }
        times = interleaved(steps, args.device, size.seconds)
        row: Record = {"mask": name, "density": found[name].density if name in found else 1.0}
        for way in DIRECTIONS:
            row[way] = spread(times[name, way], 1e3)
            row[f"{way}_part"] = ratio(times[name, way], times[DENSE, way])
        report.add(**row)


def table(record: Record) -> str:
    """Return a line for each mask, the sparsest first."""
    head = [
        "mask",
        "tiles visited",
        "forward, ms",
        "share of dense",
        "backward, ms",
        "share of dense",
    ]
    return markdown(
        head,
        (
            [
                row["mask"], f"{row['density']:.1%}",
                timed_cell(row["forward"]), f"{row['forward_part']['median']:.1%}",
                timed_cell(row["backward"]), f"{row['backward_part']['median']:.1%}",
            ]
            for row in sorted(record["rows"], key=lambda row: row["density"])
        ),
    )  # fmt: skip


def draw(figure: Any, results: list[Result]) -> None:
    """Draw time against the fraction of tiles, beside the ideal line."""
    drawn_panels = panels(figure, results)
    for axes, result in drawn_panels:
        for direction in DIRECTIONS:
            colour = colour_of(direction, DIRECTIONS)
            drawn = [row for row in result.rows if row["mask"] != "butterfly"]
            dense = next(row for row in result.rows if row["mask"] == DENSE)[direction]["median"]
            ends = [min(row["density"] for row in result.rows), 1.0]
            axes.plot(ends, [dense * end for end in ends], "--", color=colour, alpha=0.5)
            axes.plot(
                [row["density"] for row in drawn],
                [row[direction]["median"] for row in drawn],
                "o", color=colour, label=direction,
            )  # fmt: skip
            for row in result.rows:
                if row["mask"] == "butterfly":
                    axes.plot(
                        row["density"], row[direction]["median"], "*", color=colour, markersize=13,
                        markeredgecolor="black", label=f"{direction}, butterfly",
                    )  # fmt: skip
        axes.plot([], [], "--", color="#666", label="dense × fraction")
        axes.set(xscale="log", yscale="log", xlabel="fraction of tiles visited", ylabel="ms")
        record = result.record
        heads = f"{record['heads']} head{'s' if record['heads'] > 1 else ''}"
        headline(
            axes,
            f"time of a call: {heads}, {record['length']:,} keys,\n"
            f"head_dim {record['head_dim']}, blocks of {record['block']}, float32",
        )
    legend(figure, [axes for axes, _ in drawn_panels], columns=3)


CAPTION = (
    "Time by the fraction of tiles that a block mask lists, on logarithmic axes. The dashed "
    "lines show the time of the dense call multiplied by that fraction."
)
EXPERIMENT = Experiment("sparsity", __doc__, measure, table, draw, caption=CAPTION)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
