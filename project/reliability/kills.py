"""Kill a training at random moments, go on with it, and compare its losses with those of an unbroken one.

A training is a process of its own: ``train_gpt.py`` with a tiny model, dropout and clipping.  It is killed
by SIGKILL, which no process can put off, and resumed, until it comes to its end; then the next training
begins, until there are enough kills.  There are two kinds, in turn:

- at a random time of the training, and now and then while the process starts;
- in a write: the process kills itself at one of the steps of writing a checkpoint, or after a random number
  of its bytes.

After each kill every checkpoint must be readable, and the last one at most one interval old.  At the end
of each training its losses, its held-out losses and all of its weights must be those of the same training
that nobody has killed.  What a kill does not test is a machine that loses power: for that the files are
flushed to the disk, in the order that makes them safe.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import train_gpt
from bench.harness import Case, Measurement, Run
from bench.processes import child_command
from tqdm import tqdm
from training import gpt_loop

from minitorch.training import model_files
from minitorch.training.checkpoints import Checkpoints
from minitorch.training.model_files import read_checkpoint

#: Steps of a training, from one checkpoint to the next, and how many checkpoints stay.
STEPS, EVERY, KEEP = 120, 5, 2
#: Where in a write a process can be killed.
STAGES = ("bytes", "before the flush", "before the rename", "after the rename", "before a removal")
#: Seconds after its first step, or after its start, in which a process is killed.
RUNNING, STARTING = 0.8, 2.0
#: Share of the kills at a random time that come while the process starts.
EARLY = 0.1
#: Seconds that a process may take to its first step; the machine may be busy with other things.
PATIENCE = 300.0

Plan = dict[str, Any]
#: No kill.
TO_THE_END: Plan = {"stage": "never"}


def options(folder: Path, seed: int) -> list[str]:
    """Return the options of a training whose results go to a folder."""
    text = folder.parent / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return [
        "--text", str(text), "--out", str(folder / "run"), "--seed", str(seed), "--steps", str(STEPS),
        "--checkpoint-every", str(EVERY), "--keep", str(KEEP), "--batch", "4", "--context", "16",
        "--width", "16", "--heads", "2", "--layers", "1", "--dropout", "0.1", "--clip", "0.5",
        "--max-seconds", "1e6", "--sample", "0",
    ]  # fmt: skip


# -- the process that is killed ----------------------------------------------------------------------


def child(progress: str, plan: Plan) -> None:
    """Train; a byte goes to a file as each step begins, and a plan may end the process in a write.

    The options of the training are the words of the command line.
    """
    begun = os.open(progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = gpt_loop.Trainer._step  # not the warm-up's, which is no step of the training

    def noted(trainer: gpt_loop.Trainer) -> Any:
        os.write(begun, b".")
        return step(trainer)

    gpt_loop.Trainer._step = noted  # type: ignore[method-assign]
    if plan["stage"]:
        _die_in_write(**plan)
    train_gpt.main(sys.argv[1:])


def _die_in_write(stage: str, write: int, share: float) -> None:
    """Have this process kill itself at a stage of a write."""
    rename, flush, remove = os.replace, os.fsync, Path.unlink
    done = 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Written:
        """A file of which only some bytes are written, where that is the plan."""

        def __init__(self, *args: Any):
            self.file = open(*args)  # noqa: SIM115  # closed below

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, payload: bytes) -> None:
            if stage == "bytes" and done >= write:
                self.file.write(payload[: int(share * len(payload))])
                self.file.flush()
                kill()
            self.file.write(payload)

    def before(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if stage == name and done >= write:
                kill()
            return then(*args, **kwargs)

        return call

    def renamed(*args: Any) -> None:
        nonlocal done
        before("before the rename", rename)(*args)
        before("after the rename", lambda: None)()
        done += 1

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":  # not what a write that went well leaves to be swept
            before("before a removal", lambda: None)()
        remove(path, missing_ok)

    model_files.open = Written  # type: ignore[attr-defined]  # in place of Python's, in that file only
    os.fsync = before("before the flush", flush)
    os.replace = renamed
    Path.unlink = removed  # type: ignore[method-assign]


# -- the one that kills ------------------------------------------------------------------------------


def draw_plan(rng: random.Random, number: int) -> Plan:
    """Draw how a process ends: every other one in a write."""
    if number % 2:
        return {"stage": rng.choice(STAGES), "write": rng.randrange(4), "share": rng.random()}
    early = rng.random() < EARLY
    return {
        "stage": None,
        "early": early,
        "delay": rng.uniform(0.0, STARTING if early else RUNNING),
    }


def run_until(plan: Plan, progress: Path, argv: list[str]) -> tuple[int, str]:
    """Train in a process until its plan ends it, or it is done; return its exit code and what it said."""
    sent = {key: plan.get(key) for key in ("stage", "write", "share")}
    command = child_command(child, str(progress), sent)
    progress.write_bytes(b"")
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, *argv], stdout=said, stderr=said)
        if plan["stage"] is None:
            limit = time.monotonic() + PATIENCE
            while not plan["early"] and process.poll() is None and not progress.stat().st_size:
                if time.monotonic() > limit:
                    break
                time.sleep(0.002)
            time.sleep(plan["delay"])
            process.kill()
        process.wait()
        said.seek(0)
        return process.returncode, said.read()


def check_folder(run: Path, first: int, begun: int) -> int:
    """Check what a killed process has left; return the step of the last checkpoint, 0 without one."""
    checkpoints = Checkpoints(run / "checkpoints")
    states = [checkpoints.read(file) for file in checkpoints.files()]
    newest = states[-1].step if states else 0
    last = first + max(begun - 1, 0)  # steps that are done
    due = last // EVERY * EVERY
    assert newest >= due, f"killed after {last} steps, and the last checkpoint is of step {newest}"
    return newest


def unbroken(folder: Path, seed: int) -> dict[str, Any]:
    """Train in this process; return what :func:`outcome` does."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        train_gpt.main(options(folder, seed))
    return outcome(folder / "run")


def outcome(run: Path) -> dict[str, Any]:
    """Return the losses and the weights of a training that is done."""
    result = json.loads((run / "result.json").read_text())
    weights, _ = read_checkpoint(run / "model.safetensors")
    return {
        "curve": result["curve"],
        "held_out_loss": result["held_out_loss"],
        "weights": {name: weights[name].tobytes() for name in sorted(weights)},
    }


#: Trains until a plan ends it, given the plan, the file of its progress and its options.
Train = Callable[[Plan, Path, list[str]], tuple[int, str]]


def survive(
    kills: int,
    seed: int,
    show: Callable[[], Any] = lambda: None,
    run: Train = run_until,
    options_of: Callable[[Path, int], list[str]] = options,
    whole: Callable[[Path, int], dict[str, Any]] = unbroken,
) -> dict[str, Any]:
    """Kill trainings until there are enough kills, and finish the last one."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    trainings = losses = 0
    with tempfile.TemporaryDirectory() as place:
        while len(made) < kills:
            folder = Path(place) / str(trainings)
            folder.mkdir()
            argv = options_of(folder, seed + trainings)
            step, ended = 0, False
            while not ended:
                plan = draw_plan(rng, len(made)) if len(made) < kills else TO_THE_END
                on = [*argv, "--resume"] if step else argv
                code, said = run(plan, folder / "progress", on)
                begun = (folder / "progress").stat().st_size
                ended = code == 0
                if ended:
                    break
                assert code == -signal.SIGKILL, f"it ended by itself:\n{said[-2000:]}"
                kept = check_folder(folder / "run", step, begun)
                kind = plan["stage"] or ("at the start" if plan["early"] else "at a random time")
                made.append({"kind": kind, "done": step + max(begun - 1, 0), "kept": kept})
                step = kept
                show()
            # A kill before a removal leaves one too many, until the next checkpoint.
            stay = Checkpoints(folder / "run" / "checkpoints").files()[-KEEP:]
            wanted = [f"step-{STEPS - EVERY * i:08d}" for i in reversed(range(KEEP))]
            assert [file.stem for file in stay] == wanted, f"{stay} stay"
            expected = whole(Path(place) / f"{trainings}-unbroken", seed + trainings)
            given = outcome(folder / "run")
            different = [key for key in expected if given[key] != expected[key]]
            assert not different, f"training {trainings} is not equal in {', '.join(different)}"
            losses += len(expected["curve"]["train"]) + len(expected["curve"]["held_out"]) + 1
            trainings += 1
    kinds = sorted({kill["kind"] for kill in made})
    return {
        "kills": len(made),
        "survived": len(made),  # else an AssertionError
        "by_kind": {kind: sum(kill["kind"] == kind for kill in made) for kind in kinds},
        "trainings": trainings,
        "losses_equal": losses,
        "most_steps_lost": max(max(kill["done"] - kill["kept"], 0) for kill in made),
        "interval": EVERY,
        "moments": made,
    }


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(killed, run)


def killed(run: Run) -> None:
    with tqdm(total=run.kills, unit="kill") as bar:
        figures = survive(run.kills, run.seed, bar.update)
    run.note(safetensors=safetensors.__version__, steps=STEPS, **figures)


MEASUREMENT = Measurement(
    "kills", "Does a killed training go on to the same losses and weights?", cases,
    {"cpu": {"normal": {"kills": 50, "seed": 0}, "quick": {"kills": 1}}}, minutes={"cpu": 6},
    paths=("project/training", "minitorch/training"), folder="reliability",
)  # fmt: skip
