"""Time and memory of naive against flash attention, forward and backward, by length.

    python project/bench_attention.py                       lengths 256 to 8192 on the CPU
    python project/bench_attention.py --lengths 512 2048 --causal --json out.json

Timings are medians of interleaved pairs: one naive call, one flash call, and again.  Memory is what the
peak of a fresh process grows by during one forward and backward pass.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
from tqdm import tqdm

import minitorch
from kernels.formulas import attention_backward_flops, attention_flops
from minitorch import Tensor

ATTENTION = {"naive": minitorch.naive_attention, "flash": Tensor.flash_attention}
MEGABYTE = 1024 * 1024


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192], metavar="N")
    add("--batch", type=int, default=1, help="(default: %(default)s)")
    add("--heads", type=int, default=4, help="(default: %(default)s)")
    add("--head-dim", type=int, default=64, help="(default: %(default)s)")
    add("--causal", action="store_true", help="mask what comes later")
    add("--seconds", type=float, default=4.0, help="to spend on each length (default: %(default)s)")
    add("--json", metavar="FILE", help="also write the rows there")
    add("--measure-memory", choices=sorted(ATTENTION), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def operands(args: argparse.Namespace, length: int) -> list[Tensor]:
    rng = np.random.default_rng(0)
    shape = (args.batch, args.heads, length, args.head_dim)
    return [
        minitorch.from_numpy(rng.standard_normal(shape, dtype=np.float32), requires_grad=True)
        for _ in range(3)
    ]


def one_pass(name: str, tensors: list[Tensor], causal: bool) -> tuple[float, float]:
    """Run forward and backward once; return the seconds of each."""
    for t in tensors:
        t.zero_grad_()
    start = time.perf_counter()
    out = ATTENTION[name](*tensors, is_causal=causal)
    middle = time.perf_counter()
    out.backward(out.detach())
    return middle - start, time.perf_counter() - middle


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 where there is no such figure."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    # Not getrusage: its peak is inherited from the process that started this one.
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def measure_memory(args: argparse.Namespace) -> None:
    """In a process of its own: print by how many bytes one pass raises the peak."""
    if peak_memory() == 0:
        sys.exit("the peak memory of a process is known on Linux only")
    one_pass(args.measure_memory, operands(args, 64), args.causal)  # load the kernels
    tensors = operands(args, args.lengths[0])
    before = peak_memory()
    one_pass(args.measure_memory, tensors, args.causal)
    print(peak_memory() - before)


def memory_of(name: str, args: argparse.Namespace, length: int) -> float | None:
    """Return the megabytes that one pass takes, or None if it ran out of memory."""
    command = [
        sys.executable, __file__, "--measure-memory", name, "--lengths", str(length), "--batch",
        str(args.batch), "--heads", str(args.heads), "--head-dim", str(args.head_dim),
        *(["--causal"] if args.causal else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) / MEGABYTE if done.returncode == 0 else None


def measure(args: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the row of one length."""
    tensors = operands(args, length)
    names = list(ATTENTION)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        for name in names:
            one_pass(name, tensors, args.causal)  # warm-up: compilation, page faults
        start = time.perf_counter()
        while time.perf_counter() - start < args.seconds or len(seconds["flash"]) < 3:
            for name in names:
                seconds[name].append(one_pass(name, tensors, args.causal))
    except MemoryError:
        names = ["flash"]
        seconds = {"flash": [one_pass("flash", tensors, args.causal) for _ in range(4)][1:]}
    shape = (args.batch * args.heads, length, length, args.head_dim)
    row: dict[str, Any] = {"length": length, "pairs": len(seconds["flash"])}
    for name in names:
        row[f"{name}_forward_ms"] = 1e3 * median(forward for forward, _ in seconds[name])
        row[f"{name}_backward_ms"] = 1e3 * median(backward for _, backward in seconds[name])
    for name in ATTENTION:
        row[f"{name}_peak_mb"] = memory_of(name, args, length)
    row["flash_forward_gflops"] = (
        attention_flops(*shape, causal=args.causal) / row["flash_forward_ms"] / 1e6
    )
    row["flash_backward_gflops"] = (
        attention_backward_flops(*shape, causal=args.causal) / row["flash_backward_ms"] / 1e6
    )
    for direction in ("forward", "backward"):
        if "naive" in names:
            place = 0 if direction == "forward" else 1
            row[f"{direction}_speedup"] = median(
                n[place] / f[place] for n, f in zip(seconds["naive"], seconds["flash"], strict=True)
            )
    return row


def cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "–" if value is None else format(value, form)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| length | naive forward ms | flash forward ms | × | naive backward ms | flash backward ms "
        "| × | naive peak MB | flash peak MB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            str(row["length"]),
            cell(row, "naive_forward_ms", ".1f"), cell(row, "flash_forward_ms", ".1f"),
            cell(row, "forward_speedup", ".1f"),
            cell(row, "naive_backward_ms", ".1f"), cell(row, "flash_backward_ms", ".1f"),
            cell(row, "backward_speedup", ".1f"),
            cell(row, "naive_peak_mb", ".0f"), cell(row, "flash_peak_mb", ".0f"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def processor() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.measure_memory:
        return measure_memory(args)
    rows = []
    try:
        for length in tqdm(args.lengths, unit="length", disable=not sys.stderr.isatty()):
            rows.append(measure(args, length))  # noqa: PERF401 - an interrupt keeps what is done
    except KeyboardInterrupt:
        print("interrupted: these lengths are done", file=sys.stderr)
    print(
        f"{processor()}, {numba.get_num_threads()} threads; batch {args.batch}, {args.heads} heads, "
        f"head_dim {args.head_dim}, float32, {'causal' if args.causal else 'full'}\n"
    )
    print(table(rows))
    if args.json:
        record = {
            "command": "python project/bench_attention.py " + " ".join(argv or sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "device": processor(),
            "cores": os.cpu_count(),
            "threads": numba.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "numba": numba.__version__,
            },
            "batch": args.batch,
            "heads": args.heads,
            "head_dim": args.head_dim,
            "causal": args.causal,
            "rows": rows,
        }
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
