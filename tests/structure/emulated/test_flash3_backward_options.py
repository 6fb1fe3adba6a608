"""Every option on the Hopper rung's backward kernels, their own source on the emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import launch
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import FLOAT16

from ...support.attention_strategies import MASK_MODS, SCORE_MODS, Case
from ...support.emulated.hopper import FUZZ_ONLY, emulated_hopper_backward
from ...support.emulated.target import EMULATED

SEQ_Q, SEQ_K = 70, 131


def _blocks(rng: np.random.Generator) -> kernels.BlockMask:
    states = rng.integers(0, 3, (1, 5, 5))
    return kernels.BlockMask(states, SEQ_Q, SEQ_K, (16, 32), rng.random((1, 16, 32)) < 0.7)


def _additive(rng: np.random.Generator, *shape: int) -> Any:
    return np.where(rng.random(shape) < 0.1, -np.inf, rng.standard_normal(shape)).astype(FLOAT16)


#: Option → what a call of one head has of it.
OPTIONS: dict[str, Any] = {
    "boolean mask": lambda rng: {"attn_mask": rng.random((1, SEQ_Q, SEQ_K)) < 0.7},
    "floating mask": lambda rng: {"attn_mask": _additive(rng, 1, SEQ_Q, SEQ_K)},
    "floating mask of keys": lambda rng: {"attn_mask": _additive(rng, 1, 1, SEQ_K), "softcap": 3.0},
    "floating mask of rows": lambda rng: {"attn_mask": rng.standard_normal((1, SEQ_Q, 1)).astype(FLOAT16)},
    "dropout": lambda rng: {"dropout_p": 0.2, "seed": 5},
    "softcap": lambda rng: {"softcap": 2.0},
    "alibi": lambda rng: {"alibi_slopes": np.array([0.5], np.float32)},
    "mask_mod": lambda rng: {"mask_mod": MASK_MODS[0]},
    "score_mod": lambda rng: {"score_mod": SCORE_MODS[0]},
    "block mask of whole tiles": lambda rng: {
        "block_mask": kernels.BlockMask(np.array([[[1, 0], [1, 1]]]), SEQ_Q, SEQ_K, (64, 128))
    },
    "block mask": lambda rng: {"block_mask": _blocks(rng)},
    "many": lambda rng: {
        "attn_mask": _additive(rng, SEQ_Q, SEQ_K), "dropout_p": 0.3, "seed": 9, "softcap": 3.0,
        "block_mask": _blocks(rng), "mask_mod": MASK_MODS[1], "score_mod": SCORE_MODS[1],
    },
}  # fmt: skip


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
    mask, slopes = (case.options.get(name) for name in ("attn_mask", "alibi_slopes"))
    with emulated_hopper_backward():
        operands = make_operands(EMULATED.memory, problem, *case.operands, mask, slopes)
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
IN_BOTH = ("dropout", "floating mask", "block mask", "many")


#: A call takes seconds: the others are left to ``make fuzz-options``; all are compiled, and run on a GPU.
ALWAYS = ("boolean mask", "dropout", "many")


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
    options = OPTIONS[option](np.random.default_rng(1))
    if not deterministic:
        options |= {"is_causal": True, "causal_offset": 20}
    case = _case(options)
    expected = case.oracle()
    _check(case, _gradients(case, expected, deterministic), expected)


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
def test_what_nobody_sees_may_be_nan_or_infinite(deterministic: bool) -> None:
    rng = np.random.default_rng(2)
    mask = rng.random((SEQ_Q, SEQ_K)) < 0.6
    mask[:, 3:7] = mask[:, 20:33] = mask[9:12] = mask[:64, 64:80] = False
    case = _case({"attn_mask": mask})
    keys, rows = ~mask.any(axis=0), ~mask.any(axis=1)
    expected = case.oracle()
    q, k, v, dout = (x.copy() for x in (*case.operands, case.dout))
    k[:, :, keys], v[:, :, keys] = np.nan, np.inf
    q[:, :, rows], dout[:, :, rows] = np.inf, np.nan
    poisoned = replace(case, q=q, k=k, v=v, dout=dout)
    _check(case, _gradients(poisoned, expected, deterministic), expected)


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


#: Bounds that leave keys before every window, rows that see nothing, and both beside a list of whole tiles.
BOUNDS: list[dict[str, Any]] = [
    {"window_size": (0, 9), "causal_offset": 100},
    {"is_causal": True, "causal_offset": -5},
    {"is_causal": True, "causal_offset": 20, "block_mask": OPTIONS["block mask of whole tiles"]},
]


@pytest.mark.parametrize(
    "deterministic", [pytest.param(True, marks=FUZZ_ONLY), False], ids=["ordered", "atomic"]
)
@pytest.mark.parametrize("number", [*(pytest.param(i, marks=FUZZ_ONLY) for i in (0, 1)), 2])
def test_what_bounds_hide_from_all_may_be_nan(number: int, deterministic: bool) -> None:
    options = dict(BOUNDS[number])
    if "block_mask" in options:
        options |= options["block_mask"](np.random.default_rng(0))
    case = _case(options)
    bounds = case.problem()
    row, col = np.arange(SEQ_Q)[:, None], np.arange(SEQ_K)
    seen = (row + bounds.lower <= col) & (col <= row + bounds.upper)
    if bounds.block_mask is not None:
        seen &= bounds.block_mask.visible(0, SEQ_Q, 0, SEQ_K)[0]
    keys, rows = ~seen.any(axis=0), ~seen.any(axis=1)
    assert keys.any()
    expected = case.oracle()
    q, k, v, dout = (x.copy() for x in (*case.operands, case.dout))
    k[:, :, keys] = v[:, :, keys] = q[:, :, rows] = dout[:, :, rows] = np.nan
    poisoned = replace(case, q=q, k=k, v=v, dout=dout)
    _check(case, _gradients(poisoned, expected, deterministic), expected)


@pytest.mark.parametrize(
    "deterministic", [True, pytest.param(False, marks=FUZZ_ONLY)], ids=["ordered", "atomic"]
)
def test_packed_sequences_end_where_tiles_do_not(deterministic: bool) -> None:
    ends = (0, 17, 17, 20, SEQ_Q), (0, 21, 30, 31, SEQ_K)
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
    sequences = Sequences(np.array(ends[0]), np.array(ends[1]), SEQ_Q, SEQ_K)
    case.dout[:, 17:20] = np.inf  # of the third sequence; its neighbours know nothing of it
    found = _gradients(case, expected, deterministic, sequences)
    found = {name: array.copy() for name, array in found.items()}
    for name, place in (("dq", slice(17, 20)), ("dk", slice(30, 31)), ("dv", slice(30, 31))):
        found[name][:, place] = expected[name][:, place]
    _check(case, found, expected)
