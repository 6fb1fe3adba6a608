"""The functions of ``kernels.common`` and ``kernels.scores``, compiled for the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import make_geometry
from kernels.common.online_softmax import (
    LN_2,
    make_online_softmax,
    make_softmax_step,
)
from kernels.common.philox import Philox, make_philox
from kernels.cuda.device.vector import EXP2, MINUS
from kernels.cuda.ptx.numbers import lg2, rcp  # beyond module 5
from kernels.cuda.runtime.kernel import device_function, scalar_type
from kernels.runtime.targets import libdevice
from kernels.runtime.types import int64, uint32
from kernels.scores.visibility import make_masks

# On the host the same functions are those of ``geometry.PLAIN`` and its like.
_GEOMETRY = make_geometry(device_function)

ceil_div = _GEOMETRY.ceil_div

first_tile, tiles_stop = _GEOMETRY.first_tile, _GEOMETRY.tiles_stop

first_full_tile, full_tiles_stop = _GEOMETRY.first_full_tile, _GEOMETRY.full_tiles_stop

is_tile_seen, is_full_tile = _GEOMETRY.is_tile_seen, _GEOMETRY.is_full_tile

is_visible = make_masks(device_function).is_visible


@device_function
def batch_and_head(y, heads):
    """Return the batch and the head of block ``y`` of a grid with one block for each (batch, head)."""
    # Unsigned and of 32 bits: one of 64 takes several times as long, and its results twice the registers.
    number, divisor = uint32(y), uint32(heads)
    return int64(number // divisor), int64(number % divisor)


@device_function
def numbers_of_mods(flat, extras):
    """Return the batch and head of a flat index, for mods."""
    return batch_and_head(flat, max(extras.heads, 1))  # by what may be 0, a branch


def _make_device_philox() -> Philox:
    """Return the generator on 32-bit words, because a 64-bit product takes several instructions."""

    def word(x):
        return uint32(x)

    def product(x, y):
        return uint32(libdevice.umulhi(x, y)), uint32(x * y)

    return make_philox(device_function, word, product)


PHILOX = _make_device_philox()

SOFTMAX = make_online_softmax(device_function)

shift_of, inverse_sum, log_sum_exp = SOFTMAX.shift_of, SOFTMAX.inverse_sum, SOFTMAX.log_sum_exp

merge_weight = SOFTMAX.merge_weight


@cache
def softmax_step_for(dtype: np.dtype[Any]) -> Any:
    """Return ``power`` and ``grown`` of :func:`make_softmax_step`, in float32 or float64."""
    real = scalar_type(dtype)

    @device_function
    def own_shift(row_max):
        return real(shift_of(row_max))

    return make_softmax_step(device_function, own_shift, EXP2[dtype], MINUS[dtype])


@device_function  # beyond module 5
def _near_logarithm(x):  # beyond module 5
    return lg2(x) * np.float32(LN_2)


NEAR_SOFTMAX = SOFTMAX
# To a unit in the last place, an instruction each: what blocks end with.  # beyond module 5
NEAR_SOFTMAX = make_online_softmax(device_function, rcp, _near_logarithm)  # beyond module 5
