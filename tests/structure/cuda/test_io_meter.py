"""The IO meter restores the launch that it replaces in the simulator."""

from __future__ import annotations

import pytest

from kernels.cuda.runtime.kernel import Kernel
from kernels.metering.io_meter import IOMeter

from ...support.device.metering import needs_simulator


@pytest.mark.simulator
@needs_simulator
def test_a_meter_leaves_nothing_behind() -> None:
    before = Kernel.__getitem__
    with pytest.raises(ZeroDivisionError), IOMeter() as meter:
        raise ZeroDivisionError
    assert Kernel.__getitem__ is before and meter.counts() == {}
