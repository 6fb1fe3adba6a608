"""Measure the records of docs/results again, each by the command that it names.

    python project/remake_records.py cpu-2-cores                        what there is, of which commit
    python project/remake_records.py cpu-2-cores peers options          measure these two again
    python project/remake_records.py nvidia-h200 all                    all that are of another commit
    python project/remake_records.py nvidia-h200 all --into nvidia-h100    the same on another device
    python project/remake_records.py nvidia-h200 all --gpus 0 1 --compile-first 300

Figures of one device can be compared when their records are from one commit.  A record names the
last commit that changed ``kernels`` or ``minitorch``; one of the present state is left alone, so that what
was interrupted goes on.  The old record stays if
its command breaks off or makes fewer rows.  Several GPUs measure side by side, one record each at a time.
On a fresh machine half of the time is spent on compiling kernels one by one: ``--compile-first`` runs all
commands at once for some seconds before, to fill the caches of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench.measuring import commit_of_library
from bench.table_cells import markdown
from common.command_line import FROM_ZERO, POSITIVE, OneLineParser
from common.one_by_one import run_one_by_one

ROOT = Path(__file__).resolve().parents[1]
RESULTS, BUILD = ROOT / "docs" / "results", ROOT / "build" / "records"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folders = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
    parser.add_argument("device", choices=folders, help="folder of the records")
    parser.add_argument("names", nargs="*", metavar="NAME", help="records to measure, or: all")
    parser.add_argument("--into", metavar="DEVICE", help="folder to write to (default: the same)")
    parser.add_argument(
        "--gpus", nargs="+", type=FROM_ZERO, metavar="N", help="(default: the first)"
    )
    parser.add_argument("--compile-first", type=POSITIVE, metavar="SECONDS", help="see above")
    args = parser.parse_args(argv)
    args.into = args.into or args.device
    found = records_of(args.device)
    if args.names == ["all"]:
        args.names = list(found)
    if unknown := sorted({*args.names} - {*found}):
        parser.error(f"{args.device} has no record {', '.join(unknown)}; it has {', '.join(found)}")
    return args


def records_of(device: str) -> dict[str, dict[str, Any]]:
    """Return the records of a device by name; those that name no command are none."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((RESULTS / device).glob("*.json"))
    }
    return {name: record for name, record in found.items() if "command" in record}


def commit_of(record: dict[str, Any]) -> str:
    """Return the commit that a record names; empty if it names none."""
    return str(record.get("versions", {}).get("commit", ""))


def command_of(record: dict[str, Any], file: Path, gpu: int | None = None) -> list[str] | str:
    """Return the command that measures a record into a file, on one GPU, or why there is none."""
    words = shlex.split(record["command"])
    if words.count("python") != 1 or words[0] != "python":
        return "not made by one command of one process"
    kept = words[1:]
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    place = [] if gpu is None else ["env", f"CUDA_VISIBLE_DEVICES={gpu}"]
    return [*place, sys.executable, *kept, "--json", str(file)]


def take(fresh: Path, file: Path, before: dict[str, Any]) -> str:
    """Put a fresh record in its place; return what became of it."""
    if not fresh.exists():
        return "no record"
    made = len(json.loads(fresh.read_text(encoding="utf-8")).get("rows", ()))
    wanted = len(before.get("rows", ()))
    if made < wanted:
        return f"{made} of {wanted} rows; kept the old ones, {fresh.relative_to(ROOT)} has these"
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(fresh, file)
    return "new"


def compile_all(
    records: list[dict[str, Any]], gpus: list[int] | list[None], seconds: float
) -> None:
    """Run the commands of records at once, at most for so long, and throw away what they measure."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        places = zip(records, cycle(gpus), strict=False)
        commands = [
            command_of(record, Path(folder) / f"{i}.json", gpu)
            for i, (record, gpu) in enumerate(places)
        ]
        running = [
            subprocess.Popen(command, stdout=nowhere, stderr=nowhere, start_new_session=True)
            for command in commands
            if not isinstance(command, str)
        ]
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until and any(each.poll() is None for each in running):
                time.sleep(0.1)
        finally:
            for each in running:
                with suppress(ProcessLookupError):  # with the processes that it started
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def measure(
    args: argparse.Namespace, name: str, record: dict[str, Any], gpu: int | None
) -> tuple[list[str], int]:
    """Measure a record again; return a line of the table, and the exit code."""
    fresh = BUILD / args.into / f"{name}.json"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    (line,), code = run_one_by_one({name: command_of(record, fresh, gpu)})
    became = take(fresh, RESULTS / args.into / f"{name}.json", record)
    return [name, f"{line[1]}; {became}", line[2]], code


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    found, current = records_of(args.device), commit_of_library()
    made = records_of(args.into)
    if not args.names:
        lines = [
            [name, each["date"], commit_of(each), each["command"]] for name, each in found.items()
        ]
        print(markdown(["record", "date", "commit", "command"], lines))
        return 0
    done = [name for name in args.names if current and commit_of(made.get(name, {})) == current]
    todo = [name for name in args.names if name not in done]
    gpus = args.gpus or [None]
    if args.compile_first:
        compile_all([found[name] for name in todo], gpus, args.compile_first)
    free: SimpleQueue[int | None] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def on_a_free_one(name: str) -> tuple[list[str], int]:
        gpu = free.get()
        try:
            return measure(args, name, found[name], gpu)
        finally:
            free.put(gpu)

    pool, interrupted = ThreadPoolExecutor(len(gpus)), False
    results = [pool.submit(on_a_free_one, name) for name in todo]
    try:
        pool.shutdown()
    except KeyboardInterrupt:  # the commands that run got it, too
        interrupted = True
        pool.shutdown(cancel_futures=True)
    ended = [each.result() for each in results if not each.cancelled()]
    lines = [[name, f"is of {current} already", "–"] for name in done] + [line for line, _ in ended]
    print(f"\n{markdown(['record', '', 'seconds'], lines)}")
    return 130 if interrupted else next((code for _, code in ended if code), 0)


if __name__ == "__main__":
    raise SystemExit(main())
