"""Calls of a known kind on a device: few frames, and never the plan of another kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
import minitorch
from kernels import launch
from kernels.cuda.runtime.arrays import device_view, to_device
from kernels.known_calls import glance
from kernels.runtime.targets import IS_SIMULATOR

from ...support.device.fake_device import FakeDriver, fake_device
from ...support.frames import MOST_FRAMES, stacks

pytestmark = pytest.mark.skipif(IS_SIMULATOR, reason="the simulator has no driver to record")

SHAPE = (1, 2, 40, 64)
OPTIONS: list[Any] = [
    {},
    {"is_causal": True},
    {"scale": 0.5},
    {"scale": 1},
    {"window_size": (3, 4)},
    {"dropout_p": 0.5},
    {"dropout_p": 0.5, "seed": 3},
    {"softcap": 2.0},
    {"rung": "flash2"},
    {"return_lse": True},
]


def tensors() -> list[Any]:
    """Return q, k and v on the device, float16, recorded."""
    return [
        minitorch.from_numpy(np.zeros(SHAPE, np.float16), minitorch.CudaBackend, requires_grad=True)
        for _ in range(3)
    ]


def launched(own: FakeDriver, options: dict[str, Any]) -> list[Any]:
    """Make a call with its backward pass; return kernels and sizes of its launches."""
    q, k, v = tensors()
    minitorch.manual_seed(0)
    own.launches.clear()
    out = q.flash_attention(k, v, **options)
    out = out[0] if options.get("return_lse") else out
    own_shape = out.shape
    out.sum().backward()
    assert q.grad is not None and (own_shape, q.grad.shape) == (SHAPE, SHAPE)
    return [(one.kernel, one.sizes) for one in own.launches]


def test_tensors_have_the_launches_of_their_own_options() -> None:
    with fake_device() as own:
        first = [launched(own, options) for options in OPTIONS]
        for _ in range(2):
            assert [launched(own, options) for options in OPTIONS] == first
        launch.CUDA.plans.clear()
        assert [launched(own, options) for options in OPTIONS] == first


def test_a_repeated_call_takes_few_frames_to_its_launch() -> None:
    with fake_device():
        q, k, v = tensors()
        for options in OPTIONS[:7]:
            q.flash_attention(k, v, **options).sum().backward()
        for options in OPTIONS[:7]:
            out = q.flash_attention(k, v, **options)
            plan = glance((q._tensor, k._tensor, v._tensor), options, q.backend)
            assert plan is not None and plan.plan is not None
            with stacks(type(plan.plan.repeat), "into") as found:
                q.flash_attention(k, v, **options)
                out.sum().backward()
            forward, backward = (stack for stack in found if "storages" in stack)
            # The driver is one frame further on, and backward() and the walk of the graph are two.
            assert len(forward) + 1 <= MOST_FRAMES, forward
            assert forward[0] == "flash_attention"
            assert len(backward) + 1 <= MOST_FRAMES + 2, backward


def test_what_a_kind_cannot_tell_is_looked_at() -> None:
    arrays = [np.zeros(SHAPE, np.float16)] * 3
    with fake_device():
        own = [to_device(x) for x in arrays]
        assert glance(own, {}) is not None
        assert glance(arrays, {}) is None, "an array of the host"
        for options in (
            {"attn_mask": own[0]},
            {"score_mod": lambda score: 0.0},  # of too few arguments
            {"seed": 2**64},
            {"seed": 1.0},
            {"window_size": 5},
        ):
            assert glance(own, options) is None, options  # type: ignore[arg-type]
        one, other = glance(own, {"scale": 1}), glance(own, {"scale": 1.0})
        assert one is not None and other is not None and one.kind != other.kind


def test_functions_are_told_apart_by_what_they_capture() -> None:
    def halved(by: float) -> Any:
        return lambda score, batch, head, row, col: score * by

    with fake_device():
        own = [to_device(np.zeros(SHAPE, np.float16))] * 3
        one, same, other = (glance(own, {"score_mod": halved(by)}) for by in (0.5, 0.5, 0.25))
        assert one is not None and same is not None and other is not None
        assert one.kind == same.kind != other.kind


def test_an_operand_that_was_copied_is_not_known() -> None:
    with fake_device():
        base = to_device(np.zeros(SHAPE, np.float16))
        backwards = device_view(base, SHAPE, (2 * 40 * 64, 40 * 64, -64, 1), 39 * 64)
        for _ in range(2):
            kernels.flash_attention_forward(backwards, base, base)
        seen = glance((backwards, base, base), {}, "forward", None)
        assert seen is not None and seen.plan is None
