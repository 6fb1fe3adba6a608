"""The mark of tests that count what arrays move."""

from __future__ import annotations

import pytest

from kernels.runtime.targets import IS_SIMULATOR

needs_simulator = pytest.mark.skipif(
    not IS_SIMULATOR, reason="arrays count in the simulator only: NUMBA_ENABLE_CUDASIM=1"
)
