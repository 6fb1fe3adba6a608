"""Tensor-core instructions without a GPU: the layouts of their operands, and NumPy that does the same."""

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
from kernels.cuda.ptx.emulated import warp as emulated
from kernels.cuda.ptx.emulated import wgmma as emulated_wgmma
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
seeds = st.integers(0, 2**32 - 1)
#: Bytes of a row of a tile: any multiple of 16, up to head_dim 256 in 16 bits.
widths = st.integers(1, 32).map(lambda chunks: chunks * CHUNK)


def _bits(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(0, 2**16, shape, dtype=np.uint16)


def _numbers(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    """Return the bits of random numbers of a dtype."""
    return emulated_numbers.to_bits(rng.standard_normal(shape), dtype)


def _assert_same(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(actual, expected)


def _assert_product(actual: Any, left: Any, right: Any, before: Any = 0.0) -> None:
    """Compare with a product in float64, to the accuracy of float32."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    size = np.abs(left) @ np.abs(right) + np.abs(before)
    assert np.all(np.abs(actual - (left @ right + before)) <= 1e-6 * size + 1e-30)


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


@given(seeds)
def test_gathered_operands_scatter_to_themselves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, acc = _bits(rng, 16, 16), _bits(rng, 16, 8), rng.standard_normal((16, 24), np.float32)
    _assert_same(emulated.scatter_a(emulated.gather_a(a)), a)
    _assert_same(emulated.scatter_b(emulated.gather_b(b)), b)
    _assert_same(emulated.scatter_accumulators(emulated.gather_accumulators(acc)), acc)
    rows = rng.standard_normal((64, 24), np.float32)
    _assert_same(emulated_wgmma.scatter_rows(emulated_wgmma.gather_rows(rows)), rows)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@given(seed=seeds)
def test_scores_are_the_left_operand_of_the_next_product(dtype: str, seed: int) -> None:
    """P = f(S) needs no exchange between lanes: two tiles of accumulators, packed, are 16 x 16 of A."""
    tile = np.random.default_rng(seed).standard_normal((16, 16), np.float32)
    s = emulated.gather_accumulators(tile)  # (32, 8): two tiles of four
    packed = emulated_numbers.pack(s[:, ::2], s[:, 1::2], dtype)
    _assert_same(packed, emulated.gather_a(emulated_numbers.to_bits(tile, dtype)))


# -- shared memory ------------------------------------------------------------------------------


def _tile_in_memory(tile: Any, width: int, start: int) -> tuple[Any, Callable[..., Any]]:
    """Return shared memory with a tile of 16-bit patterns at ``start``, and where its pieces are."""
    place = make_tile_place(same, width)
    row, column = np.indices(tile.shape)
    shared = np.zeros(start + tile.size * 2, np.uint8)
    shared.view(np.uint16)[(start + place(row, column // 8)) // 2 + column % 8] = tile
    return shared, lambda row, chunk: start + place(row, chunk)


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


@given(widths, st.integers(0, 7), st.integers(0, 31), st.integers(0, 20))
def test_the_order_in_shared_memory_begins_anew_after_eight_rows(
    width: int, row: int, chunk: int, eights: int
) -> None:
    place, chunk = make_tile_place(same, width), chunk % (width // CHUNK)
    assert place(row + 8 * eights, chunk) == place(row, chunk) + 8 * eights * width


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_hardwares_swizzle_is_an_involution_and_that_of_whole_rows(width: int) -> None:
    offsets = np.arange(0, 64 * width, CHUNK)
    assert len(set(swizzled(offsets, width))) == len(offsets)
    _assert_same(swizzled(swizzled(offsets, width), width), offsets)
    place = make_tile_place(same, width)(offsets // width, offsets % width // CHUNK)
    _assert_same(place, swizzled(offsets, width))


def test_without_a_swizzle_offsets_stay() -> None:
    _assert_same(swizzled(np.arange(4096), 0), np.arange(4096))


@given(seeds, st.integers(2, 32).filter(lambda chunks: chunks % 2 == 0), st.data())
def test_ldmatrix_loads_both_operands_from_either_layout(seed: int, chunks: int, data: Any) -> None:
    """A tile (16, 16) of a larger one, stored by rows: A, or transposed two times B; and turned around."""
    stored = _bits(np.random.default_rng(seed), 32, 8 * chunks)
    shared, place = _tile_in_memory(stored, 2 * stored.shape[1], start=1024)
    row = 16 * data.draw(st.integers(0, 1), "tile of rows")
    chunk = 2 * data.draw(st.integers(0, chunks // 2 - 1), "tile of columns")
    tile = stored[row : row + 16, 8 * chunk : 8 * chunk + 16]

    def load(where: Callable[..., Any], is_transposed: bool) -> Any:
        own_row, own_chunk = where(LANES)
        addresses = place(row + own_row, chunk + own_chunk)
        return emulated.ldmatrix(shared, addresses, 4, is_transposed)

    def two_b(b: Any) -> Any:
        return np.concatenate([emulated.gather_b(b[:, :8]), emulated.gather_b(b[:, 8:])], axis=1)

    _assert_same(load(PLAIN.square_place, False), emulated.gather_a(tile))
    _assert_same(load(PLAIN.turned_place, True), emulated.gather_a(tile.T))
    _assert_same(load(PLAIN.square_place, True), two_b(tile))
    _assert_same(load(PLAIN.turned_place, False), two_b(tile.T))


@pytest.mark.parametrize("is_transposed", [False, True])
@given(seed=seeds)
def test_stmatrix_undoes_ldmatrix(is_transposed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shared = _bits(rng, 512).view(np.uint8)
    addresses = rng.permutation(64)[:32] * CHUNK
    fragment = emulated.ldmatrix(shared, addresses, 4, is_transposed)
    copy = np.zeros_like(shared)
    emulated.stmatrix(copy, addresses, fragment, is_transposed)
    _assert_same(emulated.ldmatrix(copy, addresses, 4, is_transposed), fragment)
    assert np.count_nonzero(copy) <= 32 * CHUNK


def test_ldmatrix_reads_rows_at_multiples_of_16_bytes_only() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        emulated.ldmatrix(np.zeros(1024, np.uint8), LANES * 8, 4)


@given(seeds, st.data())
def test_an_asynchronous_copy_fills_up_with_zeros(seed: int, data: Any) -> None:
    rng, size = np.random.default_rng(seed), 16
    memory, shared = (rng.integers(1, 256, 64, dtype=np.uint8) for _ in range(2))
    before = shared.copy()
    bytes_ = data.draw(st.integers(0, size), "bytes")
    emulated.cp_async(shared, size, memory, 2 * size, bytes_)
    _assert_same(shared[size : size + bytes_], memory[2 * size : 2 * size + bytes_])
    assert not shared[size + bytes_ : 2 * size].any()
    _assert_same(
        np.delete(shared, np.s_[size : 2 * size]), np.delete(before, np.s_[size : 2 * size])
    )


# -- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("depth", [8, 16])
@given(seed=seeds)
def test_mma_multiplies(dtype: str, depth: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = _numbers(rng, dtype, 16, depth), _numbers(rng, dtype, depth, 8)
    before = rng.standard_normal((16, 8), np.float32)
    result = emulated.mma(
        emulated.gather_accumulators(before),
        emulated.gather_a(a, depth // 4),
        emulated.gather_b(b, depth // 8),
        dtype,
    )
    left, right = (emulated_numbers.from_bits(x, dtype) for x in (a, b))
    _assert_product(emulated.scatter_accumulators(result), left, right, before)


@given(seeds)
def test_mma_of_depth_16_is_two_of_depth_8(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = emulated.gather_a(_numbers(rng, "float16", 16, 16))
    b = emulated.gather_b(_numbers(rng, "float16", 16, 8))
    acc = np.zeros((32, 4), np.float32)
    halfway = emulated.mma(acc, a[:, :2], b[:, :1], "float16")
    twice = emulated.mma(halfway, a[:, 2:], b[:, 1:], "float16")
    np.testing.assert_allclose(twice, emulated.mma(acc, a, b, "float16"), rtol=1e-5, atol=1e-5)


@given(seeds)
def test_mma_of_tf32_multiplies_what_it_reads_of_its_operands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((16, 8), np.float32), rng.standard_normal((8, 8), np.float32)
    before = rng.standard_normal((16, 8), np.float32)
    result = emulated.mma_tf32(
        emulated.gather_accumulators(before),
        a.view(np.uint32)[PLAIN.a_element_tf32(*np.ogrid[:32, :4])],
        b.view(np.uint32)[PLAIN.b_element_tf32(*np.ogrid[:32, :2])],
    )
    left, right = (emulated_numbers.read_tf32(x.view(np.uint32)) for x in (a, b))
    _assert_product(emulated.scatter_accumulators(result), left, right, before)


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


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@given(st.integers(0, 2**16 - 1))
def test_every_16_bit_number_survives_packing(dtype: str, bits: int) -> None:
    value = emulated_numbers.from_bits(np.uint16(bits), dtype)
    pair = emulated_numbers.pack(value, -value, dtype)
    low, high = emulated_numbers.unpack(pair, dtype)
    _assert_same([low, high], [value, -value])


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


# -- tensor copies and descriptors --------------------------------------------------------------


@given(seeds, st.data())
def test_a_box_brings_zeros_from_outside(seed: int, data: Any) -> None:
    tensor = np.random.default_rng(seed).integers(1, 2**16, (5, 7, 40), dtype=np.uint16)
    start = [data.draw(st.integers(-9, length + 1)) for length in reversed(tensor.shape)]
    box, shared = (2, 3, 32), np.full(2 * 3 * 64, 255, np.uint8)
    emulated.tensor_load(shared, 0, tensor, box, start, 0)
    found = shared.view(np.uint16).reshape(box)
    for place in np.ndindex(*box):
        at = tuple(x + i for x, i in zip(reversed(start), place, strict=True))
        inside = all(0 <= i < length for i, length in zip(at, tensor.shape, strict=True))
        assert found[place] == (tensor[at] if inside else 0)


@pytest.mark.parametrize("dtype", wgmma.KINDS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@given(seed=seeds)
def test_a_descriptor_finds_what_a_tensor_copy_brought(dtype: str, swizzle: int, seed: int) -> None:
    """Rows along the depth: a box as wide as the swizzle, and the products step through it."""
    rng = np.random.default_rng(seed)
    lines, width = 24, swizzle or CHUNK
    depth = wgmma.KINDS[dtype][1]
    columns = max(width * depth // 32, depth)
    values = rng.standard_normal((lines, columns), np.float32)
    words = values.view(np.uint32) if dtype == "tf32" else emulated_numbers.to_bits(values, dtype)
    shared = np.zeros(8192, np.uint8)
    box = (lines, width // words.itemsize)
    for first in range(0, columns, box[1]):  # without a swizzle two boxes of 16 bytes a row
        target = 1024 + first // box[1] * lines * width
        emulated.tensor_load(shared, target, words, box, (first, 0), swizzle)
    layout = wgmma.descriptor_layout(swizzle, leading=lines * width, stride=8 * width)
    for step in range(columns // depth):
        start = layout | (1024 + 32 * step) >> 4
        expected = values[:, step * depth : (step + 1) * depth]
        if dtype == "tf32":
            expected = emulated_numbers.read_tf32(np.ascontiguousarray(expected).view(np.uint32))
        else:
            expected = emulated_numbers.round_to(expected, dtype)
        _assert_same(emulated_wgmma.read_operand(shared, start, lines, dtype), expected)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@given(seed=seeds, panels=st.integers(1, 3))
def test_a_descriptor_finds_a_transposed_operand(swizzle: int, seed: int, panels: int) -> None:
    """V of P·V: a row for each step of the depth, columns in panels as wide as the swizzle."""
    depth, width = 32, swizzle // 2
    columns = panels * width
    bits = _numbers(np.random.default_rng(seed), "float16", depth, columns)
    shared = np.zeros(1024 + bits.nbytes, np.uint8)
    panel = depth * swizzle
    for i in range(panels):
        emulated.tensor_load(
            shared, 1024 + i * panel, bits, (depth, width), (i * width, 0), swizzle
        )
    layout = wgmma.descriptor_layout(swizzle, leading=panel, stride=8 * swizzle)
    for step in range(2):
        start = layout | (1024 + step * 16 * swizzle) >> 4
        found = emulated_wgmma.read_operand(shared, start, columns, "float16", is_transposed=True)
        expected = emulated_numbers.from_bits(bits[16 * step : 16 * step + 16].T, "float16")
        _assert_same(found, expected)


@pytest.mark.parametrize("dtype", wgmma.KINDS)
@pytest.mark.parametrize("in_registers", [False, True])
@given(seed=seeds, columns=st.integers(1, 32).map(lambda n: 8 * n), accumulate=st.booleans())
def test_wgmma_multiplies(
    dtype: str, in_registers: bool, seed: int, columns: int, accumulate: bool
) -> None:
    rng = np.random.default_rng(seed)
    depth = wgmma.KINDS[dtype][1]
    layout = wgmma.descriptor_layout(128, leading=16, stride=1024)
    a, b, shared = layout, layout | 8192 >> 4, np.zeros(8192 + 32 * 1024, np.uint8)
    operands = []
    for start, lines in ((0, 64), (8192, columns)):
        values = emulated_numbers.round_to(rng.standard_normal((lines, depth)), dtype)
        is_half = dtype != "tf32"
        words = emulated_numbers.to_bits(values, dtype) if is_half else values.view(np.uint32)
        emulated.tensor_load(shared, start, words, (lines, 128 // words.itemsize), (0, 0), 128)
        operands.append(values)
    before = rng.standard_normal((64, columns), np.float32)
    left: Any = a
    if in_registers and dtype == "float8_e4m3":
        place = PLAIN.a_element_8(*np.ogrid[:32, :4, :4])
        bits = emulated_numbers.to_bits(operands[0], dtype)
        left = np.stack([rows[place].view(np.uint32)[..., 0] for rows in np.split(bits, 4)])
    elif in_registers and dtype == "tf32":
        place = PLAIN.a_element_tf32(*np.ogrid[:32, :4])
        left = np.stack([rows.view(np.uint32)[place] for rows in np.split(operands[0], 4)])
    elif in_registers:
        bits = emulated_numbers.to_bits(operands[0], dtype)
        left = np.stack([emulated.gather_a(rows) for rows in np.split(bits, 4)])
    result = emulated_wgmma.wgmma(
        shared, emulated_wgmma.gather_rows(before), left, b, dtype, accumulate=accumulate
    )
    found = emulated_wgmma.scatter_rows(result)
    _assert_product(found, operands[0], operands[1].T, before if accumulate else 0.0)


def test_a_descriptor_says_what_it_was_made_of() -> None:
    layout = wgmma.descriptor_layout(64, leading=4096, stride=512)
    assert emulated_wgmma.fields(layout | 2048 >> 4) == (2048, 4096, 512, 64)


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
