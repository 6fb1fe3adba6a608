"""Every option on the Hopper rung's backward kernels, their own source on the emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import FLOAT16

from ...support.attention.mask_mods import mask_mods
from ...support.attention.option_examples import option_examples
from ...support.attention.strategies import Case
from ...support.emulated.gpu import held_back
from ...support.emulated.hopper import FUZZ_ONLY, emulated_hopper_backward
from ...support.emulated.target import EMULATED
from ...support.examples import at_most

SEQ_Q, SEQ_K = 70, 131


#: Option → what a call of one head has of it; this kernel reads no sinks.
OPTIONS = option_examples(1, SEQ_Q, SEQ_K, FLOAT16) | {
    "block mask of whole tiles": {
        "block_mask": kernels.BlockMask(np.array([[[1, 0], [1, 1]]]), SEQ_Q, SEQ_K, (64, 128))
    },
}
del OPTIONS["sink"], OPTIONS["everything"]["sink"]


def _case(
    options: dict[str, Any],
    dtype: Any = FLOAT16,
    lead: tuple[int, ...] = (1, 1),
    seq_q: int = SEQ_Q,
) -> Case:
    rng = np.random.default_rng(0)
    sizes = (seq_q, 64), (SEQ_K, 64), (SEQ_K, 40), (seq_q, 40)
    q, k, v, dout = (rng.standard_normal((*lead, *size)).astype(dtype) for size in sizes)
    return Case(q, k, v, dout, options, (16, 16))


def _gradients(
    case: Case, expected: dict[str, Any], deterministic: bool, sequences: Any = None
) -> dict[str, Any]:
    """Run the backward kernels on what the textbook has of the forward pass."""
    problem = case.problem(rung="flash3_wgmma", deterministic=deterministic)
    problem = replace(problem, sequences=sequences)
    with emulated_hopper_backward():
        operands = make_operands(EMULATED.memory, problem, *case.operands, case.options)
        operands = operands.having(
            out=expected["out"].astype(case.q.dtype),
            lse=expected["lse"].astype(np.float32),
            dout=case.dout,
        )
        found = launch.backward(EMULATED, problem, operands)
    return dict(zip(("dq", "dk", "dv"), found, strict=False))


def _check(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> None:
    unit = 2.0**-10 if case.q.dtype == FLOAT16 else 2.0**-7
    for name, array in found.items():
        wanted = expected[name]
        error = np.abs(array.astype(np.float64) - wanted) / (4 * unit * (1 + np.abs(wanted)))
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        assert error[worst] <= 1, f"{name} is off at {worst}: {array[worst]}, not {wanted[worst]}"


#: What is tried in both modes; dQ is a kernel of its own in the deterministic one.
IN_BOTH = ("dropout", "floating mask", "block mask", "everything")


#: A call takes seconds: the others are left to ``make fuzz-options``; all are compiled, and run on a GPU.
ALWAYS = ("boolean mask", "dropout", "everything", "chunks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "deterministic"),
    [
        *(
            pytest.param(option, False, marks=[] if option in ALWAYS else FUZZ_ONLY)
            for option in OPTIONS
        ),
        *(pytest.param(option, True, marks=FUZZ_ONLY) for option in IN_BOTH[:-1]),
        (IN_BOTH[-1], True),
    ],
)
def test_an_option_is_the_textbooks(option: str, deterministic: bool) -> None:
    options = dict(OPTIONS[option])
    if not deterministic:
        options |= {"is_causal": True, "causal_offset": 20}
    case = _case(options)
    expected = case.oracle()
    _check(case, _gradients(case, expected, deterministic), expected)


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
def test_memory_beyond_the_sequences_is_never_read_into_a_result(deterministic: bool) -> None:
    case = _case({"is_causal": True, "causal_offset": 20})
    longer = {}
    for name in ("q", "k", "v", "dout"):
        array = getattr(case, name)
        whole = np.full((*array.shape[:2], array.shape[2] + 40, array.shape[3]), np.nan, FLOAT16)
        whole[:, :, : array.shape[2]] = array
        longer[name] = whole[:, :, : array.shape[2]]
    expected = case.oracle()
    _check(case, _gradients(replace(case, **longer), expected, deterministic), expected)


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
def test_lists_of_whole_tiles_take_kernels_that_hide_nothing(deterministic: bool) -> None:
    seq_q = 200
    mask = kernels.BlockMask(np.array([[[1, 0], [1, 0]], [[0, 0], [1, 0]]]), seq_q, SEQ_K, 128)
    case = _case({"block_mask": mask}, lead=(1, 2), seq_q=seq_q)
    problem = case.problem(rung="flash3_wgmma", deterministic=deterministic).unseeded
    with emulated_hopper_backward():
        assert flash3_wgmma_backward._plan(problem, 0).features.whole_tiles
    expected = case.oracle()
    q, k, v, dout = (x.copy() for x in (*case.operands, case.dout))
    # No tile has these.
    k[:, :, 128:], v[:, :, 128:], q[:, 1, :128], dout[:, 1, :128] = np.nan, np.inf, np.nan, np.inf
    poisoned = replace(case, q=q, k=k, v=v, dout=dout)
    _check(case, _gradients(poisoned, expected, deterministic), expected)


@at_most(2)
@given(mask_mods(), st.booleans(), st.sampled_from([{}, {"is_causal": True}, {"softcap": 2.0}]))
def test_a_mask_mod_that_was_evaluated_is_the_textbooks(
    mod: Any, deterministic: bool, options: dict[str, Any]
) -> None:
    case = _case({"mask_mod": mod, **options})
    expected = case.oracle()
    with patch("kernels.problem.listed_mods.BLOCK", (16, 32)):
        _check(case, _gradients(case, expected, deterministic), expected)


#: Bounds, and the keys of the tile that no row reads: one before every window, one that the list has.
BOUNDS: list[tuple[dict[str, Any], slice]] = [
    ({"window_size": (0, 9), "causal_offset": 128}, slice(0, 128)),
    (
        {
            "is_causal": True, "causal_offset": 0,
            "block_mask": kernels.BlockMask(np.array([[[1, 0], [1, 1]]]), 128, SEQ_K, (64, 128)),
        },
        slice(128, SEQ_K),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "deterministic", [pytest.param(True, marks=FUZZ_ONLY), False], ids=["ordered", "atomic"]
)
@pytest.mark.parametrize(
    ("options", "unread"), [pytest.param(*BOUNDS[0], marks=FUZZ_ONLY), BOUNDS[1]],
    ids=["window", "block mask"],
)  # fmt: skip
def test_tiles_out_of_bounds_are_never_read(
    options: dict[str, Any], unread: slice, deterministic: bool
) -> None:
    case = _case(options, seq_q=128)
    expected = case.oracle()
    k, v = case.k.copy(), case.v.copy()
    k[:, :, unread], v[:, :, unread] = np.nan, np.inf
    found = _gradients(replace(case, k=k, v=v), expected, deterministic)
    _check(case, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deterministic", [True, pytest.param(False, marks=FUZZ_ONLY)], ids=["ordered", "atomic"]
)
@pytest.mark.parametrize(
    "ends",
    [
        ((0, 17, 17, 20, SEQ_Q), (0, 21, 30, 31, SEQ_K)),
        # The second consumer has rows and keys of the first sequence, too.
        ((0, 66, 66, 69, SEQ_Q), (0, 105, 110, 111, SEQ_K)),
    ],
    ids=["one consumer", "two consumers"],
)
def test_packed_sequences_end_where_tiles_do_not(
    ends: tuple[tuple[int, ...], tuple[int, ...]], deterministic: bool
) -> None:
    options = {"is_causal": True, "causal_offset": 5, "softcap": 3.0}
    case = _case(options, lead=(2,))
    names = "q", "k", "v", "dout"
    pieces, oracles = [], []
    for i in range(4):
        rows, cols = (slice(*sums[i : i + 2]) for sums in ends)
        places = {"q": rows, "k": cols, "v": cols, "dout": rows}
        own = replace(case, **{name: getattr(case, name)[:, places[name]] for name in names})
        if rows.stop > rows.start:
            pieces.append((i, places))
            oracles.append(own.oracle())
    expected = {
        "out": np.zeros(case.dout.shape), "lse": np.zeros(case.dout.shape[:2]),
        "dq": np.zeros(case.q.shape), "dk": np.zeros(case.k.shape), "dv": np.zeros(case.v.shape),
    }  # fmt: skip
    for (_, places), oracle in zip(pieces, oracles, strict=True):
        for name, place in (("out", "q"), ("lse", "q"), ("dq", "q"), ("dk", "k"), ("dv", "k")):
            expected[name][:, places[place]] = oracle[name]
    # Empty ones, so that both kinds of tiles have empty ones behind them.
    sums_q, sums_k = (np.pad(np.array(own), (0, 3), "edge") for own in ends)
    sequences = Sequences(sums_q, sums_k, SEQ_Q, SEQ_K)
    # Of the third sequence, which affects no other.
    rows, keys = (slice(*sums[2:4]) for sums in ends)
    case.q[:, rows], case.dout[:, rows] = np.nan, np.inf
    case.k[:, keys], case.v[:, keys] = np.nan, np.inf
    # The first consumer is late, and writes zeros that the other one multiplies by, too.
    with held_back(*range(WARPGROUP, 2 * WARPGROUP)):
        found = _gradients(case, expected, deterministic, sequences)
    found = {name: array.copy() for name, array in found.items()}
    for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
        found[name][:, place] = expected[name][:, place]
    _check(case, found, expected)
