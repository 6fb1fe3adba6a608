"""Time and memory of every rung, forward and backward, by length.

Memory is by how much one forward and backward pass raises the peak: of a fresh process on the CPU, of the
pool of device memory on a GPU.  A contestant that would take longer than ``--limit`` seconds for one pass,
or for which there is too little memory, is left out from there on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from bench.contestants import DIRECTIONS, TensorCall, contestants, random_arrays
from bench.harness import Case, Measurement, Run
from bench.measuring import out_of_memory, peak_memory, ratio, wait
from bench.processes import in_child
from bench.records import Record
from bench.table_cells import cell, markdown

from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.traffic.formulas import attention_backward_flops, attention_flops

MEBIBYTE = 1024 * 1024
QUANTITIES = (
    ("forward_ms", "forward, ms"), ("backward_ms", "backward, ms"), ("peak_mb", "peak, MiB"),
)  # fmt: skip
TOO_LONG = {"forward_ms": float("inf"), "backward_ms": float("inf")}


def one_pass(call: TensorCall, device: str) -> None:
    """Run forward and backward once, and wait for the result."""
    call.forward()
    call.backward()
    call.clear()
    wait(device)


def peak_of_process(name: str, causal: bool, shape: tuple[int, int, int]) -> float | None:
    """Return by how many MiB one pass raises the peak of this process, which is a fresh one."""
    if peak_memory() == 0:
        return None
    make = contestants("cpu", causal)[name]
    one_pass(make(random_arrays(shape[0], 64, shape[2])), "cpu")  # the kernels are loaded before
    call = make(random_arrays(*shape))
    before = peak_memory()
    one_pass(call, "cpu")
    return (peak_memory() - before) / MEBIBYTE


def memory_of(run: Run, name: str, call: TensorCall, shape: Any) -> float | None:
    """Return the MiB that one pass takes, or None if they are not known."""
    if run.device == "cpu":
        try:
            return in_child(peak_of_process, name, run.causal, shape)
        except RuntimeError:  # out of memory
            return None
    if call.memory is None:
        return 0.0
    before = call.memory.reset_peak()
    one_pass(call, run.device)
    return (call.memory.peak() - before) / MEBIBYTE


def cases(run: Run) -> Iterator[Case]:
    if run.head_dim > MAX_HEAD_DIM:
        raise SystemExit(
            f"--head-dim must be at most {MAX_HEAD_DIM}, got {run.head_dim}; take more heads"
        )
    run.note(**{name: getattr(run, name) for name in ("batch", "heads", "head_dim", "causal")})
    known = contestants(run.device, run.causal)
    running = [name for name in known if name in run.only or not run.only]
    for length in run.lengths:
        yield {"length": length}, partial(measured, run, {n: known[n] for n in running}, length)
        row = run.rows[-1] if run.rows else {}
        place = run.lengths.index(length) + 1
        longer = (run.lengths[place] / length if place < len(run.lengths) else 1) ** 2
        running = [
            name for name in running
            if longer * sum(row.get(name, TOO_LONG)[f"{way}_ms"] for way in DIRECTIONS) / 1e3 <= run.limit
        ]  # fmt: skip


def measured(run: Run, running: dict[str, Any], length: int) -> Record:
    shape = (run.batch * run.heads, length, run.head_dim)
    arrays, calls, row = random_arrays(*shape), dict[str, TensorCall](), Record()
    for name, make in running.items():
        try:
            calls[name] = make(arrays)
            one_pass(calls[name], run.device)  # compiles
            row[name] = {"peak_mb": memory_of(run, name, calls[name], shape)}
        except Exception as error:  # noqa: PERF203 (the next one may run)
            if not out_of_memory(error):
                raise
            calls.pop(name, None)
    steps = {(name, way): getattr(call, way) for name, call in calls.items() for way in DIRECTIONS}
    after = {(name, "backward"): call.release for name, call in calls.items()}
    times = run.timed(steps, at_most_seconds=3 * run.limit, warm_up=False, after=after)
    size = (shape[0], length, length, run.head_dim)
    flops = {
        "forward": attention_flops(*size, causal=run.causal),
        "backward": attention_backward_flops(*size, causal=run.causal),
    }
    for (name, way), seconds in times.items():
        row[name] |= {
            "rounds": len(seconds), f"{way}_ms": 1e3 * median(seconds),
            f"{way}_tflops": flops[way] / median(seconds) / 1e12,
            f"{way}_ratio": ratio(seconds, times[[*calls][-1], way])["median"],
        }  # fmt: skip
    return row


def table(record: Record) -> str:
    """Return milliseconds and MiB of every rung by length."""
    rows = record["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "length"))
    mask = "a causal mask" if record["causal"] else "no mask"
    shown = [
        f"batch {record['batch']}, {record['heads']} heads, head_dim {record['head_dim']}, float32, "
        f"{mask}. An empty cell: one pass takes too long, or the memory is too small."
    ]
    for key, title in QUANTITIES:
        lines = [
            [
                f"N = {row['length']:,}",
                *(
                    "" if (figure := row.get(name, {}).get(key)) is None else cell(figure)
                    for name in names
                ),
            ]
            for row in rows
        ]
        shown.append(markdown([title, *names], lines))
    return "\n\n".join(shown)


LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMMON = {"head_dim": 64, "causal": False, "only": ()}
MEASUREMENT = Measurement(
    "bench_attention", "How long does each rung take by length, and how much memory?", cases,
    {"cpu": {"quick": {"lengths": (128, 256), "seconds": 0.05},
             "normal": {"batch": 1, "heads": 4, "lengths": LENGTHS[1:7], "seconds": 4.0, "limit": 20.0,
                        **COMMON}},
     "cuda": {"quick": {"heads": 4, "lengths": LENGTHS[:4]},
              "normal": {"batch": 4, "heads": 16, "lengths": LENGTHS, "seconds": 0.3, "limit": 4.0,
                         **COMMON},
              "full": {"seconds": 4.0, "limit": 20.0}}},
    table=table, minutes={"cpu": 1, "cuda": 2},
)  # fmt: skip
