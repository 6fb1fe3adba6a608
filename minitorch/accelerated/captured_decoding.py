"""Decoding on a GPU, one token at a time, where each step is a replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.cuda.backend import to_device

from ..backends.operations import Operations
from ..models.evaluation import evaluating
from ..models.kv_cache import KVCache, Spot
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..training.captured_step import graph_step
from ..transformer import DecoderLM

#: Capacities are multiples of this, so that texts of different lengths share a graph.
UNIT = 128


class CapturedDecoding:
    """The steps of one text at a time.

    Launched one by one, the kernels of a step take longer to launch than to run.  The graph has the same
    launches for every position: the step writes its key and value where an index says, and attends to the
    whole cache under a mask.  The first five steps are eager or recorded.

    Args:
        model: A model of which :func:`can_capture` is true.
        capacity: Maximum number of positions of a text.

    Attributes:
        cache: Keys and values of the text so far.
    """

    def __init__(self, model: DecoderLM, capacity: int):
        self._model = model
        capacity = min(-(-capacity // UNIT) * UNIT, model.n_positions)
        self.cache: KVCache = model.make_cache(capacity=capacity)
        self._step = graph_step(self._eager)

    def logits(self, token: int) -> Tensor:
        """Return the logits after one more token, (1, 1, n_vocab), and put it into the cache."""
        place = self.cache.length
        places = np.arange(self.cache.capacity)[None]  # (1, capacity)
        shown = places <= place
        if self._model.window is not None:
            shown &= places > place - self._model.window
        found = self._step(np.array([[token]]), np.array([place]), shown)
        self.cache.advance(1)
        return found

    def _eager(self, ids: Any, places: Any, shown: Any) -> Tensor:
        """Take a step.

        Args:
            ids: The token, (1, 1).
            places: Its position, (1,).
            shown: True for the positions that it attends to, (1, capacity).
        """
        model = self._model
        index = to_device(places[None])
        mask = to_device(shown[None, None])  # once for all layers
        turns = None
        if model.rotary is not None:
            turns = model.rotary.turns(places, model.token_embeddings.weights.value)
        self.cache.place(Spot(places, index, mask, turns))
        try:
            return model.score(model.hidden(ids, self.cache))
        finally:
            self.cache.place(None)


def can_capture(model: DecoderLM) -> bool:
    """Tell whether the steps of a model can be replayed: it has flash attention on a GPU."""
    layers = [getattr(model, name) for name in model.layer_names]
    return model.backend.cuda and all(
        layer.attention.attend is Tensor.flash_attention for layer in layers
    )


@contextmanager
def decoding(model: DecoderLM, capacity: int) -> Iterator[Callable[[list[int]], Any]]:
    """Provide a function that returns the logits of the token after a text; on a GPU, from a graph."""
    if not can_capture(model):
        with Operations.plain["decoding"](model, capacity) as next_logits:
            yield next_logits
        return
    # Kept from text to text; taken away while one is written, so that two do not share a cache.
    captured = vars(model).pop("_captured", None)
    if captured is None or captured.cache.capacity < capacity:
        captured = CapturedDecoding(model, capacity)
    cache = captured.cache
    cache.clear()

    def replayed(ids: list[int]) -> Any:
        if len(ids) - cache.length != 1 or len(ids) > cache.capacity:
            return model.next_logits(ids, cache)
        with no_grad(), evaluating(model):
            return captured.logits(ids[-1]).to_numpy()[0, 0].astype(np.float64)

    try:
        yield replayed
    finally:
        vars(model)["_captured"] = captured
