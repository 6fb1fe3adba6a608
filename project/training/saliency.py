"""Which pixels of a Pathfinder image decide: the gradient of the logits with respect to embedded pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from data.pathfinder import Array, Pathfinder, Picture, draw_picture

import minitorch
from minitorch.models.evaluation import evaluating
from training.script_helpers import Panel

#: Points of a paddle whose pixels count as its own.
POINTS = 8
#: The part of the pixels that a picture shows at full strength.
BRIGHTEST = 0.005


def saliency(model: minitorch.SequenceClassifier, ids: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return how strongly each embedded pixel changes the logit of class 1 over that of class 0.

    Args:
        model: A classifier of two classes; dropout is off while it is called.
        ids: Pixels, (batch, seq).

    Returns:
        The Euclidean norm of the gradient, (batch, seq).
    """
    own = model.precision
    products = minitorch.get_matmul_precision() if own is None else own.products
    with evaluating(model), minitorch.matmul_precision(products):  # in the backward pass, too
        x = model.embed(ids).detach()
        x.requires_grad_(True)
        logits = model.head(model.pool(x))  # (batch, 2)
        sign = minitorch.from_numpy(np.array([[-1.0, 1.0]]), logits.backend)
        (logits * sign.to(logits.dtype)).sum().backward()
    assert x.grad is not None, "x has just been differentiated"
    return np.linalg.norm(x.grad.to_numpy().astype(np.float64), axis=-1)


def held_out(task: Pathfinder, seed: int, count: int) -> list[Picture]:
    """Return images that are in no part of a set, the two classes in turns.

    Args:
        task: The parameters.
        seed: That of the set.
        count: Number of images.
    """
    found: list[Picture] = []
    number = 0
    while len(found) < count:
        picture = draw_picture(np.random.default_rng([seed, 3, number]), task)
        number += 1
        if picture.label == (len(found) + 1) % 2:  # a joined one first
            found.append(picture)
    return found


def pixels_of(contours: Sequence[Array], size: int) -> npt.NDArray[np.bool_]:
    """Return where the middle lines of contours lie, (size, size)."""
    mask = np.zeros((size, size), bool)
    along = np.linspace(0.0, 1.0, POINTS)[:, None]
    for contour in contours:
        for paddle in contour:
            x, y = ((1.0 - along) * paddle[:2] + along * paddle[2:]).astype(int).T
            mask[y.clip(0, size - 1), x.clip(0, size - 1)] = True
    return mask


def shares(
    pictures: Sequence[Picture], maps: Sequence[npt.NDArray[np.float64]]
) -> dict[str, float]:
    """Return the mean saliency of the parts of images, relative to that of all pixels.

    Args:
        pictures: The images.
        maps: The saliency of each, (seq,).
    """
    parts: dict[str, list[float]] = {"long_contours": [], "distractors": [], "elsewhere": []}
    for picture, flat in zip(pictures, maps, strict=True):
        size = len(picture.pixels)
        strength = flat.reshape(size, size) / max(float(flat.mean()), 1e-30)
        long, short = (pixels_of(x, size) for x in (picture.contours[:2], picture.contours[2:]))
        for name, mask in zip(parts, (long, short, ~(long | short)), strict=True):
            parts[name].append(float(strength[mask].mean()) if mask.any() else 0.0)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def panel(picture: Picture, flat: npt.NDArray[np.float64], joined: float) -> Panel:
    """Return a panel of an image with its saliency in red over it.

    Args:
        picture: The image.
        flat: Its saliency, (seq,).
        joined: The model's probability of class 1.
    """

    def draw(axes: Any) -> None:
        size = len(picture.pixels)
        strength = np.clip(flat / max(float(np.quantile(flat, 1.0 - BRIGHTEST)), 1e-30), 0.0, 1.0)
        grey = 0.6 * picture.pixels / 255.0
        red = strength.reshape(size, size)
        axes.imshow(np.stack([np.maximum(grey, red), grey * (1 - red), grey * (1 - red)], axis=-1))
        truth = "joined" if picture.label else "not joined"
        axes.set(title=f"{truth}; joined with {joined:.0%}", xticks=[], yticks=[])

    return draw
