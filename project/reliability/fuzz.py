"""Minutes of drawn calls: nonsense that must be refused or right, and every combination of options.

Batches run in children, each from a seed of its own, until the time is up; the parts run side by side.

nonsense    tests/reliability/test_fuzz.py: odd memory, odd numbers, odd values of every option; a call is
            refused with a message that helps or gives what the textbook gives in float64, and changes
            nothing; operands and results lie between canaries.  Any public function called with anything
            fails only by a check of ours.
bounds      the same with NUMBA_BOUNDSCHECK=1 and a folder of compiled code of its own.
options     the tests marked fuzz: valid combinations of options, on every host rung, against the textbook.
extreme     tests/reliability/test_extreme.py: scores up to 10¹², and masks of the largest float, through
            every entrance.
sanitizer   tensor cores with every option under compute-sanitizer's memcheck: only on a machine with a GPU.

A child that dies is a failure: the draw that was under way is printed, and where Python was then.

``fuzz_gpu`` draws on a GPU in several processes (``tests/support/fuzzing/on_gpu.py``), because most of the
time goes into compiling; it needs PyTorch and CuPy, whose arrays the calls take beside numba's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from bench.kit import ROOT, Figure, Measurement, Record, Run
from bench.processes import run_for

from kernels.runtime.targets import why_no_cuda

#: Code that was compiled with bounds checking must not meet the other, which has the same name.
BOUNDS_CACHE = ROOT / "build" / "numba-boundscheck"
NONSENSE, EXTREME = "tests/reliability/test_fuzz.py", "tests/reliability/test_extreme.py"
#: Part → its tests, and what its children have in their environment.
PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "nonsense": ([NONSENSE], {}),
    "bounds": ([NONSENSE], {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(BOUNDS_CACHE)}),
    "options": (["-m", "fuzz", "tests/kernels/test_attention.py",
                 "tests/minitorch/functions/test_flash_attention.py"], {}),
    # Of long rows, some of them on the emulated GPU.
    "extreme": (["-m", "fuzz", EXTREME], {"MINITORCH_EXAMPLES": "100", "MINITORCH_EMULATE": "1"}),
}  # fmt: skip
#: Seconds that a process of a GPU may take beyond its time, to end the kind of call that it is at.
GRACE = 20.0


def run_batch(
    part: str, seed: int, examples: int, seconds: float
) -> tuple[Counter[str], str | None]:
    """Draw for a while in a child; return how the draws ended, and what to print of a failure."""
    tests, environment = PARTS[part]
    with tempfile.TemporaryDirectory() as folder:
        notes, counts = Path(folder) / "notes", Path(folder) / "counts"
        notes.touch()
        command = [
            sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-n", "0", "--tb", "short",
            "-p", "no:cacheprovider", "--hypothesis-seed", str(seed), *tests,
        ]  # fmt: skip
        own = {
            "MINITORCH_EXAMPLES": str(examples), "PYTHONUNBUFFERED": "1", **environment,
            "MINITORCH_FUZZ_NOTES": str(notes), "MINITORCH_FUZZ_COUNTS": str(counts),
        }  # fmt: skip
        code, output = run_for(command, seconds, ROOT, **own)
        last = notes.read_text(encoding="utf-8", errors="replace")
        outcomes = _outcomes(counts, last) if part != "options" else _drawn(output, examples)
    if not code:  # None: what it has drawn by then counts
        return outcomes, None
    died = f"the child died of signal {-code}\n" if code < 0 else ""
    return outcomes, f"{part}, seed {seed}: {died}{output[-6000:]}\nlast draw: {last[-4000:]}"


def draw_for(part: str, run: Run, seed: int) -> tuple[Counter[str], list[str], list[int]]:
    """Run batches of a part, each from the next seed, until the time is up; return the seeds, too."""
    outcomes, failures, seeds = Counter[str](), list[str](), list[int]()
    end = time.perf_counter() + 60 * run.minutes
    while (left := end - time.perf_counter()) > min(15.0, 30 * run.minutes):
        seeds.append(seed + len(seeds))
        found, failure = run_batch(part, seeds[-1], run.examples, left)
        outcomes.update(found)
        if failure:
            failures.append(failure)
            print(failure, flush=True)
    return outcomes, failures, seeds


def _outcomes(counts: Path, last: str) -> Counter[str]:
    """Return how the draws ended: as the child counted at its end, or else at its last draw."""
    if counts.exists():
        return Counter(json.loads(counts.read_text()))
    first = last.splitlines()[:1]
    return Counter(json.loads(first[0].replace("'", '"')) if first else {})


def _drawn(output: str, examples: int) -> Counter[str]:
    """Return how many draws the tests that have passed have made: a dot each, at most ``examples``."""
    lines = (line.split("[")[0] for line in output.splitlines())
    return Counter({"right": examples * sum(x.count(".") for x in lines if not x.strip(" .sF"))})


def sanitize() -> str:
    """Run kernels under compute-sanitizer; return what came of it, or why it did not run."""
    reason, tool = why_no_cuda(), shutil.which("compute-sanitizer")
    if reason is not None or tool is None:
        missing = "no compute-sanitizer" if reason is None else reason.split(";")[0]
        return f"not run, it needs a GPU and compute-sanitizer: {missing}"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    checked = ["tests/kernels/cuda/attention/test_on_a_gpu.py", "-k", "every_option"]
    done = subprocess.run([*command, *checked], cwd=ROOT, capture_output=True, text=True)
    return "clean" if done.returncode == 0 else f"FAILED:\n{done.stdout[-4000:]}"


def cases(run: Run) -> Record:
    """Draw for the parts side by side."""
    first, begin = run.seed or int(time.time()) % 2**31, time.perf_counter()
    with ThreadPoolExecutor(len(run.only)) as pool:
        seeds_of = range(first, first + 1000 * len(run.only), 1000)
        found = dict(
            zip(run.only, pool.map(draw_for, run.only, repeat(run), seeds_of), strict=True)
        )
    failures = [failure for _, texts, _ in found.values() for failure in texts]
    sanitizer = sanitize()
    failures += [sanitizer] if sanitizer.startswith("FAILED") else []
    return {
        "cases": sum(sum(outcomes.values()) for outcomes, *_ in found.values()),
        "minutes": round((time.perf_counter() - begin) / 60, 1), "failures": len(failures),
        "by_part": {part: dict(outcomes) for part, (outcomes, *_) in found.items()},
        "seeds": {part: seeds for part, (*_, seeds) in found.items()},
        "examples_of_each_test": run.examples, "compute_sanitizer": sanitizer.splitlines()[0],
        "which_failed": [failure[:400] for failure in failures],
    }  # fmt: skip


# -- on a GPU --------------------------------------------------------------------------------------------


def cases_of_gpu(run: Run) -> Record:
    """Draw in several processes, which print a line of JSON for each kind of call."""
    seed, begin, seconds = (
        run.seed or int(time.time()) % 2**31,
        time.perf_counter(),
        60 * run.minutes,
    )
    # The processes share the machine: one thread each.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

    def drawn(job: int) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "tests.support.fuzzing.on_gpu", "--seed", str(seed + job)]
        given = [*command, "--seconds", str(seconds)]
        return run_for(given, seconds + GRACE, ROOT, **threads)

    jobs = run.jobs or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool:
        ended = [*pool.map(drawn, range(jobs))]
    failures = [f"a process ended with {code}: {said[-2000:]}" for code, said in ended if code]
    # A kind that was under way at the end has no line, and its calls do not count.
    lines = [x for _, said in ended for x in said.splitlines(keepends=True) if x.startswith("{")]
    kinds = [json.loads(line) for line in lines if line.endswith("}\n")]
    failures += [kind["failure"] for kind in kinds if kind["failure"]]
    total = sum((Counter(kind["counts"]) for kind in kinds), Counter[str]())
    by: Record = {}
    for name in ("entry", "rung", "dtype", "dim", "extreme"):
        counter = by[name] = Counter[str]()
        for kind in kinds:
            counter[str(kind["kind"][name])] += kind["counts"].get("right", 0)
    print(*(f"\n{failure[:1500]}" for failure in failures), sep="\n")
    return {
        "cases": total.total(), "minutes": round((time.perf_counter() - begin) / 60, 1),
        "outcomes": dict(total), "kinds": len(kinds), "failures": len(failures),
        "right_by": {name: dict(sorted(counter.items())) for name, counter in by.items()},
        "which_failed": [failure[:1500] for failure in failures],
    }  # fmt: skip


def figures(record: Record) -> list[Figure]:
    draws = record.get("outcomes", {}).get("right", record["cases"])
    return [Figure("failures", record["failures"], 0, is_most=True), Figure("draws", draws, 1)]


MEASUREMENTS = (
    Measurement(
        "fuzz", "Is a random call refused with a helpful error or right, and does it change nothing?",
        cases,
        {"cpu": {"normal": {"minutes": 10.0, "seed": 0, "examples": 500, "only": tuple(PARTS)},
                 "quick": {"minutes": 0.1, "only": ("nonsense",)}}},
        figures=figures, minutes={"cpu": 10}, choices={"only": tuple(PARTS)}, folder="reliability",
    ),
    Measurement(
        "fuzz_gpu", "Is attention on a GPU right for random rungs, dtypes, options and layouts?",
        cases_of_gpu,
        {"cuda": {"normal": {"minutes": 8.0, "seed": 0, "jobs": 0}, "quick": {"minutes": 0.5}}},
        figures=figures, minutes={"cuda": 8}, paths=("kernels", "tests/support/fuzzing"),
        folder="reliability",
    ),
)  # fmt: skip
