"""A launch of our own packs what numba's would: the same numbers, in the same order and sizes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numba import float32, float64, int64, types, uint64, void

from kernels.cuda.runtime.arrays import device_view, to_device
from kernels.cuda.runtime.kernel import Kernel, three
from kernels.runtime.targets import EMULATED

from ...support.device.fake_device import fake_device

pytestmark = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")


def kernel(*types_of: Any) -> Kernel:
    def nothing(*args: Any) -> None:
        """Do nothing."""

    return Kernel(nothing, void(*types_of), 32)


def test_numbers_tuples_and_arrays_lie_one_after_the_other() -> None:
    """A number in another place or size would be read as another one."""
    vector = types.Array(float32, 2, "A")
    own = kernel(vector, int64, float32, float64, types.UniTuple(int64, 2), uint64)
    with fake_device() as device:
        x = device_view(to_device(np.zeros(24, np.float32)), (4, 3), (6, 2))
        own[(3, 2), 32](x, -5, 1.5, 0.1, (7, -8), 2**63)
        (launched,) = device.launches
        address = x.device_ctypes_pointer.value
    assert launched.sizes == (3, 2, 1, 32, 1, 1)
    *array, whole, single, double, first, second, last = launched.words
    assert array == [0, 0, 12, 4, address, 4, 3, 24, 8]
    assert struct.unpack("=f", struct.pack("=Q", single)[:4]) == (1.5,)
    assert struct.pack("=Q", double) == struct.pack("=d", 0.1)
    assert (whole, first, second, last) == (2**64 - 5, 7, 2**64 - 8, 2**63)


def test_arguments_of_another_kind_or_number_are_refused() -> None:
    vector, pair = kernel(types.Array(float32, 1, "C")), kernel(int64, types.UniTuple(int64, 2))
    with fake_device() as device:
        for wrong in (np.zeros(3), np.zeros((3, 1), np.float32)):
            with pytest.raises(TypeError, match="the kernel takes float32 of 1 dimensions, got"):
                vector[1, 32](to_device(wrong))
        with pytest.raises(ValueError, match="shorter"):
            pair[1, 32](1)
        with pytest.raises(struct.error):
            pair[1, 32](1, (2, 3, 4))
        assert not device.launches


def test_a_grid_has_three_sizes() -> None:
    assert [three(x) for x in (5, (np.int64(5), 2), (1, 2, 3))] == [(5, 1, 1), (5, 2, 1), (1, 2, 3)]
