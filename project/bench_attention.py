"""Time and memory of naive against flash attention, forward and backward, by length.

    python project/bench_attention.py                       lengths 256 to 8192 on the CPU
    python project/bench_attention.py --device cuda         the ladder of kernels, 128 to 16384, on a GPU
    python project/bench_attention.py --lengths 512 2048 --causal --json out.json
    python project/bench_attention.py --device cuda --against torch       tensor cores beside PyTorch's

Timings are medians of interleaved rounds, each of which calls every contestant once; see ``measuring``.
Memory is what one forward and backward pass adds to the peak: of a fresh process on
the CPU, of the pool that device memory comes from on a GPU.  A contestant that would take longer than
--limit for one pass, or for which there is too little memory, is left out from there on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from typing import Any

import numba
from bench import against_torch
from bench.contestants import Bound, Contestant, contestants, random_arrays
from bench.measuring import (
    command_line,
    interleaved,
    name_of,
    out_of_memory,
    peak_memory,
    ratio,
    timing_note,
    wait,
    write_record,
)
from common.command_line import COUNT, POSITIVE
from tqdm import tqdm

from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.runtime.targets import why_no_cuda
from kernels.traffic.formulas import attention_backward_flops, attention_flops

DIRECTIONS = ("forward", "backward")
MEBIBYTE = 1024 * 1024
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
    add("--lengths", type=COUNT, nargs="+", metavar="N", help="of queries and keys")
    add("--batch", type=COUNT, help="(default: 1 on the CPU, 4 on a GPU)")
    add("--heads", type=COUNT, help="(default: 4 on the CPU, 16 on a GPU)")
    add("--head-dim", type=COUNT, default=64, help="(default: %(default)s)")
    add("--causal", action="store_true", help="mask what comes later")
    add(
        "--seconds",
        type=POSITIVE,
        default=4.0,
        help="to spend on each length (default: %(default)s)",
    )
    add("--limit", type=POSITIVE, default=20.0, help="seconds of one pass (default: %(default)s)")
    add("--only", nargs="+", metavar="NAME", help="contestants to run, by their names in the table")
    add("--json", metavar="FILE", help="also write the rows there")
    add("--measure-memory", metavar="NAME", help=argparse.SUPPRESS)
    against_torch.options(parser.add_argument_group("against PyTorch's backends"))
    args = parser.parse_args(argv)
    if args.against and args.device != "cuda":
        parser.error("--against torch compares the kernels of a GPU; add --device cuda")
    if args.head_dim > MAX_HEAD_DIM:
        parser.error(
            f"--head-dim must be at most {MAX_HEAD_DIM}, got {args.head_dim}; take more heads"
        )
    batch, heads, lengths = against_torch.DEFAULTS if args.against else DEFAULTS[args.device]
    args.batch, args.heads = args.batch or batch, args.heads or heads
    args.lengths = args.lengths or lengths
    return args


def shape_of(args: argparse.Namespace, length: int) -> tuple[int, int, int]:
    """Return (batch * heads, length, head_dim): a batch and its heads are alike to attention."""
    return args.batch * args.heads, length, args.head_dim


def one_pass(bound: Bound, device: str) -> None:
    """Run forward and backward once, and wait for the result."""
    bound.forward()
    bound.backward()
    bound.clear()
    wait(device)


def measure_memory(args: argparse.Namespace) -> None:
    """In a process of its own: print by how many bytes one pass raises the peak."""
    if peak_memory() == 0:
        sys.exit("the peak memory of a process is known on Linux only")
    contestant = contestants(args.device, args.causal)[args.measure_memory]
    # The kernels are loaded before.
    one_pass(Bound(contestant, random_arrays(shape_of(args, 64))), args.device)
    bound = Bound(contestant, random_arrays(shape_of(args, args.lengths[0])))
    before = peak_memory()
    one_pass(bound, args.device)
    print(peak_memory() - before)


def memory_of(name: str, bound: Bound, args: argparse.Namespace, length: int) -> float | None:
    """Return the MiB that one pass takes, forward and backward, or None if it ran out of memory."""
    if args.device == "cuda":
        before = bound.contestant.start_peak()
        one_pass(bound, args.device)
        return (bound.contestant.peak() - before) / MEBIBYTE
    command = [
        sys.executable, __file__, "--measure-memory", name, "--lengths", str(length), "--batch",
        str(args.batch), "--heads", str(args.heads), "--head-dim", str(args.head_dim),
        *(["--causal"] if args.causal else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) / MEBIBYTE if done.returncode == 0 else None


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
    bounds: dict[str, Bound] = {}
    row: Row = {"length": length}
    for name, contestant in list(running.items()):
        if expected.get(name, 0.0) > args.limit:
            running.pop(name)
            continue
        try:
            bounds[name] = Bound(contestant, arrays)
            one_pass(bounds[name], args.device)  # warm-up: compilation, page faults
            row[name] = {"peak_mb": memory_of(name, bounds[name], args, length)}
        except Exception as error:
            if not out_of_memory(error):
                raise
            leave_out(name, running, row, bounds)
    steps = {
        (name, direction): getattr(bound, direction)
        for name, bound in bounds.items()
        for direction in DIRECTIONS
    }
    times = interleaved(
        steps, args.device, args.seconds, at_most_seconds=3 * args.limit, warm_up=False,
        after={(name, "backward"): bound.release for name, bound in bounds.items()},
    )  # fmt: skip
    shape = (args.batch * args.heads, length, length, args.head_dim)
    flops = {
        "forward": attention_flops(*shape, causal=args.causal),
        "backward": attention_backward_flops(*shape, causal=args.causal),
    }
    for name, direction in steps:
        seconds = times[name, direction]
        row[name] |= {
            "rounds": len(seconds),
            f"{direction}_ms": 1e3 * median(seconds),
            f"{direction}_tflops": flops[direction] / median(seconds) / 1e12,
            f"{direction}_ratio": ratio(seconds, times[last_of(running), direction])["median"],
        }
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

    def mebibytes(entry: Row) -> str:
        return "–" if entry["peak_mb"] is None else f"{entry['peak_mb']:.0f}"

    shown = [
        table(f"{direction} ms, × of {last}", rows, names, timing(direction))
        for direction in ("forward", "backward")
    ]
    return "\n\n".join([*shown, table("peak MiB", rows, names, mebibytes)])


def write(args: argparse.Namespace, argv: list[str], device: str, rows: list[Row]) -> None:
    """Write the rows of the lengths that are done."""
    shape = {name: getattr(args, name) for name in ("batch", "heads", "head_dim", "causal")}
    command = command_line("project/bench_attention.py", argv)
    write_record(args.json, command, device, timing=timing_note(args.device), **shape, rows=rows)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.measure_memory:
        return measure_memory(args)
    if args.device == "cuda" and (missing := why_no_cuda()) is not None:
        sys.exit(missing)
    if args.against:
        sys.exit(against_torch.run(args, argv))
    running = contestants(args.device, args.causal)
    if unknown := set(args.only or []) - set(running):
        sys.exit(f"no contestant {sorted(unknown)}; there are {list(running)}")
    running = {name: one for name, one in running.items() if name in (args.only or running)}
    names = list(running)
    device = name_of(args.device)
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
