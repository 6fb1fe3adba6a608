"""The options of attention on the device, many at a time: every CUDA rung, in the simulator.

Each set of options is compiled anew on a GPU; ``test_cuda_attention_long`` tries a few sets of many there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.common.philox import keep_scale
from kernels.runtime.targets import IS_SIMULATOR

from ....support.attention.on_cuda import (
    RUNGS,
    blind,
    draw,
    fitting,
    packed,
    run,
    taken_by,
    tiny,
)
from ....support.attention.strategies import FEATURES, MASK_MODS, SCORE_MODS, Case
from ....support.examples import at_most

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("quick_barriers")]

many_options = pytest.mark.skipif(not IS_SIMULATOR, reason="compiles hundreds of kernels on a GPU")


@many_options
@pytest.mark.parametrize("rung", RUNGS)
@at_most(12)
@given(case=tiny(features=FEATURES))
def test_every_rung_is_the_textbook_with_its_options(rung: str, case: Case) -> None:
    case = taken_by(rung, case)
    case.check(run(case, rung, fitting(rung, case.tile)), f"by {rung}")


@many_options
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    "hide",
    [
        {"attn_mask": np.arange(7)[:, None] >= 2},
        {"attn_mask": np.where(np.arange(7)[:, None] >= 2, 0.0, -np.inf)},
        {"mask_mod": lambda batch, head, row, col: row >= 2},
        {"block_mask": kernels.BlockMask.from_dense(np.arange(7)[:, None] * np.ones(6) >= 2, 16)},
        {"window_size": (0, 0), "causal_offset": -2},
    ],
    ids=["boolean", "float", "mask_mod", "blocks", "window"],
)
def test_a_row_that_an_option_hides_everything_from_is_zero(
    rung: str, hide: dict[str, Any]
) -> None:
    q, k, v, dout, dlse = draw(1, (1, 7, 3), (1, 6, 3), (1, 6, 4), (1, 7, 4), (1, 7))
    dropped = {"dropout_p": 0.4, "seed": 5}
    case = Case(q, k, v, dout, {**hide, **dropped}, (3, 4), dlse)
    if taken_by(rung, case).options != case.options:
        pytest.skip("flash1 does not have the option")
    blind(case, rung, 2)


@many_options
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(12, 20), (20, 8)])
def test_tiles_need_not_fit_the_blocks_of_a_mask(causal: bool, tile: Any) -> None:
    """Several blocks a tile and several tiles a block; a pattern for each of the heads."""
    seq_q, seq_k = 40, 35
    q, k, v, dout = draw(2, *[(2, seq_q, 2), (2, seq_k, 2)], (2, seq_k, 1), (2, seq_q, 1))
    rng = np.random.default_rng(0)
    states, patterns = rng.integers(0, 4, (2, 3, 3)), rng.random((2, 16, 16)) < 0.5
    mask = kernels.BlockMask(states, seq_q, seq_k, 16, patterns)
    case = Case(q, k, v, dout, {"block_mask": mask, "is_causal": causal}, tile)
    case.check(run(case, "flash2", tile), "by flash2")


@many_options
@at_most(4)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=3),
    options=st.sampled_from([
        {"is_causal": True},
        {"window_size": (2, 1), "enable_gqa": True, "dropout_p": 0.3, "seed": 1},
        {"mask_mod": MASK_MODS[0], "score_mod": SCORE_MODS[1], "dropout_p": 0.3, "seed": 2},
        {"alibi_slopes": np.array([0.5, 0.25]), "softcap": 2.0, "is_causal": True},
    ]),
)  # fmt: skip
def test_packed_sequences_are_calls_of_their_own(lengths: Any, options: Any) -> None:
    lengths_q, lengths_k = zip(*lengths, (3, 2), strict=True)
    case = packed(3, lengths_q, lengths_k, (3, 2), options)
    case.check(run(case, "flash2", fitting("flash2", case.tile)), "by flash2")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_dropout_drops_the_same_entries_on_every_rung_and_in_both_passes(
    rung: str, seed: int
) -> None:
    """Equal scores, and values that are the identity: out is P ∘ Z, and so is dv with such a dout."""
    size, dim = (9, 2) if IS_SIMULATOR else (128, 4)
    q, identity = np.zeros((2, 2, size, dim), np.float32), np.eye(size, dtype=np.float32)
    identity = np.broadcast_to(identity, (2, 2, size, size))
    case = Case(q, q, identity, identity, {"dropout_p": 0.3, "seed": seed}, (1, 1))
    actual = run(case, rung)
    kept = kernels.dropout_mask((2, 2, size, size), 0.3, seed)
    np.testing.assert_array_equal(actual["out"] > 0, kept)
    np.testing.assert_array_equal(np.swapaxes(actual["dv"], -1, -2) > 0, kept)
    np.testing.assert_allclose(actual["out"][kept], keep_scale(0.3) / size, rtol=1e-6)
