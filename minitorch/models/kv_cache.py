"""Key/value cache for decoding."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import shown, whole
from kernels.cuda.backend import device_view
from kernels.problem.options import Options
from kernels.runtime.dtypes import is_floating

from ..backends.elements import check_memory, dtype_or_default
from ..functions.base import check_tensor
from ..layers.checks import check_ids
from ..tensor import Tensor
from ..tensor_data import Storage, TensorData, is_device_storage
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


class LayerCache:
    """The keys and values of one attention layer, (batch, heads, length, head_dim), with spare capacity.

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
        self._step = batch * heads * head_dim  # elements of one position
        self.dtype = dtype_or_default(dtype)
        if not is_floating(self.dtype):
            raise TypeError(
                f"the dtype of a cache must be floating, got {self.dtype}; pass the model's dtype"
            )
        check_memory((batch, heads, capacity, head_dim), self.dtype)
        self._storages = [
            backend.loops.allocate(capacity * self._step, self.dtype) for _ in range(2)
        ]

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
        for new, storage in zip((k, v), self._storages, strict=True):
            self._write(new._new(new._tensor.permute(2, 0, 1, 3)), storage)
        self.length += k.shape[2]
        return self.filled(self.length)

    def attend(
        self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, options: Any
    ) -> Tensor:
        """Append keys and values, and attend to all so far; arguments as of a layer's ``attend``."""
        visible = self.visible()
        k, v = self.append(k, v)  # (batch, heads, all so far, head_dim)
        return attention(q, k, v, **{**options, **visible})

    def filled(self, length: int) -> tuple[Tensor, Tensor]:
        """View the keys and the values of the first positions, (batch, heads, length, head_dim)."""
        k, v = (self._rows(storage, 0, length) for storage in self._storages)
        return k._new(k._tensor.permute(1, 2, 0, 3)), v._new(v._tensor.permute(1, 2, 0, 3))

    def _write(self, source: Tensor, storage: Storage) -> None:
        """Write rows, (count, batch, heads, head_dim), after the filled ones."""
        rows = self._rows(storage, self.length, self.length + source.shape[0])
        if self.backend.cuda:
            self.backend.id_map(source, rows)
        else:  # so small that NumPy finishes before a parallel loop has started
            rows.to_numpy()[...] = source.to_numpy()

    def visible(self) -> Options:
        """Return the options of attention for the positions that :meth:`append` will add."""
        return {"is_causal": True, "causal_offset": self.length}

    def positions(self, count: int) -> Any:
        """Return the next positions, (count,)."""
        return np.arange(self.length, self.length + count)

    def rotated(self, rotary: Rotary, x: Tensor) -> Tensor:
        """Rotate queries or keys of the next positions, (batch, count, heads, head_dim)."""
        return rotary(x, self.length)

    def clear(self) -> None:
        """Empty the cache and write zeros: attention multiplies masked values by 0, and 0 · NaN is NaN."""
        self.length = 0
        for storage in self._storages:
            rows = self._rows(storage, 0, self.capacity)
            self.backend.id_map(zeros(rows.shape, self.backend, dtype=self.dtype), rows)

    def extended(self, count: int) -> list[npt.NDArray[Any]]:
        """Reserve further positions, for a kernel on the host to fill.

        Returns:
            The keys and the values of all positions, (length, batch, heads, head_dim), the last ``count``
            of them unwritten.

        Raises:
            ValueError: If the cache is full; nothing is reserved then.
        """
        self._check_room(whole("count", count, 0))
        self.length += count
        shape = self.length, self.batch, self.heads, self.head_dim
        return [storage[: self.length * self._step].reshape(shape) for storage in self._storages]

    def repeated(self, count: int) -> LayerCache:
        """Return a copy in which each text appears ``count`` times, one after the other."""
        batch = self.batch * whole("count", count, 1)
        found = LayerCache(
            batch, self.heads, self.capacity, self.head_dim, self.backend, self.dtype
        )
        found.length = self.length
        if self.length:
            shape = self.length, self.batch, 1, self.heads, self.head_dim
            copies = zeros((1, 1, count, 1, 1), self.backend, dtype=self.dtype)
            for own, new in zip(self._storages, found._storages, strict=True):
                rows = self._rows(own, 0, self.length).view(*shape) + copies
                target = found._rows(new, 0, self.length)
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

    def _rows(self, storage: Storage, start: int, stop: int) -> Tensor:
        """Return some positions, (count, batch, heads, head_dim), as views."""
        count = stop - start
        first, size = start * self._step, count * self._step
        if is_device_storage(storage):
            part = device_view(storage, (size,), (1,), first)
        else:
            part = storage[first : first + size]
        shape = count, self.batch, self.heads, self.head_dim
        return Tensor(TensorData(part, shape), backend=self.backend)

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
        self._check_room(count)

    def _check_room(self, count: int) -> None:
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
        kind: The class of the layers' caches.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        backend: TensorBackend,
        dtype: npt.DTypeLike | None = None,
        kind: type[LayerCache] = LayerCache,
    ):
        _checked_sizes(layers=layers)
        self.capacity = capacity
        sizes = batch, heads, capacity, head_dim
        self.layers = [kind(*sizes, backend, dtype) for _ in range(layers)]

    def __repr__(self) -> str:
        return f"KVCache(layers={len(self.layers)}, {self.layers[0]._about()})"

    @property
    def length(self) -> int:
        """Number of positions that are filled in every layer."""
        return min(layer.length for layer in self.layers)

    def start(self, model: Any, idx: Any) -> int:
        """Return the number of tokens of each text in a step of a model that appends them.

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

    def clear(self) -> None:
        """Empty the cache and write zeros to it."""
        for layer in self.layers:
            layer.clear()
