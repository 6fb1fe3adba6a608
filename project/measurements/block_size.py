"""Time and global traffic by the size of a tile, for FlashAttention and FlashAttention-2.

Three sweeps.  ``flash1`` over B_c: each key tile reads Q and O again, so traffic falls as 1 / B_c.
``flash2`` over B_c: its traffic does not depend on it, time does a little.  ``flash2`` over B_r: each query
tile reads K and V again, so traffic falls with B_r.  On the CPU, the time is that of the CPU's rung.

Source: FlashAttention (2022), figure 2, middle: forward time falls as B_c grows to 256, where arithmetic
becomes the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.contestants import random_call
from bench.harness import Case, Measurement, Run
from bench.kit import Panel, Record, columns, curves, ready, spread, timed_cell, workload_text
from common.child import in_child

from kernels.metering.rung_traffic import RUNGS, call_traffic, metered, problem_of
from kernels.traffic.formulas import HeadShape, total

#: Title, rung, and the tile of a size.  B_r of flash1 is small enough that 48 KB hold B_c = 64.
SWEEPS = {
    "flash1, B_c": ("flash1", lambda size: (16, size)),
    "flash2, B_c": ("flash2", lambda size: (64, size)),
    "flash2, B_r": ("flash2", lambda size: (size, 32)),
}
#: The metered call: length, head_dim, and tiles of each sweep, small enough for the emulated GPU.
METERED = {"length": 32, "head_dim": 4, "sizes": (4, 8, 16), "other": 8}


def meter() -> list[Record]:
    """Count small calls on the emulated GPU, which this process must use, beside the formulas."""
    length, dim = METERED["length"], METERED["head_dim"]
    shape, found = HeadShape(length, length, dim, dim, 0, 0), []
    for sweep, (rung, tile_of) in SWEEPS.items():
        for size in METERED["sizes"]:
            tile = tuple(METERED["other"] if x != size else x for x in tile_of(size))
            counted, expected = (total(side.forward).moved for side in metered(rung, shape, tile))
            if counted != expected:
                raise RuntimeError(f"{rung}, {tile}: the meter counts {counted}, not {expected}")
            found.append({"sweep": sweep, "tile": tile, "meter": counted, "formula": expected})
    return found


def cases(run: Run) -> Iterator[Case]:
    run.note(workload=run.chosen("batch_heads", "length", "head_dim"))
    run.note(metered=METERED, meter=in_child(meter, emulated=True))
    call = run.batch_heads, run.length, run.length

    def started(rung: str, tile: Any) -> Any:
        options = {**RUNGS[rung], "rung": rung, "tile": tile}
        own = random_call(run.device, *call, head_dim=run.head_dim, **options)
        own.forward()
        return own.forward

    for sweep, (rung, tile_of) in SWEEPS.items():
        tiles, problem = list(map(tile_of, run.tiles)), problem_of(rung, *call, run.head_dim)
        calls, reasons = ready({tile: partial(started, rung, tile) for tile in tiles}, ValueError)
        times = run.timed(calls) if calls else {}  # a tile may be too large
        for size, tile in zip(run.tiles, tiles, strict=True):
            moved, took = total(call_traffic(rung, problem, tile).forward).moved, times.get(tile)
            yield {"sweep": sweep, "size": size}, {
                "rung": rung, "tile": tile, "gb": 4e-9 * run.batch_heads * moved,
                "ms": took and spread(took, 1e3), "too_large": reasons.get(tile),
            }  # fmt: skip


def table(record: Record) -> str:
    workload = record["workload"]
    text = (
        f"Forward pass, batch × heads = {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, float32. The traffic was counted in "
        f"{len(record['meter'])} calls, and equals the formula in all of them."
    )
    shown = columns(record["rows"], {
        "varied size": lambda row: f"{row['sweep']} = {row['size']}",
        "tile B_r × B_c": lambda row: f"{row['tile'][0]} x {row['tile'][1]}",
        "traffic, GB": "gb",
        "ms (quartiles)": lambda row: timed_cell(row["ms"]) if row["ms"] else "not available",
    })  # fmt: skip
    return f"{text}\n\n{shown}"


def draw(record: Record) -> list[Panel]:
    traffic, times = (
        curves((row["sweep"], row["size"], row[key]) for row in record["rows"])
        for key in ("gb", "ms")
    )
    title, x = "global traffic by formula, forward", "rows or columns of a tile"
    return [
        Panel(f"{workload_text(record)}\n{title}", x, "GB", traffic, log="x"),
        Panel("time, forward", x, "ms", times, log="x"),
    ]


MEASUREMENT = Measurement(
    "block_size", "How do traffic and time depend on the size of a tile?", cases,
    {"cpu": {"quick": {"batch_heads": 1, "length": 256, "seconds": 0.1},
             "normal": {"batch_heads": 4, "length": 2048, "head_dim": 64,
                        "tiles": (16, 32, 64, 128, 256), "seconds": 2.0}},
     "cuda": {"quick": {"batch_heads": 64, "length": 512},
              "normal": {"batch_heads": 256, "length": 2048, "head_dim": 64,
                         "tiles": (8, 16, 32, 64, 128), "seconds": 2.0}}},
    table=table, draw=draw, height=3.0, minutes={"cpu": 0.5, "cuda": 1}, paths=("kernels",),
    caption="Global traffic by formula, and time. Either the rows or the columns of a tile vary; the other "
    "side is constant. Error bars are quartiles.",
)  # fmt: skip
