"""The device's conversions to and from fp16 and bf16, for every number, and its memory of such elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.cuda.device import half
from kernels.cuda.device.memory import DeviceMemory, fill
from kernels.cuda.runtime.arrays import device_view, to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, BITS, FLOAT32, FLOAT_DTYPES, rounded
from kernels.runtime.memory import Memory
from kernels.runtime.targets import EMULATED

from ...support.half_numbers import beside_the_ties, every_number, on_halves, same_bits
from ...support.tolerances import assert_close_arrays


def test_the_arithmetic_of_the_device_is_right_for_every_number() -> None:
    plain = half.PLAIN
    numbers = every_number(BFLOAT16)
    widened = np.array([plain.widen_bfloat16(bits) for bits in numbers.view(BITS)])
    np.testing.assert_array_equal(widened, numbers.astype(np.float32))
    narrowed = np.array([plain.narrow_bfloat16(x) for x in widened], BITS)
    same_bits(narrowed.view(BFLOAT16), numbers)


@on_halves
def test_the_arithmetic_of_the_device_is_right_for_every_tie(dtype: Any) -> None:
    numbers, nearest = beside_the_ties(dtype)
    chosen = np.s_[::1] if dtype == BFLOAT16 else np.s_[::7]
    with np.errstate(over="ignore"):
        odd = np.array([half.PLAIN.rounded_to_odd(x) for x in numbers[chosen]], np.float32)
    same_bits(rounded(odd, dtype), nearest[chosen])
    if dtype == BFLOAT16:
        bits = np.array([half.PLAIN.narrow_bfloat16(x) for x in odd], BITS)
        same_bits(bits.view(BFLOAT16), nearest)


@pytest.mark.emulated
@on_halves
@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
def test_the_device_converts_as_the_host_does(dtype: Any, source: Any) -> None:
    if EMULATED:
        numbers = np.random.default_rng(1).standard_normal(2 * half.EIGHT + 3)
        numbers[:4] = np.inf, -np.nan, 1e-6, -70000.0
    else:
        numbers = np.concatenate(
            [beside_the_ties(dtype)[0], every_number(dtype).astype(np.float64)]
        )
    array, memory = rounded(numbers, source), DeviceMemory()
    there = to_device(array)
    same_bits(to_host(memory.convert(there, dtype)), rounded(array, dtype))
    back = memory.convert(memory.convert(there, dtype), FLOAT32)
    np.testing.assert_array_equal(to_host(back), rounded(array, dtype).astype(np.float32))
    # A part of an array begins anywhere: no vector access is aligned there.
    part = device_view(there, (len(array) - 3,), (1,), 3)
    same_bits(to_host(memory.convert(part, dtype)), rounded(array[3:], dtype))


@pytest.mark.emulated
@on_halves
def test_memory_of_the_device_holds_16_bits(dtype: Any) -> None:
    memory, host = DeviceMemory(), Memory()
    array = rounded(np.random.default_rng(2).standard_normal((2, 3, 4)), dtype)
    there = to_device(array)
    turned = device_view(there, (4, 3, 2), (1, 4, 12))
    with_gaps = device_view(there, (2, 3, 2), (12, 4, 2))
    for view, expected in ((turned, array.T), (with_gaps, array[..., ::2])):
        wide = to_host(memory.convert(view, FLOAT32))
        np.testing.assert_array_equal(wide, expected.astype(np.float32))
    total = to_host(memory.sum_to(there, (3, 1)))
    same_bits(total, host.sum_to(array, (3, 1)))
    assert_close_arrays(total, array.astype(np.float64).sum(axis=(0, 2))[:, None], dtype)
    fill(there, 0.1)
    same_bits(to_host(there), np.full_like(array, 0.1))
