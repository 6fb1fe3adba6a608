"""The Hopper rung without a GPU: the order of its work, and where its tiles lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernels.cuda.flash3_layout import (
    ALIGNMENT,
    Layout,
    Widths,
    item_of,
    layout_of,
    schedule_of,
    shared_bytes,
    shared_tiles,
)
from kernels.targets import IS_SIMULATOR

#: Shared memory that a block of compute capability 9.0 can have, in bytes.
MOST_SHARED = 227 * 1024
plain = item_of if IS_SIMULATOR else item_of.py_func  # type: ignore[attr-defined]


@given(
    tiles=st.integers(1, 9),
    heads=st.integers(1, 12),
    bytes_a_head=st.integers(1, 100),
    cache_bytes=st.integers(1, 1000),
)
def test_every_tile_of_every_head_is_one_item_and_the_longest_of_a_group_come_first(
    tiles: int, heads: int, bytes_a_head: int, cache_bytes: int
) -> None:
    schedule = schedule_of(tiles, heads, bytes_a_head, cache_bytes)
    items = [tuple(map(int, plain(item, schedule))) for item in range(tiles * heads)]
    assert sorted(items) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    groups = [head // schedule.group for _, head in items]
    assert groups == sorted(groups)
    for group in set(groups):
        lengths = [tile for (tile, _), its in zip(items, groups, strict=True) if its == group]
        assert lengths == sorted(lengths, reverse=True)
    assert schedule.group == 1 or schedule.group * bytes_a_head <= cache_bytes


@given(
    head=st.integers(1, 16).map(lambda n: 16 * n), value=st.integers(1, 16).map(lambda n: 16 * n)
)
def test_tiles_fit_in_shared_memory_where_the_swizzle_begins_anew(head: int, value: int) -> None:
    widths = Widths(head, value)
    layout = layout_of(widths)
    assert shared_bytes(layout, widths) <= MOST_SHARED
    assert layout.block_k % 16 == 0
    tiles = shared_tiles(layout, widths)
    sizes = {"k": tiles["v"] - tiles["k"], "v": tiles["barriers"] - tiles["v"], "q": tiles["k"]}
    counts = {"k": layout.stages, "v": layout.stages, "q": layout.items}
    for name, size in sizes.items():
        assert tiles[name] % ALIGNMENT == 0
        assert size % (counts[name] * ALIGNMENT) == 0
    assert tiles["barriers"] % 8 == 0


@given(st.integers(1, 3))
def test_registers_are_no_more_than_a_multiprocessor_has(consumers: int) -> None:
    layout = Layout(consumers, 128, 2, 1, False)
    few, more = layout.registers
    assert 128 * (few + consumers * more) <= 65536
    assert few % 8 == more % 8 == 0
