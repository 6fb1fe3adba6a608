"""The steps of a classifier with each attention can be captured: on a device that computes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import minitorch
from minitorch.models.config import ATTENTIONS

from ...support.device.fake_device import FakeDriver
from ...support.models.captured_training import FIRST, assert_captured, idle_device

device = pytest.fixture(idle_device)
OPTIONS = {
    "linformer": {"length": 32, "count": 8},
    "performer": {"num_features": 16, "redraw_every": 0},
    "reformer": {"seed": 0, "chunk": 8},
    "smyrf": {"seed": 0, "cluster": 8},
    "block_sparse": {"block_size": 16},
}


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_step_is_captured(device: FakeDriver, attention: str, documents: int) -> None:
    minitorch.manual_seed(0)
    model = minitorch.SequenceClassifier(
        20, 64, 2, 32, 4, 0.1, n_layer=1, attention=attention, pad_id=0, documents=documents,
        attention_options=OPTIONS.get(attention), backend=minitorch.CudaBackend, dtype=np.float32,
    )  # fmt: skip
    random = np.random.default_rng(0)
    shape = (3, *[2] * (documents - 1), 32)
    assert_captured(
        model,
        ((random.integers(0, 20, shape), random.integers(0, 4, 3)) for _ in range(FIRST + 2)),
    )
