"""The representation of operands, for the kernels of ``flash2_mma`` and ``flash2_split``.

This rung multiplies 16-bit operands as they are: the scale of the scores is the only factor, and results
have 16 bits.  ``flash2_split`` runs the same kernels on float32 operands, which it splits and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash2_mma.products import (
    make_accumulate,
    make_accumulate_stored,
    make_accumulate_transposed,
    make_multiply,
)
from kernels.cuda.attention.flash2_mma.tiles import (
    HALF,
    MmaLayout,
    make_copy_tile,
    make_keep_tile,
    make_store_sums,
    make_store_tile,
)
from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import float32, float64


class Arithmetic(NamedTuple):
    """The constants and functions with which the flash2_mma kernels compute in one number format.

    The makers of products and tiles are those of ``products`` and ``tiles``, without the dtype.  Units are
    functions of ``(scale, b, h)`` that return factors of a head; ``scale`` is the kernel's argument.

    Attributes:
        dtype: Dtype of the numbers that tensor cores multiply.
        size: Bytes of an operand's number in shared memory.
        is_wide: Whether results are float32.
        scale_type: Numba's type of the argument ``scale``, by whether the kernel is one of gradients.
        forward_units: The factor of products of q and k, and the power of two of probabilities.
        out_unit: The factor of products of probabilities and v.
        backward_units: Those of the forward pass, and factors of dP and of delta, for the unit of dS.
        ds_unit: The unit of dS.
        gradient_units: The factors of products of dS and k, of dS and q, and of probabilities and dout.
        load_q: Makes ``load_q(q, scale, item, q_tile, thread, share, extras)``, which loads a query tile.
        copy: Makes the function that copies a tile.
        keep: Makes the function that stores scores in a tile of a number of rows.
        multiply: Makes the product of scores; ``b_rows`` is the number of rows of the right tile, and
            ``is_transposed`` tells whether it is K·Qᵀ.
        accumulate: Makes the product with probabilities in registers.
        stored: The same with probabilities in shared memory.
        transposed: The same with their transpose in shared memory.
        rung: The rung after which kernels are named.
    """

    dtype: str
    size: int
    is_wide: bool
    scale_type: Callable[[bool], Any]
    forward_units: Callable[..., Any]
    out_unit: Callable[..., Any]
    backward_units: Callable[..., Any]
    ds_unit: Callable[..., Any]
    gradient_units: Callable[..., Any]
    load_q: Callable[..., Any]
    copy: Callable[..., Any]
    keep: Callable[..., Any]
    multiply: Callable[..., Any]
    accumulate: Callable[..., Any]
    stored: Callable[..., Any]
    transposed: Callable[..., Any]
    rung: str = "flash2_mma"

    def named(self, source: Callable[..., None]) -> Callable[..., None]:
        """Return a kernel of ``flash2_mma`` by the name of the rung."""
        source.__qualname__ = source.__qualname__.replace("flash2_mma", self.rung)
        return source

    def store(
        self, layout: MmaLayout, width: int, vectors: bool, columns: int = 0, is_wide: bool = False
    ) -> Any:
        """Return the function that writes accumulators to a result."""
        if is_wide or self.is_wide:
            return make_store_sums(layout, width, vectors, columns)
        return make_store_tile(self.dtype, layout, width, vectors, columns)


_ZERO, _ONE = np.float32(0), np.float32(1)


@device_function
def _forward(scale, b, h):
    return float32(scale), _ZERO


@device_function
def _one(scale, b, h):
    return _ONE


@device_function
def _backward(scale, b, h):
    return float32(scale), _ZERO, _ONE, _ONE


@device_function
def _gradients(scale, b, h):
    return float32(scale), float32(scale), _ONE


def _make_load_q(layout: MmaLayout, width: int, vectors: bool) -> Callable[..., None]:
    """Return the function that copies the query tile."""
    copy_q = make_copy_tile(layout.threads, layout.block_q, width, vectors)

    @device_function
    def load_q(q, scale, item, q_tile, thread, share, extras):
        b, h, first, stop = item.q
        copy_q(thread, q, HeadRows(b, h, first + item.start.row, stop), q_tile)

    return load_q


def _halves(dtype: str) -> Arithmetic:
    """Return the arithmetic of a 16-bit dtype."""
    return Arithmetic(
        *(dtype, HALF, False, lambda is_backward: float64),
        *(_forward, _one, _backward, _one, _gradients),
        load_q=_make_load_q,
        copy=make_copy_tile,
        keep=lambda layout, rows, width: make_keep_tile(dtype, layout, width),
        multiply=lambda layout, width, **_: make_multiply(dtype, layout, width),
        accumulate=lambda layout, width, cols=0, **_: make_accumulate(dtype, layout, width, cols),
        stored=lambda *args: make_accumulate_stored(dtype, *args),
        transposed=lambda *args: make_accumulate_transposed(dtype, *args),
    )


#: The arithmetic of each 16-bit dtype.
HALVES = {dtype: _halves(dtype) for dtype in ("float16", "bfloat16")}
