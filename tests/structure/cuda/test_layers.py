"""Constants of layers on CUDA: a mask is copied to the device once."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cuda.runtime.arrays import is_device_array
from minitorch import CudaBackend
from minitorch.attention.score_options import bounds_penalty

pytestmark = pytest.mark.simulator


def test_the_causal_mask_is_brought_to_the_device_once() -> None:
    mask = bounds_penalty(2, 3, -2, 1, CudaBackend, np.dtype(np.float32))
    assert bounds_penalty(2, 3, -2, 1, CudaBackend, np.dtype(np.float32)) is mask
    assert is_device_array(mask._tensor._storage)
    assert mask.to_numpy().tolist() == [[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]]
