"""Captured steps train as eager ones do, and what a graph cannot hold is refused.

Only the last test needs a GPU: the others run on the host, or on a fake device that computes nothing.
``tests/structure/cuda/test_captured_step.py`` tests what a replay launches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minitorch
from kernels.runtime.targets import cuda
from minitorch.training.captured_step import RECORDED, WARM_UP

from ...support.device.fake_device import FakeDriver
from ...support.models.captured_training import FIRST, STEPS, Training, idle_device, kinds

device = pytest.fixture(idle_device)


_COUNT = iter(range(10**6))
_KEPT: list[Any] = []
CUDA = minitorch.CudaBackend


def _keeps(w: Any, x: Any) -> Any:
    _KEPT[:] = [w + _KEPT[0] if _KEPT else w + w]
    return _KEPT[0]


def _grows(w: Any, x: Any) -> Any:
    _KEPT.append(0)
    for _ in _KEPT:
        w = w + w
    return w


def _moves(w: Any, x: Any) -> Any:
    p = minitorch.Parameter(w)
    sgd = minitorch.SGD([p], lr=0.5)
    p.value.grad = p.value * 2.0
    sgd.step()
    return p.value


#: A function of a tensor on the device and an array → what the error says.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "reads": (lambda w, x: minitorch.zeros((1,), CUDA) + w.sum().item(), "reads numbers of the device"),
    "counts": (lambda w, x: minitorch.full((3,), float(next(_COUNT)), CUDA), "argument 2 .* anew"),
    "counts beside": (lambda w, x: w * float(next(_COUNT)), "Python brought it anew|launched"),
    "brings": (lambda w, x: w * minitorch.tensor([1.0, 2.0, 3.0], CUDA), "none of its inputs"),
    "brings what it computed": (lambda w, x: w * minitorch.from_numpy(x + 1.0, CUDA), "none of its inputs"),
    "draws": (lambda w, x: w * (2.0 + 0 * random.random()), "draws random numbers on the host"),
    "draws of NumPy": (lambda w, x: w * (2.0 + 0 * np.random.rand()), "draws random numbers on the host"),
    "waits": (lambda w, x: cuda.synchronize() or w * 2.0, "has numba copy, allocate or wait"),
    "keeps": (_keeps, "an earlier call of the function left behind"),
    "grows": (_grows, "launched 3 and 4 kernels"),
    "lends": (lambda w, x: w.__cuda_array_interface__ and w + w, "shares memory of the device"),
    "returns a number": (lambda w, x: (w * 2.0, 3.0), "return tensors on the device, got float"),
    "moves": (_moves, "moves its parameters by SGD to new memory"),
    "moves on the host": (
        lambda w, x: (_moves(minitorch.ones((2,), minitorch.FastBackend), x), w * 2.0)[1],
        "moves its parameters by SGD to new memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(device: FakeDriver, name: str) -> None:
    (fn, words), w = REFUSED[name], minitorch.ones((3,), CUDA, dtype=np.float32)
    _KEPT.clear()
    step = minitorch.graph_step(lambda x: fn(w, x))
    for _ in range(WARM_UP):
        step(np.zeros(3))
    kind = TypeError if name == "returns a number" else minitorch.CaptureError
    with pytest.raises(kind, match=words):
        for _ in range(RECORDED):
            step(np.zeros(3))
    assert not step.is_captured


def test_inputs_of_other_shapes_or_kinds_are_refused(device: FakeDriver) -> None:
    w = minitorch.ones((3,), minitorch.CudaBackend)
    step = minitorch.graph_step(lambda x: w + w)
    step(np.zeros((2, 3)))
    for wrong in (np.zeros(6), np.zeros((2, 3), np.float32)):
        with pytest.raises(ValueError, match="same shapes and dtypes in each call"):
            step(wrong)
    with pytest.raises(ValueError, match="same shapes and dtypes in each call"):
        step(np.zeros((2, 3)), np.zeros(1))
    for wrong, kind in ((0, ValueError), (1.5, TypeError)):
        for name in ("warm_up", "most_shapes"):
            with pytest.raises(kind, match=name):
                minitorch.graph_step(lambda: None, **{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="NumPy arrays or tensors, got int"):
        step(3)
    w.requires_grad_(True)
    with pytest.raises(ValueError, match="requires a gradient"):
        step(w)


@pytest.mark.parametrize("sizes", [(16, 7, 3), (3, 16, 7)])
def test_inputs_of_a_few_shapes_have_a_graph_each_and_share_memory(
    device: FakeDriver, sizes: tuple[int, ...]
) -> None:
    training = Training("bfloat16", 0.1, 1.0, False, captured=False)
    step, alone = (minitorch.graph_step(training.step, most_shapes=n) for n in (3, 1))
    for number in range(len(sizes) * (FIRST + 1)):
        batch, size = training.batches[number % STEPS], sizes[number % len(sizes)]
        step(*batch[:, :, :size])
    assert step.is_captured and len(device.nodes) == len(sizes)
    assert training.optimizer.steps == step.calls, "no step was captured anew"
    for number in range(FIRST):
        alone(*training.batches[number])
    shares = 1 if sizes[0] == 16 else 2  # memory that was too small stays in use
    assert 0.9 * alone.memory < step.memory < 1.1 * shares * alone.memory


@pytest.mark.parametrize("change", ["state", "value", "norm"])
def test_a_step_that_became_another_is_captured_anew(device: FakeDriver, change: str) -> None:
    training = Training("bfloat16", 0.0, 1.0, False, captured=True)
    for number in range(FIRST):
        training.take(number)
    assert training.captured.is_captured
    if change == "state":
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    elif change == "value":
        p = training.model.parameters()[3]
        p.update(p.value.detach() * 1.0)
    else:
        training.optimizer.max_norm = 2.0
    training.take(FIRST)
    assert (training.captured.is_captured, training.captured.calls) == (False, 1)
    for number in range(FIRST):
        training.take(number)
    assert training.captured.is_captured


def test_on_the_host_calls_run_the_function() -> None:
    def fn(x: Any) -> Any:
        t = minitorch.from_numpy(x)
        return (t * t).sum(), np.random.standard_normal()

    step = minitorch.graph_step(fn)
    for number in range(FIRST + 2):
        np.random.seed(number)
        loss, noise = step(np.full(3, float(number)))
        np.random.seed(number)
        assert (loss.item(), noise) == (3.0 * number**2, np.random.standard_normal())
    assert not step.is_captured


def test_a_function_of_the_host_is_never_captured(device: FakeDriver) -> None:
    step = minitorch.graph_step(lambda x: float(x.sum()))
    assert [step(np.full(3, i)) for i in range(FIRST + 2)] == [3.0 * i for i in range(FIRST + 2)]
    assert step.why_eager is not None and "launches nothing" in step.why_eager


@pytest.mark.parametrize("optimizer", [minitorch.AdamW, minitorch.SGD])
def test_a_model_on_the_host_trains_beside_a_device(device: FakeDriver, optimizer: Any) -> None:
    def trained(wrap: Callable[..., Any]) -> list[float]:
        own = optimizer([minitorch.Parameter(minitorch.ones((3,), minitorch.FastBackend))], lr=0.1)
        (p,) = own.parameters

        def step(x: Any) -> minitorch.Tensor:
            own.zero_grad()
            loss = (p.value * p.value * minitorch.from_numpy(x)).sum()
            loss.backward()
            own.step()
            return loss.detach()

        take = wrap(step)
        return [take(np.full(3, 1.0 + number)).item() for number in range(FIRST + 2)]

    assert trained(minitorch.graph_step) == trained(lambda step: step)


@pytest.mark.cuda
@kinds
def test_twenty_captured_steps_are_twenty_eager_ones(kind: Any) -> None:
    found = []
    for captured in (False, True):
        training = Training(*kind, captured=captured)
        losses = [training.take(number) for number in range(STEPS)]
        values = [p.value for p in training.model.parameters()]
        moments = [t for pair in training.optimizer.moments.values() for t in pair]
        arrays = [t.to_numpy().copy() for t in (*losses, *values, *moments)]
        found.append((arrays, random.getstate()))
    assert training.captured.is_captured
    (eager, state), (own, own_state) = found
    assert own_state == state
    for number, (expected, array) in enumerate(zip(eager, own, strict=True)):
        assert array.tobytes() == expected.tobytes(), number
