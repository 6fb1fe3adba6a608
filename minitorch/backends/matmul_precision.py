"""What models compute in: a setting for products of float32, and a policy of one name for a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.runtime.dtypes import BFLOAT16, FLOAT32

#: "float32" rounds nothing; the others allow tensor cores to.
MATMUL_PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
_precision = "float32"


def set_matmul_precision(precision: str) -> None:
    """Say what ``@`` and linear layers may round operands of float32 to, in both passes, from now on.

    It is a permission: a backend that would not be faster so computes in float32.  Sums stay float32.
    Operands of another dtype are multiplied as they are.  ``precision=`` of attention is its own.

    Args:
        precision: "float32", which is how a program begins; "tf32", 11 significant bits; "bfloat16", 8;
            "float16", 11, and numbers from 65,520 on become infinite.

    Raises:
        ValueError: For any other.
    """
    global _precision
    if precision not in MATMUL_PRECISIONS:
        names = ", ".join(map(repr, MATMUL_PRECISIONS))
        raise ValueError(f"the precision of products must be one of {names}; got {precision!r}")
    _precision = precision


def get_matmul_precision() -> str:
    """Return what :func:`set_matmul_precision` set last."""
    return _precision


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of products within a ``with`` block; a backward pass is where it is called.

    Args:
        precision: As :func:`set_matmul_precision` takes it.

    Raises:
        ValueError: Likewise.
    """
    before = _precision
    set_matmul_precision(precision)
    try:
        yield
    finally:
        set_matmul_precision(before)


class Precision(NamedTuple):
    """What a model stores, multiplies and sums in.

    Whatever the name, sums are float32 or wider: those of products, the statistics of layer norms and of
    attention, the loss, the moments of the optimiser, and what an optimiser moves: parameters of 16 bits
    are the rounded copies of masters of float32 (:class:`minitorch.AdamW`), made once a step.

    Attributes:
        name: As the user writes it.
        dtype: Of weights that are multiplied or looked up, and of all activations.
        norms: Of the weights of layer norms.
        products: What products of float32 may round to; see :func:`set_matmul_precision`.

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
    """Return the policy of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"the precision of a model must be one of {names}; got {name!r:.40}")
    return PRECISIONS[name]


def precision_and_dtypes(
    precision: str | None, dtype: npt.DTypeLike | None
) -> tuple[Precision | None, npt.DTypeLike | None, npt.DTypeLike | None]:
    """Return the policy of a model, the dtype of its parameters and that of its norms.

    Args:
        precision: Name of the policy, or None.
        dtype: Of all parameters, or None.

    Raises:
        ValueError: If there is no such precision, or both are given.
    """
    if precision is None:
        return None, dtype, dtype
    own = find_precision(precision)
    if dtype is not None:
        raise ValueError(
            f"precision={precision!r} determines the dtype of the parameters, got dtype={dtype!r:.40} "
            "as well; leave one of them out"
        )
    return own, own.dtype, own.norms


def in_own_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of a model compute its products as the model's ``precision`` says, if it has one."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.precision
        if own is None or own.products == _precision:
            return method(self, *args, **kwargs)
        with matmul_precision(own.products):
            return method(self, *args, **kwargs)

    return wrapped
