"""Steps of training and of decoding can be captured: on a device that computes nothing."""

from __future__ import annotations

from typing import Any

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
LLAMA = {
    "rotary_theta": 1e4, "norm": "rms", "feed_forward": "swiglu", "bias": False, "n_kv_head": 1,
}  # fmt: skip
LONG = {**LLAMA, "window": 5, "sinks": True}


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_step_of_a_classifier_is_captured(
    device: FakeDriver, attention: str, documents: int
) -> None:
    minitorch.manual_seed(0)
    model = minitorch.SequenceClassifier(
        20, 64, 2, 32, 4, 0.1, n_layer=1, attention=attention, pad_id=0, documents=documents,
        attention_options=OPTIONS.get(attention), backend=minitorch.CudaBackend, dtype=np.float32,
    )  # fmt: skip
    random, shape = np.random.default_rng(0), (3, *[2] * (documents - 1), 32)
    batches = ((random.integers(0, 20, shape), random.integers(0, 4, 3)) for _ in range(FIRST + 2))
    assert_captured(model, batches)


def language_model(precision: str, positions: int, structure: Any, **more: Any) -> Any:
    minitorch.manual_seed(0)
    return minitorch.DecoderLM(
        50, 64, 2, positions, 0.1, n_layer=2, backend=minitorch.CudaBackend, precision=precision,
        **structure, **more,
    )  # fmt: skip


@pytest.mark.parametrize("structure", [LLAMA, LONG], ids=["llama", "window and sinks"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_of_a_language_model_is_captured(
    device: FakeDriver, precision: str, recompute: bool, structure: Any
) -> None:
    model = language_model(precision, 32, structure, tie_weights=True, recompute=recompute)
    random = np.random.default_rng(0)
    assert_captured(model, (random.integers(0, 50, (2, 3, 24)) for _ in range(FIRST + 2)))


@pytest.mark.parametrize("structure", [{}, LLAMA, LONG], ids=["gpt2", "llama", "window and sinks"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_token_is_one_launch(device: FakeDriver, precision: str, structure: Any) -> None:
    """One graph serves every token, and every text that is not longer."""
    model = language_model(precision, 300, structure)

    def launches(count: int) -> list[str]:
        before = len(device.calls)
        model.generate([1, 2], count, temperature=0)
        names = [call.name for call in device.calls[before:]]
        return [name for name in names if name in ("cuLaunchKernel", "cuGraphLaunch")]

    launches(FIRST + 1)
    short, longer = launches(2), launches(6)
    # A replay, and a copy of its result.
    assert longer == [*short, *["cuGraphLaunch", "cuLaunchKernel"] * 4]


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.5}], ids=str)
def test_a_step_of_several_texts_is_one_launch(device: FakeDriver, options: Any) -> None:
    """The graph of four rows serves three texts, too."""
    model = language_model("bfloat16", 300, LONG)
    engine = minitorch.Engine(model, pages=40, batch=4)
    requests = [engine.submit([1, 2], 20, seed=n, **options) for n in range(4)]
    for number in range(FIRST + 4):
        if number == FIRST + 2:
            engine.cancel(requests[2])
        device.calls.clear()
        assert len(engine.step()) == len(engine.running)
    names = [call.name for call in device.calls]
    assert [n for n in names if "Launch" in n] == ["cuGraphLaunch", "cuLaunchKernel"]
