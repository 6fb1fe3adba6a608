"""Attention for one query, from a sum of exponentials to the loop of FlashAttention: run and counted.

Keys and values lie in arrays that hand out copies of rows and count them: so many passes over memory.  The
memory that a step holds meanwhile, the current rows included, is what Python's allocator says.  The error
is relative to the textbook in float64, for keys that grow until the first step overflows.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, markdown, spread, timed_cell
from bench.softmax_steps import STEPS

HEAD_DIM = 64
#: The largest score, to which the keys are scaled.
LARGEST = (1.0, 10.0, 50.0, 80.0, 88.0, 89.0, 100.0, 1000.0)


class InMemory:
    """An array in slow memory: rows that are taken from it are copied and counted."""

    def __init__(self, array: Any):
        self._array, self.shape, self.reads = array, array.shape, np.zeros(array.shape, np.int64)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        self.reads[key] += 1
        return self._array[key].copy()


def operands(length: int, largest: float | None = None) -> tuple[Any, Any, Any, float]:
    """Return q, k, v and the scale in float32; the largest score is as asked for."""
    rng, scale = np.random.default_rng(0), HEAD_DIM**-0.5
    shapes = (HEAD_DIM,), (length, HEAD_DIM), (length, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    if largest is not None:
        k *= np.float32(largest / (k @ q * scale).max())
    return q, k, v, scale


def textbook(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Return softmax(scale · k q) v in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    powers = np.exp(k @ q * scale - (k @ q * scale).max())
    return powers @ v / powers.sum()


def passes(step: Any, length: int) -> tuple[int, int]:
    """Return how often each element of k and of v is read; all are read equally often."""
    q, *arrays, scale = operands(length)
    k, v = map(InMemory, arrays)
    step(q, k, v, scale)
    if np.ptp(k.reads) or np.ptp(v.reads):
        raise RuntimeError(f"{step.__name__} reads some keys or values more often than others")
    return int(k.reads[0, 0]), int(v.reads[0, 0])


def peak_bytes(step: Any, length: int) -> int:
    """Return the most bytes that a step holds at a time, the current rows and its result included."""
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
    """Return the largest error of a step against the textbook; None if it overflows."""
    arrays = operands(length, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.abs(step(*arrays) - textbook(*arrays)).max())
    return found if np.isfinite(found) else None


def cases(run: Run) -> Iterator[Case]:
    longest = run.lengths[-1]
    arrays = operands(longest)
    times = run.timed({name: partial(step, *arrays) for name, step in STEPS.items()})
    run.note(length=longest, head_dim=HEAD_DIM)
    for name, step in STEPS.items():
        yield {"step": name}, partial(counted, step, run.lengths, times[name])


def counted(step: Any, lengths: tuple[int, ...], times: list[float]) -> Record:
    k_passes, v_passes = passes(step, lengths[-1])
    return {
        "k_passes": k_passes, "v_passes": v_passes,
        "peak_bytes": [[length, peak_bytes(step, length)] for length in lengths],
        "errors": [[largest, error(step, lengths[-1], largest)] for largest in LARGEST],
        "ms": spread(times, 1e3),
    }  # fmt: skip


def table(record: Record) -> str:
    head = ["step", "passes over k", "passes over v"]
    head += [f"peak bytes, {length:,} keys" for length, _ in record["rows"][0]["peak_bytes"]]
    head += ["scores without overflow", "largest error", "ms (quartiles)"]
    lines = []
    for row in record["rows"]:
        broken = [largest for largest, value in row["errors"] if value is None]
        worst = max(value for _, value in row["errors"] if value is not None)
        lines.append([
            row["step"], str(row["k_passes"]), str(row["v_passes"]),
            *(f"{size:,}" for _, size in row["peak_bytes"]),
            f"below {min(broken):g}" if broken else "any", f"{worst:.1e}", timed_cell(row["ms"]),
        ])  # fmt: skip
    return markdown(head, lines)


def draw(record: Record) -> list[Panel]:
    memory, errors = Record(), Record()
    for row in record["rows"]:
        label = f"{row['step']}, {row['k_passes']} pass{'es' if row['k_passes'] > 1 else ''} over k"
        memory[label] = row["peak_bytes"]
        errors[label] = [point for point in row["errors"] if point[1] is not None]
    head, errors_head = (
        f"memory of one query: head_dim {record['head_dim']}, float32",
        f"error against float64: {record['length']:,} keys",
    )
    return [
        Panel(head, "keys", "peak bytes", memory, log="xy"),
        Panel(errors_head, "largest score", "largest error", errors, log="xy"),
    ]


MEASUREMENT = Measurement(
    "evolution", "How many passes and how much memory does each step from softmax to FlashAttention take?",
    cases,
    {"cpu": {"quick": {"lengths": (64, 256), "seconds": 0.1},
             "normal": {"lengths": (256, 1024, 4096, 16384), "seconds": 2.0}}},
    table=table, draw=draw, height=3.2, minutes={"cpu": 0.2}, paths=("project/bench/softmax_steps.py",),
    caption="Memory by the number of keys, and error by the largest score, for each step from a sum of "
    "exponentials to the loop of FlashAttention. The curve of a step that overflows ends there.",
)  # fmt: skip
