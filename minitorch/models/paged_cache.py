"""Keys and values of many texts in one pool of pages, where a step adds tokens to several texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kernels

from ..tensor import Tensor
from ..tensors.factories import zeros
from ..tensors.joining import cat
from .kv_cache import KVCache, LayerCache
from .rotary import Rotary, Rotate


class Part(NamedTuple):
    """Texts that add one token each, or one text that adds several; their tokens follow one another."""

    new: int  #: Tokens of each text.
    before: npt.NDArray[np.int32]  #: Keys of each text before the step, (texts,).
    table: npt.NDArray[np.int32]  #: Pages of each text, (texts, most pages).


class PagedLayer(LayerCache):
    """The keys and values of an attention layer in pages, (pages, heads, page_size, head_dim).

    Attributes:
        owner: The cache of all layers, which holds what the next step adds.
    """

    def __init__(self, like: LayerCache, shape: tuple[int, ...], owner: PagedCache):
        self.owner = owner
        self.keys, self.values = (zeros(shape, like.backend, dtype=like.dtype) for _ in range(2))

    def _about(self) -> str:
        pages, _, size, _ = self.keys.shape
        return f"pages={pages}, page_size={size}, dtype={self.keys.dtype}"

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

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens that the next step adds, (count,)."""
        return self.owner.places

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """Rotate queries or keys by their positions, (1, tokens, heads, head_dim)."""
        return Rotate.apply(x, *rotary.turns(self.owner.places, x))


class PagedCache(KVCache):
    """A pool of pages for each attention layer of a model.

    Args:
        model: A ``DecoderLM``.
        pages: Number of pages of a layer.
        page_size: Positions of a page, a multiple of 16 up to 256.
        batch_invariant: See :func:`kernels.flash_attention_with_cache`.

    Attributes:
        parts: What the next step adds.
        places: The positions of its tokens.
    """

    def __init__(self, model: Any, pages: int, page_size: int, batch_invariant: bool = False):
        like = model.make_cache(capacity=1).layers
        shape = pages, like[0].heads, page_size, like[0].head_dim
        self.batch_invariant = batch_invariant
        self.layers: list[Any] = [PagedLayer(layer, shape, self) for layer in like]
        self.plan([])

    def plan(self, parts: list[Part]) -> None:
        """Say what the next step adds."""
        bring = self.layers[0].keys.backend.memory.bring  # once for all layers
        self.parts = [Part(new, bring(before), bring(table)) for new, before, table in parts]
        spans = [b + np.arange(new) for new, before, _ in parts for b in before.tolist()]
        self.places = np.concatenate([np.arange(0), *spans])

    def start(self, model: Any, idx: Any) -> int:
        """Return the number of tokens of a step; see :meth:`KVCache.start`."""
        return len(self.places)
