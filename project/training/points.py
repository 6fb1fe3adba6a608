"""Train on points of the plane: the options, the run and the picture of the scripts of modules 0 to 3."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from common.command_line import COUNT, POSITIVE, OneLineParser, script_parser

import minitorch
from minitorch.datasets import Graph
from training.script_helpers import (
    Panel,
    Progress,
    check_loss,
    curves,
    draw,
    ends_in_one_line,
    make_folder,
)

#: By the names of the command line.
DATASETS = {name.lower(): make for name, make in minitorch.datasets.items()}
#: Epochs between two lines of :func:`default_log_fn`.
LOG_EVERY = 10
#: Points along each side of the picture's grid.
GRID = 48

LogFunction = Callable[[int, float, int, list[float]], None]


class Classifier(Protocol):
    """What can be judged and drawn; one with ``run_many`` is asked for all points at once."""

    def run_one(self, x: Sequence[float]) -> Any:
        """Return the probability of class 1 at a point."""
        ...


class Trainer(Classifier, Protocol):
    """What the scripts, and the app, ask of a trainer."""

    def train(
        self, data: Graph, learning_rate: float, max_epochs: int, log_fn: LogFunction
    ) -> None:
        """Train a new model; ``log_fn`` is called after each epoch."""
        ...


def default_log_fn(epoch: int, total_loss: float, correct: int, losses: list[float]) -> None:
    """Print how far a training is, after the first epoch and each of ``LOG_EVERY``.

    Args:
        epoch: Epochs so far.
        total_loss: Sum of the loss over the points, in this epoch.
        correct: Points on the right side, in this epoch.
        losses: The total loss of each epoch so far.
    """
    if epoch == 1 or epoch % LOG_EVERY == 0:
        print(f"epoch {epoch}  loss {total_loss:.4f}  correct {correct}")


# -- judging and drawing -------------------------------------------------------------------------


def probabilities(
    classifier: Classifier, points: Sequence[tuple[float, float]]
) -> npt.NDArray[np.float64]:
    """Return the probability of class 1 at each of the points."""
    run_many = getattr(classifier, "run_many", None)
    if run_many is not None:
        return run_many(points).to_numpy().reshape(-1)
    outputs = [classifier.run_one(point) for point in points]
    return np.array([getattr(output, "data", output) for output in outputs], np.float64)


def count_correct(classifier: Classifier, data: Graph) -> int:
    """Count the points that a classifier puts on the right side of one half."""
    return int(((probabilities(classifier, data.X) > 0.5) == np.array(data.y)).sum())


def boundary(classifier: Classifier, data: Graph, title: str, side: int = GRID) -> Panel:
    """Return a panel of the points, upon what the classifier says of the plane around them.

    Args:
        classifier: Judges the points of a grid.
        data: The points; those on the wrong side are ringed.
        title: Above the picture.
        side: Points along each side of the grid.
    """

    def panel(axes: Any) -> None:
        X, y = np.array(data.X), np.array(data.y)
        low, high = np.minimum(X.min(0), 0.0) - 0.02, np.maximum(X.max(0), 1.0) + 0.02
        first, second = (np.linspace(low[i], high[i], side) for i in (0, 1))
        grid = [(x1, x2) for x2 in second.tolist() for x1 in first.tolist()]
        level = probabilities(classifier, grid).reshape(side, side)
        steps = np.linspace(0, 1, 11)
        areas = axes.contourf(first, second, level, levels=steps, cmap="RdBu_r", alpha=0.6)
        axes.figure.colorbar(areas, ax=axes, label="probability of class 1", shrink=0.8)
        axes.contour(first, second, level, levels=[0.5], colors="black", linewidths=1.0)
        for label, marker, color in ((0, "o", "#1e40af"), (1, "^", "#991b1b")):
            axes.scatter(*X[y == label].T, marker=marker, color=color, label=f"class {label}")
        wrong = (probabilities(classifier, data.X) > 0.5) != y
        axes.scatter(*X[wrong].T, s=130, facecolors="none", edgecolors="black", label="wrong")
        axes.set(title=title, xlabel="x1", ylabel="x2")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)  # beside the points

    return panel


# -- the scripts ---------------------------------------------------------------------------------


def truth(text: str) -> bool:
    """Read yes or no, for an option that published scripts call with a value."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be True or False, got {text}")
    return known[text.lower()]


def points_parser(description: str | None, out: str) -> OneLineParser:
    """Return a parser of the options that all four scripts have.

    Args:
        description: What --help shows first.
        out: Default folder of the picture.
    """
    parser = script_parser(description, out)
    parser.choice("--DATASET", DATASETS, "simple")
    parser.option("--PTS", COUNT, 50, "number of points")
    parser.add_argument(
        "--PLOT", type=truth, nargs="?", const=True, default=True, metavar="BOOL",
        help="whether to draw the picture (default: %(default)s)",
    )  # fmt: skip
    return parser


def add_training_options(parser: OneLineParser, hidden: int, rate: float) -> None:
    """Add the options of a script that trains, with its defaults."""
    parser.option("--HIDDEN", COUNT, hidden, "width of the two hidden layers")
    parser.option("--RATE", POSITIVE, rate, "learning rate")
    parser.option("--EPOCHS", COUNT, 500, "passes over the points")


def make_points(args: argparse.Namespace) -> Graph:
    """Seed every generator and make the points that the options ask for; exit if there are none."""
    random.seed(args.seed)  # as minitorch.manual_seed, which modules 0 and 1 have not
    np.random.seed(args.seed % 2**32)
    data = DATASETS[args.DATASET](args.PTS)
    if data.N == 0:  # a spiral of one point
        sys.exit(f"--DATASET {args.DATASET} needs at least 2 points, got --PTS {args.PTS}")
    return data


def judge(classifier: Classifier, data: Graph, args: argparse.Namespace, *more: Panel) -> None:
    """Print how many points are on the right side, and draw the boundary.

    Args:
        classifier: What is judged.
        data: The points.
        args: The options.
        more: Panels beside that of the boundary.
    """
    correct = count_correct(classifier, data)
    print(f"{args.DATASET}: {correct} of {data.N} points on the right side")
    if args.PLOT:
        title = f"{args.DATASET}: {correct} of {data.N}"
        draw(Path(args.out) / f"{args.DATASET}.png", boundary(classifier, data, title), *more)


def train_and_judge(trainer: Trainer, args: argparse.Namespace) -> None:
    """Train on the points that the options ask for, print the result and draw it."""
    data = make_points(args)
    make_folder(args.out)
    curve: list[float] = []
    with Progress(args.EPOCHS, "epoch") as progress:

        def log(epoch: int, total_loss: float, correct: int, losses: list[float]) -> None:
            check_loss(total_loss, f"the loss of epoch {epoch}", args.RATE, "--RATE")
            curve[:] = losses
            progress.update(
                epoch, f"loss {total_loss:8.4f}  correct {correct}/{data.N}  {progress.speed}"
            )

        trainer.train(data, args.RATE, args.EPOCHS, log)
    print(f"trained {progress.done} epochs in {progress.seconds:.1f} s, {progress.speed}")
    guess = data.N * math.log(2.0)
    if curve[-1] >= guess:
        print(
            f"the loss {curve[-1]:.4f} is no better than that of a guess, {guess:.4f}: if more --EPOCHS do "
            "not help, the ReLUs are dead; take a lower --RATE, a larger --HIDDEN or another --seed"
        )
    losses = curves("epoch", "loss of all points", ("", range(1, len(curve) + 1), curve))
    judge(trainer, data, args, losses)
    progress.end()


def run_points(make_trainer: Callable[[argparse.Namespace], Trainer], args: Any) -> None:
    """Run one of the scripts: train, judge, draw; whatever goes wrong is one line."""
    with ends_in_one_line("--HIDDEN or --PTS"):
        train_and_judge(make_trainer(args), args)
