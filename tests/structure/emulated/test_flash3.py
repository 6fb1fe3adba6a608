"""The Hopper rung without a GPU: the order of its work, where its tiles lie, what its source computes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import Problem, launch, make_problem
from kernels.cuda.attention.flash3_wgmma.layout import (
    ForwardLayout,
    Widths,
    item_of,
    layout_of,
    schedule_of,
    shared_tiles,
)
from kernels.cuda.device import per_device
from kernels.cuda.device.warpgroups import ALIGNMENT, block_bytes
from kernels.problem.operands import make_operands
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.targets import IS_SIMULATOR

from ...support.attention.strategies import Case
from ...support.emulated.hopper import emulated_hopper
from ...support.emulated.target import EMULATED
from ...support.tolerances import assert_close_arrays

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
    assert layout.block_k % 16 == 0
    tiles = shared_tiles(layout, widths)
    assert block_bytes(tiles) <= MOST_SHARED
    sizes = {"k": tiles["v"] - tiles["k"], "v": tiles["barriers"] - tiles["v"], "q": tiles["k"]}
    counts = {"k": layout.stages, "v": layout.stages, "q": layout.items}
    for name, size in sizes.items():
        assert tiles[name] % ALIGNMENT == 0
        assert size % (counts[name] * ALIGNMENT) == 0
    assert tiles["barriers"] % 8 == 0


@given(st.integers(1, 3))
def test_registers_are_no_more_than_a_multiprocessor_has(consumers: int) -> None:
    layout = ForwardLayout(consumers, 128, 2, 1, False)
    few, more = layout.registers
    assert 128 * (few + consumers * more) <= 65536
    assert few % 8 == more % 8 == 0


class Call(NamedTuple):
    """A call for the emulated GPU: lengths, dims, options, heads of q and of k, dtype, layout, blocks."""

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    options: Mapping[str, Any] = MappingProxyType({})
    heads: tuple[int, int] = (2, 2)
    dtype: Any = FLOAT16
    layout: ForwardLayout = ForwardLayout(2, 64, 2, 2, True)
    blocks: int = 1


def _causal(offset: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": True, "causal_offset": offset, **more}


THREE = ForwardLayout(3, 32, 2, 2, True)
CALLS = {
    "odd lengths, one block takes all items": Call((70, 100)),
    "causal, two blocks": Call((130, 100), options=_causal(0), blocks=2),
    "a window, rows that see nothing": Call(
        (70, 90), options={"window_size": (17, 0), "causal_offset": -3}, dtype=BFLOAT16
    ),
    "one query tile at a time, three stages": Call(
        (70, 130), layout=ForwardLayout(2, 32, 3, 1, False)
    ),
    "three consumers that take turns, two of them without rows": Call((193, 40), layout=THREE),
    "three consumers, two of which bounds leave no tile": Call(
        (193, 40), layout=THREE, options=_causal(-130)
    ),
    "consumers without turns, of which bounds leave one less": Call(
        (300, 300), options=_causal(0), layout=ForwardLayout(2, 32, 2, 2, False)
    ),
    "maxima that may grow": Call((70, 130), layout=ForwardLayout(2, 32, 2, 2, True, 2)),
    "narrow heads, a narrower value": Call((70, 40), (40, 24), _causal(0)),
    "two panels, heads that share keys": Call((65, 33), (96, 72), {"enable_gqa": True}, (2, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_own_source_computes_attention(name: str) -> None:
    call, rng = CALLS[name], np.random.default_rng(0)
    (seq_q, seq_k), (head, value), (heads, key_heads) = call.lengths, call.dims, call.heads
    shapes = (heads, seq_q, head), (key_heads, seq_k, head), (key_heads, seq_k, value)
    q, k, v = (rng.standard_normal((1, *shape)).astype(call.dtype) for shape in shapes)
    case = Case(q, k, v, np.zeros((1, heads, seq_q, value)), dict(call.options), (1, 1))
    problem = case.problem(rung="flash3_wgmma")
    with emulated_hopper(call.layout, call.blocks):
        operands = make_operands(EMULATED.memory, problem, *case.operands)
        out, lse, rest = launch.forward(EMULATED, problem, operands)
    expected = case.oracle()
    assert_close_arrays(out, expected["out"], call.dtype, "out")
    assert_close_arrays(lse, expected["lse"], np.float32, "lse")
    seen = np.isfinite(lse)
    assert (np.abs(rest[seen]) <= np.spacing(np.abs(lse[seen]))).all() and not rest[~seen].any()


def test_another_seed_is_another_question_and_all_that_does_not_depend_on_it_is_the_same() -> None:
    q = np.zeros((1, 2, 8, 16), np.float16)

    def asked(seed: int) -> Problem:
        return make_problem(q, q, q, is_causal=True, dropout_p=0.25, seed=seed)

    first = asked(3)
    assert first.out_shape == (1, 2, 8, 16)  # worked out, and kept
    for seed in (5, 0, -1 & (2**64 - 1)):
        other = first.with_seed(asked(seed).seed)
        assert (other, hash(other)) == (asked(seed), hash(asked(seed)))
        assert other.unseeded == asked(0)
        assert other.out_shape == first.out_shape
        assert other != first == asked(3)
    again = first.with_seed(7).with_seed(8)
    assert again == asked(8)
    assert again.unseeded is first.unseeded


def test_what_lies_on_a_device_is_kept_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_device, "to_device", lambda array: array)
    monkeypatch.setattr(per_device, "encode_tensor_map", lambda *asked: [asked])
    kept = (per_device._counters, per_device._no_clip, per_device._device_map)
    encoded = 256, (1, 1, 8, 64), (1024, 1024, 128, 2), (1, 1, 8, 64), "float16"

    def held(device: int) -> list[object]:
        monkeypatch.setattr(per_device, "current_device", lambda: device)
        own = per_device.counters(), per_device.no_clip()
        return [*own, per_device.device_map(*encoded)]

    try:
        found = [held(0), held(1), held(0)]
        for here, there, back in zip(*found, strict=True):
            assert here is back
            assert here is not there
    finally:
        for function in kept:
            function.cache_clear()
