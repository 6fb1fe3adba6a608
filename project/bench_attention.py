"""Time and memory of naive against flash attention, forward and backward, by length.

    python project/bench_attention.py                       lengths 256 to 8192 on the CPU
    python project/bench_attention.py --device cuda         the ladder of kernels, 128 to 16384, on a GPU
    python project/bench_attention.py --lengths 512 2048 --causal --json out.json

Timings are medians of interleaved rounds, each of which calls every contestant once: from the call until
the result is there.  Memory is what one forward and backward pass adds to the peak: of a fresh process on
the CPU, of the pool that device memory comes from on a GPU.  A contestant that would take longer than
--limit for one pass, or for which there is too little memory, is left out from there on.
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
from contestants import Contestant, contestants, random_arrays
from tqdm import tqdm

from kernels.formulas import attention_backward_flops, attention_flops
from kernels.targets import device_name, why_no_cuda

MEGABYTE = 1024 * 1024
#: Batch, heads and lengths by device.
DEFAULTS = {
    "cpu": (1, 4, [256, 512, 1024, 2048, 4096, 8192]),
    "cuda": (4, 16, [128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
}
Row = dict[str, Any]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=sorted(DEFAULTS), default="cpu", help="(default: %(default)s)")
    add("--lengths", type=int, nargs="+", metavar="N", help="of queries and keys")
    add("--batch", type=int, help="(default: 1 on the CPU, 4 on a GPU)")
    add("--heads", type=int, help="(default: 4 on the CPU, 16 on a GPU)")
    add("--head-dim", type=int, default=64, help="(default: %(default)s)")
    add("--causal", action="store_true", help="mask what comes later")
    add("--seconds", type=float, default=4.0, help="to spend on each length (default: %(default)s)")
    add("--limit", type=float, default=20.0, help="seconds of one pass (default: %(default)s)")
    add("--only", nargs="+", metavar="NAME", help="contestants to run, by their names in the table")
    add("--json", metavar="FILE", help="also write the rows there")
    add("--measure-memory", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    batch, heads, lengths = DEFAULTS[args.device]
    args.batch, args.heads = args.batch or batch, args.heads or heads
    args.lengths = args.lengths or lengths
    return args


def shape_of(args: argparse.Namespace, length: int) -> tuple[int, int, int]:
    """Return (batch * heads, length, head_dim): a batch and its heads are alike to attention."""
    return args.batch * args.heads, length, args.head_dim


def one_pass(contestant: Contestant, operands: list[Any]) -> tuple[float, float]:
    """Run forward and backward once; return the seconds of each."""
    contestant.wait()
    start = time.perf_counter()
    out = contestant.forward(*operands)
    contestant.wait()
    middle = time.perf_counter()
    contestant.backward(out, operands)
    contestant.wait()
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
    contestant = contestants(args.device, args.causal)[args.measure_memory]
    # The kernels are loaded before.
    one_pass(contestant, contestant.operands(random_arrays(shape_of(args, 64))))
    operands = contestant.operands(random_arrays(shape_of(args, args.lengths[0])))
    before = peak_memory()
    one_pass(contestant, operands)
    print(peak_memory() - before)


def memory_of(
    name: str, contestant: Contestant, operands: list[Any], args: argparse.Namespace, length: int
) -> float | None:
    """Return the megabytes that one pass takes, or None if it ran out of memory."""
    if args.device == "cuda":
        before = contestant.start_peak()
        one_pass(contestant, operands)
        return (contestant.peak() - before) / MEGABYTE
    command = [
        sys.executable, __file__, "--measure-memory", name, "--lengths", str(length), "--batch",
        str(args.batch), "--heads", str(args.heads), "--head-dim", str(args.head_dim),
        *(["--causal"] if args.causal else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) / MEGABYTE if done.returncode == 0 else None


def out_of_memory(error: Exception) -> bool:
    """Tell whether an error, ours or PyTorch's, means that memory has run out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def leave_out(name: str, *places: Row) -> None:
    """Forget a contestant."""
    for place in places:
        place.pop(name, None)


def measure(
    running: dict[str, Contestant], args: argparse.Namespace, length: int, expected: Row
) -> Row:
    """Return the row of one length; take out of ``running`` what cannot run any longer.

    Args:
        running: The contestants by name.
        args: The command line.
        length: Of queries and keys.
        expected: Seconds of a pass at this length by name, as far as they can be foreseen.
    """
    arrays = random_arrays(shape_of(args, length))
    operands: dict[str, list[Any]] = {}
    row: Row = {"length": length}
    for name, contestant in list(running.items()):
        if expected.get(name, 0.0) > args.limit:
            running.pop(name)
            continue
        try:
            operands[name] = contestant.operands(arrays)
            one_pass(contestant, operands[name])  # warm-up: compilation, page faults
            row[name] = {"peak_mb": memory_of(name, contestant, operands[name], args, length)}
        except Exception as error:
            if not out_of_memory(error):
                raise
            leave_out(name, running, row, operands)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    start = time.perf_counter()
    rounds = 0
    while running and (rounds < 3 or time.perf_counter() - start < args.seconds):
        rounds += 1
        for name, contestant in list(running.items()):
            try:
                seconds[name].append(one_pass(contestant, operands[name]))
            except Exception as error:  # noqa: PERF203 - who runs out of memory leaves
                if not out_of_memory(error):
                    raise
                leave_out(name, running, row, seconds, operands)
        if time.perf_counter() - start > 3 * args.limit:
            break
    shape = (args.batch * args.heads, length, length, args.head_dim)
    flops = attention_flops(*shape, causal=args.causal)
    backward_flops = attention_backward_flops(*shape, causal=args.causal)
    for name, times in seconds.items():
        forward, backward = (median(place) for place in zip(*times, strict=True))
        row[name] |= {
            "rounds": len(times),
            "forward_ms": 1e3 * forward,
            "backward_ms": 1e3 * backward,
            "forward_tflops": flops / forward / 1e12,
            "backward_tflops": backward_flops / backward / 1e12,
        }
        pairs = list(zip(times, seconds[last_of(running)], strict=False))
        for place, direction in enumerate(("forward", "backward")):
            row[name][f"{direction}_ratio"] = median(a[place] / b[place] for a, b in pairs)
    return row


def last_of(names: Any) -> str:
    """Return the contestant that the others are compared with."""
    return list(names)[-1]


def table(title: str, rows: list[Row], names: list[str], cell: Any) -> str:
    """Return one quantity of all contestants as a Markdown table, a line for each length."""
    lines = [f"| {title} | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
    for row in rows:
        cells = [cell(row[name]) if name in row else "–" for name in names]
        lines.append(f"| {row['length']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(rows: list[Row], names: list[str]) -> str:
    """Return the three tables: forward, backward, memory."""
    last = last_of(names)

    def timing(direction: str) -> Any:
        def cell(entry: Row) -> str:
            ratio = entry[f"{direction}_ratio"]
            beside = "" if ratio == 1.0 else f", {ratio:.1f} ×"
            return f"{entry[f'{direction}_ms']:.3g}{beside}"

        return cell

    def megabytes(entry: Row) -> str:
        return "–" if entry["peak_mb"] is None else f"{entry['peak_mb']:.0f}"

    shown = [
        table(f"{direction} ms, × of {last}", rows, names, timing(direction))
        for direction in ("forward", "backward")
    ]
    return "\n\n".join([*shown, table("peak MB", rows, names, megabytes)])


def processor() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    loaded = ("numpy", "numba", "numba_cuda", "torch")
    found = {name: sys.modules[name].__version__ for name in loaded if name in sys.modules}
    return {"python": platform.python_version(), **found}


def write_record(path: str, command: str, device: str, **figures: Any) -> None:
    """Write what has been measured so far, with what it depends on."""
    record = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "cores": os.cpu_count(),
        "threads": numba.get_num_threads(),
        "versions": versions(),
        **figures,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def write(args: argparse.Namespace, argv: list[str], device: str, rows: list[Row]) -> None:
    """Write the rows of the lengths that are done."""
    shape = {name: getattr(args, name) for name in ("batch", "heads", "head_dim", "causal")}
    command = "python project/bench_attention.py " + " ".join(argv)
    write_record(args.json, command, device, **shape, rows=rows)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.measure_memory:
        return measure_memory(args)
    if args.device == "cuda" and (missing := why_no_cuda()) is not None:
        sys.exit(missing)
    running = contestants(args.device, args.causal)
    if unknown := set(args.only or []) - set(running):
        sys.exit(f"no contestant {sorted(unknown)}; there are {list(running)}")
    running = {name: one for name, one in running.items() if name in (args.only or running)}
    names = list(running)
    device = processor() if args.device == "cpu" else device_name()
    rows: list[Row] = []
    expected: Row = {}
    try:
        for place, length in enumerate(tqdm(args.lengths, unit="length")):
            rows.append(measure(running, args, length, expected))
            if args.json:  # at once: the next length may take long
                write(args, argv, device, rows)
            longer = args.lengths[(place + 1) % len(args.lengths)] / length
            expected = {
                name: longer**2 * (row["forward_ms"] + row["backward_ms"]) / 1e3
                for name, row in rows[-1].items()
                if name in running
            }
    except KeyboardInterrupt:
        print("interrupted: these lengths are done", file=sys.stderr)
    print(
        f"{device}, {numba.get_num_threads()} threads; batch {args.batch}, {args.heads} heads, "
        f"head_dim {args.head_dim}, float32, {'causal' if args.causal else 'full'}\n"
    )
    print(tables(rows, names))


if __name__ == "__main__":
    main()
