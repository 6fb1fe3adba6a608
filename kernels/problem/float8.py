"""Float8 products of attention: what a call can ask for, and which calls can.

``precision="float8_e4m3"`` rounds q, k, v and the probabilities to e4m3, 4 bits of significand.  After a
"+" come techniques that lessen the error: "blocks" gives q and k a unit for each block of 128 rows instead
of one for each head, and "hadamard" multiplies q and k by the same random orthogonal matrix first, which
leaves q · k as it is and spreads large elements over the row.

Source: Shah and others, FlashAttention-3, section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.problem.option_values import Given
from kernels.runtime.dtypes import FLOAT32, NAMES, is_half

#: Rows of a block that share a unit.
BLOCK = 128
#: Columns with padding of the heads that are supported.
WIDTHS = (64, 128)
#: The signs of columns, a bit each, 16 in a word from the lowest on: the first bits of the fraction of pi.
SIGNS = np.array([0x6A88, 0x243F, 0x08D3, 0x85A3, 0x8A2E, 0x1319, 0x7344, 0x0370], np.uint32)


class Float8(NamedTuple):
    """How operands are rounded to float8."""

    #: q and k have a unit for each block of :data:`BLOCK` rows; else one for each head.
    has_blocks: bool = False
    has_hadamard: bool = False  #: q and k are multiplied by a random orthogonal matrix.


#: The values of ``precision`` with float8 products.
FLOAT8 = {
    "float8_e4m3": Float8(),
    "float8_e4m3+blocks": Float8(has_blocks=True),
    "float8_e4m3+hadamard": Float8(has_hadamard=True),
    "float8_e4m3+blocks+hadamard": Float8(True, True),
}


#: The values of ``precision`` for float32 operands; those for 16 bits are ``FLOAT8``.
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def check_precision(precision: str | None, given: Given) -> str:
    """Check ``precision``; return the name of the format in which products may be computed."""
    dtype = given.dtype
    if precision is None:
        return NAMES[dtype]
    if precision not in PRECISIONS and precision not in FLOAT8:
        names = ", ".join(map(repr, (*PRECISIONS, *FLOAT8)))
        raise ValueError(
            f"precision must be one of {names}, or None for that of the dtype; got {precision!r}"
        )
    if precision in FLOAT8:
        if not is_half(dtype):
            raise ValueError(
                f"precision={precision!r} is for operands of 16 bits, got {dtype}; convert them to "
                "float16 or bfloat16"
            )
        return precision
    if dtype != FLOAT32:
        raise ValueError(
            f"precision={precision!r} is an option for float32 operands, got {dtype}, which is not "
            "rounded; leave it at None, or convert the operands to float32"
        )
    return precision


def padded(width: int) -> int:
    """Return the columns with padding of a head of at most 128."""
    return next(columns for columns in WIDTHS if width <= columns)


def why_not_float8(problem: Any) -> str | None:
    """Return why a checked call, a ``Problem``, cannot have float8 products, or None."""
    if not problem.is_plain:
        return (
            "float8 products support the options scale, is_causal, causal_offset, window_size and "
            "enable_gqa only"
        )
    dims = problem.head_dim, problem.value_dim
    if max(dims) > WIDTHS[-1] or any(dim % 8 for dim in dims):
        return (
            f"float8 products take a head_dim and a value dim that are multiples of 8 up to "
            f"{WIDTHS[-1]}, got {dims}"
        )
    if problem.scale <= 0.0:
        return f"float8 products take a positive scale, got {problem.scale}"
    return None


def check_float8_gradient(problem: Any) -> None:
    """Check that a call with gradients has no float8 products; otherwise raise a ValueError."""
    if problem.precision in FLOAT8:
        raise ValueError(
            f"precision={problem.precision!r} is for the forward pass only, but a gradient is needed; "
            "leave precision at None, or detach q, k and v"
        )
