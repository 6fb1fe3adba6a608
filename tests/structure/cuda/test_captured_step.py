"""The launches, copies and memory of a captured step on a fake driver."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

import minitorch
from kernels.cuda.attention.flash3_wgmma.layout import PADDING
from kernels.cuda.runtime.arrays import to_device
from kernels.cuda.runtime.memory_pool import MOST_STAGED, STAGED
from kernels.cuda.runtime.recorder import ALIGNMENT, Recording, between_launches
from kernels.problem import listed_mods
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.numba_patches import watching_numba
from kernels.runtime.targets import EMULATED, cuda
from minitorch.training.captured_step import WARM_UP

from ...support.device.fake_device import FakeDriver, Launched, fake_device
from ...support.models.captured_training import (
    FIRST,
    VOCABULARY,
    Training,
    idle_device,
    kinds,
    step_of,
)

#: Where the fake device's memory lies, outside of the numbers that kernels take.
ADDRESSES = range(1 << 32, 1 << 44)
not_emulated = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")
device = pytest.fixture(idle_device)


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


@not_emulated
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


#: Of packed batches with their padding.
TOTALS = 256, 320


def _packed_batch(rng: np.random.Generator, total: int) -> tuple[Any, Any, Any]:
    """Return ids, targets and lengths of four sequences with padding behind them."""
    targets = np.full(total, -100)
    targets[rng.choice(80, 9, replace=False)] = rng.integers(0, 20, 9)
    return rng.integers(0, 20, total), targets, rng.integers(20, 65, 4)


def _of_packed_steps(captured: bool, steps: int) -> list[tuple[list[Any], set[bytes]]]:
    """Return what packed steps launch, but for copies of the result, and what they copy to the device."""
    with fake_device() as device:
        minitorch.manual_seed(0)
        model = minitorch.EncoderLM(
            20, 128, 2, 64, n_layer=2, attention_dropout=0.1, backend=minitorch.CudaBackend,
            precision="bfloat16",
        )  # fmt: skip
        step, found = step_of(model, minitorch.AdamW(model.parameters(), max_norm=1.0)), []
        take = minitorch.graph_step(step, most_shapes=2) if captured else step
        minitorch.manual_seed(1)
        for number in range(steps):
            device.launches.clear()
            device.calls.clear()
            take(*_packed_batch(np.random.default_rng(number), TOTALS[number % 2]))
            copies = (call.about[1] for call in device.calls if call.name == "cuMemcpyHtoDAsync")
            found.append((_numbers(device.launches), {*copies}))
        return found


@not_emulated
def test_a_replay_of_packed_sequences_lists_their_tiles_as_an_eager_step_does() -> None:
    first, steps = 2 * FIRST, 2 * FIRST + 4
    eager, captured = _of_packed_steps(False, steps), _of_packed_steps(True, steps)
    for number in range(first, steps):
        (expected, expected_copies), (found, copies) = eager[number], captured[number]
        assert found.pop()[0] == "map_id"  # a copy of the loss, for the caller
        assert found == expected, number
        assert copies <= expected_copies, number
        rng, total = np.random.default_rng(number), TOTALS[number % 2]
        *_, lengths = _packed_batch(rng, total)
        gap = total - lengths.sum()  # queries without keys, and keys without queries
        sums = np.cumsum([0, *lengths, gap, 0]), np.cumsum([0, *lengths, 0, gap])
        tiles = Sequences(*sums, total, total).tiles(PADDING, fixed=True)
        assert tiles.tobytes() in copies, number


@not_emulated
def test_an_eager_step_neither_reads_nor_waits(device: FakeDriver) -> None:
    training = Training("bfloat16", 0.1, 1.0, False, captured=False)
    for number in range(3):
        device.calls.clear()
        training.take(number)
    assert {call.name for call in device.calls} == {"cuLaunchKernel", "cuMemcpyHtoDAsync"}


def test_messages_are_sent_again_between_the_same_launches(device: FakeDriver) -> None:
    w, seen = minitorch.ones((3,), minitorch.CudaBackend, dtype=np.float32), list[int]()

    def fn(x: Any) -> Any:
        between_launches(lambda: seen.append(len(device.launches)))
        y = w + w
        between_launches(lambda address: seen.append(len(device.launches)), y.array())
        between_launches(lambda: seen.append(len(device.launches)))
        return y + w

    step = minitorch.graph_step(fn)
    for number in range(FIRST + 2):
        assert step.is_captured == (number >= FIRST)
        device.launches.clear()
        seen.clear()
        step(np.zeros(3))
        assert seen == [0, 1, 1] and len(device.launches) == 2 + (number >= WARM_UP)
    assert step.kernels == 2
    assert [call.name for call in device.calls].count("cuGraphLaunch") == 4


def test_a_message_in_some_calls_only_is_refused(device: FakeDriver) -> None:
    w = minitorch.ones((3,), minitorch.CudaBackend, dtype=np.float32)
    count = iter(range(100))

    def fn(x: Any) -> Any:
        if next(count) == FIRST - 1:
            between_launches(lambda: None)
        return w * 2.0

    step = minitorch.graph_step(fn)
    with pytest.raises(minitorch.CaptureError, match="did a message to another device"):
        for _ in range(FIRST):
            step(np.zeros(3))


def test_a_kernel_that_numba_launches_is_noticed() -> None:
    seen: list[str] = []
    before = cuda.dispatcher._Kernel.launch if not EMULATED else None
    if before is None:
        pytest.skip("the emulated GPU launches nothing")
    with fake_device(), watching_numba(cuda, seen.append), pytest.raises(AttributeError):
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


def test_a_mask_mod_that_a_recorded_call_evaluates_is_no_part_of_the_graph(
    device: FakeDriver,
) -> None:
    calls: list[int] = []

    def fn(x: minitorch.Tensor) -> minitorch.Tensor:
        if len(calls) == WARM_UP:  # this call is recorded, and the first of its kind
            listed_mods._evaluated.cache_clear()
            KnownCalls.cache_clear()
        device.launches.clear()
        out = x.flash_attention(x, x, mask_mod=lambda b, h, r, c: (r - c) % 7 == 0)
        calls.append([one.kernel for one in device.launches].count("evaluate_blocks"))
        return out

    step = minitorch.graph_step(fn)
    for _ in range(FIRST + 2):
        step(minitorch.full((1, 2, 200, 8), 1.0, minitorch.CudaBackend))
    assert step.is_captured, step.why_eager
    assert calls == [1, *[0] * (WARM_UP - 1), 1, *[0] * (len(calls) - WARM_UP - 1)]


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
    copied = {c.about[0]: c.about[1] for c in device.calls if c.name == "cuMemcpyHtoDAsync"}
    for launch in nodes.values():
        if (
            launch.kernel == "adam_many"
        ):  # on gradients that the graph computes, some by tensor maps
            table = np.frombuffer(copied[launch.words[4]], np.int64).reshape(launch.words[5], -1)
            assert len(words.intersection(table[:, 1].tolist())) > len(table) // 2


def test_memory_goes_back_with_the_graph(device: FakeDriver) -> None:
    training = Training("bfloat16", 0.0, None, False, captured=True)
    for number in range(FIRST + 1):
        training.take(number)
    (size,) = (x for x in device.memory.values() if 0 <= x - training.captured.memory < x // 16)
    assert device.nodes
    training.captured.reset()
    training.optimizer.zero_grad()
    gc.collect()
    assert size not in device.memory.values() and not device.nodes
    training.take(0)


@pytest.mark.parametrize("size", [1, STAGED, STAGED + 1, 3 * STAGED, MOST_STAGED, MOST_STAGED + 1])
def test_the_host_waits_for_very_large_copies_alone(device: FakeDriver, size: int) -> None:
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    to_device(array)
    names = {call.name for call in device.calls}
    assert names == {"cuMemcpyHtoDAsync" if size <= MOST_STAGED else "cuMemcpyHtoD"}
    address = device.calls[0].about[0]
    assert all(call.about[0] == address + i * STAGED for i, call in enumerate(device.calls))
    pieces = [call.about[1] for call in device.calls]
    assert b"".join(pieces) == array.tobytes()
    assert len(pieces) == 1 or max(map(len, pieces)) <= STAGED


def test_memory_of_somebody_else_is_read_before_the_call_returns(device: FakeDriver) -> None:
    to_device(np.asarray(memoryview(bytearray(64))))
    assert [call.name for call in device.calls] == ["cuMemcpyHtoD"]


# -- the memory of a graph ---------------------------------------------------------------------------


class _Memory:
    """Memory without a device."""


@given(lists(tuples(integers(1, 1 << 20), integers(0, 5)), max_size=20))
def test_allocations_share_a_place_only_one_after_the_other(steps: list[tuple[int, int]]) -> None:
    recording, held, pairs = Recording(), {}, set[tuple[int, int]]()
    for number, (size, action) in enumerate(steps):
        if action and held:
            del held[[*held][action % len(held)]]
        pairs |= {(other, number) for other in held}
        held[number] = _Memory()
        recording.allocated(held[number], size)
    assert recording.held() == held
    elsewhere = {number for number in held if number % 2}
    offsets, total = recording.layout(elsewhere)
    assert offsets.keys() == {*range(len(steps))} - elsewhere
    stops = {number: start + steps[number][0] for number, start in offsets.items()}
    assert all(start % ALIGNMENT == 0 for start in offsets.values())
    assert total >= max(stops.values(), default=0)
    for one, other in pairs:
        if {one, other} <= offsets.keys():
            assert stops[one] <= offsets[other] or stops[other] <= offsets[one]
