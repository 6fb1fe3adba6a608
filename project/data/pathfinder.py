"""Pathfinder: are two marked ends joined by one dashed contour?  Drawn images, read pixel by pixel.

An image shows two long contours and several short distractors, each a chain of paddles (short segments with
gaps between them).  The long contours begin near the centre, a fixed distance apart.  One disc marks the
beginning of one of them, and another one the end of the same contour (class 1) or of the other (class 0).

Source: Linsley et al., Learning long-range spatial dependencies with horizontal gated recurrent units
(2018), with the parameters of Tay et al., Long-Range Arena (2021).  The generator is our own: contours grow
one after the other, and paddles are drawn by their distance from a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.sequence_sets import Examples, draw_set, read_or_make
from kernels.runtime.jit import njit_cached

Array = npt.NDArray[np.float64]
CLASSES = 2
#: Beginnings of a contour that are tried before an image is begun anew, and images that are begun.
ATTEMPTS, IMAGES = 200, 10_000
#: Directions that are tried for a paddle before its contour is given up.
TURNS = 8


@dataclass(frozen=True)
class Pathfinder:
    """The parameters of the task; lengths are in pixels.

    Attributes:
        size: Of a side of an image.
        contour_length: Paddles of each of the two long contours.
        distractors: Short contours, each a third as long.
        paddle_length: Of a paddle.
        thickness: Of a paddle.
        gap: Between the paddles of a contour.
        margin: Between contours, and to the edge of the image.
        marker_radius: Of the discs.
        seed_distance: Between the beginnings of the long contours.  The first lies at least twice as far
            from each edge.
        continuity: Smoothness, 1 or more: a contour turns by 45 degrees / continuity at most.
        paddle_contrast: Brightness of the long contours; that of distractors and discs is 1.
        counts: Examples of each part.
        levels: Lengths of the long contours in training images, each in as many of them; those to validate
            and to test have ``contour_length``.  Easier images show a model what a contour is.
    """

    size: int = 32
    contour_length: int = 14
    distractors: int = 5
    paddle_length: float = 2.0
    thickness: float = 0.5
    gap: float = 1.0
    margin: float = 1.0
    marker_radius: float = 1.5
    seed_distance: float = 7.0
    continuity: float = 1.0
    paddle_contrast: float = 0.75
    counts: dict[str, int] = field(
        default_factory=lambda: {"train": 160_000, "valid": 20_000, "test": 20_000}
    )
    levels: tuple[int, ...] = (6, 9, 14)

    def __post_init__(self) -> None:
        if not (self.continuity >= 1.0 and 0.0 < self.paddle_contrast <= 1.0):
            raise ValueError(
                "continuity must be 1 or more and paddle_contrast above 0 and at most 1, got "
                f"{self.continuity} and {self.paddle_contrast}"
            )
        if 4 * self.seed_distance > self.size:
            raise ValueError(
                "seed_distance is at most a quarter of size, since the first contour begins at twice that "
                f"distance from each edge, got {self.seed_distance} and {self.size}"
            )
        if min(self.contour_length, *self.levels) < 3 or self.distractors < 0:
            raise ValueError(
                "a contour needs 3 paddles or more, and the number of distractors is 0 or more, got "
                f"{self.contour_length}, levels {self.levels} and {self.distractors}"
            )

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return max(self.contour_length // 3, 1)

    def scaled(self, factor: float) -> Pathfinder:
        """Return the parameters of the same images with ``factor`` times as many pixels on a side."""
        lengths = (
            "paddle_length", "thickness", "gap", "margin", "marker_radius", "seed_distance",
        )  # fmt: skip
        own = {name: factor * getattr(self, name) for name in lengths}
        return replace(self, size=round(factor * self.size), **own)


#: The parameters for each size of an image.
PUBLISHED = {
    task.size: task
    for task in (
        Pathfinder(),
        Pathfinder(64, paddle_length=3.5, thickness=1.0, marker_radius=2.5, seed_distance=12.0,
                   continuity=1.8, paddle_contrast=1.0),
        Pathfinder(128, distractors=8, paddle_length=5.0, thickness=1.5, gap=2.5, margin=2.5,
                   marker_radius=3.0, seed_distance=20.0, continuity=1.8, paddle_contrast=1.0),
        Pathfinder(256, distractors=7, paddle_length=5.0, thickness=2.0, gap=3.0, margin=3.0,
                   marker_radius=5.0, seed_distance=27.0, continuity=1.8, paddle_contrast=1.0),
    )
}  # fmt: skip


class Picture(NamedTuple):
    """An image and what it was drawn from.

    Attributes:
        pixels: (size, size), uint8.
        label: 1 if the markers lie on one contour, else 0.
        contours: Of each its paddles, (count, 4): the two ends (x, y, x, y); the two long ones come first.
        markers: (2, 2), the centres (x, y).
    """

    pixels: npt.NDArray[np.uint8]
    label: int
    contours: list[Array]
    markers: Array


@njit_cached()
def _distance(x, y, paddle):
    """Return the distance of a point from a paddle."""
    along_x, along_y = paddle[2] - paddle[0], paddle[3] - paddle[1]
    place = (x - paddle[0]) * along_x + (y - paddle[1]) * along_y
    place = min(max(place / (along_x * along_x + along_y * along_y), 0.0), 1.0)
    return math.hypot(x - paddle[0] - place * along_x, y - paddle[1] - place * along_y)


@njit_cached()
def _is_free(paddle, paddles, count, apart, edge, size):
    """Tell whether the ends and the middle of a paddle stay away from others and from the edge."""
    for part in (0.0, 0.5, 1.0):
        x = paddle[0] + part * (paddle[2] - paddle[0])
        y = paddle[1] + part * (paddle[3] - paddle[1])
        if not (edge < x < size - edge and edge < y < size - edge):
            return False
        for other in range(count):
            if _distance(x, y, paddles[other]) <= apart:
                return False
    return True


@njit_cached()
def _grow(paddles, count, angle, turns, reach, gap, apart, edge, size):
    """Append a contour to ``paddles``, (most, 4), of which there are ``count``; tell whether it has room.

    The first paddle begins where ``paddles[count, :2]`` says, and has a direction of ``angle``.  The next
    ones take the first of their ``turns``, (length, tries), that is free.
    """
    length, tries = turns.shape
    paddle = paddles[count].copy()
    for number in range(length):
        # The paddle before is a gap away, which may be less than the margin.
        others = count + max(number - 1, 0)
        is_free, found = False, angle
        for turn in range(tries if number else 1):
            found = angle + turns[number, turn]
            paddle[2] = paddle[0] + reach * math.cos(found)
            paddle[3] = paddle[1] + reach * math.sin(found)
            if _is_free(paddle, paddles, others, apart, edge, size):
                is_free = True
                break
        if not is_free:
            return False
        paddles[count + number] = paddle
        angle = found
        paddle[0] = paddle[2] + gap * math.cos(angle)
        paddle[1] = paddle[3] + gap * math.sin(angle)
    return True


@njit_cached()
def _place(random, paddles, count, length, low, away, steepest, reach, gap, apart, edge, size):
    """Append a contour of ``length`` paddles that begins at random; tell whether one of the tries had room.

    Args:
        random: NumPy's generator.
        paddles: (most, 4), those of other contours first; the rest is written.
        count: Of the others.
        length: Paddles of the contour.
        low: Least distance of its beginning from the edge of the image.
        away: 0, or how far from the first paddle it begins, wherever the edge is.
        steepest: Turn from paddle to paddle.
        reach: Length of a paddle.
        gap: Between the paddles.
        apart: Between the middle lines of two contours.
        edge: Between a middle line and the edge of the image.
        size: Of the image.
    """
    for _ in range(ATTEMPTS):
        paddles[count, :2] = random.uniform(low, size - low, 2)
        if away > 0.0:
            direction = random.uniform(0.0, 2.0 * math.pi)
            paddles[count, 0] = paddles[0, 0] + away * math.cos(direction)
            paddles[count, 1] = paddles[0, 1] + away * math.sin(direction)
        turns = random.uniform(-steepest, steepest, (length, TURNS))
        angle = random.uniform(0.0, 2.0 * math.pi)
        if _grow(paddles, count, angle, turns, reach, gap, apart, edge, size):
            return True
    return False


def _contours(random: np.random.Generator, task: Pathfinder) -> list[Array]:
    """Return the two long contours and the distractors."""
    lengths = [task.contour_length] * 2 + [task.distractor_length] * task.distractors
    bounds = np.cumsum([0, *lengths])
    steepest = math.pi / 4 / task.continuity
    apart, edge = task.margin + task.thickness, task.margin + task.thickness / 2.0
    for _ in range(IMAGES):
        paddles = np.zeros((bounds[-1], 4))
        for number, length in enumerate(lengths):
            low = edge if number else 2.0 * task.seed_distance
            away = task.seed_distance if number == 1 else 0.0
            if not _place(
                random, paddles, bounds[number], length, low, away, steepest, task.paddle_length, task.gap,
                apart, edge, float(task.size),
            ):  # fmt: skip
                break  # no room: begin anew
        else:
            return np.split(paddles, bounds[1:-1])
    raise ValueError(
        f"{len(lengths)} contours do not fit into {task.size} x {task.size} pixels; ask for fewer "
        "distractors, shorter contours or a larger image"
    )


def draw_picture(random: np.random.Generator, task: Pathfinder) -> Picture:
    """Draw an image.

    Raises:
        ValueError: If the contours do not fit into it.
    """
    contours, label = _contours(random, task), int(random.integers(2))
    first = random.integers(2)
    last = first if label else 1 - first
    markers = np.stack([contours[first][0, :2], contours[last][-1, 2:]])
    image = np.zeros((task.size, task.size))
    for number, contour in enumerate(contours):
        for paddle in contour:
            _paint(image, paddle, task.thickness / 2.0, 1.0 if number > 1 else task.paddle_contrast)
    for marker in markers:
        _paint(image, np.concatenate([marker, marker + 1e-6]), task.marker_radius, 1.0)
    return Picture(np.round(image * 255.0).astype(np.uint8), label, contours, markers)


@njit_cached()
def _paint(image, segment, radius, brightness):
    """Draw a segment with round ends; a pixel that it covers in part is darker."""
    size, reach = len(image), radius + 1.0
    first = max(int(min(segment[1], segment[3]) - reach), 0)
    last = min(int(max(segment[1], segment[3]) + reach) + 1, size)
    left = max(int(min(segment[0], segment[2]) - reach), 0)
    right = min(int(max(segment[0], segment[2]) + reach) + 1, size)
    for row in range(first, last):
        for col in range(left, right):
            covered = radius + 0.5 - _distance(col + 0.5, row + 0.5, segment)
            covered = min(max(covered, 0.0), 1.0) * brightness
            image[row, col] = max(image[row, col], covered)


def pathfinder(
    path: str | Path, size: int = 32, seed: int = 0, task: Pathfinder | None = None, **changes: Any
) -> dict[str, Examples]:
    """Return the parts of the data set from its file, which is made first if there is none.

    Args:
        path: Of the .npz file.
        size: Of a side of the images, if ``task`` is None: 32, 64, 128 or 256.
        seed: Of everything that is random.
        task: The parameters; the published ones for the size when None.
        changes: Other values of some of them, by name.

    Raises:
        ValueError: If there are no published parameters for the size.
    """
    if task is None and size not in PUBLISHED:
        raise ValueError(f"size must be one of {tuple(PUBLISHED)}, got {size}; or pass a task")
    chosen = replace(task or PUBLISHED[size], **changes)

    def make() -> dict[str, Examples]:
        parts: dict[str, Examples] = {}
        for part, count in chosen.counts.items():
            lengths = chosen.levels if part == "train" else (chosen.contour_length,)
            draw = partial(draw_example, task=chosen, lengths=lengths)
            parts |= draw_set(
                draw, {part: count}, chosen.size**2, seed, f"Pathfinder-{chosen.size}"
            )
        return parts

    return read_or_make(path, {"task": "pathfinder", "seed": seed, **asdict(chosen)}, make)


def draw_example(
    random: np.random.Generator, task: Pathfinder, lengths: Sequence[int]
) -> tuple[npt.NDArray[np.uint8], int]:
    """Draw the pixels of an image, (size²,), and its class.

    Args:
        random: NumPy's generator.
        task: The parameters but for ``contour_length``.
        lengths: Of the long contours, one of which is drawn.
    """
    length = lengths[int(random.integers(len(lengths)))]
    picture = draw_picture(random, replace(task, contour_length=length))
    return picture.pixels.reshape(-1), picture.label
