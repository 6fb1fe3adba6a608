"""What products of float32 may round numbers to on the way: a setting of the program, or of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: "float32" rounds nothing; the others allow tensor cores to.
MATMUL_PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
_precision = "float32"


def set_matmul_precision(precision: str) -> None:
    """Say what ``@`` and linear layers may round operands of float32 to, in both passes, from now on.

    It is a permission: a backend that would not be faster so computes in float32.  Sums stay float32.
    Operands of another dtype are multiplied as they are.  ``precision=`` of attention is its own.

    Args:
        precision: "float32", which is how a program begins; "tf32", 11 bits of fraction; "bfloat16", 8;
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
