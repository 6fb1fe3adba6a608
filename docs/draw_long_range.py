"""Draw the weights of each attention of the Long-Range Arena, and examples of its tasks, into docs/images.

    python docs/draw_long_range.py

The picture of a method shows its weights beside those of exact attention on the same operands.  They are
the result of attention whose values are the identity matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "project"), str(ROOT)]
from data import stand_ins  # noqa: E402
from data.pathfinder import PUBLISHED, draw_picture  # noqa: E402

import minitorch  # noqa: E402
from minitorch import attention  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LENGTH, HEAD_DIM = 128, 16
#: Roots of weights are drawn, so that small ones can be seen; darker than this is black.
DARKEST = 0.5


def tensor(array: Any) -> minitorch.Tensor:
    """Return a float32 tensor on the CPU."""
    return minitorch.from_numpy(np.asarray(array, np.float32), minitorch.FastBackend)


def operands() -> tuple[minitorch.Tensor, minitorch.Tensor, minitorch.Tensor]:
    """Return q and k, (1, 1, 128, 16), in four groups that attend to themselves, and the identity as v."""
    random = np.random.default_rng(3)
    centres = random.standard_normal((4, HEAD_DIM)) * 2.0
    group = np.repeat([0, 1, 2, 0, 3, 1, 2, 3], LENGTH // 8)
    q, k = (centres[group] + 0.6 * random.standard_normal((LENGTH, HEAD_DIM)) for _ in range(2))
    return tensor(q[None, None]), tensor(k[None, None]), tensor(np.eye(LENGTH)[None, None])


def project(count: int) -> minitorch.Tensor:
    """Return a projection of Linformer, (count, 128): a learned one would mix positions as it needs."""
    random = np.random.default_rng(1)
    return tensor(random.standard_normal((count, LENGTH)) * LENGTH**-0.5)


#: By the name of the method: its title, the function, and its options.
METHODS: dict[str, tuple[str, Callable[..., minitorch.Tensor], dict[str, Any]]] = {
    "block_sparse": ("block-sparse: a butterfly of blocks of 16", attention.block_sparse,
                     {"pattern": "butterfly", "block_size": 16}),
    "local": ("local: 10 positions on each side", attention.local, {"window": 10}),
    "linformer": ("Linformer: 16 mixtures, not trained", attention.linformer, {"project_k": project(16)}),
    "linear": ("linear attention: elu + 1", attention.linear, {}),
    "performer": ("Performer: 256 random features", attention.performer, {"num_features": 256, "seed": 0}),
    "reformer": ("Reformer: chunks of 16, two rounds", attention.reformer,
                 {"chunk": 16, "rounds": 2, "seed": 0}),
    "smyrf": ("Smyrf: clusters of 16, two rounds", attention.smyrf,
              {"cluster": 16, "rounds": 2, "seed": 0}),
}  # fmt: skip


def draw_weights() -> None:
    """Draw a picture for each method."""
    q, k, v = operands()
    exact = q.flash_attention(k, v).to_numpy()[0, 0]
    for name, (title, method, options) in METHODS.items():
        own = method(q, q if name == "reformer" else k, v, **options).to_numpy()[0, 0]
        figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.7), layout="constrained")
        for ax, weights, text in zip(axes, (exact, own), ("exact attention", title), strict=True):
            ax.imshow(np.sqrt(np.clip(weights, 0.0, None)), cmap="Greys", vmin=0.0, vmax=DARKEST)
            ax.set(title=text, xlabel="key", ylabel="query")
            ax.title.set_fontsize(10)
        save(figure, f"attention_{name}.png")


def draw_examples() -> None:
    """Draw images of Pathfinder of each size and class, and two digits."""
    figure, axes = plt.subplots(2, 5, figsize=(10.0, 4.6), layout="constrained")
    for column, task in zip(axes.T, PUBLISHED.values(), strict=False):
        drawn = (
            draw_picture(np.random.default_rng([7, number]), task) for number in range(20, -1, -1)
        )
        found = {picture.label: picture.pixels for picture in drawn}  # the first of each label
        for ax, label, text in zip(column, (1, 0), ("joined", "not joined"), strict=True):
            ax.imshow(found[label], cmap="Greys_r")
            ax.set_title(f"Pathfinder-{task.size}: {text}", fontsize=9)
    digits = stand_ins.image({"train": 2, "valid": 1, "test": 1})["train"].X
    for ax, digit in zip(axes[:, -1], digits, strict=True):
        ax.imshow(digit.reshape(32, 32), cmap="Greys_r")
        ax.set_title("Image (stand-in: a digit)", fontsize=9)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    save(figure, "lra_examples.png")


def save(figure: Any, name: str) -> None:
    """Write a figure, and forget it."""
    figure.savefig(IMAGES / name, dpi=80, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_weights()
    draw_examples()
