"""A call runs by the plan of its kind: never by another call's, whatever came before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels

from ..support.attention.strategies import Case

SEQ = 10  # more rows than decoding takes


def operands(dim: int = 4) -> Any:
    """Return q, k, v and dout."""
    return np.random.default_rng(0).standard_normal((4, 1, 2, SEQ, dim), np.float32)


def check(arrays: Any, options: dict[str, Any]) -> None:
    """Compare a call with the textbook."""
    case = Case(*arrays, options=options)
    case.check(case.call(), "after other calls")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "causal_offset": 2},
    {"window_size": (2, 1)},
    {"scale": 0.25},
    {"softcap": 3.0},
    {"dropout_p": 0.4, "seed": 3},
    {"dropout_p": 0.4, "seed": 4},
    {"dropout_p": 0.4, "seed": 2**63 + 1},
    {"attn_mask": np.arange(SEQ * SEQ).reshape(SEQ, SEQ) % 3 > 0},
    {"attn_mask": np.arange(SEQ * SEQ).reshape(SEQ, SEQ) % 5 > 0},
    {"alibi_slopes": np.array([0.5, 0.25])},
    {"alibi_slopes": np.array([0.1, 0.9])},
    {"sink": np.array([0.5, -1.0])},
    {"block_mask": kernels.BlockMask.from_dense(np.tri(SEQ, dtype=bool), 16)},
    {"score_mod": (lambda s, b, h, r, c: s * 0.5, lambda s, b, h, r, c: 0.5)},
]


@given(st.lists(st.sampled_from(OPTIONS), min_size=2, max_size=5), st.booleans())
def test_calls_that_follow_one_another_have_their_own_options(
    calls: list[dict[str, Any]], repeat: bool
) -> None:
    arrays = operands()
    for options in calls * (1 + repeat):
        check(arrays, options)


def test_more_kinds_than_are_kept_still_run() -> None:
    q, k, v, _ = arrays = operands(dim=2)
    for number in range(1100):
        kernels.flash_attention_forward(q, k, v, scale=1.0 + number / 1000)
    check(arrays, {"scale": 1.0})


def test_a_plan_can_be_read() -> None:
    q, k, v, _ = operands()
    plan = kernels.plan(q, k, v, is_causal=True)
    assert (plan.target, plan.rung, plan.backward) == ("cpu", "flash2", False)
    assert plan.flop == 2 * 2 * (SEQ * (SEQ + 1) // 2) * (4 + 4)
    assert plan.moved_bytes == 4 * q.nbytes + 2 * 2 * SEQ * 4  # lse and its rest
    assert "forward on cpu by flash2" in str(plan)
    (loop,) = plan.launches
    assert str(loop) == "2 work items on 1 thread"
    long = [x.repeat(64, axis=-2) for x in (q, k, v)]
    assert len(kernels.plan(*long, backward=True).launches) > 1
    named = kernels.plan(q, k, v, rung="naive", backward=True)
    assert (named.rung, named.backward) == ("naive", True)
    assert "not flash2: the call asks for naive" in str(named)
    with pytest.raises(TypeError, match="plan has no option 'causal'"):
        kernels.plan(q, k, v, causal=True)  # type: ignore[call-arg]
