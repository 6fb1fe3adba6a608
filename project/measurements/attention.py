"""Attention by length: time and memory of every rung, beside attention that stores its scores.

``bench_attention`` times forward and backward, and by how much both raise the peak of memory.
``speedup`` times constants without a graph, too, and compares with naive attention; published for such
a baseline: nearly 40 times faster forward and 16 times backward at 2,048 (``REPORTED``).  ``memory``
finds the length at which naive attention no longer fits: it keeps a number of matrices of queries by
keys, which the longest measured length tells.  The baseline is attention composed of tensor operations,
called ``naive`` on the CPU and ``composed`` on CUDA, where ``naive`` is the kernel of Algorithm 0;
``published`` is composed of the kernels of the published course.

A contestant that would take longer than the limit for one pass, or for which there is too little
memory, is left out from there on.  Peaks are those of a fresh process on the CPU, and of the pool of
device memory on a GPU; on the CPU nothing runs that would take more than a quarter of the memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.contestants import DIRECTIONS, TensorCall, contestants, directions, random_arrays
from bench.harness import Case, Measurement, Run
from bench.kit import Panel, Record, cell, curves, markdown, ratio, ready, spread
from bench.measuring import Peak, wait
from common.child import in_child

from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import attention_backward_flops, attention_flops, score_matrix_bytes

MODES, QUANTITIES = ("inference", "training"), ("inference", "forward", "backward", "training")
FLASH = {"cpu": "flash", "cuda": "flash2"}
NAIVE = {"cpu": ("naive",), "cuda": ("composed", "naive")}
#: The speedups that the published report gives, by quantity: length and factor.
REPORTED = {"forward": (2048, 40.0), "backward": (2048, 16.0)}
HEAD_DIM, ITEMSIZE, MEBIBYTE, GIGABYTE = 64, 4, 2**20, 1e9
#: Length of the pass before, in which loops of large arrays are compiled: that takes memory, too.
WARM_UP = 256
#: Of the memory of the machine, the part that a run on the CPU may take.
SAFE = 0.25


def one_pass(call: TensorCall, device: str, training: bool = True) -> None:
    """Run a forward pass, in training a backward pass too, and free the results."""
    call.forward()
    if training:
        call.backward()
    call.clear()
    wait(device)


def peak_of_pass(
    device: str, name: str, shape: tuple[int, ...], causal: bool, training: bool
) -> int:
    """Return the bytes that one pass adds to what is in use; on the CPU in a process of its own."""
    peak = Peak(device, of_torch=name == "PyTorch")
    for length in (WARM_UP, shape[1]):
        arrays = random_arrays(shape[0], length, shape[2])
        call = contestants(device, causal)[name](arrays, training=training)
        peak.begin()
        one_pass(call, device, training)
    return peak.bytes()


def peak_of(
    run: Run, name: str, shape: tuple[int, ...], causal: bool = False, training: bool = True
) -> int | None:
    """Return the bytes that one pass takes; None if they are not known, or too many."""
    given = run.device, name, shape, causal, training
    if not Peak(run.device).is_known:
        return None
    if run.device == "cuda":
        return ready({"": partial(peak_of_pass, *given)})[0].get("")
    with contextlib.suppress(RuntimeError):  # out of memory
        return in_child(peak_of_pass, *given)
    return None


# -- time ------------------------------------------------------------------------------------------------


def by_length(run: Run, names: Any, causal: bool, measure: Any, took: Any) -> Iterator[Case]:
    """Measure every length, and each contestant until the next length would take longer than the limit."""
    known = contestants(run.device, causal)
    running = [name for name in known if name in names or not names]
    for length, following in zip(run.lengths, (*run.lengths[1:], run.lengths[-1]), strict=True):
        yield {"length": length}, partial(measure, run, {n: known[n] for n in running}, length)
        row, growth = run.rows[-1] if run.rows else {}, (following / length) ** 2
        running = [n for n in running if n in row and growth * took(row[n]) <= 1e3 * run.limit]


def rungs(run: Run) -> Iterator[Case]:
    if run.head_dim > MAX_HEAD_DIM:
        raise SystemExit(
            f"--head-dim must be at most {MAX_HEAD_DIM}, got {run.head_dim}; take more heads"
        )
    run.note(**run.chosen("batch", "heads", "head_dim", "causal"))
    yield from by_length(
        run, run.only, run.causal, of_rungs, lambda one: one["forward_ms"] + one["backward_ms"]
    )


def of_rungs(run: Run, running: dict[str, Callable[..., TensorCall]], length: int) -> Record:
    shape = (run.batch * run.heads, length, run.head_dim)
    arrays, row = random_arrays(*shape), Record()

    def started(make: Callable[..., TensorCall]) -> TensorCall:
        call = make(arrays)
        one_pass(call, run.device)  # compiles
        return call

    calls = ready({name: partial(started, make) for name, make in running.items()})[0]
    after = {(name, "backward"): call.release for name, call in calls.items()}
    times = run.timed(directions(calls), at_most_seconds=3 * run.limit, warm_up=False, after=after)
    size, causal = (shape[0], length, length, run.head_dim), run.causal
    flops = attention_flops(*size, causal=causal), attention_backward_flops(*size, causal=causal)
    for name in calls:
        peak = peak_of(run, name, shape, causal)
        row[name] = {"peak_mb": None if peak is None else peak / MEBIBYTE}
        for way, count in zip(DIRECTIONS, flops, strict=True):
            seconds = times[name, way]
            row[name] |= {
                "rounds": len(seconds), f"{way}_ms": 1e3 * median(seconds),
                f"{way}_tflops": count / median(seconds) / 1e12,
                f"{way}_ratio": ratio(seconds, times[[*calls][-1], way])["median"],
            }  # fmt: skip
    return row


def table(record: Record) -> str:
    """Return milliseconds and MiB of every rung by length."""
    rows, titles = record["rows"], {"forward_ms": "forward, ms", "backward_ms": "backward, ms"}
    names = list(dict.fromkeys(name for row in rows for name in row if name != "length"))
    shown = [
        f"batch {record['batch']}, {record['heads']} heads, head_dim {record['head_dim']}, float32, "
        f"{'a causal mask' if record['causal'] else 'no mask'}. An empty cell: one pass takes too long, or "
        "the memory is too small."
    ]
    for key, title in {**titles, "peak_mb": "peak, MiB"}.items():
        values = [[row.get(name, {}).get(key) for name in names] for row in rows]
        lines = (
            [f"N = {row['length']:,}", *("" if x is None else cell(x) for x in found)]
            for row, found in zip(rows, values, strict=True)
        )
        shown.append(markdown([title, *names], lines))
    return "\n\n".join(shown)


def speedups(run: Run) -> Iterator[Case]:
    run.note(heads=run.heads, head_dim=HEAD_DIM)
    names = (*run.baselines, FLASH[run.device])
    yield from by_length(run, names, False, of_speedups, lambda one: one["training"]["median"])


def of_speedups(run: Run, running: dict[str, Callable[..., TensorCall]], length: int) -> Record:
    """Return milliseconds and speedups of one length; those that run out of memory are not among them."""
    arrays = random_arrays(run.heads, length, HEAD_DIM)

    def started(make: Callable[..., TensorCall]) -> tuple[TensorCall, TensorCall]:
        pair = make(arrays), make(arrays, training=False)
        for call, training in zip(pair, (True, False), strict=True):
            one_pass(call, run.device, training)
        return pair

    calls = ready({name: partial(started, make) for name, make in running.items()})[0]
    steps, after = dict[Any, Any](), dict[Any, Any]()
    for name, (recording, constant) in calls.items():
        steps |= {(name, "inference"): constant.forward, (name, "forward"): recording.forward}
        steps[name, "backward"] = recording.backward
        after |= {(name, "inference"): constant.release, (name, "backward"): recording.release}
    most = max(5 * run.limit, run.seconds)
    times = run.timed(steps, warm_up=length <= 1024, after=after, at_most_seconds=most)
    for name in calls:
        both = zip(times[name, "forward"], times[name, "backward"], strict=True)
        times[name, "training"] = [sum(pair) for pair in both]
    row: Record = {name: {q: spread(times[name, q], 1e3) for q in QUANTITIES} for name in calls}
    if (flash := FLASH[run.device]) in calls:
        row["speedup"] = {
            name: {q: ratio(times[name, q], times[flash, q]) for q in QUANTITIES}
            for name in calls
            if name != flash
        }
    return row


def names_of(rows: list[Record]) -> list[str]:
    """Return the contestants, the baselines first."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name not in ("length", "speedup")]


def speedup_table(record: Record) -> str:
    names, shown = names_of(record["rows"]), []

    def timed(row: Record, name: str, quantity: str) -> str:
        beside = row.get("speedup", {}).get(name)
        times = f" ({beside[quantity]['median']:.1f}×)" if beside else ""
        return f"{cell(row[name][quantity]['median'])}{times}" if name in row else "left out"

    for q in QUANTITIES:
        lines = [
            [f"{row['length']:,}", *(timed(row, n, q) for n in names)] for row in record["rows"]
        ]
        shown.append(markdown([f"{q}, ms (ratio to {names[-1]})", *names], lines))
    return "\n\n".join(shown)


def speedup_panels(record: Record) -> list[Panel]:
    own = [
        (row, name, q) for name in names_of(record["rows"]) for q in QUANTITIES
        for row in record["rows"] if name in row
    ]  # fmt: skip
    times = curves(
        (f"{n}, {q}", row["length"], row[n][q]["median"]) for row, n, q in own if q in MODES
    )
    above: Record = curves(
        (f"{n}, {q}", row["length"], row["speedup"][n][q]["median"])
        for row, n, q in own
        if n in row.get("speedup", {})
    )
    above |= {f"published report, {q}": [point] for q, point in REPORTED.items()}
    workload = f"{record['heads']} heads, head_dim {record['head_dim']}, float32"
    return [
        Panel(f"time of a call: {workload}", "length", "ms", times, log="xy"),
        Panel("baseline / flash attention, by pass", "length", "times as long", above, log="xy"),
    ]


# -- memory ----------------------------------------------------------------------------------------------


def capacity(device: str) -> int:
    """Return the bytes of the device's memory, or what this process may have of it."""
    if device == "cuda":
        return int(cuda.current_context().get_memory_info().total)
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(found)


def peaks(run: Run) -> Iterator[Case]:
    if not Peak(run.device).is_known:
        raise SystemExit(
            "peaks need Linux on the CPU, and on a GPU the driver's pool, which is not in charge here; "
            "unset NUMBA_CUDA_MEMORY_MANAGER, or take a device that has pools"
        )
    limit = capacity(run.device)
    run.note(
        capacity=limit, heads=run.heads, head_dim=HEAD_DIM, itemsize=ITEMSIZE,
        note="on a GPU a dash means that the memory was full; on the CPU, that it was not tried"
    )  # fmt: skip
    for length in run.lengths:
        yield {"length": length}, partial(peaks_at, run, length, limit)
        note_limits(run, limit)


def peaks_at(run: Run, length: int, limit: int) -> Record:
    row: Record = {}
    for name in (*NAIVE[run.device], FLASH[run.device]):
        last = run.rows[-1].get(name, {}) if run.rows else {"training": 0}
        known = last.get("training")
        if name in NAIVE[run.device] and (
            length > run.naive_to or None in last.values() or known is None
            or (run.device == "cpu" and 4 * known > SAFE * limit)
        ):  # fmt: skip
            continue
        shape = (run.heads, length, HEAD_DIM)
        row[name] = {mode: peak_of(run, name, shape, training=mode == "training") for mode in MODES}
    return row


def note_limits(run: Run, limit: int) -> None:
    """Note how many matrices naive attention keeps, and the lengths that would fill the memory."""
    matrices, longest = dict[str, Any](), dict[str, Any]()
    for name in (*NAIVE[run.device], FLASH[run.device]):
        for mode in MODES:
            known = [(r["length"], r[name][mode]) for r in run.rows if r.get(name, {}).get(mode)]
            if not known:
                continue
            length, peak = known[-1]
            most = length * limit // peak
            if name != FLASH[run.device]:
                count = peak / score_matrix_bytes(run.heads, length, length, ITEMSIZE)
                matrices.setdefault(name, {})[mode] = count
                one = score_matrix_bytes(run.heads, 1, 1, ITEMSIZE)
                most = math.isqrt(int(limit / (count * one)))
            longest.setdefault(name, {})[mode] = most
    run.note(matrices=matrices, longest=longest)


def memory_table(record: Record) -> str:
    columns = [(name, mode) for name in record["longest"] for mode in MODES]
    missing = "memory is full" if record.get("kind") == "cuda" else "not measured"
    lines = []
    for row in record["rows"]:
        found = [row.get(name, {}).get(mode) for name, mode in columns]
        shown = [missing if peak is None else f"{peak / 1e6:,.1f}" for peak in found]
        lines.append([f"{row['length']:,}", *shown])
    kept, longest = record["matrices"], record["longest"]
    counts = [f"{kept[name][mode]:.2f}" if name in kept else "" for name, mode in columns]
    lines.append(["number of queries × keys matrices at the peak", *counts])
    fills = f"length that fills {record['capacity'] / GIGABYTE:.1f} GB (formula)"
    lines.append([fills, *(f"{longest[name][mode]:,}" for name, mode in columns)])
    return markdown(["peak MB, length", *(f"{name}, {mode}" for name, mode in columns)], lines)


def memory_panels(record: Record) -> list[Panel]:
    """Show the peaks, the memory that there is, and where naive attention would reach it."""
    lines, limit = Record(), record["capacity"] / GIGABYTE
    for name, lengths in record["longest"].items():
        for mode in MODES:
            known = [row for row in record["rows"] if row.get(name, {}).get(mode)]
            points = [(row["length"], row[name][mode] / GIGABYTE) for row in known]
            lines[f"{name}, {mode}"] = points
            if name not in FLASH.values():
                lines[f"{name}, {mode}, extrapolated"] = [points[-1], (lengths[mode], limit)]
    ends = [point[0] for points in lines.values() for point in points]
    lines[f"memory of {limit:.0f} GB"] = [(min(ends), limit), (max(ends), limit)]
    sizes = f"{record['heads']} heads, head_dim {record['head_dim']}"
    return [Panel(f"peak memory: {sizes}, float32", "length", "peak, GB", lines, log="xy")]


LENGTHS = tuple(2**power for power in range(7, 17))
COMMON = {"head_dim": HEAD_DIM, "causal": False, "only": ()}
MEASUREMENTS = (
    Measurement(
        "bench_attention", "How long does each rung take by length, and how much memory?", rungs,
        {"cpu": {"quick": {"lengths": (128, 256), "seconds": 0.05},
                 "normal": {"batch": 1, "heads": 4, "lengths": LENGTHS[1:7], "seconds": 4.0, "limit": 20.0,
                            **COMMON}},
         "cuda": {"quick": {"heads": 4, "lengths": LENGTHS[:4]},
                  "normal": {"batch": 4, "heads": 16, "lengths": LENGTHS[:8], "seconds": 0.3, "limit": 4.0,
                             **COMMON}}},
        table=table, minutes={"cpu": 1, "cuda": 2},
    ),
    Measurement(
        "speedup", "How many times faster is flash attention than naive, by length?", speedups,
        {"cpu": {"quick": {"heads": 2, "lengths": LENGTHS[:3], "seconds": 0.05, "limit": 1.0},
                 "normal": {"heads": 4, "lengths": LENGTHS[:7], "seconds": 2.0, "limit": 4.0,
                            "baselines": ("naive",)}},
         "cuda": {"quick": {"heads": 16, "lengths": LENGTHS[:5], "seconds": 0.5, "limit": 0.5},
                  "normal": {"heads": 64, "lengths": LENGTHS[:8], "seconds": 1.0, "limit": 2.5,
                             "baselines": ("published", "composed", "naive")}}},
        table=speedup_table, draw=speedup_panels, height=3.6, minutes={"cpu": 1, "cuda": 2},
        caption="Time of a call by length, and the ratio of each baseline's time to that of flash "
        "attention. Inference is a forward pass without a graph; training is forward and backward "
        "together. The stars are the figures of the published course's report.",
    ),
    Measurement(
        "memory", "How much memory does attention take by length, and at which length is it full?", peaks,
        {"cpu": {"quick": {"lengths": (256, 512)},
                 "normal": {"heads": 2, "lengths": LENGTHS[2:8], "naive_to": 4096}},
         "cuda": {"quick": {"heads": 16, "lengths": LENGTHS[2:5]},
                  "normal": {"heads": 64, "lengths": LENGTHS[2:9], "naive_to": 32768}}},
        table=memory_table, draw=memory_panels, minutes={"cpu": 2, "cuda": 1},
        caption="Peak memory by length. The horizontal line is the memory of the device. Attention that "
        "stores its scores is extrapolated to the length at which it would fill the memory.",
    ),
)  # fmt: skip
