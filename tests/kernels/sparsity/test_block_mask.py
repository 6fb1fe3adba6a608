"""Block masks: builders against their definitions, ``&`` and ``|``, lists of tiles, pictures, errors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels import BlockMask
from kernels.sparsity.block_mask import FULL, HIDDEN, KEPT_LISTS, PARTIAL
from kernels.sparsity.elements import compiled_fill

Dense = np.ndarray[Any, np.dtype[np.bool_]]

sizes = st.sampled_from([16, 32, 48])
block_sizes = sizes | st.tuples(sizes, sizes)
lengths = st.integers(1, 130)
ends = st.integers(-1, 140)
offsets = st.integers(-150, 150)


def pair(block_size: Any) -> tuple[int, int]:
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


def places(seq_q: int, seq_k: int) -> tuple[Any, Any]:
    return np.arange(seq_q)[:, None], np.arange(seq_k)


def window(seq_q: int, seq_k: int, left: int, right: int, offset: int) -> Dense:
    row, col = places(seq_q, seq_k)
    ones = np.ones((seq_q, seq_k), bool)
    after = col >= row + offset - left if left >= 0 else ones
    return after & (col <= row + offset + right if right >= 0 else ones)


@st.composite
def dense_masks(draw: Callable[..., Any], heads: int | None = None) -> tuple[Dense, Any]:
    """Elements of whole blocks, of all, of none and of noise, with the block size they were made of."""
    block_size = draw(block_sizes)
    block_q, block_k = pair(block_size)
    seq_q, seq_k = draw(lengths), draw(lengths)
    count = heads or draw(st.integers(1, 3))
    shape = count, -(-seq_q // block_q), -(-seq_k // block_k)
    kinds = draw(arrays(np.int8, shape, elements=st.integers(0, 3)))
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 2, (2, block_q, block_k))
    patterns = np.stack([np.zeros_like(noise[0]), np.ones_like(noise[0]), *noise]).astype(bool)
    row, col = places(seq_q, seq_k)
    state = kinds[:, row // block_q, col // block_k]  # (heads, seq_q, seq_k)
    return patterns[state, row % block_q, col % block_k], block_size


def block_by_block(mask: BlockMask, tile_q: int, tile_k: int) -> dict[tuple[int, int, int], bool]:
    """(head, query tile, key tile) of the tiles with a visible element → no element is hidden."""
    dense = mask.dense()
    found = {}
    for head in range(mask.heads):
        for i in range(-(-mask.seq_q // tile_q)):
            for j in range(-(-mask.seq_k // tile_k)):
                rows = slice(i * tile_q, (i + 1) * tile_q)
                tile = dense[head, rows, j * tile_k : (j + 1) * tile_k]
                if tile.any():
                    found[head, i, j] = bool(tile.all())
    return found


# ---- elements ---------------------------------------------------------------------------------------


@given(dense_masks())
def test_a_mask_of_elements_shows_these_elements(drawn: tuple[Dense, Any]) -> None:
    dense, block_size = drawn
    mask = BlockMask.from_dense(dense, block_size)
    np.testing.assert_array_equal(mask.dense(), dense)
    assert (mask.heads, mask.seq_q, mask.seq_k) == dense.shape
    assert (mask.block_q, mask.block_k) == pair(block_size)


@given(dense_masks())
def test_a_block_is_partial_only_if_its_elements_differ(drawn: tuple[Dense, Any]) -> None:
    dense, block_size = drawn
    mask = BlockMask.from_dense(dense, block_size)
    block_q, block_k = pair(block_size)
    for (head, i, j), state in np.ndenumerate(mask.states):
        rows = slice(i * block_q, (i + 1) * block_q)
        block = dense[head, rows, j * block_k : (j + 1) * block_k]
        assert (state == HIDDEN) == (not block.any())
        assert (state == FULL) == bool(block.all())
    assert len({pattern.tobytes() for pattern in mask.patterns}) == len(mask.patterns)
    used = set(np.unique(mask.states[mask.states >= PARTIAL]) - PARTIAL)
    assert used == set(range(len(mask.patterns)))
    assert mask.density == (mask.states != HIDDEN).mean()


@given(dense_masks(), st.data())
def test_a_part_of_a_mask_is_a_part_of_its_elements(drawn: tuple[Dense, Any], data: Any) -> None:
    dense, block_size = drawn
    mask = BlockMask.from_dense(dense, block_size)
    row, col = (data.draw(st.integers(0, n - 1)) for n in dense.shape[1:])
    rows, cols = dense.shape[1] - row, dense.shape[2] - col
    np.testing.assert_array_equal(mask.visible(row, rows, col, cols), dense[:, row:, col:])


@given(dense_masks(), st.data())
def test_masks_that_show_the_same_are_equal(drawn: tuple[Dense, Any], data: Any) -> None:
    dense, block_size = drawn
    mask = BlockMask.from_dense(dense, block_size)
    # The same by another way: every block has a pattern of its own, with noise beyond the ends.
    count = mask.states[0].size
    table = dense.shape[0], *mask.states.shape[1:]
    padded = data.draw(arrays(bool, st.just((table[1] * mask.block_q, table[2] * mask.block_k))))
    whole = np.repeat(padded[None], dense.shape[0], axis=0)
    whole[:, : dense.shape[1], : dense.shape[2]] = dense
    blocks = whole.reshape(table[0], table[1], mask.block_q, table[2], mask.block_k)
    patterns = blocks.swapaxes(2, 3).reshape(-1, mask.block_q, mask.block_k)
    states = PARTIAL + np.arange(table[0] * count).reshape(table)
    other = BlockMask(states, mask.seq_q, mask.seq_k, block_size, patterns)
    assert other == mask and hash(other) == hash(mask)
    np.testing.assert_array_equal(other.states, mask.states)
    if dense[0, 0, 0]:
        changed = dense.copy()
        changed[0, 0, 0] = False
        assert BlockMask.from_dense(changed, block_size) != mask
    assert mask != "a mask"


# ---- functions --------------------------------------------------------------------------------------

_WHERE = np.random.default_rng(1).integers(0, 3, 200)


def shared_kind(batch: int, head: int, row: int, col: int) -> bool:
    return batch == 0 and bool(_WHERE[row] == _WHERE[col] or (row - col) % 7 == head)


_COMPILED_ONCE = numba.njit(shared_kind)


@pytest.mark.parametrize("mod", [_COMPILED_ONCE, lambda *place: shared_kind(*place)])
@settings(max_examples=10)
@given(lengths, lengths, block_sizes, st.integers(1, 3))
def test_a_function_is_asked_for_every_element(
    mod: Any, seq_q: int, seq_k: int, block_size: Any, heads: int
) -> None:
    row, col = places(seq_q, seq_k)
    head = np.arange(heads)[:, None, None]
    mask = BlockMask.from_mask_mod(mod, seq_q, seq_k, block_size, heads)
    expected = (_WHERE[row] == _WHERE[col]) | ((row - col) % 7 == head)
    np.testing.assert_array_equal(mask.dense(), expected)


def test_a_plain_function_is_compiled() -> None:
    length, far = 1024, 300

    def near(batch: int, head: int, row: int, col: int) -> bool:
        return col <= row and row - col < far

    assert compiled_fill(near) is not None
    mask = BlockMask.from_mask_mod(near, length, length)
    assert mask == BlockMask.local(length, length, far - 1, 0)


def test_a_function_that_numba_cannot_compile_runs_as_python() -> None:
    asked: set[tuple[Any, ...]] = set()
    visible = {(0, 1): "yes", (39, 19): "yes"}

    def mod(batch: int, head: int, row: int, col: int) -> bool:
        asked.add((batch, head, type(row), type(col)))
        return visible.get((row, col), "no") == "yes"

    mask = BlockMask.from_mask_mod(mod, 40, 20, 16)
    assert set(zip(*np.nonzero(mask.dense()[0]), strict=True)) == set(visible)
    assert asked == {(0, 0, int, int)}

    class Callable:
        def __call__(self, batch: int, head: int, row: int, col: int) -> bool:
            return row == col

    assert BlockMask.from_mask_mod(Callable(), 40, 20, 16) == BlockMask.band(40, 20, 0, 0, 16)


def test_a_function_that_reads_beyond_its_array_says_so() -> None:
    short = np.zeros(10, bool)
    with pytest.raises(IndexError):
        BlockMask.from_mask_mod(lambda b, h, r, c: short[c], 32, 32, 16)


# ---- builders ---------------------------------------------------------------------------------------


#: Builder → what makes a mask of lengths, drawn numbers a and b and a block size, and its elements.
BUILDERS: dict[str, tuple[Callable[..., BlockMask], Callable[..., Any]]] = {
    "causal": (
        lambda m, n, a, b, size: BlockMask.causal(m, n, size, causal_offset=a),
        lambda m, n, a, b, side: window(m, n, -1, 0, a),
    ),
    "local": (
        lambda m, n, a, b, size: BlockMask.local(m, n, a % 141 - 1, b % 141 - 1, size, causal_offset=a),
        lambda m, n, a, b, side: window(m, n, a % 141 - 1, b % 141 - 1, a),
    ),
    "local of one side": (
        lambda m, n, a, b, size: BlockMask.local(m, n, b % 141 - 1, None, size, causal_offset=a),
        lambda m, n, a, b, side: window(m, n, b % 141 - 1, b % 141 - 1, a),
    ),
    "band": (
        lambda m, n, a, b, size: BlockMask.band(m, n, a, b * 10**9, size),
        lambda m, n, a, b, side: between(m, n, a, b * 10**9),
    ),
    "global tokens": (
        lambda m, n, a, b, size: BlockMask.local_global(m, n, a % 9, b % 9, abs(a) % 6, size),
        lambda m, n, a, b, side: window(m, n, a % 9, b % 9, 0) | among(m, n, range(abs(a) % 6)),
    ),
    "listed tokens": (
        lambda m, n, a, b, size: BlockMask.local_global(m, n, 3, 0, [a % max(m, n)], size),
        lambda m, n, a, b, side: window(m, n, 3, 0, 0) | among(m, n, [a % max(m, n)]),
    ),
    "butterfly": (
        lambda m, n, a, b, size: BlockMask.butterfly(m, n, size),
        lambda m, n, a, b, side: in_butterfly(m, n, side),
    ),
    "strided": (
        lambda m, n, a, b, size: BlockMask.strided(m, n, 1 + a % 9, size, a > 0),
        lambda m, n, a, b, side: in_strides(m, n, side, 1 + a % 9) & (between(m, n, -m, 0) | (a <= 0)),
    ),
    "dilated": (
        lambda m, n, a, b, size: BlockMask.dilated(m, n, size, dilation=1 + a % 9, heads=1 + b % 4),
        lambda m, n, a, b, side: in_dilations(m, n, side, 1 + a % 9, 1 + b % 4),
    ),
}  # fmt: skip


def between(seq_q: int, seq_k: int, lower: int, upper: int) -> Dense:
    row, col = places(seq_q, seq_k)
    return (col - row >= lower) & (col - row <= upper)


def among(seq_q: int, seq_k: int, tokens: Any) -> Dense:
    row, col = places(seq_q, seq_k)
    return np.isin(row, tokens) | np.isin(col, tokens)


def in_butterfly(seq_q: int, seq_k: int, side: int) -> Dense:
    """Show blocks whose numbers differ in one bit at most."""
    counts, (row, col) = (-(-seq_q // side), -(-seq_k // side)), places(seq_q, seq_k)
    i, j = row // side * min(counts) // counts[0], col // side * min(counts) // counts[1]
    return np.asarray(sum((i ^ j) >> bit & 1 for bit in range(8)) <= 1)


def in_strides(seq_q: int, seq_k: int, side: int, stride: int) -> Dense:
    row, col = places(seq_q, seq_k)
    distance = row // side - col // side
    return (abs(distance) <= stride) | (distance % stride == 0)


def in_dilations(seq_q: int, seq_k: int, side: int, dilation: int, heads: int) -> Dense:
    row, col = places(seq_q, seq_k)
    step, head = min(dilation, -(-seq_k // side)), np.arange(heads)[:, None, None]
    return (col // side - row // side - head) % step == 0


@pytest.mark.parametrize("name", BUILDERS)
@given(lengths, lengths, offsets, offsets, block_sizes)
@example(64, 64, 0, 0, 16)
@example(33, 100, 67, 0, (16, 48))
def test_a_builder_makes_the_elements_of_its_definition(
    name: str, seq_q: int, seq_k: int, a: int, b: int, block_size: Any
) -> None:
    build, elements = BUILDERS[name]
    dense = elements(seq_q, seq_k, a, b, int(np.lcm(*pair(block_size))))
    mask = build(seq_q, seq_k, a, b, block_size)
    assert mask == BlockMask.from_dense(dense, block_size)


@given(
    st.integers(1, 400), st.integers(1, 400), sizes,
    st.sampled_from([1, 3, 5]), st.integers(0, 3), st.integers(0, 4), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_bigbird_is_a_window_global_blocks_and_so_many_others(
    seq_q: int, seq_k: int, side: int, around: int, first: int, drawn: int, heads: int, seed: int
) -> None:
    def build(random_blocks: int) -> BlockMask:
        return BlockMask.bigbird(
            seq_q, seq_k, side, window=around, global_blocks=first, random_blocks=random_blocks,
            heads=heads, seed=seed,
        )  # fmt: skip

    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    mask, fixed = build(drawn), build(0)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)
    i, j = places(-(-seq_q // side), -(-seq_k // side))
    expected = (abs(i - j) <= around // 2) | (i < first) | (j < first)
    np.testing.assert_array_equal(fixed.states, np.repeat(expected[None], heads, axis=0))
    assert (mask & fixed) == fixed
    more = mask.states.sum(axis=2) - fixed.states.sum(axis=2)  # (heads, query blocks)
    free = expected.shape[1] - expected.sum(axis=1)
    np.testing.assert_array_equal(more, np.minimum(drawn, free)[None].repeat(heads, axis=0))
    assert build(drawn) == mask


def test_bigbird_draws_each_head_and_each_seed_anew() -> None:
    masks = BlockMask.bigbird(1024, 1024, 16, heads=2), BlockMask.bigbird(1024, 1024, 16, seed=1)
    assert not np.array_equal(*masks[0].states)
    assert not np.array_equal(masks[0].states[0], masks[1].states[0])
    # Every block that is left can be drawn: over many heads each is, some time.
    many = BlockMask.bigbird(256, 256, 16, heads=200)
    assert (many.states != HIDDEN).any(axis=0).all()


# ---- combinations -----------------------------------------------------------------------------------


@st.composite
def two_masks(draw: Callable[..., Any]) -> tuple[BlockMask, BlockMask]:
    dense, block_size = draw(dense_masks())
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads = draw(st.sampled_from([1, len(dense)]))
    shape = heads, *dense.shape[1:]
    other = noise.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    if draw(st.booleans()):
        other = np.broadcast_to(~dense[:1], shape)  # then & is hidden and | is full
    a, b = BlockMask.from_dense(dense, block_size), BlockMask.from_dense(other, block_size)
    return (a, b) if draw(st.booleans()) else (b, a)


@given(two_masks())
def test_and_is_what_both_show_and_or_what_one_shows(masks: tuple[BlockMask, BlockMask]) -> None:
    a, b = masks
    for mask, dense in ((a & b, a.dense() & b.dense()), (a | b, a.dense() | b.dense())):
        assert mask == BlockMask.from_dense(dense, (a.block_q, a.block_k))
    assert (a & a) == a == (a | a)


@given(st.data(), st.integers(1, 4))
def test_a_stack_has_the_heads_of_its_masks(data: Any, count: int) -> None:
    dense, block_size = data.draw(dense_masks(heads=count))
    one_by_one = [BlockMask.from_dense(head, block_size) for head in dense]
    mask = BlockMask.from_dense(dense, block_size)
    assert BlockMask.stack(one_by_one) == mask
    np.testing.assert_array_equal(
        BlockMask.stack([mask, one_by_one[0]]).dense(), [*dense, dense[0]]
    )


# ---- lists of tiles ---------------------------------------------------------------------------------


@given(dense_masks(), st.integers(1, 100), st.integers(1, 100), st.booleans())
@example((np.tri(64, 64, dtype=bool)[None], 32), 16, 16, False)  # tiles divide the blocks
@example((np.tri(64, 64, dtype=bool)[None], 16), 32, 64, True)  # and are divided by them
@example((np.tri(100, 50, dtype=bool)[None], 16), 24, 40, True)  # and neither
def test_a_list_has_the_tiles_with_visible_elements_and_no_other(
    drawn: tuple[Dense, Any], tile_q: int, tile_k: int, by_keys: bool
) -> None:
    mask = BlockMask.from_dense(*drawn)
    tiles = mask.tile_list(tile_q, tile_k, by_keys)
    assert (
        tiles.tile_ptr.dtype == tiles.tile_ids.dtype == np.int32 and tiles.tile_full.dtype == bool
    )
    lines = -(-mask.seq_k // tile_k) if by_keys else -(-mask.seq_q // tile_q)
    assert len(tiles.tile_ptr) == mask.heads * lines + 1 and tiles.tile_ptr[0] == 0
    assert len(tiles.tile_ids) == len(tiles.tile_full) == tiles.tile_ptr[-1]
    found = {}
    for line, (start, stop) in enumerate(zip(tiles.tile_ptr, tiles.tile_ptr[1:], strict=False)):
        ids = tiles.tile_ids[start:stop]
        assert (np.diff(ids) > 0).all()
        for number, full in zip(ids, tiles.tile_full[start:stop], strict=True):
            head, own = divmod(line, lines)
            place = (head, int(number), own) if by_keys else (head, own, int(number))
            found[place] = bool(full)
    assert found == block_by_block(mask, tile_q, tile_k)


def test_a_mask_keeps_the_lists_used_last() -> None:
    mask = BlockMask.causal(64, 64, 16)
    first = mask.tile_list(16, 16)
    for tile in range(1, 3 * KEPT_LISTS):
        mask.tile_list(tile, tile)
        assert mask.tile_list(16, 16) is first
    assert len(mask._lists) == KEPT_LISTS
    for tile in range(1, 3 * KEPT_LISTS):
        mask.tile_list(tile, 1)
    assert mask.tile_list(16, 16) is not first


def test_long_masks_and_their_lists_are_small() -> None:
    length = 65_536
    tracemalloc.start()
    causal, butterfly = (
        make(length, length, 64) for make in (BlockMask.causal, BlockMask.butterfly)
    )
    lists = [
        mask.tile_list(64, 64, by_keys) for mask in (causal, butterfly) for by_keys in (False, True)
    ]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    blocks = (length // 64) ** 2
    assert most < 64 * blocks, "more than 64 bytes a block"
    assert len(causal.patterns) == 1 and len(butterfly.patterns) == 0
    assert causal.density == (blocks + length // 64) / 2 / blocks
    assert butterfly.density == 11 / 1024
    assert len(lists[0].tile_ids) == len(lists[1].tile_ids) == causal.density * blocks
    assert lists[2].tile_full.all() and len(lists[3].tile_ids) == 11 * 1024


# ---- pictures and words -----------------------------------------------------------------------------


def test_nothing_to_see_is_a_mask_too() -> None:
    for seq_q, seq_k in ((0, 5), (5, 0), (0, 0)):
        for mask in (
            BlockMask.causal(seq_q, seq_k), BlockMask.butterfly(seq_q, seq_k),
            BlockMask.strided(seq_q, seq_k), BlockMask.bigbird(seq_q, seq_k),
            BlockMask.local_global(seq_q, seq_k, 3), BlockMask.from_dense(np.ones((seq_q, seq_k), bool)),
            BlockMask.from_mask_mod(lambda b, h, r, c: True, seq_q, seq_k),
        ):  # fmt: skip
            assert mask.dense().shape == (1, seq_q, seq_k)
            assert mask.density == 0.0 and mask.picture() == "" and (mask | mask) == mask
            for by_keys in (False, True):
                tiles = mask.tile_list(16, 16, by_keys)
                lines = -(-(seq_k if by_keys else seq_q) // 16)
                assert tiles.tile_ptr.tolist() == [0] * (lines + 1)
                assert len(tiles.tile_ids) == len(tiles.tile_full) == 0
