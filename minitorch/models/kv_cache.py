"""Key/value cache for decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import shown, whole
from kernels.runtime.dtypes import is_floating

from ..backends.elements import check_memory, dtype_or_default
from ..functions.base import check_tensor
from ..layers.checks import check_ids
from ..layers.indices import kept_range
from ..tensor import Tensor
from ..tensor_data import TensorData
from ..tensor_ops import TensorBackend
from ..tensors.factories import zeros
from .rotary import Rotary


def _checked_sizes(**sizes: Any) -> None:
    """Check the sizes of a cache by name.

    Raises:
        TypeError: If a size is not a whole number.
        ValueError: If a size is below 1.
    """
    for name, size in sizes.items():
        whole(f"{name} of a cache", size, 1)


class Part(NamedTuple):
    """Texts to which a step adds the same number of tokens each, and the pages of their keys."""

    new: int  #: Tokens of each text.
    before: npt.NDArray[np.int32]  #: Keys of each text before the step, (texts,).
    table: npt.NDArray[np.int32]  #: Pages of each text, (texts, most pages).


class LayerCache:
    """The keys and values of one attention layer, with spare capacity.

    In memory the position is the first dimension, so the filled part is one contiguous piece of storage.
    Tensors of it are views, and appending writes only the new rows.

    Args:
        batch: Number of texts.
        heads: Number of heads.
        capacity: Maximum number of positions.
        head_dim: Size of a key and of a value.
        backend: Backend of the layer.
        dtype: Dtype of the layer; the default dtype when None.

    Attributes:
        length: Number of filled positions.
        keys: (batch, heads, capacity, head_dim).
        values: Like ``keys``.

    Raises:
        TypeError: If a size is not a whole number, the backend not a backend, or the dtype not floating.
        ValueError: If a size is below 1.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        backend: TensorBackend,
        dtype: npt.DTypeLike | None = None,
    ):
        _checked_sizes(batch=batch, heads=heads, capacity=capacity, head_dim=head_dim)
        if not isinstance(backend, TensorBackend):
            raise TypeError(
                f"backend must be a backend, got {shown(backend)}; pass model.backend, or use make_cache"
            )
        self.batch, self.heads, self.head_dim = batch, heads, head_dim
        self.capacity, self.length = capacity, 0
        self.backend = backend
        self.known: Any = None  # the layer's ``StepWeights``
        self.dtype = dtype_or_default(dtype)
        if not is_floating(self.dtype):
            raise TypeError(
                f"the dtype of a cache must be floating, got {self.dtype}; pass the model's dtype"
            )
        shape = batch, heads, capacity, head_dim
        check_memory(shape, self.dtype)
        storages = (backend.loops.allocate(math.prod(shape), self.dtype) for _ in range(2))
        self.keys, self.values = (
            Tensor(TensorData(x, shape, self._strides()), backend=backend) for x in storages
        )

    def _strides(self) -> tuple[int, ...]:
        width = self.heads * self.head_dim
        return width, self.head_dim, self.batch * width, 1

    def __repr__(self) -> str:
        return f"LayerCache({self._about()})"

    def _about(self) -> str:
        return (
            f"batch={self.batch}, heads={self.heads}, length={self.length}, capacity={self.capacity}, "
            f"head_dim={self.head_dim}, dtype={self.dtype}, backend={self.backend.kind.__name__}"
        )

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of further positions.

        Args:
            k: New keys, (batch, heads, count, head_dim).
            v: New values, (batch, heads, count, head_dim).

        Returns:
            All keys and all values so far, (batch, heads, length, head_dim): constants that are views of
            the cache.

        Raises:
            TypeError: If their backend or dtype is not that of the cache.
            ValueError: If their shapes do not fit, or the cache is full; nothing is appended then.
        """
        for name, new in (("k", k), ("v", v)):
            check_tensor(name, new)
            self._check(new)
        if k.shape != v.shape:
            raise ValueError(
                f"k and v must have the same shape, got {k.shape} and {v.shape}; append both for every "
                "position"
            )
        for new, kept in ((k, self.keys), (v, self.values)):
            rows = self._rows(kept, self.length, k.shape[2])
            if self.backend.cuda:
                self.backend.id_map(new.detach(), rows)
            else:  # so small that NumPy finishes before a parallel loop has started
                rows.to_numpy()[...] = new.to_numpy()
        self.grow(k.shape[2])
        return self._rows(self.keys, 0, self.length), self._rows(self.values, 0, self.length)

    def attend(
        self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, options: Any
    ) -> Tensor:
        """Append keys and values, and attend to all keys so far; the arguments are those of the layer."""
        before = self.length
        k, v = self.append(k, v)  # (batch, heads, all so far, head_dim)
        return attention(q, k, v, **{**options, "is_causal": True, "causal_offset": before})

    def part(self, batch: int, count: int) -> Part | None:
        """Return the next ``count`` positions of all texts as a part, or None if they do not fit.

        In this part, each text has one page, which has the size of the capacity.
        """
        if batch != self.batch or self.length + count > self.capacity:
            return None
        before = np.full(batch, self.length, np.int32)
        return Part(count, before, kept_range(0, batch)[:, None].astype(np.int32))

    def grow(self, count: int) -> None:
        """Add ``count`` positions to the length, after their keys and values have been written."""
        self.length += count

    def positions(self, count: int) -> Any:
        """Return the next ``count`` positions, (count,)."""
        return np.arange(self.length, self.length + count)

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """Rotate queries or keys of the next positions, (batch, count, heads, head_dim)."""
        return rotary(x, self.length)

    def repeated(self, count: int) -> LayerCache:
        """Return a copy in which each text appears ``count`` times, one after the other."""
        batch = self.batch * whole("count", count, 1)
        found = LayerCache(
            batch, self.heads, self.capacity, self.head_dim, self.backend, self.dtype
        )
        found.length = self.length
        if self.length:
            copies = zeros((1, count, 1), self.backend, dtype=self.dtype)
            for own, new in ((self.keys, found.keys), (self.values, found.values)):
                rows, target = (x._rows(t, 0, self.length) for x, t in ((self, own), (found, new)))
                rows = rows.contiguous().view(self.batch, 1, rows.size // self.batch) + copies
                self.backend.id_map(rows.view(*target.shape), target)
        return found

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` positions.

        Raises:
            ValueError: If fewer are filled.
        """
        if not 0 <= whole("length", length) <= self.length:
            raise ValueError(
                f"cannot truncate a cache of {self.length} positions to {length}; 0 empties it"
            )
        self.length = length

    def _rows(self, kept: Tensor, start: int, count: int) -> Tensor:
        """Return some positions of the keys or values, (batch, heads, count, head_dim), as a view."""
        step = self.batch * self.heads * self.head_dim
        stop = start + count
        storage = self.backend.memory.part(kept._tensor._storage, start * step, stop * step)
        return kept.on(storage, (self.batch, self.heads, count, self.head_dim), self._strides())

    def _check(self, new: Tensor) -> None:
        if new.backend.kind is not self.backend.kind or new.dtype != self.dtype:
            raise TypeError(
                f"the cache holds {self.dtype} on {self.backend.kind.__name__}, got {new.dtype} on "
                f"{new.backend.kind.__name__}; make it with DecoderLM.make_cache of this model"
            )
        if new.dims != 4:
            raise ValueError(
                "keys and values must have four dimensions, (batch, heads, seq, head_dim), got "
                f"{new.shape}; add the missing ones with view"
            )
        batch, heads, count, head_dim = new.shape
        if (batch, heads, head_dim) != (self.batch, self.heads, self.head_dim):
            raise ValueError(
                f"the cache is for batch {self.batch}, {self.heads} heads and head_dim "
                f"{self.head_dim}, got (batch, heads, seq, head_dim) {new.shape}; make one with these sizes"
            )
        if self.length + count > self.capacity:
            raise ValueError(
                f"the cache is full: {self.length} of {self.capacity} positions are filled, {count} more "
                "do not fit; make one with a larger capacity, or truncate it"
            )


class KVCache:
    """A cache for each attention layer of a model.

    Args:
        layers: Number of layers.
        batch: Number of texts.
        heads: Number of heads of a layer.
        capacity: Maximum number of positions.
        head_dim: Size of a key and of a value.
        backend: Backend of the model.
        dtype: Dtype of the model; the default dtype when None.
    """

    kind: Any = LayerCache  #: The class of the layers' caches.

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        backend: TensorBackend,
        dtype: npt.DTypeLike | None = None,
    ):
        _checked_sizes(layers=layers)
        self.capacity = capacity
        sizes = batch, heads, capacity, head_dim
        self.layers: list[Any] = [self.kind(*sizes, backend, dtype) for _ in range(layers)]

    def __repr__(self) -> str:
        return f"KVCache(layers={len(self.layers)}, {self.layers[0]._about()})"

    @property
    def length(self) -> int:
        """Number of positions that are filled in every layer."""
        return min(layer.length for layer in self.layers)

    def start(self, model: Any, idx: Any) -> int:
        """Prepare a step of the model, and return the number of tokens that it appends to each text.

        Raises:
            ValueError: If the ids exceed the context or the cache, or the cache is another model's.
        """
        count = check_ids(model, idx, self.length)
        if len(self.layers) != len(model.layer_names):
            raise ValueError(
                f"the cache is for {len(self.layers)} layers, the model has {len(model.layer_names)}; "
                "make it with make_cache of this model"
            )
        self.truncate(self.length)  # a step that failed halfway filled only some layers
        return count

    def repeated(self, count: int) -> KVCache:
        """Return a copy in which each text appears ``count`` times, one after the other.

        The keys and values of a text are thus computed only once for several continuations.
        """
        found = copy(self)
        found.layers = [layer.repeated(count) for layer in self.layers]
        return found

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` positions; 0 empties the cache.

        Raises:
            ValueError: If fewer are filled.
        """
        for layer in self.layers:
            layer.truncate(length)
