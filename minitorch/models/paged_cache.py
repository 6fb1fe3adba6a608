"""Keys and values of many texts in one pool of pages, where a step adds tokens to several texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kernels

from ..tensor import Tensor
from ..tensor_data import strides_from_shape
from ..tensors.joining import cat
from .kv_cache import KVCache, LayerCache, Part
from .rotary import Rotary, Rotate


@dataclass
class Step:
    """What the next step adds to a :class:`PagedCache`.

    Attributes:
        batch_invariant: See :func:`kernels.flash_attention_with_cache`.
        parts: The texts and their pages.
        places: The positions of the tokens.
        turns: The cosines and sines of these positions, if a layer has needed them.
    """

    batch_invariant: bool = False
    parts: list[Part] = field(default_factory=list[Part])
    places: Any = ()
    turns: Any = None


class PagedLayer(LayerCache):
    """The keys and values of an attention layer in pages, (pages, heads, page_size, head_dim).

    Attributes:
        step: The step of all layers.
    """

    step: Step

    def _strides(self) -> tuple[int, ...]:
        return strides_from_shape((self.batch, self.heads, self.capacity, self.head_dim))

    def attend(
        self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, options: Any
    ) -> Tensor:
        """Write the new keys and values to their pages, and attend within each text.

        Args:
            attention: Not called: the kernel for pages replaces it.
            q: (1, n_head, tokens, head_dim), the texts one after the other.
            k: (1, heads, tokens, head_dim).
            v: Like k.
            options: Of the layer.
        """
        options = {n: x.array() if isinstance(x, Tensor) else x for n, x in options.items()}
        options.pop("enable_gqa", None)
        start, found = 0, []
        for new, before, table in self.step.parts:
            stop = start + new * len(before)
            part = [x if stop - start == x.shape[2] else x[:, :, start:stop] for x in (q, k, v)]
            if new == 1:
                part = [x.permute(2, 1, 0, 3) for x in part]  # (texts, heads, 1, head_dim)
            rows, keys, values = (x.array() for x in part)
            out = q.wrap(
                kernels.flash_attention_with_cache(
                    rows, self.keys.array(), self.values.array(), keys, values,
                    cache_seqlens=before, block_table=table,
                    batch_invariant=self.step.batch_invariant, **options,
                )
            )  # fmt: skip
            found.append(out.permute(2, 1, 0, 3) if new == 1 else out)
            start = stop
        return found[0] if len(found) == 1 else cat(found, 2)

    def part(self, batch: int, count: int) -> Part | None:
        """Return the step's part, or None if it has several parts, or the engine is batch-invariant."""
        parts = self.step.parts
        return parts[0] if len(parts) == 1 and not self.step.batch_invariant else None

    def grow(self, count: int) -> None:
        """Count nothing: the engine counts the tokens of each text."""

    def positions(self, count: int) -> Any:
        """Return the positions of the tokens that the next step adds, (count,)."""
        return self.step.places

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """Rotate queries or keys by their positions, (1, tokens, heads, head_dim)."""
        if self.step.turns is None:
            self.step.turns = rotary.turns(self.step.places, x)
        return Rotate.apply(x, *self.step.turns)


class PagedCache(KVCache):
    """A pool of pages for each attention layer of a model; a page has the place of a text.

    Attributes:
        step: What the next step adds.
    """

    kind = PagedLayer

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self.step = Step()
        for layer in self.layers:
            layer.step = self.step  # not the cache: a circle would keep the pages in memory

    def plan(self, parts: list[Part]) -> None:
        """Say what the next step adds."""
        step, bring = self.step, self.layers[0].backend.memory.bring  # once for all layers
        step.parts = [Part(new, bring(before), bring(table)) for new, before, table in parts]
        if len(parts) == 1 and parts[0].new == 1:
            step.places = parts[0].before  # itself: a captured step reads it again
        else:
            spans = [b + np.arange(new) for new, before, _ in parts for b in before.tolist()]
            step.places = np.concatenate(spans)
        step.turns = None

    def start(self, model: Any, idx: Any) -> int:
        """Return the number of tokens of a step; see :meth:`KVCache.start`."""
        return len(self.step.places)
