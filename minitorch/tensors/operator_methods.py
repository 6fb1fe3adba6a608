"""Tensor operators and methods: each applies a Function to the tensor itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .. import operators
from ..backends.elements import NUMBERS, as_float
from ..functions.base import is_tensor
from ..tensor_functions import (
    EQ,
    LT,
    Add,
    All,
    Copy,
    Exp,
    Inv,
    IsClose,
    Log,
    MatMul,
    Mul,
    Neg,
    Permute,
    PowerScalar,  # beyond module 2
    ReLU,
    Sigmoid,
    Sum,
    Tanh,  # beyond module 2
    View,
)
from ..tensor_ops import normalize_dim

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


def _inverse(b: float) -> float:
    """Return 1 / b, infinite for 0 as it is for a tensor."""
    return operators.inv(b) if b else math.copysign(math.inf, b)


def _is_operand(b: Any) -> bool:
    return is_tensor(b) or isinstance(b, NUMBERS)


class TensorOperators(_Tensor):
    """The operators and methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    def __add__(self, b: float | Self) -> Self:
        return Add.apply(self, self._ensure_tensor(b))

    def __sub__(self, b: float | Self) -> Self:
        if isinstance(b, NUMBERS):
            return self + -as_float(b)
        return Add.apply(self, Neg.apply(self._ensure_tensor(b)))

    def __mul__(self, b: float | Self) -> Self:
        return Mul.apply(self, self._ensure_tensor(b))

    def __truediv__(self, b: float | Self) -> Self:
        if isinstance(b, NUMBERS):
            return self * _inverse(as_float(b))
        return Mul.apply(self, Inv.apply(self._ensure_tensor(b)))

    def __pow__(self, exponent: float | Self) -> Self:  # beyond module 2
        return PowerScalar.apply(self, self._ensure_tensor(exponent))

    def __radd__(self, b: float | Self) -> Self:
        return self + b

    def __rsub__(self, b: float | Self) -> Self:
        return Add.apply(self._ensure_tensor(b), Neg.apply(self))

    def __rmul__(self, b: float | Self) -> Self:
        return self * b

    def __rtruediv__(self, b: float | Self) -> Self:
        return Mul.apply(self._ensure_tensor(b), Inv.apply(self))

    def __rpow__(self, base: float) -> Self:  # beyond module 2
        return PowerScalar.apply(self._ensure_tensor(base), self)

    def __matmul__(self, b: Self) -> Self:
        """Multiply matrices; see ``TensorOps.matrix_multiply``."""
        return MatMul.apply(self, self._ensure_tensor(b))

    def __neg__(self) -> Self:
        return Neg.apply(self)

    def __lt__(self, b: float | Self) -> Self:
        return LT.apply(self, self._ensure_tensor(b))

    def __gt__(self, b: float | Self) -> Self:
        return LT.apply(self._ensure_tensor(b), self)

    def __eq__(self, b: float | Self) -> Self:  # type: ignore[override]
        if not _is_operand(b):
            return NotImplemented  # Python then says that they differ
        return EQ.apply(self, self._ensure_tensor(b))

    def __ne__(self, b: float | Self) -> Self:  # type: ignore[override]
        # Python's own would be `not (self == b)`, one truth for all elements.
        if not _is_operand(b):
            return NotImplemented
        return 1.0 - EQ.apply(self, self._ensure_tensor(b))

    def all(self, dim: int | None = None) -> Self:
        """Return 1 where no element along ``dim`` is 0, else 0; without ``dim``, reduce to shape (1,)."""
        if dim is None:
            return All.apply(self.contiguous().view(self.size), 0)
        return All.apply(self, normalize_dim(dim, self.shape))

    def is_close(self, y: Self) -> Self:
        """Return 1 where the two differ by less than 0.01."""
        return IsClose.apply(self, self._ensure_tensor(y))

    def sigmoid(self) -> Self:
        """Return 1 / (1 + e^-x)."""
        return Sigmoid.apply(self)

    def relu(self) -> Self:
        """Return x where it is positive, else 0."""
        return ReLU.apply(self)

    def log(self) -> Self:
        """Return the natural logarithm of x + 1e-6."""
        return Log.apply(self)

    def exp(self) -> Self:
        """Return e^x."""
        return Exp.apply(self)

    def tanh(self) -> Self:  # beyond module 2
        """Return the hyperbolic tangent."""
        return Tanh.apply(self)

    def sum(self, dim: int | None = None) -> Self:
        """Sum over ``dim``, which is kept with size 1; without ``dim``, reduce to shape (1,)."""
        if dim is None:
            flat = self if self.dims == 1 else self.contiguous().view(self.size)
            return Sum.apply(flat, 0)
        return Sum.apply(self, normalize_dim(dim, self.shape))

    def mean(self, dim: int | None = None) -> Self:
        """Average over ``dim``, which is kept with size 1; without ``dim``, reduce to shape (1,)."""
        count = self.size if dim is None else self.shape[normalize_dim(dim, self.shape)]
        return self.sum(dim) / count

    def var(self, dim: int | None = None) -> Self:  # beyond module 2
        """Return the biased variance (divided by the count) over ``dim``, or over all elements."""
        deviation = self - self.mean(dim)
        return (deviation * deviation).mean(dim)

    def permute(self, *order: int) -> Self:
        """Return a view with the dimensions in a different order."""
        return Permute.apply(self, order)

    def view(self, *shape: int) -> Self:
        """Return a view with a different shape; the tensor must be contiguous."""
        return View.apply(self, shape)

    def contiguous(self) -> Self:
        """Return the tensor in row-major order: itself if it already is, else a copy."""
        return self if self._tensor.is_contiguous() else Copy.apply(self)
