"""Every option on the Hopper rung's forward kernel, its own source on the emulated GPU."""

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
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.flash3_wgmma.forward.kernel import SCHEDULER_THREAD
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32

from ...support.attention.mask_mods import mask_mods
from ...support.attention.option_examples import option_examples
from ...support.attention.strategies import Case
from ...support.emulated.gpu import held_back
from ...support.emulated.hopper import FUZZ_ONLY, emulated_hopper
from ...support.emulated.target import EMULATED
from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays

#: What is emulated: two consumers in turns, and small tiles.
SMALL = ForwardLayout(2, 32, 2, 2, True)
SEQ_Q, SEQ_K = 75, 90


#: Option → what a call of two heads has of it.
OPTIONS = option_examples(2, SEQ_Q, SEQ_K, FLOAT16)


def _case(
    options: dict[str, Any], dtype: Any = FLOAT16, lengths: tuple[int, int] = (SEQ_Q, SEQ_K)
) -> Case:
    rng, (seq_q, seq_k) = np.random.default_rng(0), lengths
    shapes = (1, 2, seq_q, 64), (1, 2, seq_k, 64), (1, 2, seq_k, 40)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return Case(q, k, v, np.zeros((1, 2, seq_q, 40), dtype), options, (16, 16))


def _forward(
    case: Case, layout: ForwardLayout | None = SMALL, sequences: Any = None, blocks: int = 2
) -> tuple[Any, Any]:
    problem = replace(case.problem(rung="flash3_wgmma"), sequences=sequences)
    with emulated_hopper(layout, blocks):
        operands = make_operands(EMULATED.memory, problem, *case.operands, case.options)
        return launch.forward(EMULATED, problem, operands)[:2]


def _check(case: Case, found: tuple[Any, Any]) -> None:
    wide = case.plain()
    problem = wide.problem(rung="naive")
    memory = launch.NUMPY.memory
    operands = make_operands(memory, problem, *wide.operands, wide.options)
    out, lse, _ = launch.forward(launch.NUMPY, problem, operands)
    assert_close_arrays(found[0], out, case.q.dtype, "out")
    assert_close_arrays(found[1], lse, FLOAT32, "lse")


#: A call takes seconds: the others are left to ``make fuzz-options``; all are compiled, and run on a GPU.
ALWAYS = ("boolean mask", "floating mask", "dropout", "softcap", "block mask", "sink", "chunks")


@pytest.mark.parametrize(
    "option",
    [pytest.param(option, marks=[] if option in ALWAYS else FUZZ_ONLY) for option in OPTIONS],
)
@pytest.mark.parametrize(
    "is_causal", [True, pytest.param(False, marks=FUZZ_ONLY)], ids=["causal", "all"]
)
def test_an_option_is_the_textbooks(option: str, is_causal: bool) -> None:
    options = dict(OPTIONS[option])
    if is_causal:
        options |= {"is_causal": True, "causal_offset": -10}
    # Rounding to bfloat16 takes the emulation several times as long.
    case = _case(options, BFLOAT16 if option == "softcap" else FLOAT16)
    _check(case, _forward(case))


def test_memory_beyond_the_sequences_is_never_read_into_a_result() -> None:
    case = _case({"is_causal": True, "causal_offset": 20})
    longer = {}
    for name in ("q", "k", "v"):
        array = getattr(case, name)
        whole = np.full((*array.shape[:2], array.shape[2] + 40, array.shape[3]), np.nan, FLOAT16)
        whole[:, :, : array.shape[2]] = array
        longer[name] = whole[:, :, : array.shape[2]]
    _check(case, _forward(replace(case, **longer)))


#: Threads of a block of two consumers: the producer of keys and values, the scheduler, and consumer lanes.
LATE = {
    "copier": 0, "scheduler": SCHEDULER_THREAD, "lane": WARPGROUP + 1, "other consumer": 2 * WARPGROUP
}  # fmt: skip


@pytest.mark.parametrize("late", LATE)
def test_no_thread_is_too_late(late: str) -> None:
    states = np.zeros((1, 6, 2), int)
    states[0, 0, 0] = states[0, 3, 1] = 1  # other tiles of rows see nothing
    rng, block = np.random.default_rng(3), (SMALL.block_q, SMALL.block_k)
    mask = kernels.BlockMask(states, 6 * block[0] - 20, 2 * block[1], block)
    shapes = (1, 1, mask.seq_q, 16), (1, 1, mask.seq_k, 16), (1, 1, mask.seq_k, 16)
    q, k, v = (rng.standard_normal(shape).astype(FLOAT16) for shape in shapes)
    case = Case(q, k, v, np.zeros_like(q), {"block_mask": mask}, (16, 16))
    with held_back(LATE[late]):
        _check(case, _forward(case, blocks=1))


def test_lists_of_whole_tiles_take_a_kernel_that_hides_nothing() -> None:
    block = SMALL.block_q, SMALL.block_k
    mask = kernels.BlockMask(np.array([[[1, 0, 1]], [[0, 1, 0]]]), SEQ_Q, SEQ_K, block)
    case = _case({"block_mask": mask})
    k, v = case.k.copy(), case.v.copy()
    for head, hidden in enumerate(~mask.dense()[:, 0]):
        k[:, head, hidden], v[:, head, hidden] = np.nan, np.inf
    with emulated_hopper(SMALL):
        assert flash3_wgmma.features_for(case.problem(rung="flash3_wgmma")).whole_tiles
    _check(case, _forward(replace(case, k=k, v=v)))


@pytest.mark.slow
@at_most(3)
@given(
    mask_mods(),
    st.sampled_from([{}, {"is_causal": True}, {"dropout_p": 0.3, "seed": 4}, {"softcap": 2.0}]),
    st.sampled_from([ForwardLayout(2, 32, 2, 2, True), ForwardLayout(1, 48, 2, 1, False)]),
)
def test_a_mask_mod_that_was_evaluated_is_the_textbooks(
    mod: Any, options: dict[str, Any], layout: ForwardLayout
) -> None:
    case = _case({"mask_mod": mod, **options})
    with patch("kernels.problem.listed_mods.BLOCK", (16, 32)):
        _check(case, _forward(case, layout))


def test_tiles_of_keys_before_every_window_are_never_read() -> None:
    case = _case({"window_size": (0, 9), "causal_offset": 40, "softcap": 2.0})
    k, v = case.k.copy(), case.v.copy()
    k[:, :, : SMALL.block_k] = v[:, :, : SMALL.block_k] = np.nan
    _check(case, _forward(replace(case, k=k, v=v)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "ping_pong", "row_ends", "key_ends"),
    [
        (1, True, (0, 17, 17, 20, SEQ_Q), (0, 21, 30, 31, SEQ_K)),
        (2, True, (0, 17, 17, 20, SEQ_Q), (0, 21, 30, 31, SEQ_K)),
        # Bounds leave the first consumer fewer tiles than the second.
        (2, True, (0, 128, 128, 131), (0, 105, 110, 120)),
        (2, False, (0, 128, 128, 131), (0, 105, 110, 120)),
    ],
)
def test_packed_sequences_end_where_tiles_do_not_and_do_not_affect_each_other(
    items: int, ping_pong: bool, row_ends: tuple[int, ...], key_ends: tuple[int, ...]
) -> None:
    ends, lengths = (row_ends, key_ends), (row_ends[-1], key_ends[-1])
    case = _case({"is_causal": True, "causal_offset": 5}, lengths=lengths)
    case = replace(case, **{name: getattr(case, name)[0] for name in ("q", "k", "v", "dout")})
    rows, keys = (slice(*sums[2:4]) for sums in ends)  # of the third sequence
    case.q[:, rows], case.k[:, keys], case.v[:, keys] = np.nan, np.nan, np.inf
    # Empty ones, so that there are empty tiles behind the others.
    sums_q, sums_k = (np.pad(np.array(own), (0, 3), "edge") for own in ends)
    sequences = Sequences(sums_q, sums_k, *lengths)
    layout = replace(SMALL, items=items, ping_pong=ping_pong)
    # The first consumer is late, and writes the zeros that the other one multiplies by, too.
    with held_back(*range(WARPGROUP, 2 * WARPGROUP)):
        out, lse = _forward(case, layout, sequences, blocks=1)
    for i in (0, 3)[: len(row_ends) - 3]:
        rows, cols = (slice(*sums[i : i + 2]) for sums in ends)
        own = replace(case, q=case.q[:, rows], k=case.k[:, cols], v=case.v[:, cols])
        _check(replace(own, dout=case.dout[:, rows]), (out[:, rows], lse[:, rows]))


def test_all_options_together_are_the_textbooks() -> None:
    options = {**OPTIONS["everything"], "is_causal": True, "causal_offset": 5}
    case = _case(options)
    _check(case, _forward(case))
