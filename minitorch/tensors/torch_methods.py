"""Tensor operators and methods that the course does not have, under PyTorch's names and with its meaning.

All are composed of differentiable functions, so that they run on every backend and have derivatives of
every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernels.common.arguments import flag, shown, whole
from kernels.runtime.dtypes import is_floating

from ..functions.base import check_tensor
from ..functions.indexing import Gather, argsorted, as_condition, constant_like
from ..functions.subscripts import sliced
from ..tensor_functions import Copy, Max
from ..tensor_ops import normalize_dim
from .operator_methods import TensorOperators

if TYPE_CHECKING:
    from typing_extensions import Self

#: A dimension, several, or None for all elements.
Dims = int | Sequence[int] | None


class Picked(NamedTuple):
    """Elements of a tensor along a dimension, and the int64 indices that they came from."""

    values: Any
    indices: Any


def _reduced(reduce: Callable[..., Any], x: Any, dim: Dims, keepdim: bool | None) -> Any:
    """Apply a reduction of the course to one dimension, several, or all elements; see ``Tensor.sum``.

    Args:
        reduce: ``reduce(x, dim)`` keeps the dimension with size 1; ``reduce(x)`` returns shape (1,).
        x: The tensor.
        dim: The dimensions.
        keepdim: Whether the result has them.
    """
    if keepdim is None and not isinstance(dim, (tuple, list)):
        return reduce(x, dim)
    given: Any = (dim,) if dim is not None else range(x.dims)
    given = dim if isinstance(dim, (tuple, list)) else given
    dims = sorted({normalize_dim(each, x.shape) for each in given})
    if len(dims) < len(given) or (dim is not None and not dims):
        raise ValueError(
            f"dim must name each dimension once, got {shown(dim)}; leave it out to reduce all of them"
        )
    out = reduce(x) if dim is None else x
    for each in dims if dim is not None else ():
        out = reduce(out, each)
    keeps = keepdim is None or flag("keepdim", keepdim)
    return out.reshape(
        [1 if i in dims else n for i, n in enumerate(x.shape) if keeps or i not in dims]
    )


def _logical(x: Any) -> Any:
    """Return 1 where a tensor is not 0, else 0.

    Raises:
        TypeError: If it holds integers, of which PyTorch combines the bits.
    """
    if not is_floating(x.dtype) and x.dtype != np.bool_:
        raise TypeError(
            f"&, | and ~ combine truth values such as those of a comparison, got {x.dtype}; compare first, "
            "as in (x > 0) & (y > 0)"
        )
    return x != 0.0


def _first_max(x: Any, dim: int) -> Any:
    """Return the index of the first maximum along a dimension, kept with size 1; NaN is the largest."""
    size, x = x.shape[dim], x.detach()
    if not size:
        raise ValueError(
            f"there is no maximum along dimension {dim} of shape {x.shape}, which is empty"
        )
    marks = ((x == Max.apply(x, dim)) + (x != x)).to(np.float64)
    down = np.arange(size, 0.0, -1.0).reshape(-1, *[1] * (x.dims - dim - 1))
    return (float(size) - Max.apply(marks * constant_like(marks, down), dim)).to(np.int64)


class TorchMethods(TensorOperators):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    #: The number of dimensions.
    ndim: int = property(attrgetter("dims"))  # type: ignore[assignment]

    def numpy(self) -> Any:
        """Return ``to_numpy()``."""
        return self.to_numpy()

    def clone(self) -> Self:
        """Return a copy, through which gradients flow."""
        return Copy.apply(self)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Return a view with two dimensions exchanged."""
        order = [*range(self.dims)]
        first, second = (normalize_dim(dim, self.shape) for dim in (dim0, dim1))
        order[first], order[second] = second, first
        return self.permute(*order)

    # -- comparisons and logic ------------------------------------------------------------------

    def __ge__(self, b: float | Self) -> Self:
        return (self > b) + (self == b)

    def __le__(self, b: float | Self) -> Self:
        return (self < b) + (self == b)

    def __and__(self, b: Self) -> Self:
        check_tensor("the other operand of &", b)
        return _logical(self) * _logical(b)

    def __or__(self, b: Self) -> Self:
        check_tensor("the other operand of |", b)
        return (_logical(self) + _logical(b)) != 0.0

    def __invert__(self) -> Self:
        return 1.0 - _logical(self)

    # -- element by element ---------------------------------------------------------------------

    def sqrt(self) -> Self:
        """Return the square root; NaN for a negative number."""
        return self**0.5

    def abs(self) -> Self:
        """Return the absolute value, whose derivative at 0 is 0."""
        return self.relu() + (-self).relu()

    __abs__ = abs

    def clamp(self, min: Any = None, max: Any = None) -> Self:
        """Limit the elements to [min, max]; where min exceeds max, the result is max.

        Args:
            min: A number or a tensor, or None for no limit.
            max: A number or a tensor, or None for no limit.

        Raises:
            ValueError: If both are None.
        """
        if min is None and max is None:
            raise ValueError("clamp needs a limit, got None for both; pass min= or max=")
        out: Any = self
        if min is not None:
            out = out.where((out < min) == 0.0, min)
        return out if max is None else out.where((out > max) == 0.0, max)

    def masked_fill(self, mask: Any, value: float | Self) -> Self:
        """Return this tensor with a value where a mask is not 0; shapes broadcast.

        Args:
            mask: A tensor, such as the result of a comparison, or an array of booleans.
            value: A number, or a tensor.
        """
        out: Any = self
        return out.where(as_condition(self, mask) == 0.0, value)

    # -- reductions -----------------------------------------------------------------------------

    def sum(self, dim: Dims = None, keepdim: bool | None = None) -> Self:
        """Sum over one dimension, several, or all elements.

        Args:
            dim: The dimensions; None for all elements.
            keepdim: Whether the result has these dimensions, with size 1, as in PyTorch.  None, as in the
                course, keeps them, except that the sum of all elements has shape (1,).
        """
        return _reduced(TensorOperators.sum, self, dim, keepdim)

    def mean(self, dim: Dims = None, keepdim: bool | None = None) -> Self:
        """Average over one dimension, several, or all elements; the arguments are those of :meth:`sum`."""
        return _reduced(TensorOperators.mean, self, dim, keepdim)

    def all(self, dim: Dims = None, keepdim: bool | None = None) -> Self:
        """Return 1 where no element is 0, else 0; the arguments are those of :meth:`sum`."""
        return _reduced(TensorOperators.all, self, dim, keepdim)

    def any(self, dim: Dims = None, keepdim: bool = False) -> Self:
        """Return 1 where an element is not 0, else 0.

        Args:
            dim: The dimensions to reduce; None for all elements.
            keepdim: Whether the result has them, with size 1.
        """

        def reduce(x: Any, dim: int | None = None) -> Any:
            return 1.0 - TensorOperators.all(x == 0.0, dim)

        return _reduced(reduce, self, dim, flag("keepdim", keepdim))

    def var(self, dim: Dims = None, keepdim: bool | None = None, *, unbiased: bool = False) -> Self:
        """Return the variance; the other arguments are those of :meth:`sum`.

        Args:
            dim: The dimensions.
            keepdim: Whether the result has them.
            unbiased: Divide by the count less 1, as PyTorch does by default, in place of the count.
        """
        mean = self.mean(dim)
        squares = (self - mean) * (self - mean)
        if flag("unbiased", unbiased) and mean.size:
            count = self.size // mean.size
            squares = squares * (count / (count - 1) if count > 1 else math.nan)
        return squares.mean(dim, keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the first maximum, int64; ``minitorch.argmax`` marks all maxima.

        Args:
            dim: The dimension; None counts all elements in row-major order.
            keepdim: Whether the result has this dimension, with size 1.
        """
        if dim is None:
            return self.contiguous().view(self.size).argmax(0, keepdim)
        index = _first_max(self, dim := normalize_dim(dim, self.shape))
        return index if flag("keepdim", keepdim) else index.squeeze(dim)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the first minimum; the arguments are those of :meth:`argmax`."""
        return (-self).argmax(dim, keepdim)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the maximum of all elements, or the maxima along a dimension with their indices.

        ``minitorch.max`` keeps the dimension, and passes its gradient to all maxima in place of the first.

        Args:
            dim: The dimension; None for all elements.
            keepdim: Whether the results have this dimension, with size 1.

        Returns:
            A tensor of shape () if ``dim`` is None, else a pair ``(values, indices)``.
        """
        if dim is None:
            return self.contiguous().view(self.size).max(0, keepdim).values
        index = _first_max(self, dim := normalize_dim(dim, self.shape))
        both = Gather.apply(self, dim, index), index
        return Picked(*both if flag("keepdim", keepdim) else (each.squeeze(dim) for each in both))

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the minimum, or minima and their indices; see :meth:`max`."""
        found = (-self).max(dim, keepdim)
        return -found if dim is None else Picked(-found.values, found.indices)

    def topk(self, k: int, dim: int = -1, largest: bool = True) -> Picked:
        """Return the k largest elements along ``dim``, in descending order; NaN is the largest.

        Args:
            k: Their number, from 0 to the size of the dimension.
            dim: The dimension.
            largest: False for the smallest, in ascending order.

        Returns:
            A pair ``(values, indices)`` of this tensor's shape, with ``k`` at ``dim``.

        Raises:
            ValueError: If there are fewer than ``k``.
        """
        dim = normalize_dim(dim, self.shape)
        size = self.shape[dim]
        if whole("k", k, 0) > size:
            raise ValueError(
                f"topk finds at most {size} elements along dimension {dim}, got k = {k}"
            )
        places = range(size - 1, size - 1 - k, -1) if flag("largest", largest) else range(k)
        order = sliced(argsorted(self, dim), dim, places)
        return Picked(Gather.apply(self, dim, order), order)
