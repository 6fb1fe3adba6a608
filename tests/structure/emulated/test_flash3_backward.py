"""Hopper's backward rung without a GPU: its kernels' own source on an emulated one; its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from kernels import launch
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
from kernels.problem.operands import make_operands
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.attention.strategies import Case
from ...support.emulated.gpu import held_back
from ...support.emulated.hopper import emulated_hopper_backward
from ...support.emulated.target import EMULATED

#: Shared memory that a block of compute capability 9.0 can have, in bytes.
MOST_SHARED = 227 * 1024


class Call(NamedTuple):
    """A call: seq_q, seq_k, head_dim, value_dim; options; dtype; heads of q and of k; a gradient of lse."""

    sizes: tuple[int, int, int, int]
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: Any = FLOAT16
    heads: tuple[int, int] = (1, 1)
    has_dlse: bool = False


def _causal(offset: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": True, "causal_offset": offset, **more}


CALLS = {
    "odd lengths": Call((75, 130, 64, 64)),
    "causal": Call((150, 150, 64, 64), _causal(0), BFLOAT16),
    "a window": Call((141, 141, 64, 64), {"window_size": (20, 10)}),
    "a window far off": Call((80, 90, 64, 64), {"window_size": (0, 30), "causal_offset": 20}),
    "value dim, two panels": Call((70, 70, 40, 72), _causal(0), heads=(2, 2)),
    "head dim, two panels": Call((70, 133, 128, 24), {}, BFLOAT16),
    "rows and keys that see nothing": Call((140, 150, 64, 64), _causal(-75)),
    "shared keys, gradient of lse": Call(
        (40, 40, 64, 64), _causal(0, enable_gqa=True), FLOAT16, (2, 1), True
    ),
    "more than fits in registers": Call((200, 70, 136, 144), _causal(4)),
    "more rows than stages": Call((330, 70, 64, 64)),
    "more keys than stages": Call((70, 450, 64, 64), {}, BFLOAT16),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_own_source_computes_the_gradients(name: str, deterministic: bool) -> None:
    _check(CALLS[name], deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, WARPGROUP + 5], ids=["copier", "lane"])
def test_no_thread_is_too_late(late: int) -> None:
    # So wide that there is one tile of dout, free for the next as soon as it was read.
    with held_back(late):
        _check(Call((130, 40, 208, 208)), True)


def _check(call: Call, deterministic: bool) -> None:
    rng = np.random.default_rng(0)
    (seq_q, seq_k, head, value), (heads, key_heads) = call.sizes, call.heads
    shapes = (heads, seq_q, head), (key_heads, seq_k, head), (key_heads, seq_k, value)
    arrays = [rng.standard_normal((1, *shape)) for shape in (*shapes, (heads, seq_q, value))]
    dlse = rng.standard_normal((1, heads, seq_q)) if call.has_dlse else None
    options = {"scale": 0.3 * head**-0.25, **call.options}
    case = Case(*arrays, options, (16, 16), dlse).in_dtype(call.dtype)  # type: ignore[arg-type]
    expected, problem = (
        case.oracle(),
        case.problem(rung="flash3_wgmma", deterministic=deterministic),
    )
    with emulated_hopper_backward():
        operands = make_operands(EMULATED.memory, problem, *case.operands).having(
            out=expected["out"].astype(call.dtype), lse=expected["lse"].astype(np.float32),
            dout=case.dout, dlse=case.dlse,
        )  # fmt: skip
        found = launch.backward(EMULATED, problem, operands)
    unit = 2.0**-10 if call.dtype == FLOAT16 else 2.0**-7
    for name, array in zip(("dq", "dk", "dv"), case.own(found[:3]), strict=True):
        # P and dS are rounded to the dtype before they are multiplied.
        error = np.abs(array - expected[name]) / (2 * unit * (1 + np.abs(expected[name])))
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        assert error[worst] <= 1, f"{name} is off at {worst} by {error[worst]} units"


@drawn(
    head=st.integers(1, 16).map(lambda n: 16 * n),
    value=st.integers(1, 16).map(lambda n: 16 * n),
    adds_dq=st.booleans(),
)
def test_tiles_fit_in_shared_memory_where_the_swizzle_begins_anew(
    head: int, value: int, adds_dq: bool
) -> None:
    widths = Widths(head, value)
    for parts in parts_of(widths, adds_dq):
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


@drawn(st.integers(1, 16).map(lambda n: 16 * n), st.integers(1, 16).map(lambda n: 16 * n))
def test_every_gradient_is_computed_once(head: int, value: int) -> None:
    kernels = parts_of(Widths(head, value), True)
    for part in KeyGradients._fields[:2]:
        assert sum(getattr(parts, part) for parts in kernels) == 1
