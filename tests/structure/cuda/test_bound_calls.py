"""Bound calls on a device: few functions of ours, and never the bound call of another key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
import minitorch
from kernels import launch
from kernels.bound_calls import find
from kernels.cuda.runtime.arrays import device_view, to_device
from kernels.problem.question import problem_of
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.targets import EMULATED

from ...support.device.fake_device import FakeDriver, fake_device
from ...support.frames import entered

pytestmark = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver to record")

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
        KnownCalls.cache_clear()
        assert [launched(own, options) for options in OPTIONS] == first


def test_a_repeated_call_enters_few_functions_before_its_launch() -> None:
    with fake_device():
        q, k, v = tensors()
        for options in OPTIONS[:7]:
            q.flash_attention(k, v, **options).sum().backward()
        for options in OPTIONS[:7]:
            out = q.flash_attention(k, v, **options)
            names = entered(lambda own=options: q.flash_attention(k, v, **own))
            more = 4 * (options.get("dropout_p", 0) > 0) + ("seed" in options)
            assert len(names) <= 34 + more, " ".join(names)
            back = entered(out.sum().backward)
            own = back[len(back) - back[::-1].index("backward") :]
            assert own.index("arrays") <= 20, own
            assert not {"in_full", "pick"} & {*names, *back}


def test_a_call_that_its_key_cannot_describe_runs_in_full() -> None:
    arrays = [np.zeros(SHAPE, np.float16)] * 3
    with fake_device():
        own = [to_device(x) for x in arrays]
        assert find(own, {}) is not None
        for options in (
            {"attn_mask": [True]},
            {"score_mod": lambda score: 0.0},  # of too few arguments
            {"seed": 2**64},
            {"window_size": 5},
        ):
            assert find(own, options) is None, options  # type: ignore[arg-type]
        every: list[Any] = [
            {}, {"scale": 1}, {"scale": 1.0}, {"scale": True}, {"scale": np.float64(1)},
            {"seed": 1}, {"seed": 1.0}, {"seed": np.int64(1)}, {"attn_mask": own[0]},
            {"alibi_slopes": own[0]}, {"window_size": (1, 2)}, {"window_size": (True, 2)},
        ]  # fmt: skip
        found = [find(x, options) for options in every for x in (own, arrays)]
        found += [find(own, {}, (True,)), find(own, {}, (1,)), find(own, {}, results=own[:1])]
        keys = [one.key for one in found if one is not None]
        assert len({*keys}) == len(keys) == len(found)


def test_functions_are_told_apart_by_what_they_capture() -> None:
    def halved(by: float) -> Any:
        return lambda score, batch, head, row, col: score * by

    with fake_device():
        own = [to_device(np.zeros(SHAPE, np.float16))] * 3
        one, same, other = (find(own, {"score_mod": halved(by)}) for by in (0.5, 0.5, 0.25))
        assert one is not None and same is not None and other is not None
        assert one.key == same.key != other.key


def test_a_call_that_copies_an_operand_copies_it_again() -> None:
    with fake_device():
        base = to_device(np.zeros(SHAPE, np.float16))
        backwards = device_view(base, SHAPE, (2 * 40 * 64, 40 * 64, -64, 1), 39 * 64)
        for _ in range(2):
            kernels.flash_attention_forward(backwards, base, base)
        found = find((backwards, base, base), {}, None, launch.FORWARD, make=problem_of)
        assert found is not None and found.call is not None and not found.call.reads_given
