"""Peak memory by length, and the length at which naive attention no longer fits into the machine.

Inference is a forward pass on constants, training one that records and its backward pass.  Measured is by
how much either raises the peak: of a fresh process on the CPU, of the pool of device memory on a GPU.
Naive attention keeps a number of matrices of queries by keys; the longest measured length says how many,
and with that which length would fill the memory.  On the CPU nothing is run that would take more than a
quarter of the memory; on a GPU lengths grow until the memory is really full.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.contestants import TensorCall, contestants, random_arrays
from bench.harness import Case, Measurement, Run
from bench.measuring import out_of_memory, peak_memory, reset_peak_memory, wait
from bench.plots import Result, headline, legend, panels
from bench.processes import in_child
from bench.records import Record
from bench.table_cells import colour_of, markdown

from kernels.cuda.runtime.arrays import pool
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import score_matrix_bytes

MODES = ("inference", "training")
#: Those whose memory grows with the square of the length, and those whose memory grows with the length.
NAIVE = {"cpu": ("naive",), "cuda": ("composed", "naive")}
FLASH = {"cpu": "flash", "cuda": "flash2"}
HEAD_DIM, ITEMSIZE = 64, 4
#: Length of the pass before, in which loops of large arrays are compiled: that takes memory, too.
WARM_UP = 256
#: Of the memory of the machine, the part that a run on the CPU may take.
SAFE = 0.25
GIGABYTE = 1e9


def capacity(device: str) -> int:
    """Return the bytes of the device's memory, or what this process may have of it."""
    if device == "cuda":
        return int(cuda.current_context().get_memory_info().total)
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]))
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    if not found:
        raise RuntimeError("how much memory there is, is known on Linux only")
    return min(found)


def one_pass(call: TensorCall, mode: str, device: str) -> None:
    """Run a forward pass, in training a backward pass too, and free the results."""
    call.forward()
    if mode == "training":
        call.backward()
    call.clear()
    wait(device)


def peaks_of_process(name: str, heads: int, length: int) -> dict[str, int]:
    """Return by how many bytes each mode raises the peak of this process, which is a fresh one."""
    make, found = contestants("cpu")[name], {}
    for mode in MODES:
        training = mode == "training"
        one_pass(make(random_arrays(heads, WARM_UP, HEAD_DIM), training=training), mode, "cpu")
        call = make(random_arrays(heads, length, HEAD_DIM), training=training)
        before = reset_peak_memory()
        one_pass(call, mode, "cpu")
        found[mode] = peak_memory() - before
    return found


def peaks_of_device(name: str, heads: int, length: int) -> dict[str, int | None]:
    """Return the most bytes of the device that each mode adds to what is in use; None: no room."""
    found: dict[str, int | None] = {}
    for mode in MODES:
        try:
            arrays = random_arrays(heads, length, HEAD_DIM)
            call = contestants("cuda")[name](arrays, training=mode == "training")
            before = call.memory.reset_peak()
            one_pass(call, mode, "cuda")
            found[mode] = call.memory.peak() - before
        except Exception as error:  # noqa: PERF203 (the next one may run)
            if not out_of_memory(error):
                raise
            found[mode] = None
    return found


def cases(run: Run) -> Iterator[Case]:
    """Measure every length, and each contestant as far as it gets."""
    limit = capacity(run.device)
    if run.device == "cpu" and peak_memory() == 0:
        sys.exit("the peak memory of a process is known on Linux only")
    if run.device == "cuda" and pool() is None:
        sys.exit(
            "peaks are those of the driver's pool, which is not in charge here; unset "
            "NUMBA_CUDA_MEMORY_MANAGER, or take a device that has pools"
        )
    run.note(
        capacity=limit, heads=run.heads, head_dim=HEAD_DIM, itemsize=ITEMSIZE,
        note="on a GPU a dash means that the memory was full; on the CPU, that it was not tried"
    )  # fmt: skip
    for length in run.lengths:
        yield {"length": length}, partial(peaks, run, length, limit)
        note_limits(run, limit)


def peaks(run: Run, length: int, limit: int) -> Record:
    row: Record = {}
    for name in (*NAIVE[run.device], FLASH[run.device]):
        last = run.rows[-1].get(name, {}) if run.rows else {"training": 0}
        if name in NAIVE[run.device]:
            known = last.get("training")
            if length > run.naive_to or None in last.values() or known is None:
                continue
            if run.device == "cpu" and 4 * known > SAFE * limit:
                continue
        if run.device == "cuda":
            row[name] = peaks_of_device(name, run.heads, length)
        else:
            row[name] = in_child(peaks_of_process, name, run.heads, length)
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
            if name == FLASH[run.device]:
                most = length * limit // peak
            else:
                count = peak / score_matrix_bytes(run.heads, length, length, ITEMSIZE)
                matrices.setdefault(name, {})[mode] = count
                one = score_matrix_bytes(run.heads, 1, 1, ITEMSIZE)
                most = math.isqrt(int(limit / (count * one)))
            longest.setdefault(name, {})[mode] = most
    run.note(matrices=matrices, longest=longest)


def table(record: Record) -> str:
    columns = [(name, mode) for name in record["longest"] for mode in MODES]
    missing = "memory is full" if record.get("kind") == "cuda" else "not measured"
    lines = []
    for row in record["rows"]:
        peaks = [row.get(name, {}).get(mode) for name, mode in columns]
        shown = [missing if peak is None else f"{peak / 1e6:,.1f}" for peak in peaks]
        lines.append([f"{row['length']:,}", *shown])
    kept, longest = record["matrices"], record["longest"]
    counts = [f"{kept[name][mode]:.2f}" if name in kept else "" for name, mode in columns]
    lines.append(["number of queries × keys matrices at the peak", *counts])
    fills = f"length that fills {record['capacity'] / GIGABYTE:.1f} GB (formula)"
    lines.append([fills, *(f"{longest[name][mode]:,}" for name, mode in columns)])
    return markdown(["peak MB, length", *(f"{name}, {mode}" for name, mode in columns)], lines)


def draw(figure: Any, results: list[Result]) -> None:
    """Draw the peaks, the memory that there is, and where naive attention would reach it."""
    names = list(dict.fromkeys(name for result in results for name in result.record["longest"]))
    drawn = panels(figure, results)
    for axes, result in drawn:
        record, rows = result.record, result.rows
        limit, longest = record["capacity"] / GIGABYTE, record["longest"]
        for name, lengths in longest.items():
            colour = colour_of(name, names)
            for mode, style in zip(MODES, ("--", "-"), strict=True):
                known = [row for row in rows if row.get(name, {}).get(mode)]
                points = [(row["length"], row[name][mode] / GIGABYTE) for row in known]
                label = f"{name}, {mode}"
                axes.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=label)
                if name in FLASH.values():
                    continue
                end = (lengths[mode], limit)
                axes.plot(*zip(points[-1], end, strict=True), ":", color=colour)
                axes.plot(*end, "x", color=colour)
                if mode == "training":
                    axes.annotate(
                        f"{lengths[mode]:,}", end, textcoords="offset points", ha="center",
                        xytext=(0, 5 + 11 * list(longest).index(name)), color=colour,
                    )  # fmt: skip
        axes.axhline(limit, color="#444", linewidth=1)
        transform = axes.get_yaxis_transform()
        axes.text(0.02, limit, f"{limit:.0f} GB", va="bottom", transform=transform)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="length", ylabel="peak, GB")
        axes.set_ylim(top=limit * 12)
        sizes = f"{record['heads']} heads, head_dim {record['head_dim']}"
        headline(axes, f"peak memory: {sizes}, float32")
    legend(figure, [axes for axes, _ in drawn])


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MEASUREMENT = Measurement(
    "memory", "How much memory does attention take by length, and at which length is it full?", cases,
    {"cpu": {"quick": {"lengths": (256, 512)},
             "normal": {"heads": 2, "lengths": LENGTHS[:6], "naive_to": 4096},
             "full": {"heads": 4, "naive_to": 8192}},
     "cuda": {"quick": {"heads": 16, "lengths": LENGTHS[:3]},
              "normal": {"heads": 64, "lengths": LENGTHS[:7], "naive_to": 32768},
              "full": {"lengths": LENGTHS, "naive_to": 65536}}},
    table=table, draw=draw, minutes={"cpu": 2, "cuda": 1},
    caption="Peak memory by length. The horizontal line is the memory of the device. The dotted lines "
    "extrapolate attention that stores its scores. The numbers are the lengths at which training "
    "would fill the memory.",
)  # fmt: skip
