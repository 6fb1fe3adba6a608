"""Tensor methods that change the shape or split a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..functions.base import as_ints
from ..tensor_ops import normalize_dim

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class ShapeMethods(_Tensor):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    @property
    def T(self) -> Self:
        """The tensor with its dimensions in reverse order, a view."""
        return self.permute(*reversed(range(self.dims)))

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """Return the elements in row-major order in a new shape: a view if the tensor is contiguous.

        Args:
            shape: Sizes, one by one or as one tuple; one of them may be -1, which stands for the
                remaining size.

        Raises:
            ValueError: If the shape has a different number of elements.
        """
        only = shape[0] if len(shape) == 1 else None
        sizes = as_ints(only if isinstance(only, (tuple, list)) else shape)
        known = math.prod(size for size in sizes if size != -1)
        fits = self.size == known if -1 not in sizes else known and self.size % known == 0
        if sizes.count(-1) > 1 or min(sizes, default=0) < -1 or not fits:
            raise ValueError(
                f"cannot reshape {self.shape}, which has {self.size} elements, to {sizes}; the product of "
                "the sizes must be the number of elements, and at most one of them may be -1"
            )
        sizes = tuple(self.size // known if size == -1 else size for size in sizes)
        return self.contiguous().view(*sizes)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Join the dimensions from ``start_dim`` to ``end_dim``, inclusive, into one; see :meth:`reshape`.

        Raises:
            ValueError: If ``start_dim`` comes after ``end_dim``.
        """
        if self.dims == 0:
            return self.reshape(1)
        first, last = (normalize_dim(dim, self.shape) for dim in (start_dim, end_dim))
        if first > last:
            raise ValueError(
                f"flatten needs a start_dim that does not come after end_dim, got {start_dim} and "
                f"{end_dim} for shape {self.shape}; swap them"
            )
        joined = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], joined, *self.shape[last + 1 :])

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop dimension ``dim`` if its size is 1; without ``dim``, drop every dimension of size 1."""
        drops = range(self.dims) if dim is None else (normalize_dim(dim, self.shape),)
        sizes = enumerate(self.shape)
        return self.reshape(tuple(n for i, n in sizes if n != 1 or i not in drops))

    def unsqueeze(self, dim: int) -> Self:
        """Insert a dimension of size 1 before ``dim``; -1 appends one."""
        at = normalize_dim(dim, (*self.shape, 1))
        return self.reshape(*self.shape[:at], 1, *self.shape[at:])
