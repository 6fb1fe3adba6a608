"""Decoding with a cache, so that each token is read once; on a GPU, a step is a replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cuda.backend import device_view, put_rows, to_device
from kernels.problem.options import Options

from ..models.evaluation import evaluating
from ..models.kv_cache import KVCache, LayerCache
from ..models.rotary import Rotary, Rotate
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..tensor_data import Storage
from ..training.captured_step import graph_step
from ..transformer import DecoderLM

#: Capacities are multiples of this, so that texts of different lengths share a graph.
UNIT = 128


class Spot(NamedTuple):
    """The positions of a step's tokens, held as data: a captured step can be replayed at others.

    Attributes:
        places: The positions, (count,) int64, on the host.
        index: The positions, (1, count), on the device.
        mask: Booleans on the device, True where the tokens attend to a position, (1, 1, 1, capacity).
        turns: Cosines and sines of rotary positions, (count, 1, head_dim) each; or None.
    """

    places: npt.NDArray[np.int64]
    index: Any
    mask: Any
    turns: tuple[Tensor, Tensor] | None = None


class PlacedCache(LayerCache):
    """A cache on a GPU that writes at a spot, if it has one, and whose attention has a mask.

    Attributes:
        spot: The positions, independent of the length, or None.
    """

    spot: Spot | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values at the spot; see :meth:`LayerCache.append`."""
        length, found = self.length, super().append(k, v)
        if self.spot is None:
            return found
        self.length = length
        return self.filled(self.capacity)

    def _write(self, source: Tensor, storage: Storage) -> None:
        if self.spot is None:
            return super()._write(source, storage)
        shape = self.capacity, source.size // source.shape[0]
        rows = source.contiguous()._tensor._storage
        x = device_view(rows, (source.shape[0], shape[1]), (shape[1], 1))
        return put_rows(x, self.spot.index, device_view(storage, shape, (shape[1], 1)))

    def visible(self) -> Options:
        """See :meth:`LayerCache.visible`; a window is part of the mask."""
        if self.spot is None:
            return super().visible()
        return {"is_causal": False, "attn_mask": self.spot.mask, "window_size": None}

    def positions(self, count: int) -> Any:
        """See :meth:`LayerCache.positions`."""
        return super().positions(count) if self.spot is None else self.spot.places

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """See :meth:`LayerCache.rotated`."""
        if self.spot is None or self.spot.turns is None:
            return super().rotated(rotary, x)
        return Rotate.apply(x, *self.spot.turns)


class CapturedDecoding:
    """The steps of one text at a time.

    Launched one by one, the kernels of a step take longer to launch than to run.  The graph has the same
    launches for every position: the step writes its key and value where an index says, and attends to the
    whole cache under a mask.  The first four steps are eager or recorded.

    Args:
        model: A model of which :func:`can_capture` is true.
        capacity: Maximum number of positions of a text.

    Attributes:
        cache: Keys and values of the text so far.
    """

    def __init__(self, model: DecoderLM, capacity: int):
        self._model = model
        capacity = min(-(-capacity // UNIT) * UNIT, model.n_positions)
        self.cache: KVCache = model.make_cache(capacity=capacity, kind=PlacedCache)
        self._step = graph_step(self._eager)

    def logits(self, token: int) -> Tensor:
        """Return the logits after one more token, (1, 1, n_vocab), and put it into the cache."""
        place = self.cache.length
        places = np.arange(self.cache.capacity)[None]  # (1, capacity)
        shown = places <= place
        if self._model.window is not None:
            shown &= places > place - self._model.window
        found = self._step(np.array([[token]]), np.array([place]), shown)
        for layer in self.cache.layers:
            layer.length += 1
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
        self._set_spot(Spot(places, index, mask, turns))
        try:
            return model.score(model.hidden(ids, self.cache))
        finally:
            self._set_spot(None)

    def _set_spot(self, spot: Spot | None) -> None:
        for layer in self.cache.layers:
            layer.spot = spot  # type: ignore[attr-defined]


def can_capture(model: DecoderLM) -> bool:
    """Tell whether the steps of a model can be replayed: it has flash attention on a GPU."""
    layers = [getattr(model, name) for name in model.layer_names]
    return model.backend.cuda and all(
        layer.attention.attend is Tensor.flash_attention for layer in layers
    )


@contextmanager
def cached_decoding(model: DecoderLM, capacity: int) -> Iterator[Callable[[list[int]], Any]]:
    """Provide a function that returns the logits of the token after a text of at most ``capacity``."""
    yield partial(model.next_logits, cache=model.make_cache(capacity=capacity))


@contextmanager
def decoding(model: DecoderLM, capacity: int) -> Iterator[Callable[[list[int]], Any]]:
    """Provide a function that returns the logits of the token after a text; on a GPU, from a graph."""
    if not can_capture(model):
        with cached_decoding(model, capacity) as plain:
            yield plain
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
