"""Train a classifier on Path-X: Pathfinder with more and more pixels, each stage from the model before it.

python project/run_pathx.py --backend cuda --precision bfloat16     8 to 128 pixels (Path-X), then Path-256
python project/run_pathx.py --stages 8,16,32,64,128 --steps 2000,4000,9000,2500,1000
python project/run_pathx.py --quick                                 tiny images, in seconds on a CPU

The same command goes on where it was interrupted, in the middle of a stage, too.  Training images are drawn
as they are needed, or once into a file with --examples.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.records import command_line, name_of, read_rows, write_record
from common.command_line import COUNT, FROM_ZERO, POSITIVE, OneLineParser, per_item
from data.long_range import Task
from training.intervals import wilson_interval
from training.lra_loop import BEST, INTERRUPTED, Training
from training.lra_methods import BACKENDS, QUICK, Settings
from training.pathfinder_stages import (
    FIRST_STAGES,
    STAGES,
    Arrays,
    Stage,
    grown,
    stage_task,
    stage_title,
    task_name,
)
from training.runs import resumable
from training.saliency import held_out, panel, saliency, shares
from training.script_helpers import check_backend, curves, draw, ends_in_one_line, make_folder

import minitorch

Rows = list[dict[str, Any]]
ATTENTIONS = ("flash", "block-sparse")
#: Images whose saliency is measured, and of these the ones that are drawn.
MEASURED, DRAWN = 16, 4


MODEL = Settings(
    0, judge_every=200, judged=1000, layers=4, width=128, heads=4, hidden=256, dropout=0.0
)


@dataclass(frozen=True)
class Plan:
    """What becomes of one stage with the options of a run."""

    name: str  # of the stage
    stage: Stage  # with the options that were given
    before: str | None  # the stage before it, or None

    @property
    def side(self) -> int:
        """Of the images."""
        return self.stage.task.size


def attention_name(text: str) -> str:
    """Return one of ``ATTENTIONS``."""
    if text not in ATTENTIONS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(ATTENTIONS)}, got {text}")
    return text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--stages", type=per_item(str), metavar="NAME,…",
        help=f"in their order (default: {','.join(STAGES)}; with --quick 8,16)")  # fmt: skip
    for name, kind, what in (
        ("--steps", COUNT, "of the optimiser"),
        ("--batch", COUNT, "images of a step"),
        ("--lr", POSITIVE, "learning rate"),
        ("--attention", attention_name, "flash, or block-sparse: a head sees each fourth row of pixels"),
    ):  # fmt: skip
        add(
            name,
            type=per_item(kind),
            metavar="X,…",
            help=f"{what}, one for all stages or one for each",
        )
    for name in ("layers", "width", "heads", "hidden", "judge-every"):
        add(f"--{name}", type=COUNT, metavar="N", help="(default: that of the size)")
    add("--recompute", action=argparse.BooleanOptionalAction,
        help="recompute layers in the backward pass, which saves memory")  # fmt: skip
    add("--examples", type=COUNT, metavar="N",
        help="training images, drawn once into a file (default: new ones in each step)")  # fmt: skip
    add("--tested", type=COUNT, metavar="N", help="held-out images (default: 4000)")
    add("--processes", type=FROM_ZERO, metavar="N",
        help="that draw training images; 0 draws in this one (default: all cores but one)")  # fmt: skip
    parser.option("--seed", FROM_ZERO, 0, "of everything that is random")
    parser.choice("--backend", BACKENDS, "fast")
    parser.choice("--precision", ("float32", "bfloat16"), "float32")
    add("--eager", action="store_true",
        help="launch kernels one by one; a GPU else replays steps as a CUDA graph")  # fmt: skip
    add(
        "--quick",
        action="store_true",
        help="a tiny model and few steps: the stages 8 and 16 take seconds",
    )
    add("--out", default="runs/pathx", metavar="DIR",
        help="of sets, checkpoints, pictures and the record pathx.json (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    args.stages = args.stages or [*(FIRST_STAGES if args.quick else STAGES)]
    if args.stages != [name for name in STAGES if name in args.stages]:
        parser.error(
            f"--stages must be among {', '.join(STAGES)}, in this order, got {','.join(args.stages)}"
        )
    for name in ("steps", "batch", "lr", "attention"):
        given = getattr(args, name)
        if given is not None and len(given) not in (1, len(args.stages)):
            parser.error(
                f"--{name} takes one value for all stages or one for each of {len(args.stages)}, got "
                f"{len(given)}"
            )
    if args.processes is None and args.quick:
        args.processes = 0
    args.tested = args.tested or (64 if args.quick else 4000)
    return args


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """Return the stages with the options that were given."""
    plans = []
    for number, name in enumerate(args.stages):
        own: dict[str, Any] = {"steps": QUICK.steps, "batch": QUICK.batch} if args.quick else {}
        for option in ("steps", "batch", "lr", "attention"):
            if (given := getattr(args, option)) is not None:
                own[option] = given[number % len(given)]
        if args.recompute is not None:
            own["recompute"] = args.recompute
        before = args.stages[number - 1] if number else None
        plans.append(Plan(name, STAGES[name]._replace(**own), before))
    return plans


def settings_of(args: argparse.Namespace, stage: Stage) -> Settings:
    """Return the size of the model, the same in all stages, and of a stage's training."""
    names = "layers", "width", "heads", "hidden", "judge_every"
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    size = replace(QUICK if args.quick else MODEL, precision=args.precision, **given)
    return replace(size, steps=stage.steps, batch=stage.batch)


def task_of(args: argparse.Namespace, plan: Plan) -> Task:
    """Return the images of a stage."""
    counts = {"valid": QUICK.judged if args.quick else MODEL.judged, "test": args.tested}
    return stage_task(
        plan.name, Path(args.out) / "sets", args.seed, counts, examples=args.examples,
        processes=args.processes, before=plan.before,
    )  # fmt: skip


def start_of(args: argparse.Namespace, plan: Plan) -> Callable[[], Arrays] | None:
    """Return what reads the parameters with which a stage begins, if there is one before it."""
    if plan.before is None:
        return None
    return partial(grown, Path(args.out) / task_name(plan.before) / BEST, plan.side)


def is_same(row: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Tell whether a row of the record is of a finished training with these settings."""
    return row["done"] and all(row.get(name) == value for name, value in asked.items())


def train(args: argparse.Namespace, plan: Plan, row: dict[str, Any] | None) -> dict[str, Any]:
    """Train a stage as far as it is not, and return its row of the record."""
    stage, settings, task = plan.stage, settings_of(args, plan.stage), task_of(args, plan)
    folder = Path(args.out) / task.name
    attention, options = stage.attention.replace("-", "_"), None
    if attention == "block_sparse":
        options = {"block_size": max(plan.side, 16), "pattern": "dilated"}
    asked = {
        "source": task.source, "attention": attention, "options": options, "seed": args.seed,
        "lr": stage.lr, **asdict(settings),
    }  # fmt: skip
    if row is not None and is_same(row, asked) and (folder / BEST).exists():
        return row
    training = Training(
        task, attention, settings, args.seed, args.backend, folder, stage.lr, True, args.eager,
        start=start_of(args, plan), options=options, recompute=stage.recompute,
    )  # fmt: skip
    print(
        f"{task.name}: {task.source}; {stage.attention}, steps {training.done} to {settings.steps}"
    )
    row = training.run() | {"stage": plan.name, "side": plan.side, "recompute": stage.recompute}
    if row["done"]:
        row["interval"] = wilson_interval(
            round(row["test_accuracy"] * row["tested"]), row["tested"]
        )
        row["saliency"] = show_saliency(args, plan, training.model)
    return row


def show_saliency(
    args: argparse.Namespace, plan: Plan, model: minitorch.SequenceClassifier
) -> dict[str, float]:
    """Draw which pixels decide; return the mean saliency of the parts of images."""
    pictures = held_out(plan.stage.task, args.seed, MEASURED)
    maps, panels = [], []
    model.eval()
    for picture in pictures:
        ids = picture.pixels.reshape(1, -1).astype(np.int64)
        maps.append(saliency(model, ids)[0])
        if len(panels) < DRAWN:
            away, joined = model(ids).to_numpy().astype(np.float64)[0]
            panels.append(panel(picture, maps[-1], 1.0 / (1.0 + np.exp(away - joined))))
    draw(Path(args.out) / f"saliency-{plan.name}.png", *panels)
    return shares(pictures, maps)


def draw_curve(rows: Rows, path: Path) -> None:
    """Draw the validation accuracy and the training loss of all stages, one after the other."""
    accuracy, loss, begin = [], [], 0
    for row in rows:
        curve = row["curve"]
        name = stage_title(row["stage"])
        accuracy.append((name, [begin + x for x in curve["valid_step"]], curve["valid_accuracy"]))
        at = [begin + i * curve["train_every"] for i in range(len(curve["train"]))]
        loss.append((name, at, curve["train"]))
        begin += row["steps"]
    draw(
        path,
        curves("step", "validation accuracy", *accuracy),
        curves("step", "training loss", *loss),
    )


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Train all stages, write the record and draw the pictures; exit after Ctrl-C."""
    out = Path(args.out)
    record = out / "pathx.json"
    known = {row["stage"]: row for row in read_rows(record, "stage")}
    command = command_line("project/run_pathx.py", argv, ("--out",))
    device = name_of("cuda" if args.backend == "cuda" else "cpu")
    rows: Rows = []
    for plan in plans_of(args):
        row = train(args, plan, known.get(plan.name))
        known[plan.name] = row
        rows.append(row)
        write_record(
            record, command, device, rows=[known[name] for name in STAGES if name in known]
        )
        if not row["done"]:
            print(f"stopped by Ctrl-C in {task_name(plan.name)}; the same command goes on")
            sys.exit(INTERRUPTED)
        low, high = row["interval"]
        parts = ", ".join(
            f"{name.replace('_', ' ')} {x:.2f}" for name, x in row["saliency"].items()
        )
        print(
            f"{task_name(plan.name)}: {row['test_accuracy']:.1%} of {row['tested']} held-out images (95 % "
            f"interval {low:.1%} to {high:.1%}), by the model of step {row['best_step']}; "
            f"{row['seconds']:.0f} s\n  saliency over that of all pixels: {parts}"
        )
        gc.collect()  # the captured step of this stage, and its memory
    draw_curve(rows, out / "curve.png")
    print(f"record {record}")


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    make_folder(args.out)
    with ends_in_one_line("--batch, or pass --recompute"), resumable(args.out):
        run(args, given)


if __name__ == "__main__":
    main()
