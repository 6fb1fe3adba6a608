"""A call that was made before copies nothing to the device, and launches no more than its kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import kernels
from kernels import BlockMask
from kernels.cuda.attention.flash_decoding import cached
from kernels.cuda.runtime.arrays import is_device_array, to_device
from kernels.problem.packed_sequences import Sequences, sequences_of
from kernels.problem.question import make_problem
from kernels.runtime.dtypes import FLOAT16
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.targets import EMULATED

from ...support.device.fake_device import fake_device

HEADS, ROWS, COLS, WIDTH = 2, 70, 131, 64


def _two_of_three(batch: int, head: int, row: int, col: int) -> bool:
    return (row + col) % 3 != 0


def _blocks() -> BlockMask:
    states = np.random.default_rng(0).integers(0, 3, (HEADS, 5, 5))
    return BlockMask(states, ROWS, COLS, (16, 32), np.arange(512).reshape(1, 16, 32) % 3 > 0)


#: Option → what a call has of it, made anew for each call: equal, and not the same.
OPTIONS: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "boolean mask": lambda: {"attn_mask": to_device(np.ones((ROWS, COLS), bool))},
    "floating mask": lambda: {"attn_mask": to_device(np.ones((HEADS, ROWS, COLS), FLOAT16))},
    "dropout": lambda: {"dropout_p": 0.1, "seed": 7},
    "softcap": lambda: {"softcap": 3.0},
    "mask_mod": lambda: {"mask_mod": _two_of_three},
    "block mask": lambda: {"block_mask": _blocks()},
}
#: Options with a mask whose words are packed.
PACKED = ("boolean mask", "floating mask")


def _expected(option: str, rung: str, deterministic: bool) -> Counter[str]:
    """Return what a call launches, by name."""
    found: Counter[str] = Counter()
    if rung == "flash3_wgmma":
        found.update(["flash3_forward", "flash3_preprocess", "flash3_dkdv"])
        # One kernel adds to dq in the order of the key tiles, where it knows how many there are.
        has_dq = deterministic and option == "block mask"
        found.update(["flash3_dq"] if has_dq else ["flash3_round_dq"])
        if option in PACKED:  # words for the forward kernel and for the one with scores
            found["pack_mask"] = 2
    else:
        found.update(["flash2_mma_forward", "half_delta", "flash2_mma_dkdv"])
        found.update(["flash2_mma_dq"] if deterministic else ["flash2_mma_dq_end"])
        if option == "floating mask":  # which is read in float32, in both passes
            found["convert"] = 2
    return found


@pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")
@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
@pytest.mark.parametrize("rung", ["flash2_mma", "flash3_wgmma"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_repeated_call_copies_nothing_and_launches_its_kernels_alone(
    option: str, rung: str, deterministic: bool
) -> None:
    with fake_device() as device:
        q, k, v, dout = (
            to_device(np.zeros((1, HEADS, n, WIDTH), FLOAT16)) for n in (ROWS, COLS, COLS, ROWS)
        )
        for _ in range(3):
            options = {**OPTIONS[option](), "rung": rung, "deterministic": deterministic}
            device.launches.clear()
            device.calls.clear()
            out, lse = kernels.flash_attention_forward(q, k, v, **options)
            kernels.flash_attention_backward(dout, q, k, v, out, lse, **options)
    copies = [call.about[1] for call in device.calls if call.name.startswith("cuMemcpy")]
    assert all(len(copy) == 128 for copy in copies), "only tensor maps, which hold addresses"
    assert Counter(one.kernel for one in device.launches) == _expected(option, rung, deterministic)


@pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver")
@pytest.mark.parametrize("place", [np.asarray, to_device], ids=["host", "device"])
def test_a_repeated_call_on_a_cache_launches_what_it_launches_in_full(place: Any) -> None:
    """With lengths and a table on the host, it checks and copies those, and nothing else."""
    with fake_device() as device:

        def arrays(length: int = 20) -> list[Any]:
            shapes = (2, 4, 1, 64), *[(5, 2, 16, 64)] * 2, *[(2, 2, 1, 64)] * 2
            integers = np.array([9, length], np.int32), np.array([[3, 1], [0, 4]], np.int32)
            sink = to_device(np.zeros(4, np.float32))
            found = [to_device(np.zeros(shape, FLOAT16)) for shape in shapes]
            return [*found, *map(place, integers), sink]

        def call(arrays: list[Any]) -> list[Any]:
            device.launches.clear()
            device.calls.clear()
            *given, lengths, table, sink = arrays
            kernels.flash_attention_with_cache(
                *given, cache_seqlens=lengths, block_table=table, is_causal=True, sink=sink
            )
            return [*device.launches]

        first, own = arrays(), arrays()
        call(first)
        with patch.object(cached, "forward", None):
            repeated = call(own)
        copies = [one.about for one in device.calls if one.name.startswith("cuMemcpy")]
        if place is np.asarray:
            with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 32"):
                call(arrays(32))
        KnownCalls.cache_clear()
        full = call(own)
    maps = {to for to, copied in copies if len(copied) == 128}
    assert len(maps) == 3
    assert len(copies) == 3 + 2 * (place is np.asarray)
    fixed = maps | {x.device_ctypes_pointer.value for x in own if is_device_array(x)}
    # Other addresses are those of memory of the call.
    found, wanted = (
        [
            (*one[:2], [x if x in fixed or x < 2**31 else None for x in one.words])
            for one in launches
        ]
        for launches in (repeated, full)
    )
    assert found == wanted


def test_sums_that_were_written_to_are_other_sequences() -> None:
    sums = np.array([0, 2, 5], np.int32)
    first = sequences_of(sums, sums, 5, 5)
    assert sequences_of(sums.copy(), [0, 2, 5], 5, 5) == first
    sums[1] = 4
    second = sequences_of(sums, sums, 5, 5)
    assert second != first and hash(second) != hash(first)
    assert first.lengths[0].tolist() == [2, 3] and second.lengths[0].tolist() == [4, 1]


def test_what_is_kept_of_a_mask_or_of_sequences_cannot_be_written_to() -> None:
    mask, sequences = _blocks(), Sequences([0, 2, 5], [0, 1, 5], 5, 5)
    kept = mask.states, mask.patterns, *mask.tile_list(16, 16), *mask.tile_list(16, 16, True)
    for array in (*kept, sequences.cu_seqlens_q, sequences.cu_seqlens_k):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_mask_does_not_see_what_is_written_to_the_arrays_it_was_made_of() -> None:
    states, patterns = np.full((1, 2, 2), 2), np.zeros((1, 16, 16), bool)
    patterns[0, 3, 4] = True
    mask = BlockMask(states, 32, 32, 16, patterns)
    before = mask.dense()
    states[...], patterns[...] = 1, True
    np.testing.assert_array_equal(mask.dense(), before)


def test_wrong_slopes_are_refused_also_after_right_ones() -> None:
    q = np.zeros((1, HEADS, 4, 8), np.float32)
    assert make_problem(q, q, q, alibi_slopes=np.array([1.0, 2.0])).slopes
    for _ in range(2):
        with pytest.raises(ValueError, match="alibi_slopes must be numbers"):
            make_problem(q, q, q, alibi_slopes=np.array([1.0, np.nan]))
