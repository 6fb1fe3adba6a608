"""The dtype of a result."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.dtypes import acc_dtype, is_floating, is_half

from .elements import get_default_dtype
from .tensor_protocol import AnyTensor, TensorLike


def result_dtype(*tensors: TensorLike) -> np.dtype[Any]:
    """Return the dtype of a result: the widest floating dtype, or the default for integers.

    Raises:
        TypeError: For float16 with bfloat16, neither of which can represent all numbers of the other.
    """
    first = tensors[0].dtype
    # "V" is bfloat16: no other of its kind is in a tensor.
    if first.kind in "fV" and (len(tensors) == 1 or tensors[1].dtype == first):
        return first
    floating = {dtype for t in tensors if (dtype := t.dtype).kind in "fV"}
    if len(floating) == 1:
        return floating.pop()
    if not floating:
        return get_default_dtype()
    floating = {t.dtype for t in tensors if is_floating(t.dtype) and not t._tensor.is_number}
    if len(floating) > 1 and all(map(is_half, floating)):
        raise TypeError(
            "an operation on float16 and bfloat16 has no dtype for its result; convert one operand to the "
            "dtype of the other with to(dtype), or both to float32"
        )
    return np.result_type(*floating)


def floating(t: AnyTensor, dtype: np.dtype[Any]) -> AnyTensor:
    """Convert an integer or boolean tensor to a floating dtype; return a floating one unchanged."""
    return t if is_floating(t.dtype) else t._converted(t.backend, acc_dtype(dtype))
