"""The table of figures in README.md, read from the records in docs/results.

    python docs/readme_table.py            prints the table
    python docs/readme_table.py --write    writes it into README.md

A test compares the table in README.md with what this makes of the records.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- python docs/readme_table.py --write -->\n", "<!-- end of the table -->"
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


def training(kind: str, name: str, **wanted: Any) -> Callable[[Record], str]:
    """Return a reader of thousands of tokens/s, or of GiB, from the benchmark of training."""

    def read(record: Record) -> str:
        row = row_of(record, kind=kind, preset="gpt2-small", context=1024, **wanted)
        if kind == "memory":
            return f"{row['peak_bytes'][name] / 2**30:.1f}"
        return f"{row['tokens_per_second'][name]['median'] / 1000:.3g}"

    return read


def memory(name: str) -> Callable[[Record], str]:
    """Return a reader of GiB from the experiment on memory."""
    return lambda record: f"{row_of(record, length=16384)[name]['training'] / 2**30:.1f}"


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
    single = {"group": "float32", "head_dim": 64}
    bench = "project/measure.py against_torch"
    train = "project/measure.py bench_training"
    found = [
        Line("H200: bfloat16 attention, forward", attention("forward", "flash3_wgmma", **half),
             attention("forward", "CUDNN", **half), "TFLOP/s", "PyTorch: cuDNN", torch, bench),
        Line("H200: bfloat16 attention, backward, deterministic",
             attention("backward", "flash3_wgmma, deterministic", **half),
             attention("backward", "CUDNN", **half), "TFLOP/s", "PyTorch: cuDNN", torch, bench),
        Line("H200: float32 attention, forward", attention("forward", "float32", **single),
             attention("forward", "EFFICIENT", **single), "TFLOP/s", "PyTorch: efficient", torch,
             bench),
        Line("H200: float32 attention, backward, `deterministic=False`",
             attention("backward", "float32", **single),
             attention("backward", "EFFICIENT", **single), "TFLOP/s", "PyTorch: efficient", torch,
             bench),
        Line("H200: training GPT-2 small, bfloat16", training("speed", "ours", precision="bfloat16"),
             training("speed", "PyTorch", precision="bfloat16"), "k tokens/s", "PyTorch: eager",
             steps, train),
        Line("H200: training GPT-2 small, bfloat16, compared with a compiled step",
             training("compiled", "ours"), training("compiled", "PyTorch, compiled"), "k tokens/s",
             "PyTorch: `torch.compile`", steps, train),
        Line("H200: training GPT-2 small, bfloat16, peak memory", training("memory", "ours"),
             training("memory", "PyTorch"), "GiB", "PyTorch: eager", steps, train),
        Line("H200: training GPT-2 small, float32", training("speed", "ours", precision="float32"),
             training("speed", "PyTorch", precision="float32"), "k tokens/s", "PyTorch: eager",
             steps, train),
        Line("H200: memory of float32 attention (`flash2`), forward and backward, N = 16,384",
             memory("flash2"), memory("naive"), "GiB", "this library's `naive`",
             "nvidia-h200/memory.json", "project/measure.py memory --device cuda"),
    ]  # fmt: skip
    for what, figure, call in (
        ("attention, 8 heads, N = 2,048, forward", "attention forward", "8 x 2048 x 64, causal"),
        ("attention, 8 heads, N = 2,048, backward", "attention backward", "8 x 2048 x 64, causal"),
        ("a training step of `make train`", "training step", "a step"),
        ("decoding one token, with 1,024 in the cache", "decode a token", "a token"),
    ):
        found.append(
            Line(f"2 cores: {what}", host(figure, call, "ms"), host(figure, call, "their_ms"),
                 "ms", "PyTorch", cpu, "project/measure.py bench_cpu")
        )  # fmt: skip
    return found


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


def table_in_readme() -> str:
    """Return the table that stands in README.md."""
    return README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Print the table, or write it."""
    if "--write" in sys.argv[1:]:
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"
        README.write_text(text, encoding="utf-8", newline="\n")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
