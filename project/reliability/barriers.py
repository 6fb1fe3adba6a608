"""No barrier of the kernels on tensor cores is missing, and tests would notice: each is taken away in turn.

python project/reliability/barriers.py                          all, some 40 minutes on two cores
python project/reliability/barriers.py --only attention/flash3_wgmma/backward/dq       those of one file
python project/reliability/barriers.py --schedules 5            in five orders of the threads, not in one

A barrier, a wait, an arrival or a fence becomes ``pass`` in a copy of the repository, and the tests that
run the kernels' source on the emulated GPU have to fail.  A removal that no test catches is named.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
from bench import measuring  # noqa: E402
from common.command_line import OneLineParser  # noqa: E402

ROOT = PROJECT.parent
RECORD = ROOT / "docs" / "results" / "reliability" / "barriers.json"
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
    """Return which test fails without a barrier, or ''.

    Args:
        barrier: What to take away.
        tree: A copy of the repository, left as it was.
        schedules: Orders of the threads to try.
    """
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


def _try_all(barriers: list[Barrier], workers: int, schedules: int) -> list[bool]:
    """Return for each barrier whether a test catches its removal, and print which."""
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            tree = Path(folder) / str(number)
            for part in ("kernels", "minitorch", "tests"):
                shutil.copytree(ROOT / part, tree / part)
            shutil.copy(ROOT / "pyproject.toml", tree)
            trees.put(tree)

        def one(barrier: Barrier) -> bool:
            tree = trees.get()
            try:
                test = caught_by(barrier, tree, schedules)
            finally:
                trees.put(tree)
            print(
                f"{barrier.file}:{barrier.first}: {barrier.text}\n    {test or 'NOT CAUGHT'}",
                flush=True,
            )
            return bool(test)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, barriers))


def main(argv: list[str] | None = None) -> int:
    """Take each barrier away, and write the record; return 0 if tests catch every removal."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FILES, default=FILES, metavar="FILE",
                        help=f"of {', '.join(FILES)} (default: all)")  # fmt: skip
    parser.add_argument("--schedules", type=int, default=1, help="orders to try (default: 1)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="tests beside each other (default: one a core)")  # fmt: skip
    parser.add_argument(
        "--json", help=f"the record (default: {RECORD.name} of all files, else none)"
    )
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    record = args.json or (str(RECORD) if args.only == FILES else None)
    barriers = [
        barrier
        for file in args.only
        for barrier in barriers_of(
            file, (ROOT / KERNELS / f"{file}.py").read_text(encoding="utf-8")
        )
    ]
    caught = _try_all(barriers, args.workers, args.schedules)
    print(f"tests catch {sum(caught)} of {len(caught)} removals")
    if record:
        missed = [one for one, found in zip(barriers, caught, strict=True) if not found]
        measuring.write_record(
            record,
            measuring.command_line("project/reliability/barriers.py", argv),
            measuring.name_of("cpu"),
            statements=len(caught),
            caught_by_a_test=sum(caught),
            orders_of_threads=args.schedules,
            rows=[
                {"not_caught": f"{one.file}.py, line {one.first}", "statement": f"`{one.text}`"}
                for one in missed
            ],
        )
    return int(not all(caught))


if __name__ == "__main__":
    raise SystemExit(main())
