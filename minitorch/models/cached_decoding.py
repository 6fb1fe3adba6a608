"""Decoding with a cache of keys and values, so that each token is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..scalars.modes import no_grad
from .evaluation import evaluating
from .kv_cache import KVCache
from .text_generation import TextGeneration


@no_grad()
def next_logits(model: TextGeneration, ids: list[int], cache: KVCache) -> npt.NDArray[np.float64]:
    """Return the logits of the token after ``ids``, without dropout, (n_vocab,).

    Args:
        model: The model.
        ids: All tokens so far.
        cache: Keys and values of the first of them; those of the others are appended.
    """
    if len(ids) > model.n_positions:  # the positions of all tokens have changed
        return model.next_logits(ids)
    with evaluating(model):
        return model.last_logits(model.hidden(np.array([ids[cache.length :]]), cache))


@contextmanager
def cached_decoding(model: TextGeneration, capacity: int) -> Iterator[Callable[[list[int]], Any]]:
    """Provide a function that returns the logits of the token after a text, which grows from call to call.

    Args:
        model: The model.
        capacity: Maximum length of the text whose keys and values are cached.
    """
    yield partial(next_logits, model, cache=model.make_cache(capacity=capacity))
