"""How many functions of ours stand between a call and its compiled loop."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch
from kernels.cpu.attention import call_record
from kernels.runtime.jit import JIT_DISABLED

from ...support.frames import MOST_FRAMES, stacks


def test_a_repeated_call_takes_few_frames_to_its_loop() -> None:
    assert not JIT_DISABLED
    draw = np.random.default_rng(0)
    q, k, v = (
        minitorch.from_numpy(draw.standard_normal((1, 2, 16, 8), np.float32), requires_grad=True)
        for _ in range(3)
    )
    every: list[Any] = [{}, {"is_causal": True}, {"dropout_p": 0.1}]
    for options in every:
        with stacks(call_record, "run_alone") as found:
            q.flash_attention(k, v, **options)
            q.flash_attention(k, v, **options).sum().backward()
            q.flash_attention(k, v, **options).sum().backward()
        _, again, _, _, backward = found
        assert len(again) <= MOST_FRAMES, again
        assert again[0] == "flash_attention"
        assert len(backward) <= MOST_FRAMES + 2, backward  # backward() and the walk of the graph
