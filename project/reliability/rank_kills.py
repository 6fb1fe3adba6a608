"""Kill a random rank of a training on several ranks at random moments, and go on with all of them.

    python project/reliability/rank_kills.py              50 kills of one of two ranks, some ten minutes
    python project/reliability/rank_kills.py --kills 4    fewer
    python project/reliability/rank_kills.py --ranks 4    of more ranks

It does what ``kills.py`` does, with ``train_gpt.py`` under ``mpiexec``: data parallel and in a ring, in
turn.  One rank is killed by SIGKILL, at a random time or while it writes its part of a checkpoint.  MPI's
launcher then has to end the other ranks, which wait for it, within 30 seconds, and the training goes
on from its last checkpoint to the losses and weights of one that nobody has killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kills
from kills import Plan
from tqdm import tqdm

# isort: split
from bench import measuring
from common.command_line import COUNT, FROM_ZERO, OneLineParser

RECORD = kills.RECORD.with_name("rank_kills.json")
#: That of the MPI library in the environment of this Python, or any other.
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
#: Seconds in which all ranks have to be gone after one of them.
LIMIT = 30.0
#: Variables in which launchers tell a process its rank.
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def child(progress: str, plan: Plan, argv: list[str]) -> None:
    """Train as one of the ranks; only the first notes steps, and only the one of the plan is killed."""
    rank = next(int(os.environ[name]) for name in RANK if name in os.environ)
    pid = Path(progress).with_name(f"pid-{rank}")
    pid.write_text(str(os.getpid()))
    own = {key: plan[key] for key in ("stage", "write", "share")}
    if rank != plan["rank"]:
        own["stage"] = None
    kills.child(progress if rank == 0 else os.devnull, own, argv)


class Ranks:
    """Runs trainings on several ranks, and kills one of them.

    Args:
        size: Number of ranks.
        seed: Of the choice of ranks.

    Attributes:
        gone: Seconds from the end of the killed rank to that of the last, of each kill.
        named: How often the launcher has named the number of the killed process.
    """

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
        script = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(sent)]
        command = [str(MPIEXEC), "-n", str(self.size), *script, str(progress), *argv]
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
    """Kill ranks of trainings; return the figures of the record.

    Args:
        count: Of kills.
        size: Number of ranks.
        seed: Of all that is random.
        show: Called after each kill.

    Raises:
        AssertionError: If something was lost, is not equal, or a rank was left.
    """
    ranks = Ranks(size, seed)
    figures = kills.survive(count, seed, show, ranks.run, ranks.options, ranks.unbroken)
    return {
        "ranks": size,
        **figures,
        "most_seconds_until_all_are_gone": round(max(ranks.gone), 2),
        "named_by_the_launcher": ranks.named,
    }


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        child(argv[2], json.loads(argv[1]), argv[3:])
        return 0
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.option("--kills", COUNT, 50, "in all")
    parser.option("--ranks", COUNT, 2, "that train together")
    parser.option("--seed", FROM_ZERO, 0, "of the moments and of the trainings")
    parser.add_argument("--json", default=str(RECORD), help="the record (default: %(default)s)")
    args = parser.parse_args(argv)
    if MPIEXEC is None:
        sys.exit("there is no mpiexec; pip install 'minitorch-flash[mpi]'")
    with tqdm(total=args.kills, unit="kill") as bar:
        figures = survive(args.kills, args.ranks, args.seed, bar.update)
    measuring.write_record(
        args.json,
        measuring.command_line("project/reliability/rank_kills.py", argv),
        measuring.name_of("cpu"),
        steps=kills.STEPS,
        **figures,
    )
    print(
        f"{figures['kills']} kills of a rank survived in {figures['trainings']} trainings; at most "
        f"{figures['most_steps_lost']} steps lost of an interval of {kills.EVERY}; all ranks gone after "
        f"{figures['most_seconds_until_all_are_gone']:.1f} s at most; the launcher named "
        f"{figures['named_by_the_launcher']} of the killed processes; {figures['losses_equal']} losses "
        "equal bit for bit, and all weights"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
