"""Attention for one query, from a sum of exponentials to the loop of FlashAttention: run and counted.

    python project/experiments/evolution.py

Keys and values lie in arrays that hand out copies of rows and count them: so many passes over memory.  What
a step keeps meanwhile, the rows in hand included, is what Python's allocator says.  The error is against
the textbook in float64, for keys that grow until the first step overflows.
"""

from __future__ import annotations

import argparse
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
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
    timed_cell,
)

# isort: split
from bench.measuring import interleaved, spread, timing_note

# isort: split

from kernels.reference.evolution import STEPS

HEAD_DIM = 64
#: Rows of k and v, at which memory is read.
LENGTHS = {"quick": (64, 256), "normal": (256, 1024, 4096, 16384)}
LENGTHS["full"] = LENGTHS["normal"]
#: The largest score, to which the keys are scaled.
LARGEST = (1.0, 10.0, 50.0, 80.0, 88.0, 89.0, 100.0, 1000.0)

Array = npt.NDArray[Any]


class InMemory:
    """An array in slow memory: what is taken from it is copied, and counted.

    Args:
        array: (rows, dim).
    """

    def __init__(self, array: Array):
        self._array = array
        self.shape = array.shape
        self.reads: npt.NDArray[np.int64] = np.zeros(array.shape, np.int64)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Array:
        self.reads[key] += 1
        return self._array[key].copy()


def operands(length: int, largest: float | None = None) -> tuple[Array, Array, Array, float]:
    """Return q, k, v and the scale in float32; the largest score is as asked for."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((HEAD_DIM,), (length, HEAD_DIM), (length, HEAD_DIM))
    )
    scale = HEAD_DIM**-0.5
    if largest is not None:
        k *= np.float32(largest / (k @ q * scale).max())
    return q, k, v, scale


def textbook(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Return softmax(scale · k q) v in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = k @ q * scale
    powers = np.exp(scores - scores.max())
    return powers @ v / powers.sum()


def passes(step: Any, length: int) -> tuple[int, int]:
    """Return how often each element of k and of v is read.

    Raises:
        RuntimeError: If some are read more often than others.
    """
    q, *arrays, scale = operands(length)
    k, v = map(InMemory, arrays)
    step(q, k, v, scale)
    if np.ptp(k.reads) or np.ptp(v.reads):
        raise RuntimeError(f"{step.__name__} reads some keys or values more often than others")
    return int(k.reads[0, 0]), int(v.reads[0, 0])


def peak_bytes(step: Any, length: int) -> int:
    """Return the most bytes that a step holds at a time, the rows in hand and its result included."""
    q, *arrays, scale = operands(length)
    k, v = map(InMemory, arrays)
    step(q, k, v, scale)  # what Python keeps from a first call is not the step's
    found = []
    tracemalloc.start()
    try:
        for _ in range(3):  # the least of them: other threads of the process may allocate meanwhile
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            step(q, k, v, scale)
            found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return min(found)


def error(step: Any, length: int, largest: float) -> float | None:
    """Return the largest error of a step against the textbook; None if it is no number."""
    arrays = operands(length, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.abs(step(*arrays) - textbook(*arrays)).max())
    return found if np.isfinite(found) else None


def measure(args: argparse.Namespace, report: Report) -> None:
    """Run every step."""
    lengths = LENGTHS[args.size]
    longest = lengths[-1]
    arrays = operands(longest)
    times = interleaved(
        {name: lambda step=step: step(*arrays) for name, step in STEPS.items()}, "cpu", 2.0
    )
    report.note(timing=timing_note("cpu"), length=longest, head_dim=HEAD_DIM)
    for name, step in report.progress(STEPS.items(), "step"):
        k_passes, v_passes = passes(step, longest)
        report.add(
            step=name,
            k_passes=k_passes,
            v_passes=v_passes,
            peak_bytes=[[length, peak_bytes(step, length)] for length in lengths],
            errors=[[largest, error(step, longest, largest)] for largest in LARGEST],
            ms=spread(times[name], 1e3),
        )


def breaks_at(row: Record) -> str:
    """Describe the largest scores for which a step gives finite results."""
    broken = [largest for largest, value in row["errors"] if value is None]
    return f"below {min(broken):g}" if broken else "any"


def worst(row: Record) -> float:
    """Return the largest error of a step over the scores that do not overflow."""
    return max(value for _, value in row["errors"] if value is not None)


def table(record: Record) -> str:
    """Return a line for each step."""
    head = ["step", "passes over k", "passes over v"]
    head += [f"peak bytes, {length:,} keys" for length, _ in record["rows"][0]["peak_bytes"]]
    head += ["scores without overflow", "largest error", "ms (quartiles)"]
    return markdown(
        head,
        (
            [
                row["step"], str(row["k_passes"]), str(row["v_passes"]),
                *(f"{size:,}" for _, size in row["peak_bytes"]),
                breaks_at(row), f"{worst(row):.1e}", timed_cell(row["ms"]),
            ]
            for row in record["rows"]
        ),
    )  # fmt: skip


def draw(figure: Any, results: list[Result]) -> None:
    """Draw memory and error of each step."""
    names = [row["step"] for row in results[0].rows]
    drawn: list[Any] = []
    for (memory, errors), result in panels(figure, results, rows=2):
        for place, row in enumerate(result.rows):
            name = row["step"]
            style: dict[str, Any] = {
                "color": colour_of(name, names), "marker": "osD^v"[place % 5], "alpha": 0.8
            }  # fmt: skip
            passes_ = f"{row['k_passes']} pass{'es' if row['k_passes'] > 1 else ''} over k"
            memory.plot(*zip(*row["peak_bytes"], strict=True), label=f"{name}, {passes_}", **style)
            points = [point for point in row["errors"] if point[1] is not None]
            errors.plot(*zip(*points, strict=True), **style)
            if len(points) < len(row["errors"]):
                errors.axvline(points[-1][0], color=style["color"], linestyle=":")
                errors.text(
                    points[-1][0] / 1.2, 0.03, f"{name}: beyond,\ninfinity over infinity",
                    transform=errors.get_xaxis_transform(), ha="right", color=style["color"],
                )  # fmt: skip
        memory.set_xscale("log", base=2)
        memory.set(yscale="log", xlabel="keys", ylabel="peak bytes")
        headline(memory, f"memory of one query: head_dim {result.record['head_dim']}, float32")
        errors.set(xscale="log", yscale="log", xlabel="largest score", ylabel="largest error")
        headline(errors, f"error against float64: {result.record['length']:,} keys")
        drawn.append(memory)
    legend(figure, drawn, columns=2)


CAPTION = (
    "Memory by the number of keys, and error by the largest score, for each step from a sum of "
    "exponentials to the loop of FlashAttention. The dotted line marks the largest score before "
    "the first step overflows."
)
EXPERIMENT = Experiment(
    "evolution", __doc__, measure, table, draw, devices=("cpu",), height=3.2, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
