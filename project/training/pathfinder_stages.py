"""Pathfinder from small images to large ones: a model of small images begins a training on larger ones.

Most trainings that began with random parameters on images of 32 pixels were still at chance after tens of
thousands of steps.  On 8 pixels a model finds within a thousand what joins two markers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from data.long_range import BYTES, LraTask
from data.pathfinder import CLASSES, PUBLISHED, Pathfinder, draw_example, pathfinder
from data.sequence_sets import fresh_batches

from minitorch.models.positions import upsampled_grid
from minitorch.training.model_files import read_checkpoint
from training.lra_methods import depends_on_length

Arrays = Mapping[str, npt.NDArray[Any]]
POSITIONS = "position_embeddings.weights"


class Stage(NamedTuple):
    """The default training of one stage.

    Attributes:
        task: The parameters of the images that are held out, and of those to train unless ``mixed``.
        steps: Of the optimiser.
        batch: Images of a step.
        lr: The highest learning rate.
        attention: "flash" or "block-sparse".
        recompute: Whether layers are recomputed in the backward pass.
        mixed: Parameters of the images to train, as many of each, from what the stage before it knows to
            ``task``.  Images that are drawn once into a file are of ``task`` alone.
    """

    task: Pathfinder
    steps: int
    batch: int
    lr: float
    attention: str = "flash"
    recompute: bool = False
    mixed: tuple[Pathfinder, ...] = ()


#: The images of Path-256 with half the resolution.  A contour of Path-256 is as long in pixels as one of
#: Path-X, and half as long beside the image, which is too much for one stage.
HALF_256 = PUBLISHED[256].scaled(1 / 2)
#: By their names, in their order: the sides of the images, but for half-256 with 128 pixels.  Path-X has
#: 128, Path-256 has 256; the smallest are not of the arena.
STAGES = {
    "8": Stage(Pathfinder(8, 3, 1, 1.0, 0.5, 0.5, 0.5, 0.75, 2.0, levels=(3,)), 3_000, 256, 1e-3),
    "16": Stage(
        Pathfinder(16, 5, 2, 1.5, 0.5, 0.75, 0.75, 1.0, 4.0, levels=(3, 5)), 8_000, 256, 1e-3
    ),
    "32": Stage(PUBLISHED[32], 9_000, 256, 1e-3),
    "64": Stage(PUBLISHED[64], 2_500, 128, 5e-4),
    "128": Stage(PUBLISHED[128], 2_000, 32, 3e-4),
    "half-256": Stage(
        HALF_256, 1_500, 32, 3e-4,
        mixed=(PUBLISHED[128], replace(PUBLISHED[256].scaled(0.7), size=128), HALF_256),
    ),
    "256": Stage(PUBLISHED[256], 700, 16, 3e-4, "block-sparse"),
}  # fmt: skip
#: Those with which the Long-Range Arena's trainings on Pathfinder begin.
FIRST_STAGES = "8", "16"


def stage_title(name: str) -> str:
    """Return how texts and pictures call a stage."""
    return f"{name} pixels" if name.isdigit() else name


def task_name(name: str) -> str:
    """Return the name of a stage's task and of its folder."""
    return f"pathfinder-{name}"


def stage_task(
    name: str, sets: Path, seed: int, counts: Mapping[str, int], *, examples: int | None = None,
    processes: int | None = None, before: str | None = None,
) -> LraTask:  # fmt: skip
    """Return the images of a stage.

    Args:
        name: Of the stage.
        sets: Folder of the images that are drawn once.
        seed: Of everything that is random.
        counts: Images to validate and to test.
        examples: Training images, drawn once; when None, new ones are drawn in each step.
        processes: That draw new images; 0 draws in this one, None takes all cores but one.
        before: The stage before it, or None.
    """
    stage, own = STAGES[name], task_name(name)
    task, side = stage.task, stage.task.size
    if processes is None:
        processes = max((os.cpu_count() or 1) - 1, 0)
    parts = pathfinder(sets / f"{own}-seed-{seed}.npz", seed=seed, task=task, counts={**counts})
    fresh = None
    if examples is None:
        draw_one = partial(draw_one_of, tasks=stage.mixed or (task,))
        fresh = partial(fresh_batches, draw_one, side**2, seed, processes=processes)
    else:
        file = sets / f"{own}-train-{examples}-seed-{seed}.npz"
        parts |= pathfinder(file, seed=seed, task=task, counts={"train": examples})
    number = "new ones in each step" if examples is None else f"{examples} to train"
    source = f"generated, {side} x {side} pixels, {number}{begun_with(before)}"
    return LraTask(own, source, parts, BYTES, CLASSES, side=side, turns=True, fresh=fresh)


def draw_one_of(
    random: np.random.Generator, tasks: Sequence[Pathfinder]
) -> tuple[npt.NDArray[np.uint8], int]:
    """Draw the pixels of an image of one of the tasks, (size²,), and its class."""
    # A draw for one task alone would change the images of its seed.
    task = tasks[0] if len(tasks) == 1 else tasks[int(random.integers(len(tasks)))]
    return draw_example(random, task, task.levels)


def begun_with(name: str | None) -> str:
    """Return what a source says of the stage before, if there is one."""
    return "" if name is None else f", begun with the model of {stage_title(name)}"


def grown(model: Path, side: int) -> Arrays:
    """Return the parameters of a model of smaller images, with positions for images of a larger side."""
    arrays, _ = read_checkpoint(model)
    kept = {name: x for name, x in arrays.items() if not depends_on_length(name)}
    return {**kept, POSITIONS: upsampled_grid(arrays[POSITIONS], side)}
