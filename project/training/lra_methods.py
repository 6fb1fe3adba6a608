"""The nine attentions of FlashAttention's table on the Long-Range Arena, and their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data.long_range import LraTask

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
        options: ``(length, seed)`` to the ``attention_options``.  The features of the Performer and the
            directions of Reformer and Smyrf stay the same during a training, so that a step can be captured
            as a CUDA graph.
    """

    title: str
    options: Callable[[int, int], Mapping[str, Any]] = _none


#: By the name of the attention.
METHODS: dict[str, Method] = {
    "naive": Method("Transformer"),
    "flash": Method("FlashAttention"),
    "block_sparse": Method(
        "block-sparse FlashAttention", lambda length, seed: {"block_size": _block(length)}
    ),
    "linformer": Method(
        "Linformer",
        lambda length, seed: {"length": length, "count": min(256, max(length // 4, 1))},
    ),
    "linear": Method("linear attention"),
    "performer": Method(
        "Performer",
        lambda length, seed: {"num_features": 256, "redraw_every": 0, "seed": seed},
    ),
    "local": Method("local attention", lambda length, seed: {"window": _block(length)}),
    "reformer": Method(
        "Reformer",
        lambda length, seed: {"chunk": _block(length), "rounds": 2, "seed": seed},
    ),
    "smyrf": Method(
        "Smyrf",
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
    "pathfinder": Settings(62_400, batch=256, judge_every=400, dropout=0.0),  # images are turned
}
#: The learning rate of all methods by task, of those that ``measure.py lra --rates`` compares, that with
#: which exact attention learns best; it has been tuned for ListOps.
LEARNING_RATES = {"pathfinder": 1e-3}
LEARNING_RATE = 2e-3
#: The tiny size, to see that everything runs.
QUICK = Settings(
    30, batch=8, judge_every=10, judged=32, layers=1, width=16, heads=2, hidden=32, dropout=0.0
)


def learning_rate_of(task: str) -> float:
    """Return the learning rate of a task."""
    return LEARNING_RATES.get(task, LEARNING_RATE)


def depends_on_length(parameter: str) -> bool:
    """Tell by a parameter's name whether its shape depends on the sequence length, as Linformer's do."""
    return parameter.rpartition(".")[2] in ("project_k", "project_v")


def build(
    task: LraTask,
    attention: str,
    settings: Settings,
    backend: str,
    seed: int = 0,
    **more: Any,
) -> minitorch.SequenceClassifier:
    """Build the model of a task with one of the attentions; ``more`` as of :func:`build_classifier`."""
    return build_classifier(attention, settings, backend, seed, **task.model, **more)


def build_classifier(
    attention: str, settings: Settings, backend: str, seed: int = 0, *, vocabulary: int, length: int,
    classes: int, pad_id: int | None, documents: int, side: int | None = None,
    options: Mapping[str, Any] | None = None, recompute: bool = False,
) -> minitorch.SequenceClassifier:  # fmt: skip
    """Build a model from what it must know of a task; see :class:`minitorch.SequenceClassifier`.

    ``options`` replace those of the method.
    """
    options = METHODS[attention].options(length, seed) if options is None else options
    return minitorch.SequenceClassifier(
        vocabulary, settings.width, settings.heads, length, classes, settings.dropout,
        n_layer=settings.layers, middle_dim=settings.hidden, attention=attention,
        attention_options=options, pad_id=pad_id, documents=documents, side=side,
        recompute=recompute, backend=BACKENDS[backend], precision=settings.precision,
    )  # fmt: skip
