"""Tensor methods for indexing, sorting, cumulative sums and selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernels.common.arguments import flag, whole

from ..functions.base import check_tensor
from ..functions.indexing import (
    CumSum,
    Elu,
    Gather,
    ScatterAdd,
    argsorted,
    as_index,
    where,
)
from ..functions.subscripts import Slice, subscript
from ..tensor_ops import normalize_dim

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class IndexingMethods(_Tensor):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    def _part(self, key: Any) -> Self:
        return subscript(self, key)

    def gather(self, dim: int, index: Any) -> Self:
        """Pick elements along ``dim``: out[…, j, …] = self[…, index[…, j, …], …].

        An index whose other sizes are 1 is shared by all elements along those dimensions: with shape
        (batch, count, 1) it picks whole rows of (batch, rows, width).

        Args:
            dim: The dimension.
            index: Integers from 0 to size - 1 in a tensor, array or list, with as many dimensions as this
                tensor; in every other dimension, the size is this tensor's or 1.  Indices on a GPU are
                copied to the host to be checked.

        Returns:
            This tensor's shape, with the count of indices at ``dim``.

        Raises:
            TypeError: If the indices are not integers, or are on a different backend.
            ValueError: If their shape does not fit, or one is out of bounds.
        """
        dim = normalize_dim(dim, self.shape)
        return Gather.apply(self, dim, as_index(self, index, dim, self.shape[dim]))

    def scatter_add(self, dim: int, index: Any, source: Self) -> Self:
        """Add elements of ``source`` to this tensor: out[…, index[…, j, …], …] += source[…, j, …].

        The elements are added in order, without atomics, so the result is the same on every run.

        Args:
            dim: The dimension.
            index: Integers, as for :meth:`gather`, with the shape of ``source``, or with size 1 in
                dimensions other than ``dim``.
            source: A tensor of this tensor's shape, with any size at ``dim``.

        Returns:
            This tensor's shape.

        Raises:
            TypeError: If the source is not a tensor, or the indices are not integers on its backend.
            ValueError: If a shape does not fit, or an index is out of bounds.
        """
        check_tensor("source", source)
        dim, source = normalize_dim(dim, self.shape), self._ensure_tensor(source)
        own = (*self.shape[:dim], *self.shape[dim + 1 :])
        if source.dims != self.dims or (*source.shape[:dim], *source.shape[dim + 1 :]) != own:
            raise ValueError(
                f"scatter_add to shape {self.shape} along dimension {dim} needs a source of that shape, "
                f"with any size at {dim}, got {source.shape}"
            )
        places = as_index(source, index, dim, self.shape[dim])
        if places.shape[dim] != source.shape[dim]:
            raise ValueError(
                f"scatter_add needs an index for each of the {source.shape[dim]} elements of the source "
                f"along dimension {dim}, got {places.shape[dim]}"
            )
        return self + ScatterAdd.apply(source, dim, places, self.shape[dim])

    def argsort(self, dim: int = -1) -> Self:
        """Return the indices that sort the elements in ascending order along ``dim``, an int64 constant.

        Equal elements keep their order, and NaN comes last.  For descending order, sort the negative.

        Args:
            dim: The dimension.

        Returns:
            This tensor's shape, int64.
        """
        return argsorted(self, normalize_dim(dim, self.shape))

    def sort(self, dim: int = -1) -> tuple[Self, Self]:
        """Sort along ``dim`` in ascending order; see :meth:`argsort`.

        Args:
            dim: The dimension.

        Returns:
            The sorted elements, differentiable, and the indices that they came from, int64; both of this
            tensor's shape.
        """
        dim = normalize_dim(dim, self.shape)
        order = argsorted(self, dim)
        return Gather.apply(self, dim, order), order

    def cumsum(self, dim: int, exclusive: bool = False, reverse: bool = False) -> Self:
        """Return the cumulative sum along ``dim``: the sum of each element and all before it.

        Args:
            dim: The dimension.
            exclusive: Leave out the element itself, so that the first result is 0.
            reverse: Start from the end.

        Returns:
            This tensor's shape.

        Raises:
            TypeError: If exclusive or reverse is neither True nor False.
        """
        flags = flag("exclusive", exclusive), flag("reverse", reverse)
        return CumSum.apply(self, normalize_dim(dim, self.shape), *flags)

    def elu(self) -> Self:
        """Return x where it is positive, else e^x - 1."""
        return Elu.apply(self)

    def where(self, condition: Any, other: float | Self) -> Self:
        """Return this tensor where a condition is not 0, and ``other`` elsewhere; shapes broadcast.

        Infinity or NaN in an element that is not chosen affects neither the result nor the gradients.

        Args:
            condition: A tensor, such as the result of a comparison, or an array of booleans.
            other: A tensor or a number.

        Raises:
            TypeError: If the condition is neither a tensor nor an array, or ``other`` is neither a tensor
                nor a number.
        """
        return where(condition, self, self._ensure_tensor(other))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> list[Self]:
        """Cut the tensor along ``dim``.

        Args:
            sizes: One size for every part, where the last part may be smaller, or a size for each part.
            dim: The dimension.

        Returns:
            The parts, which share storage with the tensor where they are contiguous in it.

        Raises:
            ValueError: If a size is below 1, or the sizes do not sum to that of the dimension.
        """
        dim = normalize_dim(dim, self.shape)
        total = self.shape[dim]
        if isinstance(sizes, Sequence):
            parts = [whole("a size", size) for size in sizes]
        else:
            each = whole("sizes", sizes)
            parts = [min(each, total - at) for at in range(0, total, each)] if each > 0 else [each]
        if min(parts, default=0) < 0 or sum(parts) != total:
            raise ValueError(
                f"cannot split dimension {dim} of shape {self.shape} into {sizes}; give a size of at least "
                f"1, or a list of sizes that sum to {total}"
            )
        ends = [sum(parts[: i + 1]) for i in range(len(parts))]
        ranges = [range(end - size, end) for size, end in zip(parts, ends, strict=True)]
        return [Slice.apply(self, dim, places) for places in ranges]
