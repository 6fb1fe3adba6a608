"""Hopper's float8 forward kernels, their own source on the emulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from kernels import make_problem
from kernels.cuda.attention.flash3_wgmma.forward.kernel import SCHEDULER_THREAD
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.cuda.emulator.schedule import held_back
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.attention.float8 import PRECISIONS, assert_near, wanted
from ...support.attention.on_cuda import forward
from ...support.attention.strategies import Case
from ...support.device.emulated_gpu import EMULATED_ONLY, FUZZ_ONLY, emulated_gpu, longer

pytestmark = EMULATED_ONLY
SMALL = ForwardLayout(2, 32, 2, 2, True, 2)


class Call(NamedTuple):
    """A call for the emulated GPU: lengths, dims, heads of q and of k, options, layout, blocks."""

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    options: Mapping[str, Any] = MappingProxyType({})
    precision: str = PRECISIONS[0]
    layout: ForwardLayout = SMALL
    blocks: int = 1
    dtype: Any = FLOAT16


CALLS = {
    "odd lengths, one block takes all items": Call((70, 100)),
    "blocks of rows with units of their own": Call((140, 300), precision=PRECISIONS[1]),
    "rotated, causal, two blocks": Call(
        (150, 100), options={"is_causal": True}, precision=PRECISIONS[3], blocks=2
    ),
    "a window, rows that see nothing": Call(
        (70, 90), options={"window_size": (20, -1), "is_causal": True, "causal_offset": -25},
        precision=PRECISIONS[2], dtype=BFLOAT16,
    ),
    "wide heads, narrower than their padding": Call((70, 70), (72, 128), precision=PRECISIONS[3]),
    "heads that share keys": Call((65, 33), (128, 40), (4, 2), {"enable_gqa": True}),
    "three consumers that take turns": Call(
        (193, 140), layout=ForwardLayout(3, 64, 3, 2, True, 0), options={"scale": 1.0}
    ),
    "a consumer without rows, which have no unit": Call(
        (70, 33), precision=PRECISIONS[1], layout=ForwardLayout(3, 32, 2, 2, True, 2)
    ),
    "consumers without turns": Call(
        (200, 200), options={"is_causal": True}, layout=ForwardLayout(2, 64, 2, 2, False, 1)
    ),
}  # fmt: skip


def _forward(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    case = Case(q, k, v, None, {**call.options, "precision": call.precision}, (1, 1))
    with emulated_gpu(layout=call.layout, blocks=call.blocks):
        found = forward(case, "flash3_wgmma")
    return found["out"], found["lse"]


def _check(call: Call, rng: np.random.Generator) -> None:
    (seq_q, seq_k), (head, value), (heads, key_heads) = call.lengths, call.dims, call.heads
    sizes = ((heads, seq_q, head), (key_heads, seq_k, head), (key_heads, seq_k, value))
    q, k, v = (rng.standard_normal((1, *size)).astype(call.dtype) for size in sizes)
    out, lse = _forward(call, q, k, v)
    problem = make_problem(q, k, v, **call.options)
    distance = np.arange(seq_k) - np.arange(seq_q)[:, None]
    visible = (problem.lower <= distance) & (distance <= problem.upper)
    k, v = (np.repeat(x, heads // key_heads, axis=1) for x in (k, v))
    right = wanted(q, k, v, call.precision, call.options.get("scale"), visible)
    # In float32 an element may fall on the other side of a midpoint.
    assert_near(out, lse, right, call.dtype, 2e-2 if "hadamard" in call.precision else 1e-4)


#: A call takes seconds.
ALWAYS = [*list(CALLS)[:6], "a consumer without rows, which have no unit"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else FUZZ_ONLY) for name in CALLS]
)
def test_the_kernels_own_source_computes_attention(name: str) -> None:
    _check(CALLS[name], np.random.default_rng(0))


def test_rows_of_large_scores_have_their_probabilities() -> None:
    rng, call = np.random.default_rng(2), Call((70, 100), heads=(1, 1))
    q = 2.0**12 * np.sign(rng.standard_normal((1, 1, 70, 64)))
    q[..., ::3, :] /= 2.0**12
    k, v = rng.integers(-3, 4, (1, 1, 100, 64)), rng.standard_normal((1, 1, 100, 64))
    q, k, v = (x.astype(call.dtype) for x in (q, k, v))
    right = wanted(q, k, v, call.precision, None, np.bool_(True))
    assert_near(*_forward(call, q, k, v), right, call.dtype, 4e-3)  # a unit of lse is 2e-3


def test_only_rows_that_are_not_finite_are_nan_and_memory_beyond_is_not_read() -> None:
    rng, call = np.random.default_rng(1), Call((70, 90), precision=PRECISIONS[1])
    arrays = [longer(rng.standard_normal((1, 2, n, 64)).astype(FLOAT16)) for n in (70, 90, 90)]
    arrays[0][0, 0, 3, 5], arrays[0][0, 0, 60, 1] = np.inf, np.nan
    out, lse = _forward(call, *arrays)
    again = _forward(call, *(x.copy() for x in arrays))
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])
    assert np.isnan(out[0, 0, [3, 60]]).all() and np.isfinite(out[0, 1]).all()
    assert np.isfinite(np.delete(out[0, 0], [3, 60], axis=0)).all()


#: The producer of keys and values, the scheduler, and consumer lanes.
LATE = {
    "copier": 0, "scheduler": SCHEDULER_THREAD, "lane": WARPGROUP + 1, "other consumer": 2 * WARPGROUP
}  # fmt: skip


@pytest.mark.parametrize("late", LATE)
def test_no_thread_is_too_late(late: str) -> None:
    call = Call((300, 90), (64, 64), (1, 1), {"is_causal": True, "causal_offset": -130})
    with held_back(LATE[late]):
        _check(call, np.random.default_rng(3))
