"""Draw thousands of calls of attention on a GPU, and write what became of them.

    python project/reliability/fuzz_gpu.py --minutes 8

Several processes draw side by side (``tests/support/fuzzing/on_gpu.py``), for most of the time goes into
compiling.  It
needs a GPU, PyTorch and CuPy, whose arrays the calls take beside numba's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
from bench import measuring  # noqa: E402
from common.command_line import COUNT, FROM_ZERO, POSITIVE, OneLineParser  # noqa: E402

from kernels.runtime.targets import why_no_cuda  # noqa: E402

ROOT = PROJECT.parent
RECORD = ROOT / "docs" / "results" / "reliability" / "fuzz_gpu.json"
#: Seconds that a process may take beyond its time, to end the kind of call that it is at.
GRACE = 20.0


def drawn_by(seed: int, seconds: float, output: Path) -> subprocess.Popen[str]:
    """Start a process that draws for a while, a line of JSON in ``output`` for each kind of call."""
    command = [
        sys.executable, "-m", "tests.support.fuzzing.on_gpu",
        "--seed", str(seed), "--seconds", str(seconds),
    ]  # fmt: skip
    # The processes share the machine: one thread each.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    with open(output, "w") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | threads,
        )


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.option("--minutes", POSITIVE, 8.0, "to draw for")
    parser.option("--seed", FROM_ZERO, 0, "of the first process; 0 takes one from the clock")
    parser.option("--jobs", COUNT, os.cpu_count() or 1, "processes")
    parser.add_argument("--json", default=str(RECORD), help="the record (default: %(default)s)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if (reason := why_no_cuda()) is not None:
        raise SystemExit(f"these draws need a GPU: {reason}")
    seed, begin = args.seed or int(time.time()) % 2**31, time.perf_counter()
    kinds: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(job) for job in range(args.jobs)]
        seconds = 60 * args.minutes
        jobs = [drawn_by(seed + i, seconds, output) for i, output in enumerate(outputs)]
        for job, output in zip(jobs, outputs, strict=True):
            try:
                left = begin + seconds + GRACE - time.perf_counter()
                _, errors = job.communicate(timeout=max(left, 1.0))
                if job.returncode:
                    failures.append(f"a process ended with {job.returncode}: {errors[-2000:]}")
            except subprocess.TimeoutExpired:  # within a kind, whose calls do not count then
                job.kill()
                job.communicate()
            lines = output.read_text().splitlines(keepends=True)
            kinds += [json.loads(line) for line in lines if line.endswith("\n")]
    failures += [kind["failure"] for kind in kinds if kind["failure"]]
    total: Counter[str] = Counter()
    names = ("entry", "rung", "dtype", "dim", "extreme")
    by: dict[str, Counter[str]] = {name: Counter() for name in names}
    for kind in kinds:
        total.update(kind["counts"])
        for name, counter in by.items():
            counter[str(kind["kind"][name])] += kind["counts"].get("right", 0)
    measuring.write_record(
        args.json,
        measuring.command_line("project/reliability/fuzz_gpu.py", argv),
        measuring.name_of("cuda"),
        cases=sum(total.values()),
        minutes=round((time.perf_counter() - begin) / 60, 1),
        outcomes=dict(total),
        kinds=len(kinds),
        right_by={name: dict(sorted(counter.items())) for name, counter in by.items()},
        failures=len(failures),
        which_failed=[failure[:1500] for failure in failures],
    )
    print(f"{dict(total)} of {len(kinds)} kinds, {len(failures)} failures")
    for failure in failures:
        print(f"\n{failure[:1500]}")
    return int(bool(failures) or not total["right"])


if __name__ == "__main__":
    raise SystemExit(main())
