"""Tests notice the removal of any barrier of the tensor-core kernels: each is removed in turn.

A barrier, a wait, an arrival or a fence becomes ``pass`` in a copy of the repository, and the tests that
run the kernels' source on the emulated GPU have to fail.  A removal that no test catches is named.
"""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.kit import ROOT, Case, Figure, Measurement, Record, Run

from reliability.mutations import Mutation, caught_by, copy_of_tree

KERNELS = Path("kernels/cuda")
EMULATED = "tests/structure/emulated/test_"
WGMMA, MMA = "attention/flash3_wgmma", "attention/flash2_mma"
DECODING = "attention/flash_decoding"
#: Files of kernels, and the tests that run their source.
TESTED_BY = {
    (f"{WGMMA}/forward/consumer", f"{WGMMA}/forward/producer", "device/pipeline"): ("flash3",),
    (f"{WGMMA}/float8/consumer",): ("float8",),
    (f"{WGMMA}/backward/dkdv_consumer", f"{WGMMA}/backward/dq_shares", f"{WGMMA}/backward/producer",
     f"{WGMMA}/backward/dq", f"{WGMMA}/tiles"): ("flash3_backward",),
    (f"{MMA}/forward", f"{MMA}/dkdv", f"{MMA}/dq", f"{MMA}/dkdv_wide_heads", f"{MMA}/tiles"): (
        "flash2_mma", "split_operands"),
    (f"{DECODING}/producer", f"{DECODING}/consumer", f"{DECODING}/kernel"): ("flash_decoding",),
    ("matmul/wgmma", "matmul/epilogue", "matmul/mma", "matmul/operands"): ("matmul",),
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


def barriers_of(file: str, source: str) -> list[Mutation]:
    """Return the removals of statements that order what threads do; their kind is the text."""
    lines, found = source.encode().splitlines(keepends=True), []
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).rpartition(".")[2]
            if name in NAMES or name.startswith("wait_"):
                last = node.end_lineno or node.lineno
                text = b" ".join(line.strip() for line in lines[node.lineno - 1 : last]).decode()
                first = starts[node.lineno - 1] + node.col_offset
                end = starts[last - 1] + len(lines[last - 1].rstrip())
                place = (KERNELS / f"{file}.py").as_posix()
                found.append(Mutation(place, node.lineno, text, first, end, "pass"))
    return sorted(found, key=lambda one: one.line)


def run_by(file: str) -> list[tuple[str, str]]:
    """Return the tests that run the source of a file."""
    names = next(tests for files, tests in TESTED_BY.items() if file in files)
    return [("emulated", f"{EMULATED}{name}.py") for name in names]


def cases(run: Run) -> Iterator[Case]:
    """Remove each barrier in a copy of the repository of its own; their tests run side by side."""
    read = {file: (ROOT / KERNELS / f"{file}.py").read_text(encoding="utf-8") for file in run.files}
    removals = [(file, one) for file, source in read.items() for one in barriers_of(file, source)]
    workers = run.workers or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        tree = Path(folder) / "tree"
        copy_of_tree(str(ROOT), tree)

        def caught(file: str, one: Mutation) -> str:
            for order in range(run.schedules):
                own = {"MINITORCH_SCHEDULE": str(order)}
                if test := caught_by(one, tree, run_by(file), PATIENCE, **own):
                    return test
            return ""

        run.note(statements=len(removals), caught_by_a_test=0, orders_of_threads=run.schedules)
        for one, found in [(one, pool.submit(caught, file, one)) for file, one in removals]:
            place = one.file.removeprefix(f"{KERNELS.as_posix()}/")
            key = {"not_caught": f"{place}, line {one.line}", "statement": f"`{one.kind}`"}
            yield key, partial(noted, run, key, found)


def noted(run: Run, key: Record, found: Any) -> Record | None:
    """Count a removal that a test catches; return a row for one that none does."""
    test = found.result()
    print(f"{key['not_caught']}: {key['statement']}\n    {test or 'NOT CAUGHT'}", flush=True)
    if test.startswith("exit code"):  # the tests themselves cannot run
        raise RuntimeError(f"{test} without a test that fails")
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
