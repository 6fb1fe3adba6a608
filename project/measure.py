"""List the measurements, run them, and say which records are older than the code that they measured.

    python project/measure.py                          what each answers, how long it takes, its records
    python project/measure.py --stale                  those with records that are older than the code
    python project/measure.py sparsity --help          its settings
    python project/measure.py sparsity --quick         one of them in small, within seconds
    python project/measure.py peers calls --publish    some of them, into docs/results
    python project/measure.py figures                  those that draw a figure
    python project/measure.py all --device cuda --gpus 0 1 --publish      all, on two GPUs side by side

One measurement runs in this process, and its settings are options; several run in processes of their own,
one at a time on the CPU and on each GPU.  "all" are those that the device can measure but for the long
checks of ``project/reliability``, which are named.  A failure does not keep the others from running; Ctrl-C
stops after the running one, whose rows are kept.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench import harness, plots, records
from bench.harness import Measurement
from bench.table_cells import markdown
from common.command_line import FROM_ZERO, OneLineParser

from kernels.runtime.targets import why_no_cuda


def stale(measurement: Measurement, name: str) -> dict[str, int | None]:
    """Return by device how many commits have changed the measured code since the published record."""
    return {
        result.folder: records.commits_since(result.record, measurement.paths)
        for result in plots.stored(name)
    }


def listing(found: dict[str, Measurement], only_stale: bool) -> str:
    """Return a table of the measurements: questions, minutes, and the age of their records in commits."""
    lines = []
    for name, one in found.items():
        minutes = ", ".join(f"{one.minutes.get(device, 1):g} ({device})" for device in one.devices)
        ages = {folder: age for folder, age in stale(one, name).items() if age or not only_stale}
        told = (
            f"{folder}: {'unknown' if age is None else f'{age} commits old' if age else 'up to date'}"
            for folder, age in ages.items()
        )
        if ages or not only_stale:
            lines.append([name, one.answers, minutes, "; ".join(told) or "no record"])
    return markdown(["measurement", "question", "minutes", "records"], lines)


def run_several(names: list[str], handed: list[str], gpus: list[int] | list[None]) -> int:
    """Run measurements in processes of their own, one at a time on each GPU."""
    free: SimpleQueue[int | None] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def one(name: str) -> list[Any]:
        gpu, start = free.get(), time.perf_counter()
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        print(f"\n## {name}\n", flush=True)
        try:
            command = [sys.executable, str(Path(__file__).resolve()), name, *handed]
            code = subprocess.call(command, env=os.environ | chosen)
        finally:
            free.put(gpu)
        return [name, code, f"{time.perf_counter() - start:.0f}"]

    pool, interrupted = ThreadPoolExecutor(len(gpus)), False
    running = [pool.submit(one, name) for name in names]
    try:
        pool.shutdown()
    except KeyboardInterrupt:  # the measurements that run got it, too
        interrupted = True
        pool.shutdown(cancel_futures=True)
    ended = [each.result() for each in running if not each.cancelled()]
    how = {0: "done", 130: "interrupted"}
    lines = [[n, how.get(code, f"failed with exit code {code}"), s] for n, code, s in ended]
    print(f"\n{markdown(['measurement', '', 'seconds'], lines)}")
    return 130 if interrupted else next((code for _, code, _ in ended if code), 0)


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    known = harness.load_all()
    if len(names) == 1 and names[0] not in GROUPS:
        if names[0] not in known:
            sys.exit(f"there is no measurement {names[0]!r}; there are {', '.join(known)}")
        one = known[names[0]]
        own = [] if names[0] == one.name else ["--record", names[0]]
        return harness.run(one, [*own, *argv[1:]])
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", choices=[*known, *GROUPS, []],
        help="measurements, or: all, figures (default: list them)")  # fmt: skip
    add("--stale", action="store_true", help="only those with records older than the code")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one, else cpu)")
    add("--gpus", nargs="+", type=FROM_ZERO, metavar="N", help="(default: the first)")
    for name in HANDED:
        add(f"--{name}", action="store_true", help="see python project/measure.py NAME --help")
    args = parser.parse_args(argv)
    if not args.names:
        print(listing(known, args.stale))
        return 0
    device = args.device or ("cpu" if why_no_cuda() else "cuda")
    chosen = [
        name for name, one in known.items()
        if device in one.devices
        and (name in args.names or any(fits(one) for group, fits in GROUPS.items() if group in args.names))
        and (not args.stale or any(age != 0 for age in stale(one, name).values()))
    ]  # fmt: skip
    options = ["--device", device, *(f"--{name}" for name in HANDED if getattr(args, name))]
    return run_several(chosen, options, args.gpus or [None])


def takes_part(one: Measurement) -> bool:
    """Tell whether a measurement is one of all: checks, trainings and what judges a model are named."""
    return one.folder is None and not {"runs", "folder"} & {*one.settings[one.devices[0]]["normal"]}


HANDED = ("quick", "publish", "resume", "redraw")
GROUPS: dict[str, Callable[[Measurement], bool]] = {
    "all": takes_part, "figures": lambda one: takes_part(one) and bool(one.caption)
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
