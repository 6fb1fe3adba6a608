"""Keys and values of many texts in one pool of pages, where a step adds tokens to several texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kernels

from ..tensor import Tensor
from ..tensor_data import strides_from_shape
from ..tensors.joining import cat
from .kv_cache import KVCache, LayerCache, Part
from .rotary import Rotary, Rotate


class PagedLayer(LayerCache):
    """The keys and values of an attention layer in pages, (pages, heads, page_size, head_dim).

    Attributes:
        owner: The cache of all layers, which holds what the next step adds.
    """

    owner: PagedCache

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
        for new, before, table in self.owner.parts:
            stop = start + new * len(before)
            part = [x if stop - start == x.shape[2] else x[:, :, start:stop] for x in (q, k, v)]
            if new == 1:
                part = [x.permute(2, 1, 0, 3) for x in part]  # (texts, heads, 1, head_dim)
            rows, keys, values = (x.array() for x in part)
            out = q.wrap(
                kernels.flash_attention_with_cache(
                    rows, self.keys.array(), self.values.array(), keys, values,
                    cache_seqlens=before, block_table=table,
                    batch_invariant=self.owner.batch_invariant, **options,
                )
            )  # fmt: skip
            found.append(out.permute(2, 1, 0, 3) if new == 1 else out)
            start = stop
        return found[0] if len(found) == 1 else cat(found, 2)

    def part(self, batch: int, count: int) -> Part | None:
        """Return the step as a part, or None if it has several, or one kernel must attend in all steps."""
        parts = self.owner.parts
        return parts[0] if len(parts) == 1 and not self.owner.batch_invariant else None

    def grow(self, count: int) -> None:
        """Count nothing: the engine counts the tokens of each text."""

    def positions(self, count: int) -> Any:
        """Return the positions of the tokens that the next step adds, (count,)."""
        return self.owner.places

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """Rotate queries or keys by their positions, (1, tokens, heads, head_dim)."""
        if self.owner.turns is None:
            self.owner.turns = rotary.turns(self.owner.places, x)
        return Rotate.apply(x, *self.owner.turns)


class PagedCache(KVCache):
    """A pool of pages for each attention layer of a model; a page has the place of a text.

    Attributes:
        batch_invariant: See :func:`kernels.flash_attention_with_cache`.
        parts: What the next step adds.
        places: The positions of its tokens.
        turns: The cosines and sines of these positions, if a layer has needed them.
    """

    kind = PagedLayer

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self.batch_invariant = False
        for layer in self.layers:
            layer.owner = self
        self.plan([])

    def plan(self, parts: list[Part]) -> None:
        """Say what the next step adds."""
        bring = self.layers[0].backend.memory.bring  # once for all layers
        self.parts = [Part(new, bring(before), bring(table)) for new, before, table in parts]
        if len(parts) == 1 and parts[0].new == 1:
            self.places = parts[0].before  # itself: a captured step reads it again
        else:
            spans = [b + np.arange(new) for new, before, _ in parts for b in before.tolist()]
            self.places = np.concatenate([np.arange(0), *spans])
        self.turns: Any = None

    def start(self, model: Any, idx: Any) -> int:
        """Return the number of tokens of a step; see :meth:`KVCache.start`."""
        return len(self.places)
