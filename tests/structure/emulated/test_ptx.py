"""Tensor-core instructions without a GPU: the layouts of their operands, and how their numbers round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.geometry import same
from kernels.cuda.ptx.emulated import numbers as emulated_numbers
from kernels.cuda.ptx.fragments import PLAIN
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place, swizzled
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.targets import EMULATED, compute_capability

from ...support.attention import float8
from ...support.tensor_cores.ptx_kernels import CASES, Case, run

LANES = np.arange(32)
#: Bytes of a row of a tile: any multiple of 16, up to head_dim 256 in 16 bits.
widths = st.integers(1, 32).map(lambda chunks: chunks * CHUNK)


def _assert_same(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(actual, expected)


# -- layouts ------------------------------------------------------------------------------------

MAPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, int]]] = {
    "A": (PLAIN.a_element, (4, 2), (16, 16)),
    "A of depth 8": (PLAIN.a_element, (2, 2), (16, 8)),
    "B": (PLAIN.b_element, (2, 2), (16, 8)),
    "B of depth 8": (PLAIN.b_element, (1, 2), (8, 8)),
    "accumulators": (PLAIN.accumulator_element, (4,), (16, 8)),
    "accumulators side by side": (PLAIN.accumulator_element, (32,), (16, 64)),
    "A of TF32": (PLAIN.a_element_tf32, (4,), (16, 8)),
    "B of TF32": (PLAIN.b_element_tf32, (2,), (8, 8)),
    "A of 8 bits": (PLAIN.a_element_8, (4, 4), (16, 32)),
    "a matrix": (PLAIN.matrix_element, (2,), (8, 8)),
}


@pytest.mark.parametrize("name", MAPS)
def test_every_element_of_a_tile_has_one_place(name: str) -> None:
    element, sizes, shape = MAPS[name]
    row, column = element(*np.ix_(LANES, *map(np.arange, sizes)))
    flat = np.ravel_multi_index(np.broadcast_arrays(row, column), shape)
    _assert_same(np.sort(flat, axis=None), np.arange(shape[0] * shape[1]))


# -- shared memory ------------------------------------------------------------------------------


@given(widths, st.integers(0, 100))
def test_a_tile_in_shared_memory_has_no_bank_conflicts(width: int, first: int) -> None:
    place, chunks = make_tile_place(same, width), width // CHUNK
    rows = 8 * first + np.arange(8)  # what ldmatrix reads at a time: a column of eight pieces
    for chunk in range(chunks):
        assert len(set(place(rows, chunk) // CHUNK % 8)) == 8
    pieces = 8 * first + np.arange(8)  # what eight neighbouring lanes write, piece by piece
    assert len(set(place(pieces // chunks, pieces % chunks) // CHUNK % 8)) == 8


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_hardwares_swizzle_is_an_involution_and_that_of_whole_rows(width: int) -> None:
    offsets = np.arange(0, 64 * width, CHUNK)
    assert len(set(swizzled(offsets, width))) == len(offsets)
    _assert_same(swizzled(swizzled(offsets, width), width), offsets)
    place = make_tile_place(same, width)(offsets // width, offsets % width // CHUNK)
    _assert_same(place, swizzled(offsets, width))


# -- numbers ------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32), min_size=1))
def test_rounding_is_that_of_ieee_754_and_in_tf32_ties_go_away_from_zero(
    values: list[float],
) -> None:
    x = np.array([*values, np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in (FLOAT16, BFLOAT16):
            found = emulated_numbers.round_to(x, str(dtype))
            _assert_same(found, x.astype(dtype).astype(np.float32))
            _assert_same(np.signbit(found[~np.isnan(found)]), np.signbit(x[~np.isnan(x)]))
    places = np.arange(2**10, 2**11, dtype=np.float32)
    _assert_same(emulated_numbers.round_to(places + np.float32(0.5), "tf32"), places + 1)
    _assert_same(emulated_numbers.round_to(places + np.float32(0.25), "tf32"), places)


@given(st.lists(st.floats(-500, 500, width=32) | st.floats(-0.125, 0.125, width=32), min_size=1))
def test_e4m3_rounds_to_nearest_even_and_has_a_greatest_number(values: list[float]) -> None:
    x = np.array(values, np.float32)
    _assert_same(emulated_numbers.round_to(x, "float8_e4m3"), float8.rounded(x))


def test_every_number_of_e4m3_survives_packing_and_midpoints_go_to_even() -> None:
    known = float8.numbers()
    bits = np.arange(len(known), dtype=np.uint8)
    _assert_same(emulated_numbers.from_bits(bits, "float8_e4m3"), known)
    _assert_same(emulated_numbers.to_bits(known, "float8_e4m3"), bits)
    middle = (known[1:] + known[:-1]) / 2
    even = np.where(bits[1:] % 2 == 0, known[1:], known[:-1])
    _assert_same(emulated_numbers.round_to(-middle, "float8_e4m3"), -even)
    large = np.array([448.1, 1e9, np.inf, np.nan], np.float32)
    _assert_same(emulated_numbers.round_to(large, "float8_e4m3"), [448, 448, 448, np.nan])
    fours = emulated_numbers.pack_e4m3(*known[8:12])
    assert int(fours) == 8 | 9 << 8 | 10 << 16 | 11 << 24


def test_powers_of_two_have_no_subnormal_results() -> None:
    _assert_same(emulated_numbers.ex2([-np.inf, -127, -126, 3]), [0, 0, 2.0**-126, 8])


def test_logarithms_take_subnormal_numbers_for_zeros() -> None:
    values = [8, 2.0**-126, 2.0**-127, 0, np.inf, -1]
    _assert_same(emulated_numbers.lg2(values), [3, -126, -np.inf, -np.inf, np.inf, np.nan])


# -- on a device --------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_instruction_does_what_its_emulation_says(case: Case) -> None:
    if not EMULATED and compute_capability() < case.cc[:2]:
        pytest.skip(f"needs compute capability {case.cc[0]}.{case.cc[1]}")
    assert run(case, np.random.default_rng()) <= 1
