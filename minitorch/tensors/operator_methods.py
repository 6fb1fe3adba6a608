"""Tensor operators and methods: each applies a Function to the tensor itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernels import takes_attention_options
from kernels.common.arguments import flag
from kernels.problem.options import Options
from kernels.problem.signature import by_name

from .. import operators
from ..backends.elements import NUMBERS, as_float
from ..functions.base import is_tensor
from ..functions.flash_attention import FlashAttention, attend_packed
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
    PowerScalar,
    ReLU,
    Sigmoid,
    Sum,
    Tanh,
    View,
)
from ..tensor_ops import normalize_dim
from .indexing_methods import IndexingMethods

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


def _inverse(b: float) -> float:
    """Return 1 / b, infinite for 0 as it is for a tensor."""
    return operators.inv(b) if b else math.copysign(math.inf, b)


def _is_operand(b: Any) -> bool:
    return is_tensor(b) or isinstance(b, NUMBERS)


class TensorOperators(IndexingMethods):
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

    def __pow__(self, exponent: float | Self) -> Self:
        return PowerScalar.apply(self, self._ensure_tensor(exponent))

    def __radd__(self, b: float | Self) -> Self:
        return self + b

    def __rsub__(self, b: float | Self) -> Self:
        return Add.apply(self._ensure_tensor(b), Neg.apply(self))

    def __rmul__(self, b: float | Self) -> Self:
        return self * b

    def __rtruediv__(self, b: float | Self) -> Self:
        return Mul.apply(self._ensure_tensor(b), Inv.apply(self))

    def __rpow__(self, base: float) -> Self:
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
            return All.apply(self.view(self.size), 0)
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

    def tanh(self) -> Self:
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

    def var(self, dim: int | None = None) -> Self:
        """Return the biased variance (divided by the count) over ``dim``, or over all elements."""
        deviation = self - self.mean(dim)
        return (deviation * deviation).mean(dim)

    def permute(self, *order: int) -> Self:
        """Return a view with the dimensions in a different order."""
        return Permute.apply(self, order)

    def view(self, *shape: int) -> Self:
        """Return a view with a different shape; the tensor must be contiguous."""
        return View.apply(self, shape)

    @takes_attention_options
    def flash_attention(self, k: Self, v: Self, *args: Any, **options: Unpack[Options]) -> Any:
        """Compute attention with this tensor as the queries, in one fused kernel.

        ``attn_mask`` may be a tensor, or a boolean array of any library; a floating mask must be a tensor
        and receives its gradient.  Without ``seed``, ``manual_seed`` determines the dropout mask.

        Args:
            k: Keys, (…, heads, seq_k, head_dim); this tensor is (…, heads, seq_q, head_dim).
            v: Values, (…, heads, seq_k, value_dim).
            args: Options by position, in PyTorch's order; ``help`` shows all of them here.
            options: Options by name.

        Returns:
            (…, heads, seq_q, value_dim); with ``return_lse`` a pair of it and lse (…, heads, seq_q), both
            differentiable.

        Raises:
            TypeError: If the dtypes or backends of the operands differ, or an option has the wrong type.
            ValueError: If a shape or a value is invalid.
        """
        options = by_name("flash_attention", args, options)
        # A mask and sinks may require gradients: they are arguments of their own.
        args = self, k, v, options.get("attn_mask"), options.get("sink"), options
        if "return_lse" in options and flag("return_lse", options["return_lse"]):
            out, lse, _ = FlashAttention.apply_several(*args)
            return out, lse
        return FlashAttention.apply(*args)

    @takes_attention_options
    def flash_attention_varlen(
        self,
        k: Self,
        v: Self,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *args: Any,
        **options: Unpack[Options],
    ) -> Any:
        """Compute attention within each of several packed sequences, without padding.

        Rows and columns are counted from the start of their sequence, for ``is_causal``, ``window_size``,
        ``alibi_slopes``, dropout, ``mask_mod`` and ``score_mod``.  The batch index that a mod receives is
        the index of the sequence.

        Args:
            k: Keys, (total_k, heads, head_dim); this tensor is (total_q, heads, head_dim).
            v: Values, (total_k, heads, value_dim).
            cu_seqlens_q: Cumulative lengths, (count + 1,) whole numbers that begin with 0: sequence i has
                the query rows from ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i + 1]``.
            cu_seqlens_k: Cumulative lengths of the keys, (count + 1,) whole numbers.
            args: Options by position; ``attn_mask`` and ``block_mask`` must be None.
            options: Options by name.

        Returns:
            (total_q, heads, value_dim); with ``return_lse`` a pair of it and lse (heads, total_q), both
            differentiable.

        Raises:
            TypeError: As in :meth:`flash_attention`, or if the cumulative lengths are not whole numbers.
            ValueError: As in :meth:`flash_attention`, if the lengths do not fit the operands, or if a mask
                is given.
        """
        sums = cu_seqlens_q, cu_seqlens_k
        options = by_name("flash_attention_varlen", args, options)
        return attend_packed(self, k, v, *sums, options)

    def contiguous(self) -> Self:
        """Return the tensor in row-major order: itself if it already is, else a copy."""
        return self if self._tensor.is_contiguous() else Copy.apply(self)
