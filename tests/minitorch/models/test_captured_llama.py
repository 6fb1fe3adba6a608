"""The steps of a model of Llama's shape can be captured: on a device that computes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch

from ...support.device.fake_device import FakeDriver
from ...support.models.captured_training import FIRST, assert_captured, idle_device

device = pytest.fixture(idle_device)


@pytest.mark.parametrize("options", [{}, {"window": 5, "sinks": True}])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_is_captured(
    device: FakeDriver, precision: str, recompute: bool, options: Any
) -> None:
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        20, 64, 4, 32, 0.1, bias=False, n_layer=2, n_kv_head=2, rotary_theta=1e4, norm="rms",
        feed_forward="swiglu", tie_weights=True, backend=minitorch.CudaBackend, precision=precision,
        recompute=recompute, **options,
    )  # fmt: skip
    random = np.random.default_rng(0)
    assert_captured(model, (random.integers(0, 20, (2, 3, 24)) for _ in range(FIRST + 2)))
