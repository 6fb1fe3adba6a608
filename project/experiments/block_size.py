"""Time and global traffic against the size of a tile, for FlashAttention and FlashAttention-2.

    python project/experiments/block_size.py                  the CPU rung's time; traffic by formula
    python project/experiments/block_size.py --device cuda    both CUDA rungs, each tile that fits

Three sweeps.  ``flash1`` over B_c: each key tile reads Q and O again, so traffic falls as 1 / B_c.
``flash2`` over B_c: its traffic does not depend on it, time does a little.  ``flash2`` over B_r: each query
tile reads K and V again, so here it is B_r that traffic falls with.

Source: FlashAttention (2022), figure 2, middle: forward time falls as B_c grows to 256, and then no more,
for arithmetic is the limit.
"""

from __future__ import annotations

import argparse
from typing import Any

import harness
from bench.contestants import ArrayCall
from bench.measuring import in_child, interleaved, spread, timing_note
from common.command_line import COUNT
from harness import Experiment, Record, Report, Result, markdown, timed_cell

from kernels.metering.io_meter import metered
from kernels.metering.rung_traffic import RUNGS, call_traffic, problem_of
from kernels.traffic.formulas import HeadShape, total

#: Batch · heads and length by device and size.
WORKLOADS = {
    "cpu": {"quick": (1, 512), "normal": (4, 2048), "full": (8, 4096)},
    "cuda": {"quick": (64, 512), "normal": (256, 2048), "full": (1024, 2048)},
}
SIZES = {"cpu": (16, 32, 64, 128, 256), "cuda": (8, 16, 32, 64, 128)}
#: Title, rung, and the tile of a size.  B_r of flash1 is small enough that 48 KB hold B_c = 64.
SWEEPS = {
    "flash1, B_c": ("flash1", lambda size: (16, size)),
    "flash2, B_c": ("flash2", lambda size: (64, size)),
    "flash2, B_r": ("flash2", lambda size: (size, 32)),
}
#: The metered call: length, head_dim, and tiles of each sweep, small enough for the simulator.
METERED = {"length": 32, "head_dim": 4, "sizes": (4, 8, 16), "other": 8}


def options(parser: Any) -> None:
    parser.add_argument("--batch-heads", type=COUNT, help="batch · heads")
    parser.add_argument("--length", type=COUNT, help="of queries and keys")
    parser.option("--head-dim", int, 64, "of q, k and v")
    parser.option("--seconds", float, 2.0, "to spend on each sweep")


def meter() -> list[Record]:
    """Count small calls in the simulator, in which this process must be, beside the formulas."""
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


def runnable(call: ArrayCall) -> str | None:
    """Run a call once, which compiles it; return why it cannot run, or None."""
    try:
        call.forward()
    except ValueError as error:  # the tile does not fit
        return str(error)
    return None


def measure(args: argparse.Namespace, report: Report) -> None:
    batch_heads, length = WORKLOADS[args.device][args.size]
    args.batch_heads, args.length = args.batch_heads or batch_heads, args.length or length
    workload = {name: getattr(args, name) for name in ("batch_heads", "length", "head_dim")}
    report.note(workload=workload, timing=timing_note(args.device))
    report.note(metered=METERED, meter=in_child(meter, simulator=True))
    size = args.batch_heads, args.length, args.length, args.head_dim
    for sweep, (rung, tile_of) in report.progress(SWEEPS.items(), "sweep"):
        tiles = {block: tile_of(block) for block in SIZES[args.device]}
        calls, reasons = {}, {}
        for block, tile in tiles.items():
            options = RUNGS[rung] | {"rung": rung}
            call = ArrayCall(args.device, *size[:2], head_dim=args.head_dim, tile=tile, **options)
            reasons[block] = runnable(call)
            if reasons[block] is None:
                calls[block] = call.forward
        times = interleaved(calls, args.device, args.seconds) if calls else {}
        for block, tile in tiles.items():
            counts = total(call_traffic(rung, problem_of(rung, *size), tile).forward)
            report.add(
                sweep=sweep,
                rung=rung,
                size=block,
                tile=tile,
                gb=4e-9 * args.batch_heads * counts.moved,
                ms=spread(times[block], 1e3) if block in times else None,
                why_not=reasons[block],
            )


def table(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        name = f"{row['sweep']} = {row['size']}"
        lines.append(
            [
                name,
                f"{row['tile'][0]} x {row['tile'][1]}",
                row["gb"],
                timed_cell(row["ms"]) if row["ms"] else "not available",
            ]
        )
    workload = record["workload"]
    text = (
        f"Forward pass, batch × heads = {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, float32. The traffic was counted in "
        f"{len(record['meter'])} calls, and equals the formula in all of them."
    )
    head = ["varied size", "tile B_r × B_c", "traffic, GB", "ms (quartiles)"]
    return f"{text}\n\n{markdown(head, lines)}"


def draw(figure: Any, results: list[Result]) -> None:
    colours = dict(
        zip(SWEEPS, (harness.COLOURS["flash1"], harness.COLOURS["flash2"], "#2e8b57"), strict=True)
    )
    drawn: list[Any] = []
    for axes, result in harness.panels(figure, results, rows=2):
        workload = result.record["workload"]
        size = (
            f"{workload['batch_heads']} heads, {workload['length']:,} keys, head_dim "
            f"{workload['head_dim']}"
        )
        for sweep, colour in colours.items():
            rows = [row for row in result.rows if row["sweep"] == sweep]
            axes[0].plot(
                [row["size"] for row in rows],
                [row["gb"] for row in rows],
                "o-",
                color=colour,
                label=sweep,
            )
            timed = [row for row in rows if row["ms"]]
            if timed:
                middle = [row["ms"]["median"] for row in timed]
                errors = [
                    [row["ms"]["median"] - row["ms"]["low"] for row in timed],
                    [row["ms"]["high"] - row["ms"]["median"] for row in timed],
                ]
                sizes = [row["size"] for row in timed]
                axes[1].errorbar(
                    sizes, middle, errors, fmt="o-", color=colour, capsize=2, label=sweep
                )
        titles = (f"{size}, float32\nglobal traffic by formula, forward", "time, forward")
        for panel, title, unit in zip(axes, titles, ("GB", "ms"), strict=True):
            sizes = sorted({row["size"] for row in result.rows})
            panel.set(xscale="log", ylabel=unit, xlabel="rows or columns of a tile")
            harness.headline(panel, title)
            panel.set_xticks(sizes, map(str, sizes))
            panel.set_xticks([], minor=True)
            panel.set_ylim(bottom=0)
            drawn.append(panel)
    harness.legend(figure, drawn)


CAPTION = (
    "Global traffic by formula, and time. Either the rows or the columns of a tile vary; the other "
    "side is constant. Error bars are quartiles."
)
EXPERIMENT = Experiment(
    "block_size", __doc__, measure, table, draw, options=options, height=3.0, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(harness.run(EXPERIMENT))
