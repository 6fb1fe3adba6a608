"""Naive, safe and online softmax as kernels: passes over memory, overflow, and time by the length of a row.

    python project/experiments/softmax_ladder.py                  on the CPU
    python project/experiments/softmax_ladder.py --device cuda    on a GPU

The number of elements is the same for all lengths.  Where the rows in work do not fit into the cache, each
pass streams them from memory: naive and online softmax move three elements for each of x (two reads and a
write), the safe one four, and the online one should take three quarters of its time.  The passes are
counted in numba's simulator, element by element; the largest element that naive softmax can take is
searched for on the device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import (
    Experiment,
    Record,
    Report,
    Result,
    cell,
    colour_of,
    headline,
    legend,
    markdown,
    panels,
    run,
)

# isort: split
from bench.measuring import in_child, interleaved, ratio, spread, timing_note

# isort: split

from kernels.cpu.layers import softmax_ladder as cpu_ladder
from kernels.cuda.layers import softmax_ladder as cuda_ladder
from kernels.cuda.runtime.arrays import device_view, empty_device, to_device, to_host
from kernels.metering.io_meter import IOMeter
from kernels.reference.softmax_ladder import READS
from kernels.runtime.targets import cuda

#: Elements of x by device and size, and the lengths of rows, as powers of two.
ELEMENTS = {
    "cpu": {"quick": 2**20, "normal": 2**24, "full": 2**26},
    "cuda": {"quick": 2**26, "normal": 2**30, "full": 2**30},
}
POWERS = {"cpu": range(8, 23, 2), "cuda": range(8, 21, 2)}
SECONDS = {"quick": 0.2, "normal": 1.0, "full": 3.0}
#: Rows and length of what is counted in the simulator, and of what is searched for overflow.
COUNTED, SEARCHED = (3, 40), 1024
#: Elements that the host draws; the device has them many times over.
DRAWN = 2**20

SOFTMAX: dict[str, Callable[..., None]] = {"cpu": cpu_ladder.softmax, "cuda": cuda_ladder.softmax}


def counted() -> dict[str, tuple[int, int]]:
    """Return reads and writes of one element by each kernel; to be called in the simulator.

    Raises:
        RuntimeError: If the elements of one array have travelled differently often.
    """
    found = {}
    x = np.random.default_rng(0).standard_normal(COUNTED, dtype=np.float32)
    for step in READS:
        with IOMeter() as meter:
            x_device, out = cuda.to_device(x), cuda.to_device(np.full_like(x, np.nan))
            cuda_ladder.softmax(step, x_device, out)
        reads, writes = meter.elements(x_device)[0], meter.elements(out)[1]
        if np.ptp(reads) or np.ptp(writes):
            raise RuntimeError(f"{step}: some elements have travelled more often than others")
        found[step] = int(reads[0, 0]), int(writes[0, 0])
    return found


def operands(device: str, rows: int, length: int) -> tuple[Any, Any]:
    """Return x, drawn, and an array for the result, (rows, length) in float32."""
    drawn = np.random.default_rng(0).standard_normal(DRAWN, dtype=np.float32)
    total = rows * length
    if device == "cpu":
        x = np.resize(drawn, total).reshape(rows, length)
        return x, np.full_like(x, np.nan)
    flat, out = (empty_device((total,), drawn.dtype) for _ in range(2))
    for start in range(0, total, DRAWN):
        size = min(DRAWN, total - start)
        device_view(flat, (size,), (1,), start).copy_to_device(drawn[:size])
    shape, steps = (rows, length), (length, 1)
    return device_view(flat, shape, steps), device_view(out, shape, steps)


def is_right(device: str, step: str, value: float) -> bool:
    """Tell whether softmax of a row whose elements are all one value is 1/n everywhere."""
    x = np.full((1, SEARCHED), value, np.float32)
    out = np.full_like(x, np.nan)
    if device == "cpu":
        cpu_ladder.softmax(step, x, out)
    else:
        out_device = to_device(out)
        cuda_ladder.softmax(step, to_device(x), out_device)
        out = to_host(out_device)
    return bool((np.abs(out * SEARCHED - 1.0) < 1e-3).all())


def largest_element(device: str, step: str) -> float | None:
    """Return the largest value that all elements of a row may have; None if there is no bound."""
    low, high = 0.0, 1e6
    if is_right(device, step, high):
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if is_right(device, step, middle) else (low, middle)
    return low


def measure(args: argparse.Namespace, report: Report) -> None:
    """Time every length."""
    device, total = args.device, ELEMENTS[args.device][args.size]
    softmax = SOFTMAX[device]
    report.note(
        timing=timing_note(device),
        elements=total,
        moved=in_child(counted, simulator=True),
        searched=SEARCHED,
        largest={step: largest_element(device, step) for step in READS},
        expected=math.log(float(np.finfo(np.float32).max)) - math.log(SEARCHED),
    )
    lengths = [2**power for power in POWERS[device] if 2**power <= total]
    x, out = operands(device, 1, total)
    for length in report.progress(lengths, "length"):
        shape = total // length, length
        rows, rows_out = (
            array.reshape(shape) if device == "cpu" else device_view(array, shape, (length, 1))
            for array in (x, out)
        )
        steps = {
            step: lambda step=step, x=rows, out=rows_out: softmax(step, x, out) for step in READS
        }
        times = interleaved(steps, device, SECONDS[args.size])
        report.add(
            length=length,
            **{step: spread(times[step], 1e3) for step in READS},
            gain=ratio(times["safe"], times["online"]),
        )


def rate(record: Record, row: Record, step: str) -> float:
    """Return the gigabytes a second that a step moves, were nothing kept in a cache."""
    moved = sum(record["moved"][step]) * record["elements"] * 4
    return moved / (1e-3 * row[step]["median"]) / 1e9


def table(record: Record) -> str:
    """Return what each step moves and can take, and a line for each length."""
    properties = markdown(
        [
            "step",
            "reads per element",
            "writes per element",
            f"overflow: {record['searched']} equal elements of more than",
        ],
        (
            [
                step,
                *map(str, record["moved"][step]),
                "never" if value is None else f"{value:.2f} (in theory {record['expected']:.2f})",
            ]
            for step, value in record["largest"].items()
        ),
    )
    head = [
        "length",
        *(f"{step}, ms (GB/s)" for step in READS),
        "time of safe / online (quartiles)",
    ]
    lines = (
        [
            f"{row['length']:,}",
            *(f"{cell(row[s]['median'])} ({cell(rate(record, row, s))})" for s in READS),
            f"{row['gain']['median']:.3f} ({row['gain']['low']:.3f} … {row['gain']['high']:.3f})",
        ]
        for row in record["rows"]
    )
    return f"{properties}\n\n{markdown(head, lines)}"


def draw(figure: Any, results: list[Result]) -> None:
    """Draw the time of each step, and what the online one gains, by length."""
    steps = list(READS)
    drawn: list[Any] = []
    for (time, gain), result in panels(figure, results, rows=2, sharex="col"):
        lengths = [row["length"] for row in result.rows]
        for step in steps:
            reads, writes = result.record["moved"][step]
            time.plot(
                lengths, [row[step]["median"] for row in result.rows], "o-", color=colour_of(step, steps),
                label=f"{step}: {reads} reads, {writes} write",
            )  # fmt: skip
        time.set(ylabel="ms", ylim=(0, None))
        headline(time, f"softmax of {result.record['elements']:,} elements, float32")
        middle, low, high = (
            np.array([row["gain"][key] for row in result.rows]) for key in ("median", "low", "high")
        )
        gain.errorbar(lengths, middle, (middle - low, high - middle), fmt="o-", color="#1b6ca8")
        safe, online = (sum(result.record["moved"][step]) for step in ("safe", "online"))
        gain.axhline(
            safe / online, color="#666", linestyle="--", label=f"{safe}/{online}, by traffic"
        )
        gain.set_xscale("log", base=2)
        gain.set(xlabel="length of a row", ylabel="safe / online")
        gain.set_ylim(min(0.7, low.min() - 0.05), max(1.5, high.max() + 0.05))
        headline(gain, "time of safe over that of online softmax")
        drawn += [time, gain]
    legend(figure, drawn)


CAPTION = (
    "Time of one softmax by the length of a row, and the time of safe softmax divided by that of "
    "online softmax. The dashed line is the same ratio for the number of elements read and written."
)
EXPERIMENT = Experiment(
    "softmax_ladder", __doc__, measure, table, draw, height=3.0, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
