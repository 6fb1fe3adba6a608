"""A captured step does what an eager one does, in one launch; what a graph cannot hold is refused."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

import minitorch
from kernels.cuda.runtime.arena import ALIGNMENT, Arena
from kernels.cuda.runtime.arrays import to_device
from kernels.cuda.runtime.memory_pool import STAGED
from kernels.cuda.runtime.numba_watch import watching_numba
from kernels.cuda.runtime.recorder import active
from kernels.runtime.targets import IS_SIMULATOR, cuda
from minitorch.training.captured_step import RECORDED, WARM_UP

from ...support.fake_device import FakeDriver, Launched, fake_device

VOCABULARY, CONTEXT, BATCH, STEPS = 40, 16, 2, 20
#: Calls before the first replay.
FIRST = WARM_UP + RECORDED
#: Where the fake device's memory lies, and what is no number of a kernel.
ADDRESSES = range(1 << 32, 1 << 44)
no_simulator = pytest.mark.skipif(IS_SIMULATOR, reason="the simulator has no driver")


@pytest.fixture
def device() -> Iterator[FakeDriver]:
    """Return a device that computes nothing."""
    if IS_SIMULATOR:
        pytest.skip("the simulator has no driver")
    with fake_device() as own:
        yield own


class Training:
    """A small model in training; equal ones take equal steps.

    Args:
        precision: Of the model.
        dropout: Everywhere, in attention too.
        clip: Norm of the gradients, or None.
        recompute: See :class:`minitorch.DecoderLM`.
        captured: Whether steps are captured.
    """

    def __init__(
        self, precision: str, dropout: float, clip: float | None, recompute: bool, captured: bool
    ):
        minitorch.manual_seed(5)
        self.model = minitorch.DecoderLM(
            VOCABULARY, 64, 2, CONTEXT, p_dropout=dropout, n_layer=1, attention_dropout=dropout,
            backend=minitorch.CudaBackend, precision=precision, recompute=recompute,
        )  # fmt: skip
        self.optimizer = minitorch.AdamW(self.model.parameters(), max_norm=clip)
        self.captured: Any = minitorch.graph_step(self.step) if captured else None
        rng = np.random.default_rng(2)
        self.batches = rng.integers(0, VOCABULARY, (STEPS, 2, BATCH, CONTEXT))
        minitorch.manual_seed(6)

    def step(self, ids: Any, targets: Any) -> minitorch.Tensor:
        """Take a step; return the loss before it."""
        self.optimizer.zero_grad()
        loss = self.model.loss(ids, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def take(self, number: int) -> minitorch.Tensor:
        """Take the step of a number, with a learning rate of its own."""
        self.optimizer.lr = 1e-3 / (1 + number)
        return (self.captured or self.step)(*self.batches[number])


#: Precision, dropout, norm and whether activations are recomputed.
KINDS = [
    ("bfloat16", 0.0, None, False),
    ("bfloat16", 0.1, 1.0, True),
    ("float32", 0.1, 0.5, False),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))


def _numbers(launches: list[Launched]) -> list[Any]:
    """Return launches without the places of arrays."""
    return [
        (name, sizes, ["place" if word in ADDRESSES else word for word in words])
        for name, sizes, words in launches
    ]


def _of_steps(kind: tuple[Any, ...], captured: bool, steps: int) -> tuple[list[Any], Any, int]:
    """Return what each step launches, but for copies of its result, and where random numbers end."""
    with fake_device() as device:
        training, found = Training(*kind, captured=captured), []
        for number in range(steps):
            device.launches.clear()
            training.take(number)
            found.append(_numbers(device.launches))
        return found, random.getstate(), training.optimizer.steps


@no_simulator
@kinds
def test_a_replay_launches_what_an_eager_step_launches_with_its_numbers(kind: Any) -> None:
    steps = FIRST + 3
    eager, state, count = _of_steps(kind, False, steps)
    captured, own_state, own_count = _of_steps(kind, True, steps)
    assert (own_state, own_count) == (state, count)
    for number in range(1, steps):
        expected, found = eager[number], captured[number]
        if number >= WARM_UP:
            assert found.pop()[0] == "map_id"  # a copy of the loss, for the caller
        assert [name for name, *_ in found] == [name for name, *_ in expected], number
        assert found == expected, number


@kinds
def test_a_replay_is_a_launch_and_copies_of_the_inputs(device: FakeDriver, kind: Any) -> None:
    training = Training(*kind, captured=True)
    for number in range(FIRST):
        assert not training.captured.is_captured
        training.take(number)
    assert training.captured.is_captured and training.captured.why_eager is None
    device.calls.clear()
    training.take(FIRST)
    asked = Counter(call.name for call in device.calls)
    assert asked.pop("cuGraphExecKernelNodeSetParams") <= training.captured.kernels // 4
    # Ids, their uses in the table, and targets; one launch copies the loss for the caller.
    assert asked == {"cuMemcpyHtoDAsync": 3, "cuGraphLaunch": 1, "cuLaunchKernel": 1}
    copies = [call.about[1] for call in device.calls if call.name == "cuMemcpyHtoDAsync"]
    ids, targets = (x.reshape(-1) for x in training.batches[FIRST])
    assert ids.tobytes() in copies and targets.tobytes() in copies
    order = np.argsort(ids, kind="stable").tobytes()
    assert any(copy.endswith(order) for copy in copies), "of the table's gradient"


@no_simulator
def test_an_eager_step_neither_reads_nor_waits(device: FakeDriver) -> None:
    training = Training("bfloat16", 0.1, 1.0, False, captured=False)
    for number in range(3):
        device.calls.clear()
        training.take(number)
    assert {call.name for call in device.calls} == {"cuLaunchKernel", "cuMemcpyHtoDAsync"}


def _reads(w: minitorch.Tensor, x: Any) -> Any:
    return minitorch.zeros((1,), minitorch.CudaBackend) + w.sum().item()


def _counts(w: minitorch.Tensor, x: Any) -> Any:
    return minitorch.full((3,), float(next(_COUNT)), minitorch.CudaBackend)


def _counts_beside(w: minitorch.Tensor, x: Any) -> Any:
    return w * float(next(_COUNT))


def _brings(w: minitorch.Tensor, x: Any) -> Any:
    return w * minitorch.tensor([1.0, 2.0, 3.0], minitorch.CudaBackend)


def _brings_what_it_computed(w: minitorch.Tensor, x: Any) -> Any:
    return w * minitorch.from_numpy(x + 1.0, minitorch.CudaBackend)


def _draws(w: minitorch.Tensor, x: Any) -> Any:
    random.random()
    return w * 2.0


def _draws_of_numpy(w: minitorch.Tensor, x: Any) -> Any:
    np.random.standard_normal(1)
    return w * 2.0


def _waits(w: minitorch.Tensor, x: Any) -> Any:
    cuda.synchronize()
    return w * 2.0


def _keeps(w: minitorch.Tensor, x: Any) -> Any:
    _KEPT[:] = [w + _KEPT[0] if _KEPT else w + w]
    return _KEPT[0]


def _grows(w: minitorch.Tensor, x: Any) -> Any:
    _KEPT.append(0)
    for _ in _KEPT:
        w = w + w
    return w


def _lends(w: minitorch.Tensor, x: Any) -> Any:
    assert w.__cuda_array_interface__
    return w + w


def _returns_a_number(w: minitorch.Tensor, x: Any) -> Any:
    return w * 2.0, 3.0


def _moves(w: minitorch.Tensor, x: Any) -> Any:
    p = minitorch.Parameter(w)
    sgd = minitorch.SGD([p], lr=0.5)
    p.value.grad = w * 2.0
    sgd.step()
    return p.value


def _moves_on_the_host(w: minitorch.Tensor, x: Any) -> Any:
    p = minitorch.Parameter(minitorch.ones((2,), minitorch.FastBackend))
    sgd = minitorch.SGD([p], lr=0.5)
    p.value.grad = p.value * 2.0
    sgd.step()
    return w * 2.0


_COUNT = iter(range(10**6))
_KEPT: list[Any] = []
REFUSED: dict[Callable[..., Any], str] = {
    _reads: "reads numbers of the device on the host",
    _counts: "argument 2 .*Python brought it anew",
    _counts_beside: "Python brought it anew|launched",
    _brings: r"copies an array of shape \(3,\) .* none of its inputs",
    _brings_what_it_computed: r"copies an array of shape \(3,\) .* none of its inputs",
    _draws: "draws random numbers on the host",
    _draws_of_numpy: "draws random numbers on the host",
    _waits: "has numba copy, allocate or wait",
    _keeps: "an earlier call of the function left behind",
    _grows: "launched 4 and 5 kernels",
    _lends: "shares memory of the device with another library",
    _returns_a_number: "returns tensors on the device, got float",
    _moves: "moves its parameters by SGD to new memory",
    _moves_on_the_host: "moves its parameters by SGD to new memory",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__.strip("_"))
def test_what_a_graph_cannot_hold_is_refused(device: FakeDriver, fn: Any) -> None:
    w = minitorch.ones((3,), minitorch.CudaBackend, dtype=np.float32)
    _KEPT.clear()
    step = minitorch.graph_step(lambda x: fn(w, x))
    for _ in range(WARM_UP):
        step(np.zeros(3))
    kind = TypeError if fn is _returns_a_number else minitorch.CaptureError
    with pytest.raises(kind, match=REFUSED[fn]):
        for _ in range(RECORDED):
            step(np.zeros(3))
    assert active() is None and not step.is_captured


def test_a_kernel_that_numba_launches_is_noticed() -> None:
    seen: list[str] = []
    before = cuda.dispatcher._Kernel.launch if not IS_SIMULATOR else None
    if before is None:
        pytest.skip("the simulator launches nothing")
    with fake_device(), watching_numba(seen.append), pytest.raises(AttributeError):
        cuda.dispatcher._Kernel.launch(None, (), (1, 1, 1), (1, 1, 1))
    assert seen == ["launches a kernel by numba (cuda.jit)"]
    assert cuda.dispatcher._Kernel.launch is before


def test_results_belong_to_the_caller(device: FakeDriver) -> None:
    def fn(x: minitorch.Tensor, y: Any) -> Any:
        return x + x, {"y": minitorch.from_numpy(y, minitorch.CudaBackend), "none": None}

    step, found = minitorch.graph_step(fn), []
    for number in range(FIRST + 2):
        x = minitorch.full((2, 3), float(number), minitorch.CudaBackend)
        found.append(step(x, np.full(4, number)))
    assert step.is_captured
    storages = [t._tensor._storage for x, rest in found for t in (x, rest["y"])]
    places = {int(storage.gpu_data.device_pointer) for storage in storages}
    assert len(places) == len(storages), "each its own"
    assert all(rest["none"] is None and x.shape == (2, 3) for x, rest in found)


def test_inputs_of_other_shapes_or_kinds_are_refused(device: FakeDriver) -> None:
    w = minitorch.ones((3,), minitorch.CudaBackend)
    step = minitorch.graph_step(lambda x: w + w)
    step(np.zeros((2, 3)))
    for wrong in (np.zeros(6), np.zeros((2, 3), np.float32)):
        with pytest.raises(ValueError, match="same shapes and dtypes in each call"):
            step(wrong)
    with pytest.raises(ValueError, match="same shapes and dtypes in each call"):
        step(np.zeros((2, 3)), np.zeros(1))
    with pytest.raises(TypeError, match="NumPy arrays and tensors, got int"):
        step(3)
    w.requires_grad_(True)
    with pytest.raises(ValueError, match="requires a gradient"):
        step(w)


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


def test_a_wrong_input_leaves_the_step_untaken(device: FakeDriver) -> None:
    training = Training("bfloat16", 0.1, None, False, captured=True)
    for number in range(FIRST + 1):
        training.take(number)
    state, device_calls = random.getstate(), len(device.calls)
    with pytest.raises(ValueError, match=f"token ids must be from 0 to {VOCABULARY - 1}"):
        training.captured(training.batches[0, 0] + VOCABULARY, training.batches[0, 1])
    assert training.optimizer.steps == FIRST + 1
    assert random.getstate() == state and len(device.calls) == device_calls


@kinds
def test_what_a_graph_reads_and_writes_stays_allocated(device: FakeDriver, kind: Any) -> None:
    training = Training(*kind, captured=True)
    for number in range(FIRST):
        training.take(number)
    gc.collect()
    (nodes,) = device.nodes.values()
    words = {word for launch in nodes.values() for word in launch.words if word in ADDRESSES}
    assert len(words) > len(nodes)
    for word in words:
        assert any(at <= word < at + size for at, size in device.memory.items()), hex(word)


def test_memory_goes_back_with_the_graph(device: FakeDriver) -> None:
    training = Training("bfloat16", 0.0, None, False, captured=True)
    for number in range(FIRST + 1):
        training.take(number)
    size = training.captured.memory
    assert size in device.memory.values() and device.nodes
    training.captured.reset()
    training.optimizer.zero_grad()
    gc.collect()
    assert size not in device.memory.values() and not device.nodes
    training.take(0)


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


@pytest.mark.parametrize(("wrong", "kind"), [(0, ValueError), (1.5, TypeError)])
def test_wrong_numbers_of_calls_are_refused(wrong: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="warm_up"):
        minitorch.graph_step(lambda: None, warm_up=wrong)


@pytest.mark.parametrize("size", [STAGED, STAGED + 1])
def test_a_large_copy_is_read_before_the_call_returns(device: FakeDriver, size: int) -> None:
    array = np.zeros(size, np.uint8)
    for x in (array, array[:64], memoryview(bytearray(64))):
        device.calls.clear()
        to_device(np.asarray(x))
        small = x is not array or size <= STAGED
        asked = "cuMemcpyHtoDAsync" if small and isinstance(x, np.ndarray) else "cuMemcpyHtoD"
        assert [call.name for call in device.calls] == [asked]


# -- the arena ---------------------------------------------------------------------------------------


class _Source:
    """Memory without a device."""

    def __init__(self) -> None:
        self.next, self.given = 1 << 20, {}

    def allocate(self, size: int) -> tuple[int, int]:
        self.next += size  # one beside the other
        self.given[self.next - size] = size
        return self.next - size, 0

    def free(self, block: tuple[int, int]) -> None:
        del self.given[block[0]]


@given(lists(tuples(integers(1, 1 << 20), integers(0, 5)), max_size=20))
def test_pieces_never_overlap_and_the_next_call_has_the_same(steps: list[tuple[int, int]]) -> None:
    source: Any = _Source()
    arena = Arena(source, int)
    calls, leftover = [], []
    for _ in range(3):
        arena.begin()
        held, places = [], []
        for size, action in steps:
            if action and held:
                arena.free(held.pop(action % len(held))[0])
            for block in leftover[:1]:
                arena.free(block)  # of the call before: somebody held it until now
                leftover.pop(0)
            block = arena.allocate(size)
            start, stop = block.address, block.address + size
            assert start % ALIGNMENT == 0
            assert any(at <= start and stop <= at + room for at, room in source.given.items())
            assert not any(
                start < other.address + room and other.address < stop for other, room in held
            )
            held.append((block, size))
            places.append(start)
        leftover = [block for block, _ in held]
        calls.append(places)
        arena.end()
    assert calls[1] == calls[2], "what the first call made room for is there from the beginning"
    del arena
    assert source.given == {}


# -- on a GPU ----------------------------------------------------------------------------------------


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
