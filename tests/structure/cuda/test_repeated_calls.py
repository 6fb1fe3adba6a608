"""A call that was made before copies nothing to the device, and launches no more than its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kernels import BlockMask, launch
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.runtime.kernel import Kernel
from kernels.problem.operands import make_operands
from kernels.problem.packed_problem import PackedMaker
from kernels.problem.packed_sequences import Sequences, sequences_of
from kernels.problem.question import Problem, make_problem
from kernels.runtime.dtypes import FLOAT16

from ...support.attention.option_table import TENSOR_CORES
from ...support.emulated.hopper import emulated_hopper_backward
from ...support.emulated.target import EMULATED

HEADS, ROWS, COLS, WIDTH = 2, 70, 131, 64
SUMS = [0, 10, 40, 70], [0, 31, 31, 131]


@dataclass
class Counts:
    """What a call asks of a device: launches by the kernel's name and their arguments, and copies to it."""

    launches: Counter[str] = field(default_factory=Counter)
    arguments: list[Any] = field(default_factory=list)
    copies: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Let the rungs of tensor cores launch on a device that counts and does nothing."""
    counts = Counts()

    def to_device(array: Any) -> Any:
        counts.copies += 1
        return array

    def launched(kernel: Kernel, where: Any) -> Any:
        def run(*args: Any) -> None:
            counts.launches[kernel.name] += 1
            counts.arguments += args

        return run

    with (
        emulated_hopper_backward(),
        patch.object(Kernel, "__getitem__", launched),
        patch("kernels.cuda.attention.options.packed_tiles.to_device", to_device),
        patch("kernels.cuda.device.memory.to_device", to_device),
        patch("kernels.cuda.attention.flash2_mma.launch.merge_parts", lambda *arrays: None),
    ):
        yield counts


def _two_of_three(batch: int, head: int, row: int, col: int) -> bool:
    return (row + col) % 3 != 0


def _blocks() -> BlockMask:
    states = np.random.default_rng(0).integers(0, 3, (HEADS, 5, 5))
    return BlockMask(states, ROWS, COLS, (16, 32), np.arange(512).reshape(1, 16, 32) % 3 > 0)


#: Option → what a call has of it, made anew for each call: equal, and not the same.
OPTIONS: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "boolean mask": lambda: {"attn_mask": np.ones((ROWS, COLS), bool)},
    "floating mask": lambda: {"attn_mask": np.ones((HEADS, ROWS, COLS), FLOAT16)},
    "dropout": lambda: {"dropout_p": 0.1, "seed": 7},
    "sink": lambda: {"sink": np.array([0.5, -2.0])},
    "slopes": lambda: {"alibi_slopes": np.array([0.5, 0.25])},
    "softcap": lambda: {"softcap": 3.0},
    "mask_mod": lambda: {"mask_mod": _two_of_three},
    "block mask": lambda: {"block_mask": _blocks()},
    "documents": lambda: {},
}
#: By which kernel the words of a mask are packed.
PACKED = {"boolean mask": "pack_mask", "floating mask": "pack_pairs"}


def _problem(option: str, operands: list[Any], **more: Any) -> tuple[Problem, dict[str, Any]]:
    """Return the problem of a call, and its options."""
    options = OPTIONS[option]()
    if option == "documents":
        q, k, v = operands
        every: Any = {**options, **more}
        return PackedMaker(np.array(SUMS[0]), np.array(SUMS[1]))(q, k, v, every), options
    return make_problem(*operands, **options, **more), options


def _call(option: str, rung: str, deterministic: bool, seed: int | None = None) -> None:
    """Make a call forward and backward; its operands are arrays of its own."""
    lead = (HEADS,) if option == "documents" else (1, HEADS)
    q, k, v, dout = (np.zeros((*lead, seq, WIDTH), FLOAT16) for seq in (ROWS, COLS, COLS, ROWS))
    more = {} if seed is None else {"seed": seed}
    problem, options = _problem(option, [q, k, v], rung=rung, deterministic=deterministic, **more)
    operands = make_operands(EMULATED.memory, problem, q, k, v, options)
    out, lse, rest = launch.forward(EMULATED, problem, operands)
    launch.backward(EMULATED, problem, operands.having(out=out, lse=lse, lse_rest=rest, dout=dout))


def _expected(option: str, rung: str, deterministic: bool) -> Counter[str]:
    """Return what a call launches, by name."""
    found: Counter[str] = Counter()
    if rung == "flash3_wgmma":
        found.update(["flash3_forward", "flash3_preprocess", "flash3_dkdv"])
        found.update(["flash3_dq"] if deterministic else ["flash3_round_dq"])
        if option in PACKED:  # words for the forward kernel and for each that has scores
            found[PACKED[option]] = 3 if deterministic else 2
    else:
        found.update(["flash2_mma_forward", "half_delta", "flash2_mma_dkdv"])
        found.update(["flash2_mma_dq"] if deterministic else ["flash2_mma_dq_end"])
    return found


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
@pytest.mark.parametrize("rung", TENSOR_CORES)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_repeated_call_copies_nothing_and_launches_its_kernels_alone(
    option: str, rung: str, deterministic: bool
) -> None:
    with counted() as counts:
        _call(option, rung, deterministic)
        counts.launches.clear()
        counts.copies = 0
        _call(option, rung, deterministic)
    assert counts.copies == 0
    assert counts.launches == _expected(option, rung, deterministic)


@pytest.mark.parametrize("rung", TENSOR_CORES)
def test_a_repeated_call_has_the_mask_and_the_seed_that_it_is_given(rung: str) -> None:
    masks: list[Any] = []

    def options() -> dict[str, Any]:
        masks.append(np.ones((ROWS, COLS), bool))
        return {"attn_mask": masks[-1], "dropout_p": 0.1}

    with patch.dict(OPTIONS, {"both": options}), counted() as counts:
        for seed in (11, 12, 2**63 + 5):
            counts.arguments.clear()
            _call("both", rung, True, seed)
            found = [getattr(x, "extras", x) for x in counts.arguments]
            extras = [x for x in found if isinstance(x, Extras) and x.threshold]
            given = [x for x in extras if isinstance(x.mask, np.ndarray)]
            assert len(given) == 3  # forward, by keys and by rows
            assert {x.seed for x in given} == {seed if seed < 2**63 else seed - 2**64}
            assert all(np.shares_memory(x.mask, masks[-1]) for x in given)


def test_sums_that_were_written_to_are_other_sequences() -> None:
    sums = np.array([0, 2, 5], np.int32)
    first = sequences_of(sums, sums, 5, 5)
    assert sequences_of(sums.copy(), [0, 2, 5], 5, 5) == first
    sums[1] = 4
    second = sequences_of(sums, sums, 5, 5)
    assert second != first and hash(second) != hash(first)
    assert first.lengths[0].tolist() == [2, 3] and second.lengths[0].tolist() == [4, 1]


@pytest.mark.parametrize("sums", [[0, 3, 2, 5], [1, 5], [0, 4], [0.0, 5.0], [[0, 5]], [0]])
def test_wrong_sums_are_refused_each_time(sums: Any) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens_q must"):
            sequences_of(sums, [0, 5], 5, 5)


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
