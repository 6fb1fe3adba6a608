"""The steps of a classifier with each attention can be captured: on a device that computes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch.transformer import ATTENTIONS

from ...support.captured_training import FIRST, idle_device
from ...support.fake_device import FakeDriver

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
    optimizer = minitorch.AdamW(model.parameters(), max_norm=1.0)

    def step(X: Any, y: Any) -> minitorch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(X, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = minitorch.graph_step(step)
    random = np.random.default_rng(0)
    for _ in range(FIRST + 2):
        X = random.integers(0, 20, (3, *[2] * (documents - 1), 32))
        captured(X, random.integers(0, 4, 3))
    assert captured.is_captured and captured.why_eager is None
