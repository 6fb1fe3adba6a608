"""Decoding on a GPU replays one graph for every token, and for every text that is not longer."""

from __future__ import annotations

from typing import Any

import pytest

import minitorch

from ...support.device.fake_device import FakeDriver
from ...support.models.captured_training import FIRST, idle_device

device = pytest.fixture(idle_device)
LLAMA = {
    "rotary_theta": 1e4, "norm": "rms", "feed_forward": "swiglu", "bias": False, "n_kv_head": 1,
}  # fmt: skip


LONG = {**LLAMA, "window": 7, "sinks": True}


@pytest.mark.parametrize("structure", [{}, LLAMA, LONG], ids=["gpt2", "llama", "window and sinks"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_token_is_one_launch(device: FakeDriver, precision: str, structure: Any) -> None:
    model = minitorch.DecoderLM(
        50,
        64,
        2,
        300,
        0.0,
        n_layer=2,
        backend=minitorch.CudaBackend,
        precision=precision,
        **structure,
    )

    def launches(count: int) -> list[str]:
        """Return the launches of a text of so many tokens."""
        before = len(device.calls)
        model.generate([1, 2], count, temperature=0)
        names = [call.name for call in device.calls[before:]]
        return [name for name in names if name in ("cuLaunchKernel", "cuGraphLaunch")]

    launches(FIRST + 1)
    short, longer = launches(2), launches(6)
    # A replay, and a copy of its result.
    assert longer == [*short, *["cuGraphLaunch", "cuLaunchKernel"] * 4]
