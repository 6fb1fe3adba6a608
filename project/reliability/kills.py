"""Kill trainings at random moments, resume them, and compare them with trainings that nobody killed.

``train_gpt.py`` trains a tiny model with dropout and clipping: ``kills`` in one process, ``rank_kills``
on several ranks of ``mpiexec``, data parallel and in a ring in turn.  SIGKILL ends one process, every
other time at a random moment, and else at a step of writing a checkpoint or after a random number of
its bytes.  After each kill all ranks must end within 30 seconds, every checkpoint must be readable, and
the last one be at most one interval old.  At its end a training must have the losses and weights of one
without a kill.  A machine that loses power is not tested: for that the files are flushed to the disk,
in the order that makes them safe.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import train_gpt
from bench import processes
from bench.kit import Measurement, Record, Run
from tqdm import tqdm
from training import gpt_loop

from minitorch.training.checkpoints import Checkpoints
from minitorch.training.model_files import read_checkpoint

#: Steps of a training, from one checkpoint to the next, and how many checkpoints stay.
STEPS, EVERY, KEEP = 120, 5, 2
#: Where in a write a process can be killed.
STAGES = ("bytes", "before the flush", "before the rename", "after the rename", "before a removal")
#: Seconds after its first step, or after its start, in which a process is killed; the share of the latter.
RUNNING, STARTING, EARLY = 0.8, 2.0, 0.1
#: Seconds until the first step on a busy machine, and until all ranks have to be gone.
PATIENCE, LIMIT = 300.0, 30.0
Plan = dict[str, Any]
#: No kill.
TO_THE_END: Plan = {"stage": "never", "write": 0, "share": 0.0}


def options(folder: Path, seed: int, ranks: int) -> list[str]:
    """Return the options of a training whose results go to a folder."""
    text = folder.parent / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    way = [] if ranks == 1 else ["--ring" if seed % 2 else "--data-parallel", str(ranks)]
    return [
        "--text", str(text), "--out", str(folder / "run"), "--seed", str(seed), "--steps", str(STEPS),
        "--checkpoint-every", str(EVERY), "--keep", str(KEEP), "--context", "16", "--width", "16",
        "--heads", "2", "--layers", "1", "--dropout", "0.1", "--clip", "0.5", "--max-seconds", "1e6",
        "--sample", "0", "--batch", str(4 if ranks == 1 else 2 * ranks), *way,
    ]  # fmt: skip


# -- the process that is killed ----------------------------------------------------------------------


def child(folder: str, plan: Plan) -> None:
    """Train as the words of the command line say; a byte goes to a file as each step of rank 0 begins."""
    rank = processes.rank() or 0
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    begun = open(os.devnull if rank else Path(folder) / "progress", "ab", buffering=0)  # noqa: SIM115
    step = gpt_loop.Trainer._step  # not the warm-up's, which is no step of the training

    def noted(trainer: gpt_loop.Trainer) -> Any:
        begun.write(b".")
        return step(trainer)

    gpt_loop.Trainer._step = noted  # type: ignore[method-assign]
    if plan["stage"] and rank == plan.get("rank", 0):
        _die_in_write(plan["stage"], plan["write"], plan["share"])
    train_gpt.main(sys.argv[1:])


def _die_in_write(at: str, write: int, share: float) -> None:
    """Have this process kill itself at a stage of a write, or after some of its bytes."""
    rename, flush, remove, done = os.replace, os.fsync, Path.unlink, 0

    def reach(stage: str) -> None:
        if stage == at and done >= write:
            os.kill(os.getpid(), signal.SIGKILL)

    def flushed(file: int) -> None:
        if at == "bytes" and done >= write and stat.S_ISREG(os.fstat(file).st_mode):
            os.truncate(file, int(share * os.fstat(file).st_size))
            reach("bytes")
        reach("before the flush")
        flush(file)

    def renamed(*args: Any) -> None:
        nonlocal done
        reach("before the rename")
        rename(*args)
        reach("after the rename")
        done += 1

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":  # not what a write that went well leaves to be swept
            reach("before a removal")
        remove(path, missing_ok)

    os.fsync, os.replace = flushed, renamed
    Path.unlink = removed  # type: ignore[method-assign]


# -- the one that kills ------------------------------------------------------------------------------


def draw_plan(rng: random.Random, number: int, ranks: int) -> Plan:
    """Draw how a process ends: every other one in a write."""
    if number % 2:
        plan = {"stage": rng.choice(STAGES), "write": rng.randrange(4), "share": rng.random()}
    else:
        early = rng.random() < EARLY
        limit = STARTING if early else RUNNING
        plan = {"stage": None, "early": early, "delay": rng.uniform(0.0, limit)}
    only_first = "removal" in (plan["stage"] or "")  # the first rank alone removes files
    return {**plan, "rank": 0 if only_first else rng.randrange(ranks)}


def is_there(number: int) -> bool:
    """Tell whether a process runs still."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def train(plan: Plan, folder: Path, argv: list[str], ranks: int) -> tuple[bool, int, float]:
    """Train until the plan ends a process, or to the end.

    Returns:
        Whether it came to its end, the steps that it has begun, and the seconds from the end of the first
        process to that of the last.
    """
    progress, pids = folder / "progress", [folder / f"pid-{rank}" for rank in range(ranks)]
    for file in (progress, *pids):
        file.unlink(missing_ok=True)
    command = [*processes.child_command(child, str(folder), plan), *argv]
    environment = dict(os.environ)
    if ranks > 1:
        command = [processes.mpiexec(), "-n", str(ranks), *command]
        environment |= {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)

        def wait_for(ready: Callable[[], bool]) -> None:
            limit = time.monotonic() + PATIENCE
            while process.poll() is None and not ready():
                assert time.monotonic() < limit, "no step has begun"
                time.sleep(0.002)

        wait_for(lambda: all(file.exists() and file.stat().st_size for file in pids))
        numbers = [int(file.read_text()) for file in pids if file.exists()]
        if plan["stage"] is None and len(numbers) == ranks:
            wait_for(lambda: plan["early"] or (progress.exists() and progress.stat().st_size > 0))
            time.sleep(plan["delay"])
            if process.poll() is None and is_there(numbers[plan["rank"]]):
                os.kill(numbers[plan["rank"]], signal.SIGKILL)
        first = None
        while ranks > 1 and (there := sum(map(is_there, numbers))):
            if first is None and there < ranks:
                first = time.monotonic()
            time.sleep(0.005)
        seconds = 0.0 if first is None else time.monotonic() - first
        code = process.wait(None if ranks == 1 else LIMIT)
        said.seek(0)
        text = said.read()
    by_itself = re.search(
        r"^rank \d+ of \d+:|Traceback", text, re.MULTILINE
    )  # the training's own error
    killed = code == -signal.SIGKILL if ranks == 1 else code and not by_itself
    assert code == 0 or (killed and plan is not TO_THE_END), f"it ended by itself:\n{text[-2000:]}"
    assert seconds < LIMIT, f"the last rank ended {seconds:.0f} s after the killed one"
    return code == 0, progress.stat().st_size if progress.exists() else 0, seconds


def newest_step(run: Path, last: int) -> int:
    """Return the step of the last checkpoint, 0 without one, once ``last`` steps were done."""
    checkpoints = Checkpoints(run / "checkpoints")
    states = [checkpoints.read(file) for file in checkpoints.files()]  # each must be readable
    newest = states[-1].step if states else 0
    assert newest >= last // EVERY * EVERY, (
        f"killed after {last} steps, the last checkpoint is of {newest}"
    )
    return newest


def outcome(run: Path) -> dict[str, Any]:
    """Return the losses and the weights of a training that is done."""
    result = json.loads((run / "result.json").read_text())
    weights, _ = read_checkpoint(run / "model.safetensors")
    kept = {name: weights[name].tobytes() for name in sorted(weights)}
    return {"curve": result["curve"], "held_out_loss": result["held_out_loss"], "weights": kept}


def survive(
    kills: int, seed: int, ranks: int = 1, show: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Kill trainings until there are enough kills, finish the last one, and return the figures."""
    rng, made = random.Random(seed), list[dict[str, Any]]()
    trainings, losses, gone = 0, 0, list[float]()
    with tempfile.TemporaryDirectory() as place:
        while len(made) < kills:
            folders = [Path(place) / f"{trainings}{kind}" for kind in ("", "-unbroken")]
            for folder in folders:
                folder.mkdir()
            given, whole = (options(folder, seed + trainings, ranks) for folder in folders)
            step = 0
            while True:
                plan = draw_plan(rng, len(made), ranks) if len(made) < kills else TO_THE_END
                ended, begun, seconds = train(
                    plan, folders[0], [*given, *["--resume"] * bool(step)], ranks
                )
                if ended:
                    break
                gone.append(seconds)
                last = step + max(begun - 1, 0)
                kept = newest_step(folders[0] / "run", last)
                kind = plan["stage"] or ("at the start" if plan["early"] else "at a random time")
                made.append({"kind": kind, "done": last, "kept": kept})
                step = kept
                show()
            # A kill before a removal leaves one too many, until the next checkpoint.
            stay = Checkpoints(folders[0] / "run" / "checkpoints").files()[-KEEP:]
            wanted = [f"step-{STEPS - EVERY * i:08d}" for i in reversed(range(KEEP))]
            assert [file.stem for file in stay] == wanted, f"{stay} stay"
            train(TO_THE_END, folders[1], whole, ranks)
            found, expected = (outcome(folder / "run") for folder in folders)
            different = [key for key in expected if found[key] != expected[key]]
            assert not different, f"training {trainings} is not equal in {', '.join(different)}"
            losses += len(expected["curve"]["train"]) + len(expected["curve"]["held_out"]) + 1
            trainings += 1
    return {
        "kills": len(made), "survived": len(made),  # else an AssertionError
        "by_kind": dict(sorted(Counter(kill["kind"] for kill in made).items())),
        "trainings": trainings, "losses_equal": losses, "interval": EVERY, "moments": made,
        "most_steps_lost": max(max(kill["done"] - kill["kept"], 0) for kill in made),
        **({"ranks": ranks, "most_seconds_until_all_are_gone": round(max(gone), 2)} if ranks > 1 else {}),
    }  # fmt: skip


def cases(run: Run) -> Record:
    with tqdm(total=run.kills, unit="kill") as bar:
        figures = survive(run.kills, run.seed, run.ranks, bar.update)
    return {"safetensors": safetensors.__version__, "steps": STEPS, **figures}


MEASUREMENT = Measurement(
    "kills", "Does a killed training, on one rank or on several, go on to the same losses and weights?",
    cases, {"cpu": {"normal": {"kills": 50, "seed": 0, "ranks": 1}, "quick": {"kills": 1}}},
    minutes={"cpu": 6}, records={"rank_kills": {"ranks": 2}}, folder="reliability",
    paths=("project/training", "minitorch/training", "minitorch/distributed"),
)  # fmt: skip
