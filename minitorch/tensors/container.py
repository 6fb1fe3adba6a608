"""Tensor methods of a Python container: subscripts, length, iteration, and formatting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.common.arguments import shown
from kernels.runtime.dtypes import FLOAT32, is_half

from ..tensor_data import IndexingError

if TYPE_CHECKING:
    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


#: Longest text of a tensor on one line, and what separates the numbers of a longer one from the rest.
LINE, NEXT_LINE = 90, "\n" + " " * len("tensor(")


class Container(_Tensor):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    def __getitem__(self, key: Any) -> Any:
        """Return an element or a part, as NumPy does.

        Args:
            key: One entry, or a tuple of them: integers, slices, ``...``, None for a new dimension, and
                integer lists, arrays or tensors.  Negative integers count from the end.  A mask is an
                array of booleans, or a floating tensor of zeros and ones such as a comparison returns.

        Returns:
            A number if the key is an integer for each dimension.  Otherwise a tensor, differentiable.  A
            part that is one piece of the storage shares it; any other part is a copy.

        Raises:
            IndexingError: If an index is out of bounds, or there are too many of them.
            TypeError: If an entry has any other type.
        """
        place = self._place(key)
        return self._part(key) if place is None else self._tensor.get(place)

    def _part(self, key: Any) -> Any:
        raise TypeError(
            f"an index is an integer for each dimension of shape {self.shape}, got {shown(key)}"
        )

    def __setitem__(self, key: Any, val: float) -> None:
        place = self._place(key)
        if place is None:
            raise TypeError(
                f"only single elements can be assigned, with an integer for each dimension of shape "
                f"{self.shape}, got {shown(key)}; choose between two tensors with "
                "a.where(condition, b), join parts with minitorch.cat, or write to to_numpy(), which "
                "shares memory on the host"
            )
        self._tensor.set(place, val)

    def _place(self, key: Any) -> tuple[int, ...] | None:
        """Return a key of an integer for each dimension, counted from 0, or None for any other key."""
        keys = key if isinstance(key, tuple) else (key,)
        shape = self.shape or (1,)[: len(keys)]  # x[0] reads a tensor without dimensions, too
        if len(keys) != len(shape):
            return None
        if not all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in keys):
            return None
        place = tuple([int(k) + n * (k < 0) for k, n in zip(keys, shape, strict=True)])
        if not all(0 <= k < n for k, n in zip(place, shape, strict=True)):
            raise IndexingError(
                f"index {tuple(map(int, keys))} is out of range for shape {self.shape}; entries run from "
                "-size to size - 1"
            )
        return place or (0,)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self.shape:
            raise TypeError("a tensor of shape () has no length; item() returns its number")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Tell whether the only element is not 0.

        Raises:
            ValueError: If there are several elements, or none.
        """
        if self.size != 1:
            raise ValueError(
                f"a tensor of shape {self.shape} is neither true nor false; write (0 < x) * (x < 1) for "
                "0 < x < 1, reduce it with all(), or ask whether it is None"
            )
        return bool(self.item())

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, or as one number for shape ()."""
        return self.to_numpy().tolist()

    def __iter__(self) -> Iterator[Any]:
        """Yield the numbers of a vector; otherwise, the slices along the first dimension."""
        if len(self.shape) == 1:
            return iter(self.to_numpy())
        return (self[row] for row in range(len(self)))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """Format the only element: ``f"{loss:.3f}"``; without a format, as ``str`` does."""
        if not spec:
            return str(self)
        if self.size != 1:
            raise TypeError(
                f"the format {spec!r} needs one element, but shape {self.shape} has {self.size}; format "
                "to_numpy(), or an element of it"
            )
        return format(self.to_numpy().item(), spec)

    def __repr__(self) -> str:
        array = self.to_numpy()
        if is_half(array.dtype):
            array = array.astype(FLOAT32)  # NumPy aligns numbers of its own dtypes alone
        numbers = np.array2string(array, separator=", ", prefix="tensor(")
        notes = [
            f"shape={self.shape}",
            f"dtype={self.dtype}",
            f"backend={self.backend.kind.__name__}",
        ]
        if self.history is not None:
            made_by = self.history.last_fn
            notes.append(f"grad_fn={made_by.__name__}" if made_by else "requires_grad=True")
        text = ", ".join(notes)
        fits = len(numbers) + len(text) < LINE and "\n" not in numbers
        return f"tensor({numbers},{' ' if fits else NEXT_LINE}{text})"
