"""Elements of tensors as the arrays that kernels take, and results of kernels as tensors."""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import acc_dtype

from ..backends.tensor_protocol import AnyTensor
from ..backends.tensor_protocol import TensorLike as Tensor


def contiguous_array(t: Tensor, dtype: Any) -> Any:
    """Return a tensor's elements as a contiguous array of a dtype, copied only if necessary."""
    if dtype != t.dtype or not t._tensor.is_contiguous():
        t = t.f.id_map(t, t.empty(t.shape, dtype))
    return t.array()


def dense(t: Tensor, dtype: Any = None) -> Any:
    """Return a tensor's elements as a contiguous array, in float32 if the tensor's dtype has 16 bits.

    Args:
        t: Any tensor.
        dtype: Dtype of the result before widening; that of t if None.
    """
    return contiguous_array(t, acc_dtype(t.dtype if dtype is None else dtype))


def rounded(like: AnyTensor, array: Any, dtype: Any = None) -> AnyTensor:
    """Return a kernel's result as a tensor, rounded to 16 bits where ``dense`` widened the operand.

    Args:
        like: A tensor of the backend.
        array: A contiguous result of a kernel.
        dtype: Dtype of the tensor; that of ``like`` if None.
    """
    dtype = like.dtype if dtype is None else dtype
    return like.wrap(like.f.memory.convert(array, dtype))
