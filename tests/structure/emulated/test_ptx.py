"""Tensor-core instructions without a GPU: the layouts of their operands, and how their numbers round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.geometry import same
from kernels.cuda.ptx import barriers, inline, wgmma
from kernels.cuda.ptx.emulated import numbers as emulated_numbers
from kernels.cuda.ptx.fragments import PLAIN
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place, swizzled
from kernels.cuda.ptx.tensor_map import check_tensor_map
from kernels.runtime.targets import cuda

from ...support.attention import float8
from ...support.tensor_cores.ptx_cases import Case, run
from ...support.tensor_cores.ptx_kernels import CASES as OF_A_WARP
from ...support.tensor_cores.ptx_kernels_hopper import CASES as OF_A_BLOCK

LANES = np.arange(32)
HALF_DTYPES = ["float16", "bfloat16"]
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


@given(widths, st.integers(1, 40))
def test_a_tile_in_shared_memory_fills_it_without_gaps(width: int, rows: int) -> None:
    row, chunk = np.indices((rows, width // CHUNK))
    places = np.sort(make_tile_place(same, width)(row, chunk), axis=None)
    _assert_same(places, np.arange(0, rows * width, CHUNK))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_hardwares_swizzle_is_an_involution_and_that_of_whole_rows(width: int) -> None:
    offsets = np.arange(0, 64 * width, CHUNK)
    assert len(set(swizzled(offsets, width))) == len(offsets)
    _assert_same(swizzled(swizzled(offsets, width), width), offsets)
    place = make_tile_place(same, width)(offsets // width, offsets % width // CHUNK)
    _assert_same(place, swizzled(offsets, width))


# -- numbers ------------------------------------------------------------------------------------

#: dtype → bits of fraction with the hidden one.
PRECISIONS = {"float16": 11, "bfloat16": 8, "tf32": 11}
normal = st.floats(2.0**-14, 2.0**15, width=32)


@pytest.mark.parametrize("dtype", PRECISIONS)
@given(x=normal, negative=st.booleans())
def test_rounding_takes_a_nearest_number(dtype: str, x: float, negative: bool) -> None:
    x = -x if negative else x
    rounded = float(emulated_numbers.round_to(np.float32(x), dtype))
    unit = 2.0 ** (np.frexp(x)[1] - PRECISIONS[dtype])
    assert abs(rounded - x) <= unit / 2
    assert rounded / unit == int(rounded / unit)


@pytest.mark.parametrize("dtype", PRECISIONS)
@given(place=st.integers(2**7, 2**8 - 1))
def test_ties_go_to_even_and_in_tf32_away_from_zero(dtype: str, place: int) -> None:
    place <<= PRECISIONS[dtype] - 8
    rounded = int(emulated_numbers.round_to(np.float32(place + 0.5), dtype))
    assert rounded == (place + 1 if dtype == "tf32" else place + place % 2)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_infinities_and_what_is_no_number_stay(dtype: str) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    _assert_same(emulated_numbers.round_to(values, dtype), values)
    assert np.signbit(emulated_numbers.round_to(values, dtype)[-1])


def test_too_large_a_number_is_infinite() -> None:
    large = np.float32(3.4e38)
    for dtype in HALF_DTYPES:
        assert emulated_numbers.round_to(large, dtype) == np.inf


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


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(48, 16, 16), (128, 8, 16), (128, 16, 1 << 18)], ids=str)
def test_a_descriptor_refuses_what_it_cannot_say(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 16 below"):
        wgmma.descriptor_layout(*arguments)


@pytest.mark.parametrize("arguments", [(12, "float16"), (264, "float16"), (64, "float32")], ids=str)
def test_wgmma_refuses_sizes_and_dtypes_that_it_has_not(arguments: tuple[int, str]) -> None:
    with pytest.raises(ValueError, match="8 to 256 columns"):
        wgmma.make_wgmma(*arguments)


@pytest.mark.parametrize("dtype", ["tf32", "float8_e4m3"])
def test_wgmma_transposes_16_bits_only(dtype: str) -> None:
    with pytest.raises(ValueError, match="store this one along the depth"):
        wgmma.make_wgmma(64, dtype, b_transposed=True)


def test_registers_are_handed_out_in_eights() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        barriers.make_setmaxnreg("inc", 236)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "must be one of float16"),
        ({"box": (64,)}, "1 to 5 dimensions"),
        ({"strides": (100, 2)}, "multiples of 16 bytes"),
        ({"address": 8}, "multiples of 16 bytes"),
        ({"strides": (256, 4)}, "side by side"),
        ({"box": (257, 64)}, "1 to 256 places"),
        ({"box": (64, 128)}, "no longer than it"),
        ({"swizzle": 48}, "one of"),
    ],
    ids=str,
)
def test_a_tensor_map_refuses_what_the_copy_engine_cannot_read(
    change: dict[str, Any], message: str
) -> None:
    fits: dict[str, Any] = {
        "address": 1024, "shape": (100, 128), "strides": (256, 2), "box": (64, 64),
        "dtype": "float16", "swizzle": 128,
    }  # fmt: skip
    check_tensor_map(**fits)
    with pytest.raises(ValueError, match=message):
        check_tensor_map(**{**fits, **change})


def test_operands_must_be_named_as_parameters_are() -> None:
    with pytest.raises(TypeError, match="same names and order"):

        @inline.instruction("nothing;", x=inline.U32)
        def _nothing(y: Any) -> None:
            """Do nothing."""


def test_in_the_simulator_an_instruction_says_that_there_is_none() -> None:
    def mma() -> None:
        """Do nothing."""

    with pytest.raises(RuntimeError, match="mma is a GPU instruction"):
        inline._refusing(mma)()


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("case", OF_A_WARP + OF_A_BLOCK, ids=lambda case: case.name)
def test_an_instruction_does_what_its_emulation_says(case: Case) -> None:
    if tuple(cuda.get_current_device().compute_capability) < case.cc[:2]:
        pytest.skip(f"needs compute capability {case.cc[0]}.{case.cc[1]}")
    assert run(case, np.random.default_rng()) <= 1
