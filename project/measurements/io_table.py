"""Floating-point operations, global traffic and time of standard attention and of FlashAttention.

Three sources of the traffic must agree: the formulas (``kernels.traffic.formulas``), the IO meter, which
counts every element that the kernels touch on the emulated GPU in a small call, and the counters of a GPU
(``hardware_counters``), where there is a record of it.  Formulas and meter count what a kernel requests; a
cache answers a part of it, so that less comes from DRAM.

Source: FlashAttention (2022), figure 2, left: forward and backward, N = 1024, d = 64, 16 heads, batch
64, on an A100 in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.contestants import DIRECTIONS, directions, rungs_of
from bench.harness import Case, Measurement, Run
from bench.kit import Panel, Record, cell, columns, markdown, spread, workload_text
from bench.plots import stored
from common.child import in_child

from kernels.metering.rung_traffic import RUNGS, call_traffic, metered, problem_of
from kernels.traffic.formulas import PRODUCTS, HeadShape, attention_flops, total

#: GFLOPs, GB and ms as printed.
PUBLISHED = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}
#: The metered call: a head that the emulated GPU runs in seconds, with tiles that do not divide it.
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


def meter() -> list[Record]:
    """Count the small call on the emulated GPU, which this process must use, beside the formulas."""
    length, dim = METERED["length"], METERED["head_dim"]
    shape, found = HeadShape(length, length, dim, dim, 0, 0), []
    for name, causal in [(name, causal) for name in RUNGS for causal in (False, True)]:
        pair = metered(name, shape, METERED["tile"], is_causal=causal)
        for way in DIRECTIONS:
            counted, expected = (total(getattr(side, way))._asdict() for side in pair)
            if counted != expected:
                raise RuntimeError(
                    f"{name} {way}: the meter counts {counted}, the formula says {expected}"
                )
            entry = {"rung": name, "causal": causal, "pass": way}
            found.append({**entry, "meter": counted, "formula": expected})
    return found


def cases(run: Run) -> Iterator[Case]:
    size, dim = (run.batch_heads, run.length), run.head_dim
    run.note(
        workload=run.chosen("batch_heads", "length", "head_dim"), metered=METERED,
        note=NOTE + (CPU_NOTE if run.device == "cpu" else ""), meter=in_child(meter, emulated=True),
    )  # fmt: skip
    times = run.timed(directions(rungs_of(run.device, *size, dim)), 2 * run.seconds)
    flops = attention_flops(size[0], run.length, run.length, dim)
    for name in RUNGS:
        traffic = call_traffic(name, problem_of(name, size[0], run.length, run.length, dim))
        for way, counts, products in zip(DIRECTIONS, traffic, PRODUCTS[name], strict=True):
            reads, writes = (4e-9 * run.batch_heads * count for count in total(counts))
            yield {"rung": name, "pass": way}, {
                "gflop": 1e-9 * flops * products / 2, "read_gb": reads, "write_gb": writes,
                "gb": reads + writes, "ms": spread(t, 1e3) if (t := times.get((name, way))) else None,
            }  # fmt: skip


def both(rows: list[Record], rung: str, quantity: str) -> float | None:
    """Return one quantity of forward and backward together; None where it was not measured."""
    found = [row[quantity] for row in rows if row["rung"] == rung]
    if len(found) < 2 or None in found:
        return None
    return sum(x["median"] if isinstance(x, dict) else x for x in found)


def counters_of(record: Record) -> dict[tuple[str, str], Record]:
    """Return what the counters of the same device say of the same workload, by rung and pass."""
    for result in stored("hardware_counters"):
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
    rows, counters, workload = record["rows"], counters_of(record), record["workload"]

    def counted(key: str) -> Any:
        return lambda row: counters.get((row["rung"], row["pass"]), {}).get(key)

    def ms(row: Record) -> str | None:
        entry = row["ms"]
        return entry and f"{cell(entry['median'])} ± {cell((entry['high'] - entry['low']) / 2)}"

    shown: Record = {
        "rung, pass": lambda row: f"{row['rung']}, {row['pass']}", "GFLOP": "gflop", "reads GB": "read_gb",
        "writes GB": "write_gb",
    }  # fmt: skip
    if counters:
        shown |= {"requested GB, counter": counted("asked_gb"), "DRAM GB": counted("dram_gb")}
    size = (
        f"batch · heads {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, float32"
    )
    sums = [
        [rung, *(against(both(rows, rung, q), both(rows, "naive", q)) for q, _ in QUANTITIES)]
        for rung in RUNGS
        if both(rows, rung, "gb") is not None
    ]
    standard, flash = PUBLISHED.values()
    sums.append(["published, standard", *map(cell, standard)])
    sums.append(["published, FlashAttention", *map(against, flash, standard)])
    head_of_sums = ["forward and backward, × of standard", *(title for _, title in QUANTITIES)]
    parts = [
        size,
        columns(rows, shown | {"ms": ms}),
        markdown(head_of_sums, sums),
        _agreement(record),
    ]
    return "\n\n".join(parts)


def _agreement(record: Record) -> str:
    """Return the table of the metered call."""
    call, lines = record["metered"], []
    what = (
        f"elements of one head, N = {call['length']}, d = {call['head_dim']}, tile {call['tile']}"
    )
    for entry in record["meter"]:
        mask = "causal" if entry["causal"] else "full"
        numbers = [entry[source][way] for source in ("meter", "formula") for way in entry[source]]
        lines.append([f"{entry['rung']}, {entry['pass']}, {mask}", *(f"{n:,}" for n in numbers)])
    return markdown([what, "meter: reads", "writes", "formula: reads", "writes"], lines)


def draw(record: Record) -> list[Panel]:
    size, seen, found = workload_text(record), Record(), list[Panel]()
    for (rung, way), row in counters_of(record).items():
        seen.setdefault(way, {})[f"{rung}, DRAM by counters"] = row["dram_gb"]
    titles = (f"{size}\noperations", "global traffic, by formula", "time")
    for (quantity, unit), title in zip(QUANTITIES, titles, strict=True):
        bars: Record = {way: {} for way in DIRECTIONS}
        for row in record["rows"]:
            if (value := row[quantity]) is not None:
                value = value["median"] if isinstance(value, dict) else value
                bars[row["pass"]][row["rung"]] = value
        for way, values in seen.items() if quantity == "gb" else ():
            bars[way] |= values
        found.append(Panel(title, unit.rpartition(", ")[2], bars=bars, stacked=True))
    return found


MEASUREMENT = Measurement(
    "io_table", "How many operations, bytes and milliseconds does each rung take?", cases,
    {"cpu": {"quick": {"batch_heads": 2, "length": 256, "seconds": 0.1},
             "normal": {"batch_heads": 16, "length": 1024, "head_dim": 64, "seconds": 4.0}},
     "cuda": {"quick": {"batch_heads": 64, "length": 512},
              "normal": {"batch_heads": 1024, "length": 1024, "head_dim": 64, "seconds": 4.0}}},
    table=table, draw=draw, height=2.1, minutes={"cpu": 0.5, "cuda": 0.5}, paths=("kernels",),
    caption="Operations, global traffic and time of one call by rung. The full colour is the forward "
    "pass, the paler one the backward pass, and the figure at the end is their sum.",
)  # fmt: skip
