"""The arithmetic of float32 operands on float16 tensor cores, and the units of scaled operands.

float16 lacks range.  Each head of a tensor is therefore multiplied by the power of two that brings its
largest number to 2¹⁴ … 2¹⁵, and a number of the head is the 16-bit number times the *unit* of the head.
Powers of two cause no rounding, and kernels undo them where they multiply by a number anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash2_mma.arithmetic import HALVES
from kernels.cuda.attention.flash2_mma.tiles import HALF, make_copy_tile
from kernels.cuda.attention.flash2_split.operands import make_load_q
from kernels.cuda.attention.flash2_split.products import (
    TERMS,
    make_accumulate_terms,
    make_copy_terms,
    make_keep_terms,
    make_multiply_terms,
    make_stored_terms,
    make_transposed_terms,
)
from kernels.cuda.ptx.numbers import ex2
from kernels.cuda.runtime.kernel import array_type, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.types import float32, float64, int64, types

#: The largest power of two of a scaled number, and so of a probability: float16 overflows at 2**16.
TOP = 15
_ZERO, _ONE, _TOP = np.float32(0), np.float32(1), np.float32(2.0**TOP)
_LARGEST = np.finfo(np.float32).max


class SplitUnits(NamedTuple):
    """The scale factors of split operands; flash2_split kernels receive them as argument ``scale``.

    ``scale`` is that of the scores, ``keep_scale`` the factor of the probabilities that dropout keeps, and
    2**top that of probabilities before they become float16.  The others are (batch, heads) float32: units,
    and the largest norms of rows in their units; from dout on they are 0 in the forward pass.  2**TOP units
    of delta exceed any delta of the head.
    """

    scale: Any
    top: Any
    keep_scale: Any
    k: Any
    v: Any
    q: Any
    dout: Any = 0
    delta: Any = 0
    v_norm: Any = 0
    dout_norm: Any = 0


def scale_type(is_backward: bool) -> Any:
    """Return numba's type of a kernel's argument ``scale``."""
    heads = array_type(FLOAT32, 2)
    rest = [heads if is_backward else int64] * 4
    return types.NamedTuple((float64, float32, float32, *[heads] * 3, *rest), SplitUnits)


@device_function
def _forward(scale, b, h):
    return float32(scale.scale) * scale.k[b, h] * scale.q[b, h], scale.top


@device_function
def _out(scale, b, h):
    return scale.v[b, h]


@device_function
def _bound(scale, b, h):
    """Return an upper bound of |dP ∘ Z - D|; ∥dO∥·∥V∥ bounds dP."""
    dp = scale.v_norm[b, h] * scale.v[b, h] * (scale.dout_norm[b, h] * scale.dout[b, h])
    return scale.keep_scale * dp + _TOP * scale.delta[b, h]


@device_function
def _backward(scale, b, h):
    # dS is P times at most 1: no float16 overflows.
    most = _bound(scale, b, h)
    delta = min(_ONE / most, _LARGEST) if most > _ZERO else _ZERO
    factor, top = _forward(scale, b, h)
    return factor, top, delta * scale.dout[b, h] * scale.v[b, h], delta


@device_function
def _ds_unit(scale, b, h):
    return _bound(scale, b, h) * ex2(-scale.top)


@device_function
def _gradients(scale, b, h):
    ds = float32(scale.scale) * _ds_unit(scale, b, h)
    return ds * scale.k[b, h], ds * scale.q[b, h], scale.dout[b, h] * ex2(-scale.top)


#: One float16 for a number, scaled: the precision of TF32.  Rows of split operands are whole pieces.
TF32 = HALVES["float16"]._replace(
    rung="flash2_split",
    is_wide=True,
    scale_type=scale_type,
    forward_units=_forward,
    out_unit=_out,
    backward_units=_backward,
    ds_unit=_ds_unit,
    gradient_units=_gradients,
    load_q=partial(make_load_q, 1),
    copy=lambda threads, rows, width, vectors: make_copy_tile(threads, rows, width, True),
)
#: Two terms for a number: the precision of float32.
TWO_TERMS = TF32._replace(
    size=TERMS * HALF,
    load_q=partial(make_load_q, TERMS),
    copy=lambda threads, rows, width, vectors: make_copy_terms(threads, rows, width),
    keep=make_keep_terms,
    multiply=make_multiply_terms,
    accumulate=make_accumulate_terms,
    stored=make_stored_terms,
    transposed=make_transposed_terms,
)
