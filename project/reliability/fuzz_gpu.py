"""Draw thousands of calls of attention on a GPU, and write what became of them.

Several processes draw side by side (``tests/support/fuzzing/on_gpu.py``), because most of the time goes
into compiling.  It needs PyTorch and CuPy, whose arrays the calls take beside numba's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Case, Figure, Measurement, Run
from bench.records import ROOT, Record

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
            command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True, env=os.environ | threads
        )  # fmt: skip


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(draw_for, run)


def draw_for(run: Run) -> None:
    seed, begin = run.seed or int(time.time()) % 2**31, time.perf_counter()
    kinds: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(job) for job in range(run.jobs or os.cpu_count() or 1)]
        seconds = 60 * run.minutes
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
    run.note(
        cases=sum(total.values()), minutes=round((time.perf_counter() - begin) / 60, 1),
        outcomes=dict(total), kinds=len(kinds),
        right_by={name: dict(sorted(counter.items())) for name, counter in by.items()},
        failures=len(failures), which_failed=[failure[:1500] for failure in failures],
    )  # fmt: skip
    for failure in failures:
        print(f"\n{failure[:1500]}")


def figures(record: Record) -> list[Figure]:
    right = record["outcomes"].get("right", 0)
    return [
        Figure("failures", record["failures"], 0, is_most=True),
        Figure("right results", right, 1),
    ]


MEASUREMENT = Measurement(
    "fuzz_gpu", "Is attention on a GPU right for random rungs, dtypes, options and layouts?",
    cases,
    {"cuda": {"normal": {"minutes": 8.0, "seed": 0, "jobs": 0}, "quick": {"minutes": 0.5}}},
    figures=figures, minutes={"cuda": 8}, paths=("kernels", "tests/support/fuzzing"), folder="reliability",
)  # fmt: skip
