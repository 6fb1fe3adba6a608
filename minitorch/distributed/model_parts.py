"""Spread the sequences of a language model over ranks, each of which reads a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from .group import Group
from .ring_attention import ring_attention
from .sequence_parts import positions


def spread_sequence(
    model: Any, group: Group, *, method: str = "ring", layout: str = "zigzag"
) -> Callable[[], None]:
    """Make a language model read only this rank's part of every sequence.

    With ``mine = positions(seq, group, layout)``, ``model.loss(ids[:, mine], targets[:, mine])`` is then
    the mean over the tokens of this rank.  Averaged over the ranks, losses and gradients are those of the
    whole sequences.

    Args:
        model: A :class:`minitorch.DecoderLM` with exact attention, the same on all ranks.
        group: The ranks that share a sequence.
        method: See :func:`ring_attention`.
        layout: See :func:`positions`.

    Returns:
        A function that makes the model read whole sequences again.

    Raises:
        ValueError: If the attention of the model is an approximation, or has sinks.
    """
    layers = [getattr(model, name) for name in model.layer_names]
    if not all(layer.attention.is_exact for layer in layers):
        raise ValueError(
            "a sequence is spread over ranks by ring_attention, which is exact, and this model has an "
            "approximation; build it with attention='flash'"
        )
    if any(layer.attention.has_sinks for layer in layers):
        raise ValueError(
            "ring_attention has no sinks, and the heads of this model have; build it with sinks=False"
        )

    @lru_cache(maxsize=8)
    def places(rows: int) -> Any:
        found = positions(rows * group.size, group, layout)
        found.setflags(write=False)  # a GPU keeps its copy
        return found

    def place(chosen: Any, attends: Any) -> None:
        model.places = chosen
        for layer, attend in zip(layers, attends, strict=True):
            layer.attention.places, layer.attention.attend = chosen, attend

    whole = [layer.attention.attend for layer in layers]
    attend = partial(ring_attention, group=group, method=method, layout=layout)
    place(places, [attend] * len(layers))
    return lambda: place(None, whole)
