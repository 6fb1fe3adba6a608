"""Minutes of drawn calls: nonsense that must be refused or right, and every combination of options.

Batches run in children, each from a seed of its own, until the time is up; the parts run side by side.

nonsense    tests/reliability/test_fuzz.py: odd memory, odd numbers, odd values of every option; a
call is refused
            with a message that helps or gives what the textbook gives in float64, and changes nothing;
            operands and results lie between canaries.  Any public function called with anything
            fails only by a check of ours.
bounds      the same with NUMBA_BOUNDSCHECK=1 and a folder of compiled code of its own.
options     the tests marked fuzz: valid combinations of options, on every host rung, against the textbook.
extreme     tests/reliability/test_extreme.py: scores up to 10¹², and masks of the largest float, through
            every entrance.
sanitizer   attention's smoke test under compute-sanitizer's memcheck: only on a machine with a GPU.

A child that dies is a failure: the draw that was under way is printed, and where Python was then.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.harness import Case, Figure, Measurement, Run
from bench.records import ROOT, Record
from tqdm import tqdm

from kernels.runtime.targets import why_no_cuda

#: Code that was compiled with bounds checking must not meet the other, which has the same name.
BOUNDS_CACHE = ROOT / "build" / "numba-boundscheck"
#: Part → its tests, and what its children have in their environment.
PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "nonsense": (["tests/reliability/test_fuzz.py"], {}),
    "bounds": (
        ["tests/reliability/test_fuzz.py"],
        {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(BOUNDS_CACHE)},
    ),
    "options": (
        ["-m", "fuzz", "tests/kernels/test_attention.py", "tests/kernels/test_varlen.py",
         "tests/minitorch/functions/test_flash_attention.py"],
        {},
    ),
    "extreme": (
        ["-m", "fuzz", "tests/reliability/test_extreme.py"],
        {"MINITORCH_EXAMPLES": "100"},  # of long rows, some of them on the emulated GPU
    ),
}  # fmt: skip
#: What a sanitizer looks at: kernels on a GPU, each with its options.
SANITIZED = "tests.support.smoke.attention"


class Batch(NamedTuple):
    """What became of one child."""

    outcomes: Counter[str]  # "right", "refused", "returned" or "drawn" → how many draws
    failure: str | None  # what to print, or None


def run_batch(part: str, seed: int, examples: int, seconds: float) -> Batch:
    """Draw for a while in a child."""
    tests, environment = PARTS[part]
    with tempfile.TemporaryDirectory() as folder:
        notes, counts = Path(folder) / "notes", Path(folder) / "counts"
        notes.touch()
        command = [
            sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-n", "0", "--tb", "short",
            "-p", "no:cacheprovider", "--hypothesis-seed", str(seed), *tests,
        ]  # fmt: skip
        names = {"MINITORCH_FUZZ_NOTES": str(notes), "MINITORCH_FUZZ_COUNTS": str(counts)}
        own = {"MINITORCH_EXAMPLES": str(examples), "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **own, **environment, **names}
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = child.communicate(timeout=seconds)
            stopped = False
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            stopped = True
        last = notes.read_text(encoding="utf-8", errors="replace")
        outcomes = _outcomes(counts, last) if part != "options" else _drawn(output, examples)
    if child.returncode == 0 or stopped:
        return Batch(outcomes, None)
    died = f"the child died of signal {-child.returncode}\n" if child.returncode < 0 else ""
    return Batch(
        outcomes, f"{part}, seed {seed}: {died}{output[-6000:]}\nlast draw: {last[-4000:]}"
    )


class Drawn(NamedTuple):
    """What one part has drawn."""

    outcomes: Counter[str]  # as of a :class:`Batch`
    failures: list[str]  # texts
    seeds: list[int]  # of the batches


def draw_for(part: str, seed: int, examples: int, seconds: float) -> Drawn:
    """Run batches of one part, each from the next seed, until the time is up."""
    drawn, end = Drawn(Counter(), [], []), time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > min(15.0, seconds / 2):
        batch = run_batch(part, seed + len(drawn.seeds), examples, left)
        drawn.seeds.append(seed + len(drawn.seeds))
        drawn.outcomes.update(batch.outcomes)
        if batch.failure:
            drawn.failures.append(batch.failure)
            tqdm.write(batch.failure)
    return drawn


def _outcomes(counts: Path, last: str) -> Counter[str]:
    """Return how the draws ended: as the child counted at its end, or else at its last draw."""
    if counts.exists():
        return Counter(json.loads(counts.read_text()))
    first = last.splitlines()[:1]
    return Counter(json.loads(first[0].replace("'", '"')) if first else {})


def _drawn(output: str, examples: int) -> Counter[str]:
    """Return how many draws the tests that have passed have made: a dot each, at most ``examples``."""
    dots = sum(
        line.split("[")[0].count(".")
        for line in output.splitlines()
        if not line.split("[")[0].strip(" .sF")
    )
    return Counter({"right": dots * examples})


def sanitize() -> str:
    """Run kernels under compute-sanitizer; return what came of it, or why it did not run."""
    reason = why_no_cuda()
    tool = shutil.which("compute-sanitizer")
    if reason is not None or tool is None:
        missing = "no compute-sanitizer" if reason is None else reason.split(";")[0]
        return f"not run, it needs a GPU and compute-sanitizer: {missing}"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", SANITIZED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "clean" if done.returncode == 0 else f"FAILED:\n{done.stdout[-4000:]}"


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(draw_all, run)


def draw_all(run: Run) -> None:
    """Draw for the parts side by side."""
    first = run.seed or int(time.time()) % 2**31
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(run.only)) as pool:
        drawing = {
            part: pool.submit(draw_for, part, first + 1000 * number, run.examples, 60 * run.minutes)
            for number, part in enumerate(run.only)
        }
        for _ in tqdm(range(round(60 * run.minutes)), unit="s", disable=None):
            if all(future.done() for future in drawing.values()):
                break
            time.sleep(1.0)
    results = {part: future.result() for part, future in drawing.items()}
    outcomes = {part: found.outcomes for part, found in results.items()}
    failures = [failure for found in results.values() for failure in found.failures]
    sanitizer = sanitize()
    failures += [sanitizer] if sanitizer.startswith("FAILED") else []
    drawn = sum(sum(found.values()) for found in outcomes.values())
    run.note(
        cases=drawn, minutes=round((time.perf_counter() - begin) / 60, 1), failures=len(failures),
        by_part={part: dict(found) for part, found in outcomes.items()},
        seeds={part: found.seeds for part, found in results.items()},
        examples_of_each_test=run.examples, compute_sanitizer=sanitizer.splitlines()[0],
        which_failed=[failure[:400] for failure in failures],
    )  # fmt: skip


def figures(record: Record) -> list[Figure]:
    return [
        Figure("failures", record["failures"], 0, is_most=True),
        Figure("draws", record["cases"], 1),
    ]


MEASUREMENT = Measurement(
    "fuzz", "Is a random call refused with a helpful error or right, and does it change nothing?", cases,
    {"cpu": {"normal": {"minutes": 10.0, "seed": 0, "examples": 500, "only": tuple(PARTS)},
             "quick": {"minutes": 0.1, "only": ("nonsense",)}}},
    figures=figures, minutes={"cpu": 10}, choices={"only": tuple(PARTS)}, folder="reliability",
)  # fmt: skip
