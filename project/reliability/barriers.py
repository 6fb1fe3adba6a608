"""Tests notice the removal of any barrier of the tensor-core kernels: each is removed in turn.

A barrier, a wait, an arrival or a fence becomes ``pass`` in a copy of the repository, and the tests that
run the kernels' source on the emulated GPU have to fail.  A removal that no test catches is named.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from bench.harness import Case, Figure, Measurement, Run
from bench.records import ROOT, Record

KERNELS = Path("kernels/cuda")
#: Files of kernels, and the tests that run their source.
TESTED_BY = {
    (
        "attention/flash3_wgmma/forward/consumer", "attention/flash3_wgmma/forward/producer",
        "attention/flash3_wgmma/forward/scheduler", "device/pipeline",
    ): ("tests/structure/emulated/test_flash3", "tests/structure/emulated/test_flash3_options"),
    ("attention/flash3_wgmma/float8/consumer",): ("tests/structure/emulated/test_float8",),
    (
        "attention/flash3_wgmma/backward/dkdv_consumer",
        "attention/flash3_wgmma/backward/dkdv_producer",
        "attention/flash3_wgmma/backward/dq", "attention/flash3_wgmma/tiles",
    ): (
        "tests/structure/emulated/test_flash3_backward",
        "tests/structure/emulated/test_flash3_backward_options",
    ),
    (
        "attention/flash2_mma/forward", "attention/flash2_mma/dkdv", "attention/flash2_mma/dq",
        "attention/flash2_mma/dkdv_wide_heads",
        "attention/flash2_mma/tiles",
    ): ("tests/structure/emulated/test_flash2_mma", "tests/structure/emulated/test_split_operands"),
    (
        "matmul/wgmma", "matmul/epilogue", "matmul/mma", "matmul/operands"
    ): ("tests/structure/emulated/test_matmul",),
}  # fmt: skip
FILES = [file for files in TESTED_BY for file in files]
#: What is taken away: statements that call one of these, or a ``wait_`` of a kernel's own.
NAMES = {
    "syncthreads", "syncwarp", "bar_sync", "bar_arrive", "mbarrier_wait", "mbarrier_arrive",
    "fence_proxy_async", "cp_async_wait_all",
    # steps of a pipeline, and of consumers that multiply in turns
    "acquire", "publish", "wait", "release", "release_alone", "release_slot", "take_turn", "pass_turn",
}  # fmt: skip
#: Seconds after which tests that have not ended hang.
PATIENCE = 600


class Barrier(NamedTuple):
    """A statement to take away: its file, its lines from first to last, and how it reads."""

    file: str
    first: int
    last: int
    text: str


def barriers_of(file: str, source: str) -> list[Barrier]:
    """Return the statements of a file that order what threads do."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).rpartition(".")[2]
            if name in NAMES or name.startswith("wait_"):
                last = node.end_lineno or node.lineno
                text = " ".join(line.strip() for line in lines[node.lineno - 1 : last])
                found.append(Barrier(file, node.lineno, last, text))
    return sorted(found, key=lambda one: one.first)


def without(barrier: Barrier, source: str) -> str:
    """Return a file's source with ``pass`` in place of a statement."""
    lines = source.splitlines()
    line = lines[barrier.first - 1]
    indent = line[: len(line) - len(line.lstrip())]
    lines[barrier.first - 1 : barrier.last] = [f"{indent}pass"]
    return "\n".join(lines) + "\n"


def caught_by(barrier: Barrier, tree: Path, schedules: int) -> str:
    """Return which test fails without a barrier, or ''."""
    tests = next(tests for files, tests in TESTED_BY.items() if barrier.file in files)
    place = tree / KERNELS / f"{barrier.file}.py"
    source = place.read_text(encoding="utf-8")
    place.write_text(without(barrier, source), encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        *(f"{test}.py" for test in tests),
    ]  # fmt: skip
    try:
        for schedule in range(schedules):
            own = {"PYTHONPATH": str(tree), "MINITORCH_SCHEDULE": str(schedule), "CI": "true"}
            run = subprocess.run(
                command, cwd=tree, env={**os.environ, **own}, capture_output=True, text=True,
                timeout=PATIENCE,
            )  # fmt: skip
            failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED ")]
            if failed:
                return failed[0].removeprefix("FAILED ").split(" - ")[0]
            if run.returncode:
                raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    except subprocess.TimeoutExpired:
        return f"all: the tests hang, or take longer than {PATIENCE} s"
    finally:
        place.write_text(source, encoding="utf-8")
    return ""


def cases(run: Run) -> Iterator[Case]:
    """Remove each barrier in one of several copies of the repository, whose tests run side by side."""
    read = {file: (ROOT / KERNELS / f"{file}.py").read_text(encoding="utf-8") for file in run.files}
    barriers = [one for file, source in read.items() for one in barriers_of(file, source)]
    workers = run.workers or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            tree = Path(folder) / str(number)
            for part in ("kernels", "minitorch", "tests"):
                shutil.copytree(ROOT / part, tree / part)
            shutil.copy(ROOT / "pyproject.toml", tree)
            trees.put(tree)

        def caught(barrier: Barrier) -> str:
            tree = trees.get()
            try:
                return caught_by(barrier, tree, run.schedules)
            finally:
                trees.put(tree)

        run.note(statements=len(barriers), caught_by_a_test=0, orders_of_threads=run.schedules)
        waiting = [(one, pool.submit(caught, one)) for one in barriers]
        for one, found in waiting:
            place = {"not_caught": f"{one.file}.py, line {one.first}", "statement": f"`{one.text}`"}
            yield place, partial(noted, run, place, found)


def noted(run: Run, place: Record, found: Any) -> Record | None:
    """Count a removal that a test catches; return a row for one that none does."""
    test = found.result()
    print(f"{place['not_caught']}: {place['statement']}\n    {test or 'NOT CAUGHT'}", flush=True)
    if not test:
        return {}
    run.note(caught_by_a_test=run.record["caught_by_a_test"] + 1)
    return None


def figures(record: Record) -> list[Figure]:
    missed = record["statements"] - record["caught_by_a_test"]
    return [Figure("removals that no test catches", missed, 0, is_most=True)]


MEASUREMENT = Measurement(
    "barriers", "Do tests notice the removal of any barrier of the tensor-core kernels?", cases,
    {"cpu": {"normal": {"files": tuple(FILES), "schedules": 4, "workers": 0},
             "quick": {"files": ("matmul/epilogue",), "schedules": 1}}},
    figures=figures, minutes={"cpu": 160}, paths=("kernels/cuda", "tests/structure/emulated"),
    choices={"files": FILES}, folder="reliability",
)  # fmt: skip
