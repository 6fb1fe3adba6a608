"""The Hopper rung without a GPU: the order of its work, where its tiles lie, what its source computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.flash3_wgmma.forward.kernel import SCHEDULER_THREAD
from kernels.cuda.attention.flash3_wgmma.layout import (
    ForwardLayout,
    Widths,
    item_of,
    layout_of,
    schedule_of,
    shared_tiles,
)
from kernels.cuda.device import per_device
from kernels.cuda.device.warpgroups import ALIGNMENT, WARPGROUP, block_bytes
from kernels.cuda.emulator.schedule import held_back
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.attention.large_scores import large_case
from ...support.attention.mask_mods import mask_mods
from ...support.attention.on_cuda import forward, packed
from ...support.attention.option_examples import option_examples
from ...support.attention.strategies import Case
from ...support.device.emulated_gpu import FUZZ_ONLY, emulated_gpu, emulated_only, longer
from ...support.examples import at_most

#: Shared memory that a block of compute capability 9.0 can have, in bytes.
MOST_SHARED = 227 * 1024
plain = item_of.py_func  # type: ignore[attr-defined]


@given(
    tiles=st.integers(1, 9),
    heads=st.integers(1, 12),
    bytes_a_head=st.integers(1, 100),
    cache_bytes=st.integers(1, 1000),
)
def test_every_tile_of_every_head_is_one_item_and_the_longest_of_a_group_come_first(
    tiles: int, heads: int, bytes_a_head: int, cache_bytes: int
) -> None:
    """A wrong order costs time: heads of a group share the cache, and long items must not come last."""
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
    """A launch with more shared memory than a block has fails."""
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
    few, more = layout.registers  # of a thread: a multiprocessor has 65,536
    assert 128 * (few + layout.consumers * more) <= 65536
    assert few % 8 == more % 8 == 0


#: Two consumers in turns, and small tiles.
SMALL = ForwardLayout(2, 32, 2, 2, True)


class Call(NamedTuple):
    """A call for the emulated GPU: lengths, dims, options, heads of q and of k, dtype, layout, blocks."""

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    options: Mapping[str, Any] = MappingProxyType({})
    heads: tuple[int, int] = (2, 2)
    dtype: Any = FLOAT16
    layout: ForwardLayout | None = ForwardLayout(2, 64, 2, 2, True)
    blocks: int = 1

    @property
    def case(self) -> Case:
        """Return the call with drawn operands."""
        (seq_q, seq_k), (head, value), (heads, key_heads) = self.lengths, self.dims, self.heads
        rng = np.random.default_rng(0)
        shapes = (heads, seq_q, head), (key_heads, seq_k, head), (key_heads, seq_k, value)
        q, k, v = (rng.standard_normal((1, *shape)).astype(self.dtype) for shape in shapes)
        dout = np.zeros((1, heads, seq_q, value), self.dtype)
        return Case(q, k, v, dout, dict(self.options), (1, 1))


def _causal(offset: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": True, "causal_offset": offset, **more}


THREE = ForwardLayout(3, 32, 2, 2, True)
CALLS = {
    "odd lengths, one block takes all items": Call((70, 100)),
    "causal, two blocks": Call((130, 100), options=_causal(0), blocks=2),
    "a window, rows whose keys are all masked": Call(
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
    "maxima that do not grow": Call(
        (20, 200), (16, 16), {"scale": 2.0**-9}, (1, 1), layout=ForwardLayout(1, 16, 2, 2, False, 2)
    ),
    "narrow heads, a narrower value": Call((70, 40), (40, 24), _causal(0)),
    "two panels, heads that share keys": Call((65, 33), (96, 72), {"enable_gqa": True}, (2, 1)),
}
SEQ_Q, SEQ_K = 75, 90
OPTIONS = option_examples(2, SEQ_Q, SEQ_K, FLOAT16)
#: A call takes seconds: the others are left to ``make fuzz-options``; all are compiled, and run on a GPU.
ALWAYS = (
    "boolean mask", "floating mask", "dropout", "softcap", "block mask", "sink", "chunks", "everything"
)  # fmt: skip
# Rounding to bfloat16 takes the emulation several times as long.
OF_OPTIONS = {
    f"{name}{', causal' if causal else ''}": Call(
        (SEQ_Q, SEQ_K), (64, 40), {**options, **(_causal(-10) if causal else {})},
        dtype=BFLOAT16 if name == "softcap" else FLOAT16, layout=SMALL, blocks=2,
    )
    for name, options in OPTIONS.items() for causal in (True, False)
}  # fmt: skip


def _check(case: Case, call: Call, exact: Case | None = None) -> None:
    """Compare the forward pass on the emulated GPU with the textbook of the case, or of another."""
    with emulated_gpu(layout=call.layout, blocks=call.blocks):
        found = forward(case, "flash3_wgmma")
    rest, seen = found.pop("lse_rest"), np.isfinite(found["lse"])
    (exact or case).check(found, "on the emulated GPU")
    assert (np.abs(rest[seen]) <= np.spacing(np.abs(found["lse"][seen]))).all()
    assert not rest[~seen].any()


RARE = [
    pytest.param(name, marks=FUZZ_ONLY) for name in OF_OPTIONS
    if name.removesuffix(", causal") not in ALWAYS or name in ALWAYS
]  # fmt: skip


@emulated_only
@pytest.mark.parametrize("name", [*CALLS, *(f"{name}, causal" for name in ALWAYS), *RARE])
def test_the_kernels_own_source_computes_attention(name: str) -> None:
    call = (CALLS | OF_OPTIONS)[name]
    _check(call.case, call)


#: What most of the other tests run.
USUAL = Call((SEQ_Q, SEQ_K), (64, 40), layout=SMALL, blocks=2)


@emulated_only
def test_memory_beyond_the_sequences_is_never_read_into_a_result() -> None:
    case = USUAL._replace(options=_causal(20)).case
    _check(replace(case, q=longer(case.q), k=longer(case.k), v=longer(case.v)), USUAL, case)


#: Threads of a block of two consumers: the producer of keys and values, the scheduler, and consumer lanes.
LATE = {
    "copier": 0, "scheduler": SCHEDULER_THREAD, "lane": WARPGROUP + 1, "other consumer": 2 * WARPGROUP
}  # fmt: skip


@emulated_only
@pytest.mark.parametrize("late", LATE)
def test_no_thread_is_too_late(late: str) -> None:
    states = np.zeros((1, 6, 2), int)
    states[0, 0, 0] = states[0, 3, 1] = 1  # every key of the other tiles is masked
    block = SMALL.block_q, SMALL.block_k
    mask = kernels.BlockMask(states, 6 * block[0] - 20, 2 * block[1], block)
    call = Call((mask.seq_q, mask.seq_k), (16, 16), {"block_mask": mask}, (1, 1), layout=SMALL)
    with held_back(LATE[late]):
        _check(call.case, call)


@emulated_only
def test_lists_of_whole_tiles_take_a_kernel_that_masks_no_element() -> None:
    """Masking each element of whole tiles would cost time."""
    mask = kernels.BlockMask(
        np.array([[[1, 0, 1]], [[0, 1, 0]]]), SEQ_Q, SEQ_K, (SMALL.block_q, SMALL.block_k)
    )
    case = USUAL._replace(options={"block_mask": mask}).case
    k, v = case.k.copy(), case.v.copy()
    for head, masked in enumerate(~mask.dense()[:, 0]):
        k[:, head, masked], v[:, head, masked] = np.nan, np.inf
    with emulated_gpu(layout=SMALL):
        assert flash3_wgmma.features_for(case.problem(rung="flash3_wgmma")).whole_tiles
    _check(replace(case, k=k, v=v), USUAL, case)


@emulated_only
@pytest.mark.slow
@at_most(3)
@given(
    mask_mods(),
    st.sampled_from([{}, {"is_causal": True}, {"dropout_p": 0.3, "seed": 4}, {"softcap": 2.0}]),
    st.sampled_from([SMALL, ForwardLayout(1, 48, 2, 1, False)]),
)
def test_a_mask_mod_that_was_evaluated_is_the_textbooks(
    mod: Any, options: dict[str, Any], layout: ForwardLayout
) -> None:
    call = USUAL._replace(options={"mask_mod": mod, **options}, layout=layout)
    with patch("kernels.problem.listed_mods.BLOCK", (16, 32)):
        _check(call.case, call)


@emulated_only
def test_tiles_of_keys_before_every_window_are_never_read() -> None:
    call = USUAL._replace(options={"window_size": (0, 9), "causal_offset": 40, "softcap": 2.0})
    case, unread = call.case, np.s_[:, :, : SMALL.block_k]
    k, v = case.k.copy(), case.v.copy()
    k[unread] = v[unread] = np.nan
    _check(replace(case, k=k, v=v), call, case)


@emulated_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "ping_pong", "lengths_q", "lengths_k"),
    [
        (1, True, (17, 0, 3, 55), (21, 9, 1, 59)),
        (2, True, (17, 0, 3, 55), (21, 9, 1, 59)),
        # Bounds leave the first consumer fewer tiles than the second.
        (2, True, (128, 0, 3), (105, 5, 10)),
        (2, False, (128, 0, 3), (105, 5, 10)),
    ],
)
def test_packed_sequences_end_where_tiles_do_not_and_do_not_affect_each_other(
    items: int, ping_pong: bool, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]
) -> None:
    # Empty ones, so that there are empty tiles behind the others.
    ends = (*lengths_q, 0, 0, 0), (*lengths_k, 0, 0, 0)
    case = packed(0, *ends, (64, 40), _causal(5)).in_dtype(FLOAT16)
    rows, keys, _ = case.alone(2)
    case.q[:, rows], case.k[:, keys], case.v[:, keys] = np.nan, np.nan, np.inf
    layout = replace(SMALL, items=items, ping_pong=ping_pong)
    # The first consumer is late, and writes the zeros that the other one multiplies by, too.
    with held_back(*range(WARPGROUP, 2 * WARPGROUP)), emulated_gpu(layout=layout, blocks=1):
        found = forward(case, "flash3_wgmma")
    for number in (0, 3)[: len(lengths_q) - 2]:
        rows, _, alone = case.alone(number)
        alone.check({name: found[name][:, rows] for name in ("out", "lse")}, f"of {number}")


@emulated_only
@pytest.mark.parametrize("patience", [0, 2])
def test_rows_are_rescaled_to_larger_maxima_and_lse_with_its_rest_is_exact(patience: int) -> None:
    case = large_case("rows of both kinds", BFLOAT16, 6, 80)
    with emulated_gpu(layout=ForwardLayout(1, 16, 2, 2, False, patience)):
        found = forward(case, "flash3_wgmma")
    lse = found["lse"].astype(np.float64) + found["lse_rest"]
    np.testing.assert_allclose(lse, case.oracle()["lse"], 0, 1e-5)
    case.check({"out": found["out"]}, "with large scores")


def test_what_lies_on_a_device_is_kept_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for each call would cost time, and memory of another device cannot be read."""
    monkeypatch.setattr(per_device, "to_device", lambda array: array)
    monkeypatch.setattr(per_device, "encode_tensor_map", lambda *asked: np.zeros(2))
    kept = (per_device._counters, per_device._no_clip, per_device._device_map)
    encoded = (256,), (1, 1, 8, 64), (1024, 1024, 128, 2), (1, 1, 8, 64), "float16"

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
