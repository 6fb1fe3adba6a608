"""Naive, safe and online softmax as kernels: passes over memory, overflow, and time by the length of a row.

The number of elements is the same for all lengths.  Where the rows do not fit into the cache, each pass
streams them from memory: naive and online softmax move three elements for each of x (two reads and a
write), the safe one four, and the online one should take three quarters of its time.  Passes are counted on
the emulated GPU, element by element; the largest element that naive softmax can take is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from bench.contestants import place_on
from bench.kit import Case, Measurement, Panel, Record, Run, cell, curves, markdown, ratio, spread
from common.child import in_child

from kernels.cpu.layers import softmax_ladder as cpu_ladder
from kernels.cuda.layers import softmax_ladder as cuda_ladder
from kernels.cuda.runtime.arrays import device_view, empty_device, to_host
from kernels.metering.io_meter import IOMeter
from kernels.reference.softmax_ladder import READS
from kernels.runtime.targets import cuda

#: Rows and length of what is counted on the emulated GPU; elements that the host draws.
COUNTED, DRAWN = (3, 40), 2**20
SOFTMAX = {"cpu": cpu_ladder.softmax, "cuda": cuda_ladder.softmax}


def counted() -> dict[str, tuple[int, int]]:
    """Return reads and writes of one element by each kernel; to be called on the emulated GPU."""
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


def operands(device: str, total: int) -> tuple[Any, Any]:
    """Return x, drawn, and an array for the result, flat in float32."""
    drawn = np.random.default_rng(0).standard_normal(DRAWN, dtype=np.float32)
    x = place_on(device)(np.resize(drawn, total))
    return x, np.full(total, np.nan, np.float32) if device == "cpu" else empty_device(
        (total,), x.dtype
    )


def is_right(device: str, step: str, value: float, length: int) -> bool:
    """Tell whether softmax of a row whose elements are all one value is 1/n everywhere."""
    x, out = (place_on(device)(np.full((1, length), y, np.float32)) for y in (value, np.nan))
    SOFTMAX[device](step, x, out)
    found = to_host(out) if device == "cuda" else out
    return bool((np.abs(found * length - 1.0) < 1e-3).all())


def largest_element(device: str, step: str, length: int) -> float | None:
    """Return the largest value that all elements of a row may have; None if there is no bound."""
    low, high = 0.0, 1e6
    if is_right(device, step, high, length):
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        right = is_right(device, step, middle, length)
        low, high = (middle, high) if right else (low, middle)
    return low


def cases(run: Run) -> Iterator[Case]:
    device, total = run.device, run.elements
    run.note(
        elements=total, moved=in_child(counted, emulated=True), searched=run.searched,
        largest={step: largest_element(device, step, run.searched) for step in READS},
        expected=math.log(float(np.finfo(np.float32).max)) - math.log(run.searched),
    )  # fmt: skip
    x, out = operands(device, total)
    for length in (2**power for power in run.powers if 2**power <= total):
        yield {"length": length}, partial(timed, run, x, out, length)


def timed(run: Run, x: Any, out: Any, length: int) -> Record:
    shape = x.shape[0] // length, length
    rows = [
        array.reshape(shape) if run.device == "cpu" else device_view(array, shape, (length, 1))
        for array in (x, out)
    ]
    times = run.timed({step: partial(SOFTMAX[run.device], step, *rows) for step in READS})
    found = {step: spread(times[step], 1e3) for step in READS}
    return {**found, "gain": ratio(times["safe"], times["online"])}


def table(record: Record) -> str:
    expected = record["expected"]
    head = ["step", "reads per element", "writes per element",
            f"overflow: {record['searched']} equal elements of more than"]  # fmt: skip
    properties = markdown(head, (
        [step, *map(str, record["moved"][step]),
         "never" if value is None else f"{value:.2f} (in theory {expected:.2f})"]
        for step, value in record["largest"].items()
    ))  # fmt: skip
    head = [
        "length", *(f"{step}, ms (GB/s)" for step in READS), "time of safe / online (quartiles)"
    ]  # fmt: skip

    def rate(row: Record, step: str) -> float:  # were nothing kept in a cache
        moved = sum(record["moved"][step]) * record["elements"] * 4
        return moved / (1e-3 * row[step]["median"]) / 1e9

    lines = (
        [f"{row['length']:,}", *(f"{cell(row[s]['median'])} ({cell(rate(row, s))})" for s in READS),
         f"{row['gain']['median']:.3f} ({row['gain']['low']:.3f} … {row['gain']['high']:.3f})"]
        for row in record["rows"]
    )  # fmt: skip
    return f"{properties}\n\n{markdown(head, lines)}"


def draw(record: Record) -> list[Panel]:
    rows, moved = record["rows"], record["moved"]
    times = curves(
        (f"{step}: {reads} reads, {writes} write", row["length"], row[step]["median"])
        for step, (reads, writes) in moved.items()
        for row in rows
    )
    safe, online = sum(moved["safe"]), sum(moved["online"])
    gain = curves(("measured", row["length"], row["gain"]) for row in rows)
    ends = [(row["length"], safe / online) for row in (rows[0], rows[-1])]
    gain[f"{safe}/{online}, by traffic"] = ends
    size, title = (
        f"softmax of {record['elements']:,} elements, float32",
        "time of safe over that of online softmax",
    )
    return [
        Panel(size, "length of a row", "ms", times, log="x"),
        Panel(title, "length of a row", "safe / online", gain, log="x"),
    ]


MEASUREMENT = Measurement(
    "softmax_ladder", "Does online softmax save a pass over memory, and the time of it?", cases,
    {"cpu": {"quick": {"elements": 2**16, "seconds": 0.1},
             "normal": {"elements": 2**24, "powers": tuple(range(8, 23, 2)), "searched": 1024,
                        "seconds": 1.0}},
     "cuda": {"quick": {"elements": 2**26, "seconds": 0.2},
              "normal": {"elements": 2**30, "powers": tuple(range(8, 21, 2)), "searched": 1024,
                         "seconds": 1.0}}},
    table=table, draw=draw, height=3.0, minutes={"cpu": 0.5, "cuda": 0.5},
    paths=("kernels/cpu/layers", "kernels/cuda/layers"),
    caption="Time of one softmax by the length of a row, and the time of safe softmax divided by that of "
    "online softmax. The dashed line is the same ratio for the number of elements read and written.",
)  # fmt: skip
