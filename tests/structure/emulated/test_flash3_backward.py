"""Hopper's backward rung without a GPU: its kernels' own source on an emulated one; its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    KeyGradients,
    key_layout,
    key_tiles,
    parts_of,
    query_layout,
    query_tiles,
)
from kernels.cuda.attention.flash3_wgmma.layout import PADDING, Widths
from kernels.cuda.device.warpgroups import ALIGNMENT, WARPGROUP, block_bytes
from kernels.cuda.emulator.schedule import held_back
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.attention.large_scores import NAMES, large_case
from ...support.attention.mask_mods import mask_mods
from ...support.attention.on_cuda import backward, packed, run
from ...support.attention.option_examples import option_examples
from ...support.attention.strategies import Case
from ...support.device.emulated_gpu import FUZZ_ONLY, emulated_gpu, emulated_only, longer
from ...support.examples import at_most

#: Shared memory that a block of compute capability 9.0 can have, in bytes.
MOST_SHARED = 227 * 1024
in_both_modes = pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])


class Call(NamedTuple):
    """A call: seq_q, seq_k, head_dim, value_dim; options; dtype; heads of q and of k; a gradient of lse."""

    sizes: tuple[int, int, int, int]
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: Any = FLOAT16
    heads: tuple[int, int] = (1, 1)
    has_dlse: bool = False

    @property
    def case(self) -> Case:
        """Return the call with drawn operands."""
        rng = np.random.default_rng(0)
        (seq_q, seq_k, head, value), (heads, key_heads) = self.sizes, self.heads
        shapes = (heads, seq_q, head), (key_heads, seq_k, head), (key_heads, seq_k, value)
        # Heads beside the last dimension, as models have them.
        arrays = [
            rng.standard_normal((1, seq, count, dim)).swapaxes(1, 2)
            for count, seq, dim in (*shapes, (heads, seq_q, value))
        ]
        dlse = rng.standard_normal((1, heads, seq_q)) if self.has_dlse else None
        return Case(*arrays, self.options, (16, 16), dlse).in_dtype(self.dtype)  # type: ignore[arg-type]


def _check(case: Case, deterministic: bool, exact: Case | None = None) -> None:
    """Compare the gradients of the textbook's forward pass with its own, of the case or of another."""
    exact = exact or case
    right, dtype = exact.oracle(), case.q.dtype
    given = {"out": right["out"].astype(dtype), "lse": right["lse"].astype(np.float32)}
    with emulated_gpu():
        found = backward(case, given, "flash3_wgmma", deterministic=deterministic)
    exact.check_halves({**found, "out": given["out"]}, "on the emulated GPU")


def _causal(offset: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": True, "causal_offset": offset, **more}


CALLS = {
    "odd lengths": Call((75, 130, 64, 64)),
    "causal": Call((150, 150, 64, 64), _causal(0), BFLOAT16),
    "a window": Call((141, 141, 64, 64), {"window_size": (20, 10)}),
    "a window far off": Call((80, 90, 64, 64), {"window_size": (0, 30), "causal_offset": 20}),
    "value dim, two panels": Call((70, 70, 40, 72), _causal(0), heads=(2, 2)),
    "head dim, two panels": Call((70, 133, 128, 24), {}, BFLOAT16),
    "rows and keys that are all masked": Call((140, 150, 64, 64), _causal(-75)),
    "shared keys, gradient of lse": Call(
        (40, 40, 64, 64), _causal(0, enable_gqa=True), FLOAT16, (2, 1), True
    ),
    "more than fits in registers": Call((200, 70, 136, 144), _causal(4)),
    "more rows than stages": Call((330, 70, 64, 64)),
    "more keys than stages": Call((70, 450, 64, 64), {}, BFLOAT16),
}  # fmt: skip


@emulated_only
@pytest.mark.slow
@in_both_modes
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_own_source_computes_the_gradients(name: str, deterministic: bool) -> None:
    _check(CALLS[name].case, deterministic)


@emulated_only
@pytest.mark.slow
def test_ordered_gradients_do_not_depend_on_the_number_of_blocks() -> None:
    case = CALLS["more keys than stages"].case
    right = case.oracle()
    given = {"out": right["out"].astype(BFLOAT16), "lse": right["lse"].astype(np.float32)}
    found = []
    for blocks in (1, 3):
        with emulated_gpu(blocks=blocks):
            found.append(backward(case, given, "flash3_wgmma", deterministic=True))
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(found[0][name], found[1][name]), name


@emulated_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "shape"),
    [
        # So wide that there is one tile of dout, free for the next as soon as it was read.
        (0, (130, 40, 208, 208)), (WARPGROUP + 5, (130, 40, 208, 208)),
        # Each consumer reads the dS of both, of the tile before.
        (WARPGROUP + 5, (200, 70, 64, 64)), (2 * WARPGROUP + 5, (200, 70, 64, 64)),
    ],
)  # fmt: skip
def test_no_thread_is_too_late(late: int, shape: tuple[int, int, int, int]) -> None:
    with held_back(late):
        _check(Call(shape).case, True)


SEQ_Q, SEQ_K = 70, 131
USUAL = Call((SEQ_Q, SEQ_K, 64, 40))
#: Option → what a call of one head has of it; these kernels read no sinks.
OPTIONS = option_examples(1, SEQ_Q, SEQ_K, FLOAT16) | {
    "block mask of whole tiles": {
        "block_mask": kernels.BlockMask(np.array([[[1, 0], [1, 1]]]), SEQ_Q, SEQ_K, (64, 128))
    },
}
del OPTIONS["sink"], OPTIONS["everything"]["sink"]
#: What is tried in both modes; with lists, dQ is a kernel of its own in the deterministic one.
IN_BOTH = ("dropout", "floating mask", "block mask", "everything")
#: A call takes seconds: the others are left to ``make fuzz-options``; all are compiled, and run on a GPU.
ALWAYS = ("boolean mask", "dropout", "everything", "chunks")


@emulated_only
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
    options = OPTIONS[option] if deterministic else OPTIONS[option] | _causal(20)
    _check(USUAL._replace(options=options).case, deterministic)


@emulated_only
@in_both_modes
def test_memory_beyond_the_sequences_is_never_read_into_a_result(deterministic: bool) -> None:
    case = USUAL._replace(options=_causal(20)).case
    arrays = {name: longer(getattr(case, name)) for name in ("q", "k", "v", "dout")}
    _check(replace(case, **arrays), deterministic, case)


@emulated_only
@in_both_modes
def test_lists_of_whole_tiles_take_kernels_that_mask_no_element(deterministic: bool) -> None:
    """Masking each element of whole tiles would cost time."""
    seq_q = 200
    mask = kernels.BlockMask(np.array([[[1, 0], [1, 0]], [[0, 0], [1, 0]]]), seq_q, SEQ_K, 128)
    case = Call((seq_q, SEQ_K, 64, 40), {"block_mask": mask}, heads=(2, 2)).case
    problem = case.problem(rung="flash3_wgmma", deterministic=deterministic).unseeded
    with emulated_gpu():
        assert flash3_wgmma_backward._plan(problem, 0).features.whole_tiles
    q, k, v, dout = (x.copy() for x in (*case.operands, case.dout))
    # No tile has these.
    k[:, :, 128:], v[:, :, 128:], q[:, 1, :128], dout[:, 1, :128] = np.nan, np.inf, np.nan, np.inf
    _check(replace(case, q=q, k=k, v=v, dout=dout), deterministic, case)


@emulated_only
@at_most(2)
@given(mask_mods(), st.booleans(), st.sampled_from([{}, {"is_causal": True}, {"softcap": 2.0}]))
def test_a_mask_mod_that_was_evaluated_is_the_textbooks(
    mod: Any, deterministic: bool, options: dict[str, Any]
) -> None:
    with patch("kernels.problem.listed_mods.BLOCK", (16, 32)):
        _check(USUAL._replace(options={"mask_mod": mod, **options}).case, deterministic)


#: Bounds, and the keys of the tile that no row reads: one before every window, one that the list has.
BOUNDS: list[tuple[dict[str, Any], slice]] = [
    ({"window_size": (0, 9), "causal_offset": 128}, slice(0, 128)),
    (
        _causal(0, block_mask=kernels.BlockMask(np.array([[[1, 0], [1, 1]]]), 128, SEQ_K, (64, 128))),
        slice(128, SEQ_K),
    ),
]  # fmt: skip


@emulated_only
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
    case = Call((128, SEQ_K, 64, 40), options).case
    k, v = case.k.copy(), case.v.copy()
    k[:, :, unread], v[:, :, unread] = np.nan, np.inf
    _check(replace(case, k=k, v=v), deterministic, case)


@emulated_only
@pytest.mark.slow
@pytest.mark.parametrize(
    "deterministic", [True, pytest.param(False, marks=FUZZ_ONLY)], ids=["ordered", "atomic"]
)
@pytest.mark.parametrize(
    "lengths",
    [
        ((17, 0, 3, SEQ_Q - 20), (21, 9, 1, SEQ_K - 31)),
        # The second consumer has rows and keys of the first sequence, too.
        ((66, 0, 3, SEQ_Q - 69), (105, 5, 1, SEQ_K - 111)),
    ],
    ids=["one consumer", "two consumers"],
)
def test_packed_sequences_end_where_tiles_do_not(lengths: Any, deterministic: bool) -> None:
    options = _causal(5, softcap=3.0)
    # Empty ones, so that both kinds of tiles have empty ones behind them.
    of_q, of_k = ((*own, 0, 0, 0) for own in lengths)
    case = packed(0, of_q, of_k, (64, 40), options).in_dtype(FLOAT16)
    case.dlse = None
    right = case.oracle()
    given = {"out": right["out"].astype(FLOAT16), "lse": right["lse"].astype(np.float32)}
    rows, keys, _ = case.alone(2)  # which affects no other
    case.q[:, rows], case.dout[:, rows] = np.nan, np.inf
    case.k[:, keys], case.v[:, keys] = np.nan, np.inf
    # The first consumer is late, and writes zeros that the other one multiplies by, too.
    with held_back(*range(WARPGROUP, 2 * WARPGROUP)), emulated_gpu():
        found = backward(case, given, "flash3_wgmma", deterministic=deterministic)
    assert not found["dk"][:, case.alone(1)[1]].any()
    for number in (0, 3):
        rows, keys, alone = case.alone(number)
        parts = {"out": given["out"][:, rows], "dq": found["dq"][:, rows]}
        parts |= {name: found[name][:, keys] for name in ("dk", "dv")}
        alone.check_halves(parts, f"of sequence {number}")


#: A call takes seconds: the others are left to ``make fuzz-options``, and run on a GPU.
LARGE = ("large queries", "a row of the least number", "rows of both kinds")


@emulated_only
@pytest.mark.slow
@in_both_modes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in LARGE else FUZZ_ONLY)
        for name in NAMES
        if name != "a negative scale"
    ],
)
def test_rows_of_large_scores_have_their_probabilities(name: str, deterministic: bool) -> None:
    case = large_case(name, BFLOAT16, 5, 35)
    with emulated_gpu():
        found = run(case, "flash3_wgmma", deterministic=deterministic)
    case.check(found, name)


@given(
    head=st.integers(1, 16).map(lambda n: 16 * n),
    value=st.integers(1, 16).map(lambda n: 16 * n),
    deterministic=st.booleans(),
    is_listed=st.booleans(),
)
def test_tiles_fit_in_shared_memory_where_the_swizzle_begins_anew(
    head: int, value: int, deterministic: bool, is_listed: bool
) -> None:
    """A launch with more shared memory than a block has fails."""
    widths = Widths(head, value)
    kernels_by_keys = parts_of(widths, deterministic, is_listed)
    for parts in kernels_by_keys:
        layout = key_layout(widths, parts)
        tiles = key_tiles(layout, widths, parts)
        assert block_bytes(tiles) <= MOST_SHARED
        assert PADDING % layout.block_q == 0
        assert all(tiles[name] % ALIGNMENT == 0 for name in ("k", "v", "q", "dout", "ds"))
        assert all(tiles[name] % 16 == 0 for name in ("dq", "shifts", "delta", "barriers"))
    by_rows = query_layout(widths)
    tiles = query_tiles(by_rows, widths)
    assert block_bytes(tiles) <= MOST_SHARED
    assert by_rows.block_k % 16 == 0
    assert all(tiles[name] % ALIGNMENT == 0 for name in ("q", "dout", "k", "v"))
    assert tiles["barriers"] % 8 == 0
    for part in KeyGradients._fields[:2]:  # each gradient is computed once
        assert sum(getattr(parts, part) for parts in kernels_by_keys) == 1
