"""Peak memory against length, and the length at which naive attention no longer fits into the machine.

    python project/experiments/memory.py                  on the CPU
    python project/experiments/memory.py --device cuda    on a GPU

Inference is a forward pass on constants, training one that records and its backward pass; counted is what
either adds to the peak: of a fresh process on the CPU, of the pool that device memory comes from on a GPU.
Naive attention keeps a number of matrices of queries by keys; the longest length that was measured says how
many, and with that which length would fill the memory.  On the CPU nothing is run that would take more
than a quarter of the memory; on a GPU lengths grow until the memory is really full.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any, NamedTuple

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
)

# isort: split
from bench.contestants import Bound, contestants, random_arrays
from bench.measuring import in_child, out_of_memory, peak_memory, reset_peak_memory, wait

from kernels.cuda.runtime.arrays import pool
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import score_matrix_bytes

MODES = ("inference", "training")
#: Those whose memory grows with the square of the length, and those that stay.
NAIVE = {"cpu": ("naive",), "cuda": ("composed", "naive")}
FLASH = {"cpu": "flash", "cuda": "flash2"}
HEAD_DIM, ITEMSIZE = 64, 4
#: Length of the pass before, in which loops of large arrays are compiled: that takes memory, too.
WARM_UP = 256
#: Of the memory of the machine, the part that a run on the CPU may take.
SAFE = 0.25
GIGABYTE = 1e9


class Size(NamedTuple):
    """Heads, and lengths of queries and keys; the naive ones stop earlier on the CPU."""

    heads: int
    lengths: tuple[int, ...]
    naive_to: int


SIZES = {
    "cpu": {
        "quick": Size(2, (256, 512), 512),
        "normal": Size(2, (512, 1024, 2048, 4096, 8192, 16384), 4096),
        "full": Size(4, (512, 1024, 2048, 4096, 8192, 16384), 8192),
    },
    "cuda": {
        "quick": Size(16, (512, 1024, 2048), 2048),
        "normal": Size(64, (512, 1024, 2048, 4096, 8192, 16384, 32768), 32768),
        "full": Size(64, (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), 65536),
    },
}


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


def operands_of(bound: Bound, mode: str) -> Bound:
    """Return the contestant for a mode: in inference its operands want no gradient."""
    if mode == "inference":
        bound.operands = [x.detach() for x in bound.operands]
    return bound


def one_pass(bound: Bound, mode: str, device: str) -> None:
    """Run a forward pass, in training a backward pass too, and forget the results."""
    bound.forward()
    if mode == "training":
        bound.backward()
    bound.clear()
    wait(device)


def peaks_of_process(name: str, heads: int, length: int) -> dict[str, int]:
    """Return by how many bytes each mode raises the peak of this process; to be called in a fresh one."""
    contestant = contestants("cpu", causal=False)[name]
    found = {}
    for mode in MODES:
        small = Bound(contestant, random_arrays((heads, WARM_UP, HEAD_DIM)))
        one_pass(operands_of(small, mode), mode, "cpu")
        bound = operands_of(Bound(contestant, random_arrays((heads, length, HEAD_DIM))), mode)
        before = reset_peak_memory()
        one_pass(bound, mode, "cpu")
        found[mode] = peak_memory() - before
    return found


def peaks_of_device(name: str, arrays: list[Any]) -> dict[str, int | None]:
    """Return the most bytes of the device that each mode adds to what is in use; None: no room."""
    contestant = contestants("cuda", causal=False)[name]

    def peak(mode: str) -> int | None:
        try:
            bound = operands_of(Bound(contestant, arrays), mode)
            before = contestant.start_peak()
            one_pass(bound, mode, "cuda")
            return contestant.peak() - before
        except Exception as error:
            if not out_of_memory(error):
                raise
            return None

    return {mode: peak(mode) for mode in MODES}


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure every length, and each contestant as far as it gets."""
    device, size = args.device, SIZES[args.device][args.size]
    limit = capacity(device)
    if device == "cpu" and peak_memory() == 0:
        raise SystemExit("the peak memory of a process is known on Linux only")
    if device == "cuda" and pool() is None:
        raise SystemExit(
            "peaks are those of the driver's pool, which is not in charge here; unset "
            "NUMBA_CUDA_MEMORY_MANAGER, or take a device that has pools"
        )
    report.note(
        capacity=limit, heads=size.heads, head_dim=HEAD_DIM, itemsize=ITEMSIZE,
        note="on a GPU a dash means that the memory was full; on the CPU, that it was not tried"
    )  # fmt: skip
    full: set[str] = set()
    for length in report.progress(size.lengths, "length"):
        row: dict[str, Any] = {}
        arrays = random_arrays((size.heads, length, HEAD_DIM)) if device == "cuda" else []
        for name in (*NAIVE[device], FLASH[device]):
            is_naive = name in NAIVE[device]
            if name in full or (is_naive and length > size.naive_to):
                continue
            if device == "cuda":
                row[name] = peaks_of_device(name, arrays)
                if None in row[name].values():
                    full.add(name)
                continue
            known = report.rows[-1][name]["training"] if report.rows else 0
            if is_naive and 4 * known > SAFE * limit:
                full.add(name)
                continue
            row[name] = in_child(peaks_of_process, name, size.heads, length)
        report.add(length=length, **row)
        report.note(
            matrices={
                name: {mode: matrices(report.rows, name, mode, size.heads) for mode in MODES}
                for name in NAIVE[device]
            },
            longest={
                name: {mode: longest(report.rows, name, mode, size.heads, limit) for mode in MODES}
                for name in (*NAIVE[device], FLASH[device])
            },
        )


def last_peak(rows: list[Record], name: str, mode: str) -> tuple[int, int]:
    """Return the longest length that was measured, and its peak in bytes."""
    return [(row["length"], row[name][mode]) for row in rows if row.get(name, {}).get(mode)][-1]


def matrices(rows: list[Record], name: str, mode: str, heads: int) -> float:
    """Return how many matrices of queries by keys the longest measured length took."""
    length, peak = last_peak(rows, name, mode)
    return peak / score_matrix_bytes(heads, length, length, ITEMSIZE)


def longest(rows: list[Record], name: str, mode: str, heads: int, limit: int) -> int:
    """Return the length whose peak would be the limit: by the square for naive ones, else in proportion."""
    length, peak = last_peak(rows, name, mode)
    if name in FLASH.values():
        return length * limit // peak
    count = matrices(rows, name, mode, heads)
    return math.isqrt(int(limit / (count * score_matrix_bytes(heads, 1, 1, ITEMSIZE))))


def table(record: Record) -> str:
    """Return megabytes by length, and the length that fills the memory."""
    rows, names = record["rows"], list(record["longest"])
    columns = [(name, mode) for name in names for mode in MODES]
    missing = "memory is full" if record.get("kind") == "cuda" else "not measured"
    lines = []
    for row in rows:
        peaks = [row.get(name, {}).get(mode) for name, mode in columns]
        shown = [missing if peak is None else f"{peak / 1e6:,.1f}" for peak in peaks]
        lines.append([f"{row['length']:,}", *shown])
    kept = record["matrices"]
    counts = [f"{kept[name][mode]:.2f}" if name in kept else "" for name, mode in columns]
    lines.append(["number of queries × keys matrices at the peak", *counts])
    lines.append(
        [
            f"length that fills {record['capacity'] / GIGABYTE:.1f} GB (formula)",
            *(f"{record['longest'][name][mode]:,}" for name, mode in columns),
        ]
    )
    return markdown(["peak MB, length", *(f"{name}, {mode}" for name, mode in columns)], lines)


def draw(figure: Any, results: list[Result]) -> None:
    """Draw the peaks, the memory that there is, and where naive attention would reach it."""
    names = list(dict.fromkeys(name for result in results for name in result.record["longest"]))
    drawn = panels(figure, results)
    for axes, result in drawn:
        limit = result.record["capacity"]
        for name, lengths in result.record["longest"].items():
            colour = colour_of(name, names)
            for mode, style in zip(MODES, ("--", "-"), strict=True):
                points = [
                    (row["length"], row[name][mode] / GIGABYTE)
                    for row in result.rows
                    if row.get(name, {}).get(mode)
                ]
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    marker=".",
                    color=colour,
                    label=f"{name}, {mode}",
                )
                if name not in FLASH.values():
                    end = (lengths[mode], limit / GIGABYTE)
                    axes.plot(*zip(points[-1], end, strict=True), ":", color=colour)
                    axes.plot(*end, "x", color=colour)
                    if mode == "training":
                        axes.annotate(
                            f"{lengths[mode]:,}", end, textcoords="offset points", ha="center",
                            xytext=(0, 5 + 11 * list(result.record["longest"]).index(name)),
                            color=colour,
                        )  # fmt: skip
        axes.axhline(limit / GIGABYTE, color="#444", linewidth=1)
        axes.text(
            0.02, limit / GIGABYTE, f"{limit / GIGABYTE:.0f} GB", va="bottom",
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="length", ylabel="peak, GB")
        axes.set_ylim(top=limit / GIGABYTE * 12)
        record = result.record
        headline(
            axes, f"peak memory: {record['heads']} heads, head_dim {record['head_dim']}, float32"
        )
    legend(figure, [axes for axes, _ in drawn])


CAPTION = (
    "Peak memory by length. The horizontal line is the memory of the device. The dotted lines "
    "extrapolate attention that stores its scores. The numbers are the lengths at which training "
    "would fill the memory."
)
EXPERIMENT = Experiment("memory", __doc__, measure, table, draw, caption=CAPTION)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
