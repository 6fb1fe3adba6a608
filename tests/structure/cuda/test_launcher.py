"""A launch of our own packs what numba's would: the same numbers, in the same order and sizes."""

from __future__ import annotations

import ctypes
import struct
import sys
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import float32, float64, int64, types, uint64, void

from kernels.cuda.runtime import launcher
from kernels.cuda.runtime.launcher import LATER, Launcher, filled, three


class FakeArray:
    """What a launcher asks of a device array."""

    def __init__(self, array: Any):
        self.owner, self.dtype, self.ndim = array, array.dtype, array.ndim
        self.size, self.shape, self.strides = array.size, array.shape, array.strides
        self.device_ctypes_pointer = ctypes.c_size_t(array.ctypes.data)


class FakeDriver:
    """Reads the numbers of a launch from the addresses that it is given."""

    class CUresult:
        CUDA_SUCCESS = 0

    def __init__(self, format: str):
        self.format = format
        self.seen: list[Any] = []

    @staticmethod
    def CUstream(number: int) -> int:
        return number

    @staticmethod
    def CUfunction(handle: int) -> int:
        return handle

    @staticmethod
    def cuCtxGetDevice() -> tuple[int, int]:
        return 0, 0

    def cuLaunchKernel(self, function: Any, *args: Any) -> tuple[int]:
        *sizes, shared_bytes, _, pointers, _ = args
        count = len(self.format)
        addresses = (ctypes.c_uint64 * count).from_address(pointers)
        numbers = [
            struct.unpack(f"={kind}", ctypes.string_at(address, struct.calcsize(f"={kind}")))[0]
            for kind, address in zip(self.format, addresses, strict=True)
        ]
        self.seen.append((function, sizes, shared_bytes, numbers))
        return (0,)


def make(monkeypatch: pytest.MonkeyPatch, signature: Any, format: str) -> tuple[Any, FakeDriver]:
    class Overload:
        class _codelibrary:
            @staticmethod
            def get_cufunc() -> Any:
                return type("Handle", (), {"handle": 77})

    class Compiled:
        overloads = {signature: Overload}  # noqa: RUF012

    class Cuda:
        @staticmethod
        def current_context() -> Any:
            return type("Context", (), {"device": type("Device", (), {"id": 0})})

    driver = FakeDriver(format)
    monkeypatch.setattr(launcher, "driver", driver)
    monkeypatch.setattr(launcher, "cuda", Cuda)
    return Launcher(Compiled, signature, 512, "fake"), driver


def test_numbers_tuples_and_arrays_lie_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = void(
        types.Array(float32, 2, "A"), int64, float32, float64, types.UniTuple(int64, 2), uint64
    )
    run, driver = make(monkeypatch, signature, "q" * 9 + "qfd" + "qq" + "Q")
    x = np.zeros((4, 6), np.float32)[:, ::2]
    run.launch((3, 2, 1), (32, 1, 1), FakeArray(x), -5, 1.5, 0.1, (7, -8), 2**63)
    ((function, sizes, shared_bytes, numbers),) = driver.seen
    assert (function, sizes, shared_bytes) == (77, [3, 2, 1, 32, 1, 1], 512)
    assert numbers[:9] == [0, 0, 12, 4, x.ctypes.data, 4, 3, 24, 8]
    assert numbers[9:] == [-5, 1.5, 0.1, 7, -8, 2**63]


def test_an_array_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run, driver = make(monkeypatch, void(types.Array(float32, 1, "C")), "q" * 7)
    for wrong in (np.zeros(3), np.zeros((3, 1), np.float32)):
        with pytest.raises(TypeError, match="the kernel takes float32 of 1 dimensions, got"):
            run.launch((1, 1, 1), (1, 1, 1), FakeArray(wrong))
    assert driver.seen == []


def test_a_wrong_number_of_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make(monkeypatch, void(int64, types.UniTuple(int64, 2)), "qqq")
    with pytest.raises(ValueError, match="shorter"):
        run.launch((1, 1, 1), (1, 1, 1), 1)
    with pytest.raises(struct.error):
        run.launch((1, 1, 1), (1, 1, 1), 1, (2, 3, 4))


def test_a_prepared_launch_asks_arrays_for_their_addresses_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vector = types.Array(float32, 1, "C")
    run, driver = make(monkeypatch, void(vector, vector, float64), "q" * 14 + "d")
    arrays = [FakeArray(np.zeros(5, np.float32)) for _ in range(4)]
    launch = run.prepared((3, 1, 1), (32, 1, 1), 0.5)
    for pair in (arrays[:2], arrays[2:], arrays[1:3]):
        launch(*pair)
        run.launch((3, 1, 1), (32, 1, 1), *pair, 0.5)
        prepared, other = driver.seen[-2:]
        assert prepared == other
    with pytest.raises(ValueError, match="argument"):
        launch(arrays[0])


class Given(NamedTuple):
    """Numbers and an array, as what options need."""

    lower: Any
    seed: Any
    table: Any


def test_a_prepared_launch_takes_later_what_a_call_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = types.Array(float32, 1, "C")
    given = types.NamedTuple((int64, int64, vector), Given)
    signature = void(vector, float32, vector, types.UniTuple(int64, 2), given)
    run, driver = make(monkeypatch, signature, "q" * 7 + "f" + "q" * 7 + "qq" + "qq" + "q" * 7)
    first, second, table, *others = (FakeArray(np.zeros(5, np.float32)) for _ in range(6))
    rest = 0.5, LATER, (7, 8), Given(-3, LATER, LATER)
    launch = run.prepared((3, 1, 1), (32, 1, 1), *rest)
    calls = (first, second, 11, table), (*others[:2], -(2**63), others[2])
    for array, later, seed, own in (*calls, calls[0]):
        launch(array, later, seed, own)
        args = array, 0.5, later, (7, 8), Given(-3, seed, own)
        assert filled(rest, (array, later, seed, own)) == args
        run.launch((3, 1, 1), (32, 1, 1), *args)
        prepared, other = driver.seen[-2:]
        assert prepared == other
    assert driver.seen[0] != driver.seen[2]


def test_a_prepared_launch_refuses_arrays_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    run, driver = make(monkeypatch, void(types.Array(float32, 1, "C"), int64), "q" * 8)
    launch = run.prepared((1, 1, 1), (1, 1, 1), 7)
    with pytest.raises(TypeError, match="the kernel takes float32 of 1 dimensions, got"):
        launch(FakeArray(np.zeros(3)))
    assert driver.seen == []


def test_threads_that_share_a_prepared_launch_launch_with_their_own_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vector = types.Array(float32, 1, "C")
    run, driver = make(monkeypatch, void(vector, vector), "q" * 14)
    launch = run.prepared((1, 1, 1), (1, 1, 1))
    pairs = [[FakeArray(np.zeros(3, np.float32)) for _ in range(2)] for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            Thread(target=lambda own=own: [launch(*own) for _ in range(50)]) for own in pairs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    addresses = {tuple(array.owner.ctypes.data for array in own) for own in pairs}
    found = [(numbers[4], numbers[11]) for *_, numbers in driver.seen]
    assert len(found) == 200
    assert set(found) == addresses


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run, driver = make(monkeypatch, void(int64), "q")

    class NoContext(int):
        name = "CUDA_ERROR_INVALID_CONTEXT"

    answers = [NoContext(201), 0]
    whole = driver.cuLaunchKernel
    run._launch = lambda *args: (answers.pop(0),) if len(answers) == 2 else whole(*args)
    run.launch((1, 1, 1), (1, 1, 1), 3)
    assert [numbers for *_, numbers in driver.seen] == [[3]]


def test_a_grid_has_three_sizes() -> None:
    assert three(5) == (5, 1, 1)
    assert three((np.int64(5), 2)) == (5, 2, 1)
    assert three((1, 2, 3)) == (1, 2, 3)
