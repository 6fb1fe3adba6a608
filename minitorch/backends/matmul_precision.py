"""Precision of computation: a setting for float32 matrix products, and a policy for a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from kernels.common.arguments import one_of
from kernels.runtime.dtypes import BFLOAT16, FLOAT32

#: Precisions of products; all but "float32" allow tensor cores to round operands.
MATMUL_PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
_precision = "float32"


def set_matmul_precision(precision: str) -> None:
    """Set the format to which ``@`` and linear layers may round float32 operands, in both passes.

    This is a permission: a backend that would not be faster with it computes in float32.  Sums stay in
    float32.  Operands of other dtypes are not rounded.  Attention has its own option ``precision``.

    Args:
        precision: "float32", the default; "tf32", 11 significant bits; "bfloat16", 8; "float16", 11, where
            numbers from 65,520 on become infinite.

    Raises:
        ValueError: For any other value.
    """
    global _precision
    _precision = one_of("the precision of products", precision, MATMUL_PRECISIONS)


def get_matmul_precision() -> str:
    """Return the value that :func:`set_matmul_precision` set last."""
    return _precision


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of matrix products within a ``with`` block.

    A backward pass uses the precision that is set where ``backward`` is called.

    Args:
        precision: As in :func:`set_matmul_precision`.

    Raises:
        ValueError: As in :func:`set_matmul_precision`.
    """
    before = _precision
    set_matmul_precision(precision)
    try:
        yield
    finally:
        set_matmul_precision(before)


class Precision(NamedTuple):
    """The formats in which a model stores, multiplies and sums.

    Under every policy, these are float32 or wider: sums of products, the statistics of layer norms and of
    attention, the loss, the moments of the optimiser, and the weights that the optimiser updates.  16-bit
    parameters are rounded copies of float32 master weights (:class:`minitorch.AdamW`), made once per step.

    Attributes:
        name: The name of the policy, as the user writes it.
        dtype: Dtype of the weights that are multiplied or looked up, and of all activations.
        norms: Dtype of the weights of layer norms.
        products: The format that float32 products may round to; see :func:`set_matmul_precision`.

    Source: Micikevicius et al., Mixed precision training (2018), section 3.
    """

    name: str
    dtype: np.dtype[Any]
    norms: np.dtype[Any]
    products: str


PRECISIONS = {
    own.name: own
    for own in (
        Precision("float32", FLOAT32, FLOAT32, "float32"),
        Precision("tf32", FLOAT32, FLOAT32, "tf32"),
        # Its range is that of float32: no gradient is lost, and the loss needs no scaling.
        Precision("bfloat16", BFLOAT16, FLOAT32, "bfloat16"),
    )
}


def find_precision(name: str) -> Precision:
    """Return the policy with a given name.

    Raises:
        ValueError: If there is no such policy.
    """
    return PRECISIONS[one_of("the precision of a model", name, PRECISIONS)]


def in_own_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a model compute its products in the model's ``precision``, if it has one."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.precision
        if own is None or own.products == _precision:
            return method(self, *args, **kwargs)
        with matmul_precision(own.products):
            return method(self, *args, **kwargs)

    return wrapped
