"""The nine attentions of FlashAttention's table on the Long-Range Arena, and their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data.long_range import Task

import minitorch

BACKENDS = {"fast": minitorch.FastBackend, "cuda": minitorch.CudaBackend}


def _none(length: int, seed: int) -> dict[str, Any]:
    return {}


def _block(length: int) -> int:
    """Return positions of a block, cluster or chunk: 64, or 16 for sequences of a few blocks."""
    return 64 if length >= 256 else 16


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        title: In tables and figures.
        lr: The learning rate in training.
        options: ``(length, seed)`` to the ``attention_options``.  The features of the Performer and the
            directions of Reformer and Smyrf stay the same during a training, so that a step can be captured
            as a CUDA graph.
    """

    title: str
    lr: float
    options: Callable[[int, int], Mapping[str, Any]] = _none


#: By the name of the attention.  The learning rate is that of ``project/run_lra.py --tune`` with which
#: exact attention learns ListOps best.
METHODS: dict[str, Method] = {
    "naive": Method("Transformer", 2e-3),
    "flash": Method("FlashAttention", 2e-3),
    "block_sparse": Method(
        "block-sparse FlashAttention", 2e-3, lambda length, seed: {"block_size": _block(length)}
    ),
    "linformer": Method(
        "Linformer", 2e-3,
        lambda length, seed: {"length": length, "count": min(256, max(length // 4, 1))},
    ),
    "linear": Method("linear attention", 2e-3),
    "performer": Method(
        "Performer", 2e-3,
        lambda length, seed: {"num_features": 256, "redraw_every": 0, "seed": seed},
    ),
    "local": Method("local attention", 2e-3, lambda length, seed: {"window": _block(length)}),
    "reformer": Method(
        "Reformer", 2e-3,
        lambda length, seed: {"chunk": _block(length), "rounds": 2, "seed": seed},
    ),
    "smyrf": Method(
        "Smyrf", 2e-3,
        lambda length, seed: {"cluster": _block(length), "rounds": 2, "seed": seed},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The size of a model and of its training: the same for all methods of a task.

    Attributes:
        steps: Of the optimiser.
        batch: Examples of a step.
        judge_every: Steps between two validations.
        judged: Most examples of a validation.
        layers: Transformer layers.
        width: Of the model.
        heads: Of each layer.
        hidden: Width of the feed-forward networks.
        dropout: Probability of all branches.
        clip: Largest norm of all gradients together.
        weight_decay: Of AdamW.
        precision: "float32", or "bfloat16"; see :class:`minitorch.Precision`.
    """

    steps: int
    batch: int = 32
    judge_every: int = 200
    judged: int = 1000
    layers: int = 2
    width: int = 64
    heads: int = 2
    hidden: int = 128
    dropout: float = 0.1
    clip: float = 1.0
    weight_decay: float = 0.01
    precision: str = "float32"


#: By task.  Source: the small configuration of Xiong et al., Nyströmformer (2021), which FlashAttention's
#: table uses: 2 layers, width 64, 2 heads, hidden width 128, mean pooling, and these steps and batches.
SETTINGS = {
    "listops": Settings(5_000, judged=2000, dropout=0.0),  # each example is seen less than twice
    "text": Settings(20_000),
    "retrieval": Settings(30_000),
    "image": Settings(35_000, batch=256),
    "pathfinder": Settings(62_400, batch=256, judge_every=400),
}
#: The tiny size, to see that everything runs.
QUICK = Settings(
    30, batch=8, judge_every=10, judged=32, layers=1, width=16, heads=2, hidden=32, dropout=0.0
)


def build(
    task: Task, attention: str, settings: Settings, backend: str, seed: int = 0
) -> minitorch.SequenceClassifier:
    """Build the model of a task with one of the attentions."""
    return build_classifier(attention, settings, backend, seed, **task.model)


def build_classifier(
    attention: str, settings: Settings, backend: str, seed: int = 0, *, vocabulary: int, length: int,
    classes: int, pad_id: int | None, documents: int,
) -> minitorch.SequenceClassifier:  # fmt: skip
    """Build a model from what it must know of a task; see :class:`minitorch.SequenceClassifier`."""
    return minitorch.SequenceClassifier(
        vocabulary, settings.width, settings.heads, length, classes, settings.dropout,
        n_layer=settings.layers, middle_dim=settings.hidden, attention=attention,
        attention_options=METHODS[attention].options(length, seed), pad_id=pad_id,
        documents=documents, backend=BACKENDS[backend], precision=settings.precision,
    )  # fmt: skip
