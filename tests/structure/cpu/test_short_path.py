"""How many functions of ours stand between a call and its compiled loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import minitorch
from kernels.cpu.attention import call_record
from kernels.runtime.jit import JIT_DISABLED

ROOT = Path(__file__).parents[3]
#: As docs/architecture.md has them.
MOST_FRAMES = 7


@contextmanager
def stacks() -> Iterator[list[list[str]]]:
    """Note the functions of ours that are active when the loop is called."""
    found: list[list[str]] = []
    run = call_record.run_alone

    def noted(*args: Any) -> None:
        frame, names = sys._getframe(1), list[str]()
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "kernels") or path.is_relative_to(ROOT / "minitorch"):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        found.append(names[::-1])
        run(*args)

    with patch.object(call_record, "run_alone", noted):
        yield found


def test_a_repeated_call_takes_few_frames_to_its_loop() -> None:
    assert not JIT_DISABLED
    draw = np.random.default_rng(0)
    q, k, v = (
        minitorch.from_numpy(draw.standard_normal((1, 2, 16, 8), np.float32), requires_grad=True)
        for _ in range(3)
    )
    every: list[Any] = [{}, {"is_causal": True}, {"dropout_p": 0.1}]
    for options in every:
        with stacks() as found:
            q.flash_attention(k, v, **options)
            q.flash_attention(k, v, **options).sum().backward()
            q.flash_attention(k, v, **options).sum().backward()
        _, again, _, _, backward = found
        assert len(again) <= MOST_FRAMES, again
        assert again[0] == "flash_attention"
        assert len(backward) <= MOST_FRAMES + 2, backward  # backward() and the walk of the graph
