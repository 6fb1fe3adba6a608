"""Floating-point operations, global traffic and time of standard attention and of FlashAttention.

    python project/experiments/io_table.py                  times on the CPU, traffic of the CUDA rungs
    python project/experiments/io_table.py --device cuda    the published workload on a GPU

Traffic is told by three that must agree: the formulas (``kernels.traffic.formulas``), the IO
meter, which counts
every element that the kernels touch in the simulator on a small call, and the counters of a GPU
(``hardware_counters.py``), where a file of it is there.  Formulas and meter count what a kernel asks for; a
cache answers a part of it, so that less comes from DRAM.

Source: FlashAttention (2022), figure 2, left: forward and backward, N = 1024, d = 64, 16 heads, batch
64, on an A100 in 16 bit.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import harness
from bench.contestants import ArrayCall, Bound, contestants, random_arrays
from bench.measuring import in_child, interleaved, spread, timing_note
from common.command_line import COUNT
from harness import Experiment, Record, Report, Result, cell, markdown

from kernels.metering.io_meter import metered
from kernels.metering.rung_traffic import RUNGS, PassTraffic, call_traffic, problem_of
from kernels.traffic.formulas import PRODUCTS, HeadShape, attention_flops, total

#: Batch · heads and length by device and size.
WORKLOADS = {
    "cpu": {"quick": (2, 256), "normal": (16, 1024), "full": (64, 1024)},
    "cuda": {"quick": (64, 512), "normal": (1024, 1024), "full": (1024, 1024)},
}
#: GFLOPs, GB and ms as printed.
PUBLISHED = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}
#: The metered call: a head that the simulator runs in seconds, with tiles that do not divide it.
METERED = {"length": 38, "head_dim": 8, "tile": (16, 12)}
QUANTITIES = (("gflop", "GFLOP"), ("gb", "global traffic, GB"), ("ms", "runtime, ms"))
NOTE = (
    "the published GFLOPs do not fit the published workload, whose products alone are 962 GFLOP, so ratios "
    "are compared; here all is in float32 without dropout or mask, and the naive rung computes S again in "
    "its backward pass, where the published baseline reads a stored P; flash1 divides 48 KB of float32 into"
    " tiles, a quarter of the elements that the published one had, and so visits rows more often"
)
#: What is timed without a GPU is not what is counted.
CPU_NOTE = (
    "; operations and traffic are those of the CUDA rungs, but the times are the CPU's: naive is there "
    "attention composed of tensor operations, which keeps P for its backward pass, and flash2 is the rung "
    "of the CPU"
)


def options(parser: Any) -> None:
    parser.add_argument("--batch-heads", type=COUNT, help="batch · heads")
    parser.add_argument("--length", type=COUNT, help="of queries and keys")
    parser.option("--head-dim", int, 64, "of q, k and v")
    parser.option("--seconds", float, 4.0, "to spend on timing each direction")


def meter() -> list[Record]:
    """Count the small call in the simulator, in which this process must be, beside the formulas.

    Returns:
        Elements read and written, by rung, mask and direction.

    Raises:
        RuntimeError: If meter and formulas disagree.
    """
    length, dim = METERED["length"], METERED["head_dim"]
    shape, found = HeadShape(length, length, dim, dim, 0, 0), []
    for name, causal in [(name, causal) for name in RUNGS for causal in (False, True)]:
        pair = metered(name, shape, METERED["tile"], is_causal=causal)
        for way in PassTraffic._fields:
            by_meter, by_formula = (total(getattr(side, way))._asdict() for side in pair)
            if by_meter != by_formula:
                raise RuntimeError(
                    f"{name} {way}: the meter counts {by_meter}, the formula says {by_formula}"
                )
            entry = {"rung": name, "causal": causal, "pass": way}
            found.append({**entry, "meter": by_meter, "formula": by_formula})
    return found


def calls(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is timed, by rung: the kernels on a GPU; composed and fused attention on the CPU."""
    if args.device == "cuda":
        return {
            name: ArrayCall("cuda", args.batch_heads, args.length, head_dim=args.head_dim, **rung)
            for name, rung in RUNGS.items()
        }
    arrays = random_arrays((args.batch_heads, args.length, args.head_dim))
    known = contestants("cpu", causal=False)
    return {
        name: Bound(known[own], arrays) for name, own in (("naive", "naive"), ("flash2", "flash"))
    }


def measure(args: argparse.Namespace, report: Report) -> None:
    batch_heads, length = WORKLOADS[args.device][args.size]
    args.batch_heads, args.length = args.batch_heads or batch_heads, args.length or length
    workload = {name: getattr(args, name) for name in ("batch_heads", "length", "head_dim")}
    print("counting a small call in the simulator, some 10 s", file=sys.stderr)
    note = NOTE + (CPU_NOTE if args.device == "cpu" else "")
    report.note(workload=workload, timing=timing_note(args.device), note=note)
    report.note(metered=METERED, meter=in_child(meter, simulator=True))
    timed = calls(args)
    steps = {
        (name, way): getattr(timed[name], way) for name in timed for way in PassTraffic._fields
    }
    times = interleaved(steps, args.device, 2 * args.seconds)
    size = args.batch_heads, args.length, args.length, args.head_dim
    for name in RUNGS:
        traffic = call_traffic(name, problem_of(name, *size))
        for way, counts, products in zip(PassTraffic._fields, traffic, PRODUCTS[name], strict=True):
            reads, writes = (4e-9 * args.batch_heads * count for count in total(counts))
            report.add(
                **{"rung": name, "pass": way},
                gflop=1e-9 * attention_flops(*size) * products / 2,
                read_gb=reads,
                write_gb=writes,
                gb=reads + writes,
                ms=spread(times[name, way], 1e3) if (name, way) in times else None,
            )


def both(rows: list[Record], rung: str, quantity: str) -> float | None:
    """Return one quantity of forward and backward together; None where it was not measured."""
    found = [row[quantity] for row in rows if row["rung"] == rung]
    if len(found) < 2 or None in found:
        return None
    return sum(x["median"] if isinstance(x, dict) else x for x in found)


def counters_of(record: Record) -> dict[tuple[str, str], Record]:
    """Return what the counters of the same device say of the same workload, by rung and pass."""
    for result in harness.stored("hardware_counters"):
        same = result.record["device"] == record["device"]
        if same and result.record.get("workload") == record["workload"]:
            return {(row["rung"], row["pass"]): row for row in result.rows}
    return {}


def against(value: float | None, standard: float | None) -> str:
    """Write a number, and beside it how many times that of standard attention it is."""
    if value is None or standard is None or value == standard:
        return cell(value)
    return f"{cell(value)}, {cell(value / standard)} ×"


def table(record: Record) -> str:
    rows, counters = record["rows"], counters_of(record)
    head = [
        "rung, pass",
        "GFLOP",
        "reads GB",
        "writes GB",
        "requested GB, counter",
        "DRAM GB",
        "ms",
    ]
    lines = []
    for row in rows:
        seen = counters.get((row["rung"], row["pass"]), {})
        ms = row["ms"] and f"{cell(row['ms']['median'])} ± {cell(_spread_of(row['ms']))}"
        measured = [seen.get("asked_gb"), seen.get("dram_gb"), ms]
        name = f"{row['rung']}, {row['pass']}"
        lines.append([name, *(row[q] for q in ("gflop", "read_gb", "write_gb")), *measured])
    if not counters:
        head, lines = [*head[:4], head[6]], [[*line[:4], line[6]] for line in lines]
    workload = record["workload"]
    size = (
        f"batch · heads {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, float32"
    )
    parts = [size, markdown(head, lines), _sums(rows)]
    parts.append(_agreement_table(record))
    return "\n\n".join(parts)


def _spread_of(entry: Record) -> float:
    """Return half of the distance of the quartiles."""
    return (entry["high"] - entry["low"]) / 2


def _sums(rows: list[Record]) -> str:
    """Return forward and backward together, beside the published figures."""
    lines = [
        [rung, *(against(both(rows, rung, q), both(rows, "naive", q)) for q, _ in QUANTITIES)]
        for rung in RUNGS
        if both(rows, rung, "gb") is not None
    ]
    standard, flash = PUBLISHED.values()
    lines.append(["published, standard", *map(cell, standard)])
    lines.append(["published, FlashAttention", *map(against, flash, standard)])
    head = ["forward and backward, × of standard", *(title for _, title in QUANTITIES)]
    return markdown(head, lines)


def _agreement_table(record: Record) -> str:
    call = record["metered"]
    what = (
        f"elements of one head, N = {call['length']}, d = {call['head_dim']}, tile {call['tile']}"
    )
    head = [what, "meter: reads", "writes", "formula: reads", "writes"]
    lines = []
    for entry in record["meter"]:
        mask = "causal" if entry["causal"] else "full"
        numbers = [entry[source][way] for source in ("meter", "formula") for way in entry[source]]
        lines.append([f"{entry['rung']}, {entry['pass']}, {mask}", *(f"{n:,}" for n in numbers)])
    return markdown(head, lines)


def draw(figure: Any, results: list[Result]) -> None:
    rungs = list(RUNGS)
    for axes, result in harness.panels(figure, results, rows=len(QUANTITIES)):
        counters = counters_of(result.record)
        for panel, (quantity, title) in zip(axes, QUANTITIES, strict=True):
            own = [
                rung for rung in rungs if any(_value(row, rung, quantity) for row in result.rows)
            ]
            for place, rung in enumerate(own):
                bottom = 0.0
                for row in result.rows:
                    value = _value(row, rung, quantity)
                    if value is None:
                        continue
                    value = value["median"] if isinstance(value, dict) else value
                    colour = harness.colour_of(rung, rungs)
                    shade = 1.0 if row["pass"] == "forward" else 0.55
                    panel.barh(place, value, left=bottom, color=colour, alpha=shade)
                    bottom += value
                if bottom:
                    panel.text(bottom, place, f"   {cell(bottom)}", va="center")
                seen = [row["dram_gb"] for key, row in counters.items() if key[0] == rung]
                if quantity == "gb" and seen:
                    panel.plot(sum(seen), place, "kD", markersize=5)
            panel.set(xlabel=title.rpartition(", ")[2], xmargin=0.25)
            panel.set_yticks(range(len(own)), own)
            panel.set_ylim(len(own) - 0.5, -0.5)
        workload = result.record["workload"]
        harness.headline(
            axes[0],
            f"{workload['batch_heads']:,} heads, {workload['length']:,} keys, head_dim "
            f"{workload['head_dim']}, float32\noperations, GFLOP",
        )
        harness.headline(
            axes[1], f"global traffic, GB, by formula{'; ◆ DRAM, by counters' if counters else ''}"
        )
        harness.headline(axes[2], "time, ms")


def _value(row: Record, rung: str, quantity: str) -> Any:
    """Return what a row has of a quantity if it is a rung's own."""
    return row[quantity] if row["rung"] == rung else None


CAPTION = (
    "Operations, global traffic and time of one call by rung. The full colour is the forward "
    "pass, the paler one the backward pass, and the figure at the end is their sum."
)
EXPERIMENT = Experiment(
    "io_table", __doc__, measure, table, draw, options=options, height=2.1, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(harness.run(EXPERIMENT))
