"""Kill a random rank of a training on several ranks at random moments, and go on with all of them.

It does what ``kills`` does, with ``train_gpt.py`` under ``mpiexec``: data parallel and in a ring, in
turn.  One rank is killed by SIGKILL, at a random time or while it writes its part of a checkpoint.  MPI's
launcher then has to end the other ranks, which wait for it, within 30 seconds, and the training goes
on from its last checkpoint to the losses and weights of one that nobody has killed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import processes
from bench.harness import Case, Measurement, Run
from bench.processes import child_command
from tqdm import tqdm

from reliability import kills
from reliability.kills import Plan

#: Seconds in which all ranks have to be gone after one of them.
LIMIT = 30.0


def child(progress: str, plan: Plan) -> None:
    """Train as one of the ranks; only the first notes steps, and only the one of the plan is killed."""
    rank = processes.rank()
    pid = Path(progress).with_name(f"pid-{rank}")
    pid.write_text(str(os.getpid()))
    own = {key: plan[key] for key in ("stage", "write", "share")}
    if rank != plan["rank"]:
        own["stage"] = None
    kills.child(progress if rank == 0 else os.devnull, own)


class Ranks:
    """Runs trainings on several ranks, and kills one of them."""

    def __init__(self, size: int, seed: int):
        self.size, self._random = size, random.Random(seed)
        self.gone: list[float] = []
        self.named = 0

    def options(self, folder: Path, seed: int) -> list[str]:
        """Return the options of a training."""
        way = "--ring" if seed % 2 else "--data-parallel"
        return [*kills.options(folder, seed), "--batch", str(2 * self.size), way, str(self.size)]

    def unbroken(self, folder: Path, seed: int) -> dict[str, Any]:
        """Train without a kill."""
        folder.mkdir()
        code, said = self.run(kills.TO_THE_END, folder / "progress", self.options(folder, seed))
        assert code == 0, said[-2000:]
        return kills.outcome(folder / "run")

    def run(self, plan: Plan, progress: Path, argv: list[str]) -> tuple[int, str]:
        """Train until the plan ends a rank; see :func:`kills.run_until`."""
        sent = {key: plan.get(key) for key in ("stage", "write", "share")}
        # Only the first rank removes files.
        sent["rank"] = (
            0 if "removal" in (sent["stage"] or "") else self._random.randrange(self.size)
        )
        pids = [progress.with_name(f"pid-{rank}") for rank in range(self.size)]
        for file in pids:
            file.unlink(missing_ok=True)
        progress.write_bytes(b"")
        one = child_command(child, str(progress), sent)
        command = [processes.mpiexec(), "-n", str(self.size), *one, *argv]
        one_thread = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                command, stdout=said, stderr=said, env={**os.environ, **one_thread}
            )
            numbers = self._numbers(process, pids)
            if sent["stage"] is None:
                limit = time.monotonic() + kills.PATIENCE
                while not plan["early"] and process.poll() is None and not progress.stat().st_size:
                    assert time.monotonic() < limit, "no step has begun"
                    time.sleep(0.002)
                time.sleep(plan["delay"])
                if process.poll() is None and is_there(numbers[sent["rank"]]):
                    os.kill(numbers[sent["rank"]], signal.SIGKILL)
            seconds = self._until_gone(numbers)
            code = process.wait(LIMIT)
            said.seek(0)
            text = said.read()
        if code == 0:
            return 0, text
        killed = numbers[sent["rank"]]
        # An error of the training's own is a line of a rank.
        if re.search(r"^rank \d+ of \d+:|Traceback", text, re.MULTILINE):
            return code, text
        self.gone.append(seconds)
        self.named += bool(re.search(rf"\b(PID {killed}|rank {sent['rank']})\b", text))
        assert seconds < LIMIT, f"the last rank ended {seconds:.0f} s after rank {sent['rank']}"
        return -signal.SIGKILL, text

    def _numbers(self, process: Any, pids: list[Path]) -> list[int]:
        """Return the numbers of the processes, once all have begun."""
        limit = time.monotonic() + kills.PATIENCE
        while not all(file.exists() and file.stat().st_size for file in pids):
            assert process.poll() is None and time.monotonic() < limit, "the ranks have not begun"
            time.sleep(0.002)
        return [int(file.read_text()) for file in pids]

    @staticmethod
    def _until_gone(numbers: list[int]) -> float:
        """Wait for the end of all processes; return the seconds from that of the first."""
        first = None
        while there := sum(map(is_there, numbers)):
            if first is None and there < len(numbers):
                first = time.monotonic()
            time.sleep(0.005)
        return 0.0 if first is None else time.monotonic() - first


def is_there(number: int) -> bool:
    """Tell whether a process runs still."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def survive(count: int, size: int, seed: int, show: Any = lambda: None) -> dict[str, Any]:
    """Kill ranks of trainings; return the figures of the record."""
    ranks = Ranks(size, seed)
    figures = kills.survive(count, seed, show, ranks.run, ranks.options, ranks.unbroken)
    return {
        "ranks": size,
        **figures,
        "most_seconds_until_all_are_gone": round(max(ranks.gone), 2),
        "named_by_the_launcher": ranks.named,
    }


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(killed, run)


def killed(run: Run) -> None:
    with tqdm(total=run.kills, unit="kill") as bar:
        figures = survive(run.kills, run.ranks, run.seed, bar.update)
    run.note(steps=kills.STEPS, **figures)


MEASUREMENT = Measurement(
    "rank_kills", "Does a training go on after one of its ranks was killed, to the same result?",
    cases, {"cpu": {"normal": {"kills": 50, "ranks": 2, "seed": 0}, "quick": {"kills": 1}}},
    minutes={"cpu": 10}, paths=("project/training", "minitorch/training", "minitorch/distributed"),
    folder="reliability",
)  # fmt: skip
