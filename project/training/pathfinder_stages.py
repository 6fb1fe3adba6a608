"""Pathfinder from small images to large ones: a model of small images begins a training on larger ones.

Most trainings that began with random parameters on images of 32 pixels were still at chance after tens of
thousands of steps.  On 8 pixels a model finds within a thousand what joins two markers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
from data.long_range import BYTES, Task
from data.pathfinder import CLASSES, PUBLISHED, Pathfinder, draw_example, pathfinder
from data.sequence_sets import fresh_batches

from minitorch.models.positions import upsampled_grid
from minitorch.training.model_files import read_checkpoint
from training.lra_methods import depends_on_length

Arrays = Mapping[str, npt.NDArray[Any]]
POSITIONS = "position_embeddings.weights"


class Stage(NamedTuple):
    """The default training on images of one size.

    Attributes:
        task: The parameters of the images.
        steps: Of the optimiser.
        batch: Images of a step.
        lr: The highest learning rate.
        attention: "flash" or "block-sparse".
        recompute: Whether layers are recomputed in the backward pass.
    """

    task: Pathfinder
    steps: int
    batch: int
    lr: float
    attention: str = "flash"
    recompute: bool = False


#: By the side of the images.  Path-X has 128, Path-256 has 256; the smallest are not of the arena.
STAGES = {
    8: Stage(Pathfinder(8, 3, 1, 1.0, 0.5, 0.5, 0.5, 0.75, 2.0, levels=(3,)), 3_000, 256, 1e-3),
    16: Stage(
        Pathfinder(16, 5, 2, 1.5, 0.5, 0.75, 0.75, 1.0, 4.0, levels=(3, 5)), 8_000, 256, 1e-3
    ),
    32: Stage(PUBLISHED[32], 9_000, 256, 1e-3),
    64: Stage(PUBLISHED[64], 2_500, 128, 5e-4),
    128: Stage(PUBLISHED[128], 2_000, 32, 3e-4),
    256: Stage(PUBLISHED[256], 1_500, 16, 3e-4, "block-sparse", True),
}
#: Those with which the Long-Range Arena's trainings on Pathfinder begin.
FIRST_STAGES = 8, 16


def stage_name(side: int) -> str:
    """Return the name of a stage, of its task and of its folder."""
    return f"pathfinder-{side}"


def stage_task(
    side: int, sets: Path, seed: int, counts: Mapping[str, int], *, examples: int | None = None,
    processes: int | None = None, before: int | None = None,
) -> Task:  # fmt: skip
    """Return the images of a stage.

    Args:
        side: Of the images.
        sets: Folder of those that are drawn once.
        seed: Of everything that is random.
        counts: Images to validate and to test.
        examples: Training images, drawn once; when None, new ones are drawn in each step.
        processes: That draw new images; 0 draws in this one, None takes all cores but one.
        before: Side of the images of the stage before it, or None.
    """
    task, name = STAGES[side].task, stage_name(side)
    if processes is None:
        processes = max((os.cpu_count() or 1) - 1, 0)
    parts = pathfinder(sets / f"{name}-seed-{seed}.npz", seed=seed, task=task, counts={**counts})
    draw_one = partial(draw_example, task=task, lengths=task.levels)
    fresh = None
    if examples is None:
        fresh = partial(fresh_batches, draw_one, side**2, seed, processes=processes)
    else:
        file = sets / f"{name}-train-{examples}-seed-{seed}.npz"
        parts |= pathfinder(file, seed=seed, task=task, counts={"train": examples})
    number = "new ones in each step" if examples is None else f"{examples} to train"
    source = f"generated, {side} x {side} pixels, {number}{begun_with(before)}"
    return Task(name, source, parts, BYTES, CLASSES, side=side, turns=True, fresh=fresh)


def begun_with(side: int | None) -> str:
    """Return what a source says of the stage before, if there is one."""
    return "" if side is None else f", begun with the model of {side} pixels"


def grown(model: Path, side: int) -> Arrays:
    """Return the parameters of a model of smaller images, with positions for images of a larger side."""
    arrays, _ = read_checkpoint(model)
    kept = {name: x for name, x in arrays.items() if not depends_on_length(name)}
    return {**kept, POSITIONS: upsampled_grid(arrays[POSITIONS], side)}
