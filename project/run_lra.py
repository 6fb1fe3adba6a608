"""Train exact, sparse and approximate attention on the Long-Range Arena, and compare them.

python project/run_lra.py --task listops --attention performer
python project/run_lra.py --task listops --all                 all nine; --all alone takes all tasks, too
python project/run_lra.py --all --go-on                        what the record lacks
python project/run_lra.py --task text --data aclImdb --all     the official files; a stand-in otherwise
python project/run_lra.py --quick --all --task listops         a tiny size, to see that everything runs
python project/measure.py lra_lengths lra_steps                time by length, and of training steps
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bench.long_range import peak_in_child, pictures, rates_table, results_table
from bench.records import command_line, name_of, read_rows, write_record
from common.command_line import COUNT, FROM_ZERO, POSITIVE, PROBABILITY, OneLineParser
from data.long_range import GENERATED, TASKS, TEXT_LENGTH, Task, load_task
from data.pathfinder import PUBLISHED
from training.lra_loop import BEST, INTERRUPTED, Training
from training.lra_methods import BACKENDS, METHODS, QUICK, SETTINGS, Settings, learning_rate_of
from training.pathfinder_stages import (
    FIRST_STAGES,
    STAGES,
    Arrays,
    begun_with,
    grown,
    stage_task,
    task_name,
)
from training.script_helpers import check_backend, draw, ends_in_one_line, make_folder

from minitorch.training.model_files import CheckpointError

Rows = list[dict[str, Any]]
#: That --tune compares.
RATES = (1e-3, 2e-3, 4e-3)
#: Options that say how to train, which a run in a process of its own gets, too.
HANDED_ON = (
    "backend",
    "data",
    "examples",
    "size",
    "length",
    "steps",
    "batch",
    "judge_every",
    "dropout",
    "precision",
    "out",
    "json",
)


class Run(NamedTuple):
    """What tells a training from others in a record."""

    task: str
    attention: str
    seed: int
    lr: float

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.task}-{self.attention}-seed-{self.seed}-lr-{self.lr:g}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, help="(default: listops; with --all: all of them)")
    add("--attention", nargs="+", choices=[*METHODS], help="(default: flash)")
    add("--all", action="store_true", help="all nine attentions, each in a process of its own")
    add("--seed", nargs="+", type=FROM_ZERO, default=[0], metavar="N",
        help="of everything that is random; several train several times")  # fmt: skip
    add("--lr", type=POSITIVE, metavar="X", help="learning rate (default: that of the task)")
    add("--tune", action="store_true", help=f"train with each learning rate of {RATES}")
    add("--data", metavar="DIR",
        help="folder of a task's official files: aclImdb for text, AAN's three .tsv for retrieval, "
        "CIFAR-10's binary version for image (default: a stand-in)")  # fmt: skip
    add(
        "--examples", type=COUNT, metavar="N", help="most training examples (default: as published)"
    )
    add("--size", type=int, choices=[*PUBLISHED], default=32, help="side of Pathfinder's images")
    parser.option("--length", COUNT, TEXT_LENGTH, "bytes of a text, and of each document of a pair")
    add("--steps", type=COUNT, metavar="N", help="of each training (default: as published)")
    add("--batch", type=COUNT, metavar="N", help="examples of a step (default: as published)")
    add(
        "--judge-every",
        type=COUNT,
        metavar="N",
        help="steps between two validations (default: 200)",
    )
    add(
        "--dropout",
        type=PROBABILITY,
        metavar="P",
        help="of all branches (default: that of the size)",
    )
    parser.choice("--backend", BACKENDS, "fast")
    parser.choice("--precision", ("float32", "bfloat16"), "float32")
    add("--eager", action="store_true",
        help="launch kernels one by one; a GPU else replays steps as a CUDA graph")  # fmt: skip
    add("--quick", action="store_true", help="a tiny size that runs in seconds")
    add("--go-on", action="store_true",
        help="add to the record: skip what it has, and continue what was interrupted")  # fmt: skip
    add("--out", default="runs/lra", metavar="DIR", help="of sets, checkpoints and the record")
    add("--json", metavar="FILE", help="the record (default: lra.json in --out)")
    add("--plots", metavar="DIR", help="draw accuracy against speed and memory")
    args = parser.parse_args(argv)
    if args.lr is not None and args.tune:
        parser.error("--tune tries several learning rates; leave out --lr")
    if args.all and args.attention:
        parser.error("--all takes all attentions; leave out --attention, or --all")
    args.task = args.task or [*(TASKS if args.all else ("listops",))]
    if args.data is not None and (len(args.task) > 1 or args.task[0] in GENERATED):
        parser.error("--data holds the files of one task: add --task text, retrieval or image")
    args.attention = args.attention or [*(METHODS if args.all else ("flash",))]
    args.json = args.json or str(Path(args.out) / "lra.json")
    return args


# -- trainings -------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace, task: str) -> Settings:
    """Return the size of a task's model and training."""
    names = "steps", "batch", "judge_every", "dropout", "precision"
    given = {name: getattr(args, name) for name in names}
    own = QUICK if args.quick else SETTINGS[task]
    return replace(own, **{name: value for name, value in given.items() if value is not None})


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Return the trainings that the options ask for."""
    return [
        Run(task, attention, seed, lr)
        for task in args.task
        for attention in args.attention
        for lr in (RATES if args.tune else (args.lr or learning_rate_of(task),))
        for seed in args.seed
    ]


def key_of(row: dict[str, Any]) -> Run:
    return Run(row["task"], row["attention"], row["seed"], row["lr"])


def is_done(rows: Rows, run: Run, settings: Settings) -> bool:
    """Tell whether a record has a training; exit with one line if it had other settings."""
    for row in rows:
        if key_of(row) == run:
            other = [name for name, value in asdict(settings).items() if row.get(name) != value]
            if other:
                sys.exit(
                    f"the record has {run.name} with other values of {', '.join(other)}; pass the options "
                    "of that training, or another --out"
                )
            return row["done"] and "peak_bytes" in row  # its memory is measured last
    return False


def write(args: argparse.Namespace, argv: Sequence[str], rows: Rows, **more: Any) -> None:
    device = "cuda" if args.backend == "cuda" else "cpu"
    command = command_line("project/run_lra.py", [*argv], ("--json", "--out", "--plots"))
    write_record(args.json, command, name_of(device), **more, rows=rows)


def task_of(args: argparse.Namespace, name: str, examples: int | None) -> Task:
    """Return a task with as many training examples as are asked for, or all."""
    sets = Path(args.out) / "sets"
    return load_task(name, sets, args.data, 0, args.quick, examples, args.size, args.length)


def begun_small(args: argparse.Namespace, run: Run, settings: Settings, folder: Path) -> Arrays:
    """Train on smaller images of Pathfinder; return parameters for those of the task.  Ctrl-C exits."""
    models = [folder / task_name(name) / BEST for name in FIRST_STAGES]
    processes = 0 if args.quick else None
    counts = {"valid": settings.judged, "test": settings.judged}
    for name, before in zip(FIRST_STAGES, (None, *models[:-1]), strict=True):
        stage = STAGES[name]
        start = None if before is None else partial(grown, before, stage.task.size)
        steps = min(stage.steps, settings.steps)
        task = stage_task(name, Path(args.out) / "sets", run.seed, counts, processes=processes)
        training = Training(
            task, run.attention, replace(settings, steps=steps, judge_every=min(200, settings.judge_every)),
            run.seed, args.backend, folder / task.name, run.lr, args.go_on, args.eager, start,
        )  # fmt: skip
        if training.done < steps and not training.run()["done"]:
            stop(training)
    return grown(models[-1], args.size)


def stop(training: Training) -> NoReturn:
    """Exit after Ctrl-C."""
    done, steps = training.done, training.settings.steps
    print(
        f"stopped by Ctrl-C after {done} of {steps} steps of {training.task.name}; --go-on continues"
    )
    sys.exit(INTERRUPTED)


def train_one(args: argparse.Namespace, run: Run, argv: Sequence[str]) -> None:
    """Train, and put the row into the record; exit after Ctrl-C."""
    settings, folder = settings_of(args, run.task), Path(args.out) / run.name
    task = task_of(args, run.task, args.examples)
    begins_small = run.task == "pathfinder"
    if begins_small:
        task = replace(task, source=task.source + begun_with(FIRST_STAGES[-1]))
    print(f"{task.name}: {task.source}; {METHODS[run.attention].title}, {settings.steps} steps")
    try:
        start = partial(begun_small, args, run, settings, folder) if begins_small else None
        training = Training(
            task, run.attention, settings, run.seed, args.backend, folder, run.lr, args.go_on, args.eager,
            start,
        )  # fmt: skip
        row = training.run()
    except CheckpointError as error:
        sys.exit(str(error))
    rows = [other for other in read_rows(args.json) if key_of(other) != run]
    write(args, argv, [*rows, row])
    if row["done"]:
        row["peak_bytes"] = peak_in_child(run.attention, settings, args.backend, task.model)
        write(args, argv, [*rows, row])
    else:
        stop(training)
    print(
        f"test accuracy {row['test_accuracy']:.1%}, by the model of step {row['best_step']} (validation "
        f"{row['valid_accuracy']:.1%}); {row['seconds']:.0f} s"
    )


def command_of(args: argparse.Namespace, run: Run) -> list[str]:
    """Return the command of one training in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--go-on"]
    for name, value in run._asdict().items():
        command += [f"--{name}", str(value)]
    for name in HANDED_ON:
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command + [f"--{name}" for name in ("eager", "quick") if getattr(args, name)]


def in_process(command: list[str]) -> int:
    """Run a command and return its exit code; after Ctrl-C once it has written what it has."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return INTERRUPTED


def train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Train whatever the record lacks, print the tables and draw the pictures."""
    if Path(args.json).exists() and not args.go_on:
        sys.exit(
            f"{args.json} exists; --go-on adds to it and skips what it has, --out or --json names another"
        )
    rows, runs = read_rows(args.json), runs_of(args)
    left = [run for run in runs if not is_done(rows, run, settings_of(args, run.task))]
    code = 0
    if len(runs) == 1:
        for run in left:
            train_one(args, run, argv)
    elif left:
        for (
            run
        ) in left:  # each in a process of its own; a failure does not keep the others from running
            status = in_process(command_of(args, run))
            print(f"{run.name} · {'done' if status == 0 else f'ended with exit code {status}'}")
            code = code or status
            if status == INTERRUPTED:
                break
        if Path(args.json).exists():
            write(args, argv, read_rows(args.json))
    rows = [row for row in read_rows(args.json) if key_of(row) in runs and row["done"]]
    if rows and (len(runs) > 1 or not left):
        print(f"\n{rates_table(rows) if args.tune else results_table(rows)}\n")
    if args.plots and rows:
        for name, panels in pictures(rows).items():
            draw(make_folder(args.plots) / f"lra_{name}.png", *panels)
    print(f"record {args.json}")
    if code:
        sys.exit(code)


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    make_folder(args.out)
    with ends_in_one_line("--batch, --length or --size"):
        train(args, given)


if __name__ == "__main__":
    main()
