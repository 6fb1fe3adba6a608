"""Time by length, and how many times faster flash attention is than naive: forward, backward and both.

In inference the operands are constants and no graph is recorded; in training it is, and a backward pass
follows.  The baseline is attention composed of this library's tensor operations, called ``naive`` on the
CPU and ``composed`` on CUDA, where ``naive`` is the kernel of Algorithm 0; ``published`` is composed of
the kernels of the published course.  Published for such a baseline: nearly 40 times faster forward and 16
times backward at 2,048 (``REPORTED``).  A contestant that would take longer than the limit for one pass, or
for which there is too little memory, is left out from there on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.contestants import contestants, random_arrays
from bench.harness import Case, Measurement, Run
from bench.measuring import out_of_memory, ratio, spread, wait
from bench.plots import Result, headline, legend, panels
from bench.records import Record
from bench.table_cells import cell, colour_of, markdown

#: What is timed: a forward pass on constants; one that records, its backward pass, and their sum.
QUANTITIES = ("inference", "forward", "backward", "training")
STYLES = dict(zip(QUANTITIES, (":", "--", "-.", "-"), strict=True))
#: Whose speedup is shown.
FLASH = {"cpu": "flash", "cuda": "flash2"}
#: The speedups that the published report gives, by quantity: length and factor.
REPORTED = {"forward": (2048, 40.0), "backward": (2048, 16.0)}
HEAD_DIM = 64
#: Up to this length steps are short, and run several times a round.
SHORT = 1024


def cases(run: Run) -> Iterator[Case]:
    """Time every length, and every contestant as far as it gets."""
    found, running = contestants(run.device), [*run.baselines, FLASH[run.device]]
    run.note(heads=run.heads, head_dim=HEAD_DIM)
    for length in run.lengths:
        if running:
            yield {"length": length}, partial(timed, run, {n: found[n] for n in running}, length)
            row = run.rows[-1] if run.rows else {}
            took = {n: 4e-3 * row[n]["training"]["median"] for n in running if n in row}
            running = [name for name, seconds in took.items() if seconds <= run.limit]


def timed(run: Run, running: dict[str, Any], length: int) -> Record:
    """Return milliseconds and speedups of one length; those that run out of memory are not among them."""
    arrays, steps, after = random_arrays(run.heads, length, HEAD_DIM), {}, {}
    for name, make in running.items():
        try:
            recording, constant = make(arrays), make(arrays, training=False)
            for one in (recording.forward, recording.backward, recording.release,
                        constant.forward, constant.release):  # compiles  # fmt: skip
                one()
                wait(run.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            continue
        steps |= {
            (name, "inference"): constant.forward, (name, "forward"): recording.forward,
            (name, "backward"): recording.backward,
        }  # fmt: skip
        after |= {(name, "inference"): constant.release, (name, "backward"): recording.release}
    times = run.timed(
        steps, warm_up=length <= SHORT, after=after,
        at_most_seconds=max(5 * run.limit, run.seconds),
    )  # fmt: skip
    names = list(dict.fromkeys(name for name, _ in steps))
    for name in names:
        both = zip(times[name, "forward"], times[name, "backward"], strict=True)
        times[name, "training"] = [sum(pair) for pair in both]
    row: Record = {name: {q: spread(times[name, q], 1e3) for q in QUANTITIES} for name in names}
    if (flash := FLASH[run.device]) in names:
        row["speedup"] = {
            name: {q: ratio(times[name, q], times[flash, q]) for q in QUANTITIES}
            for name in names
            if name != flash
        }
    return row


def names_of(rows: list[Record]) -> list[str]:
    """Return the contestants, the baselines first."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name not in ("length", "speedup")]


def table(record: Record) -> str:
    rows, names, shown = record["rows"], names_of(record["rows"]), []
    for quantity in QUANTITIES:
        lines = []
        for row in rows:
            line = [f"{row['length']:,}"]
            for name in names:
                beside = row.get("speedup", {}).get(name)
                times = f" ({beside[quantity]['median']:.1f}×)" if beside else ""
                own = f"{cell(row[name][quantity]['median'])}{times}" if name in row else "left out"
                line.append(own)
            lines.append(line)
        shown.append(markdown([f"{quantity}, ms (ratio to {names[-1]})", *names], lines))
    return "\n\n".join(shown)


def draw(figure: Any, results: list[Result]) -> None:
    names = list(dict.fromkeys(name for result in results for name in names_of(result.rows)))
    times, speedups = list[Any](), list[Any]()
    for (time, speedup), result in panels(figure, results, rows=2, sharex="col"):
        for name in names_of(result.rows):
            own = [row for row in result.rows if name in row]
            colour = colour_of(name, names)
            for quantity in ("inference", "training"):
                points = [(row["length"], row[name][quantity]["median"]) for row in own]
                style = {"color": colour, "label": name if quantity == "training" else None}
                time.plot(*zip(*points, strict=True), STYLES[quantity], marker=".", **style)
            own = [row for row in own if name in row.get("speedup", {})]
            for quantity in QUANTITIES if own else ():
                points = [(row["length"], row["speedup"][name][quantity]["median"]) for row in own]
                speedup.plot(*zip(*points, strict=True), STYLES[quantity], marker=".", color=colour)
        for quantity, style in STYLES.items():
            speedup.plot([], [], style, color="#444", label=quantity)
        for quantity, place in REPORTED.items():
            speedup.plot(
                *place, "*", color="black", markersize=9, linestyle="none",
                fillstyle="full" if quantity == "forward" else "none",
                label=f"{quantity}, published report",
            )  # fmt: skip
        time.set_xscale("log", base=2)
        time.set(yscale="log", ylabel="ms")
        record = result.record
        workload = f"{record['heads']} heads, head_dim {record['head_dim']}, float32"
        headline(time, f"time of a call: {workload}")
        speedup.set(yscale="log", xlabel="length", ylabel="times the time of flash attention")
        headline(speedup, "baseline / flash attention, by pass")
        speedup.axhline(1.0, color="#999", linewidth=0.8)
        times.append(time)
        speedups.append(speedup)
    legend(figure, [*times, *speedups], columns=6)


LENGTHS = tuple(2**power for power in range(7, 15))
MEASUREMENT = Measurement(
    "speedup", "How many times faster is flash attention than naive, by length?", cases,
    {"cpu": {"quick": {"heads": 2, "lengths": LENGTHS[:3], "seconds": 0.05, "limit": 1.0},
             "normal": {"heads": 4, "lengths": LENGTHS[:7], "seconds": 2.0, "limit": 4.0,
                        "baselines": ("naive",)},
             "full": {"lengths": LENGTHS, "seconds": 4.0, "limit": 20.0}},
     "cuda": {"quick": {"heads": 16, "lengths": LENGTHS[:5], "seconds": 0.5, "limit": 0.5},
              "normal": {"heads": 64, "lengths": LENGTHS, "seconds": 1.0, "limit": 2.5,
                         "baselines": ("published", "composed", "naive")},
              "full": {"seconds": 4.0, "limit": 20.0}}},
    table=table, draw=draw, height=3.2, minutes={"cpu": 1, "cuda": 2},
    caption="Time of a call by length, and the ratio of each baseline's time to that of flash attention. "
    "A dotted line is a forward pass without a graph; a solid line is forward and backward "
    "together. The stars are the figures of the published course's report.",
)  # fmt: skip
