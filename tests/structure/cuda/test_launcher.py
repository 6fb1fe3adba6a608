"""A launch of our own packs what numba's would: the same numbers, in the same order and sizes."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest
from numba import float32, float64, int64, types, uint64, void

from kernels.cuda.runtime import launcher
from kernels.cuda.runtime.kernel import three
from kernels.cuda.runtime.launcher import Launcher


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
