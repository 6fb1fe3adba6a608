"""The table of figures in README.md, read from the records in docs/results; ``figures.py`` writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- python docs/figures.py --write -->\n", "<!-- end of the table -->"
Record = dict[str, Any]


class Line(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was measured, and its workload.
        ours: Reads this library's figure from the record.
        theirs: Reads the other figure.
        unit: Of both.
        other: Names what the other figure belongs to.
        record: Path of the record below docs/results.
        command: Makes the figure.
    """

    what: str
    ours: Callable[[Record], str]
    theirs: Callable[[Record], str]
    unit: str
    other: str
    record: str
    command: str


def row_of(record: Record, **wanted: Any) -> Record:
    """Return the one row of a record in which every key has the wanted value."""
    (found,) = (r for r in record["rows"] if wanted.items() <= r.items())
    return found


def attention(direction: str, name: str, **wanted: Any) -> Callable[[Record], str]:
    """Return a reader of TFLOP/s from the benchmark of attention beside PyTorch."""

    def read(record: Record) -> str:
        row = row_of(record, case="causal", length=8192, **wanted)
        return f"{row[direction][name]['tflops']:.0f}"

    return read


def training(kind: str, name: str) -> Callable[[Record], str]:
    """Return a reader of thousands of tokens/s from the benchmark of training."""

    def read(record: Record) -> str:
        row = row_of(record, kind=kind, preset="gpt2-small", context=1024)
        return f"{row['tokens_per_second'][name]['median'] / 1000:.3g}"

    return read


def host(figure: str, call: str, key: str) -> Callable[[Record], str]:
    """Return a reader of milliseconds from the benchmark of the CPU."""

    def read(record: Record) -> str:
        calls = row_of(record, figure=f"{figure} / PyTorch")["calls"]
        (found,) = (each for each in calls if each["call"] == call)
        return f"{found[key]:.3g}"

    return read


def lines_of_table() -> list[Line]:
    """Return the lines of the table."""
    torch, steps = "nvidia-h200/against_torch.json", "nvidia-h200/bench_training.json"
    cpu = "cpu-2-cores/bench_cpu.json"
    half = {"group": "dense", "dtype": "bfloat16", "head_dim": 128}
    bench = "project/measure.py against_torch"
    call, host_bench = "8 x 2048 x 64, causal", "project/measure.py bench_cpu"
    return [
        Line("H200: attention, bfloat16, forward", attention("forward", "flash3_wgmma", **half),
             attention("forward", "CUDNN", **half), "TFLOP/s", "PyTorch: cuDNN", torch, bench),
        Line("H200: attention, bfloat16, backward, `deterministic=False`",
             attention("backward", "flash3_wgmma", **half),
             attention("backward", "CUDNN", **half), "TFLOP/s", "PyTorch: cuDNN", torch, bench),
        Line("H200: attention, bfloat16, backward, deterministic",
             attention("backward", "flash3_wgmma, deterministic", **half),
             attention("backward", "CUDNN", **half), "TFLOP/s", "PyTorch: cuDNN", torch, bench),
        Line("H200: training GPT-2 small, bfloat16, compiled",
             training("compiled", "ours"), training("compiled", "PyTorch, compiled"), "k tokens/s",
             "PyTorch: `torch.compile`", steps, "project/measure.py bench_training"),
        Line("2 cores: attention, forward", host("attention forward", call, "ms"),
             host("attention forward", call, "their_ms"), "ms", "PyTorch", cpu, host_bench),
        Line("2 cores: a training step of `make train`", host("training step", "a step", "ms"),
             host("training step", "a step", "their_ms"), "ms", "PyTorch", cpu, host_bench),
    ]  # fmt: skip


def table() -> str:
    """Return the table as Markdown."""
    head = ["measurement", "this library", "compared with", "command (links to its record)"]
    rows = [f"| {' | '.join(head)} |", "|---|---:|---:|---|"]
    for line in lines_of_table():
        record = json.loads((ROOT / "docs" / "results" / line.record).read_text(encoding="utf-8"))
        link = f"[`{line.command}`](docs/results/{line.record})"
        ours, theirs = line.ours(record), line.theirs(record)
        beside = f"{theirs} {line.unit} ({line.other})"
        rows.append(f"| {line.what} | {ours} {line.unit} | {beside} | {link} |")
    return "\n".join(rows) + "\n"


def refreshed(text: str) -> str:
    """Return the text of README.md with today's table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"
