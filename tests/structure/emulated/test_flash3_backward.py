"""Hopper's backward rung without a GPU: its kernels' own source on an emulated one; its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from kernels import make_problem
from kernels.cuda.attention.flash3_wgmma import launch_common
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.backward.layout import (
    PADDING,
    KeyGradients,
    key_layout,
    key_tiles,
    parts_of,
    query_layout,
    query_tiles,
)
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.device.warpgroups import ALIGNMENT, WARPGROUP, block_bytes
from kernels.cuda.ptx.emulated.numbers import from_bits, to_bits
from kernels.cuda.runtime.kernel import Kernel
from kernels.problem.operands import Operands
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.emulated.engines import TensorMap
from ...support.emulated.gpu import held_back, launch
from ...support.emulated.hopper import forget_launches

_STORED = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16)}
#: Shared memory that a block of compute capability 9.0 can have, in bytes.
MOST_SHARED = 227 * 1024
#: Beyond every row and column.
FAR = 1 << 20


class Call(NamedTuple):
    """One call of one batch.

    Attributes:
        sizes: seq_q, seq_k, head_dim, value_dim.
        bounds: Row sees from row + lower to row + upper.
        dtype: "float16" or "bfloat16".
        heads: Of q, and how many of them share those of k and v.
        has_dlse: There is a gradient of lse.
    """

    sizes: tuple[int, int, int, int]
    bounds: tuple[int, int] = (-FAR, FAR)
    dtype: str = "float16"
    heads: tuple[int, int] = (1, 1)
    has_dlse: bool = False


CALLS = {
    "odd lengths": Call((75, 130, 64, 64)),
    "causal": Call((150, 150, 64, 64), (-FAR, 0), "bfloat16"),
    "a window": Call((141, 141, 64, 64), (-20, 10)),
    "a window far off": Call((80, 90, 64, 64), (20, 50)),
    "value dim, two panels": Call((70, 70, 40, 72), (-FAR, 0), heads=(2, 1)),
    "head dim, two panels": Call((70, 133, 128, 24), (-FAR, FAR), "bfloat16"),
    "rows and keys that see nothing": Call((140, 150, 64, 64), (-FAR, -75)),
    "shared keys, gradient of lse": Call((40, 40, 64, 64), (-FAR, 0), "float16", (2, 2), True),
    "more than fits in registers": Call((200, 70, 136, 144), (-FAR, 4)),
    "more rows than stages": Call((330, 70, 64, 64)),
    "more keys than stages": Call((70, 450, 64, 64), (-FAR, FAR), "bfloat16"),
}


def _textbook(wide: Any, dlse: Any, call: Call, scale: float) -> Any:
    """Return out, lse, dq, dk and dv of q, k, v and dout in float64."""
    q, k, v, dout = wide
    scores = scale * q @ k.swapaxes(-1, -2)
    row, col = np.indices(scores.shape[-2:])
    seen = (row + call.bounds[0] <= col) & (col <= row + call.bounds[1])
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    out = p @ v
    delta = (dout * out).sum(axis=-1, keepdims=True) - dlse[..., None]
    ds = p * (dout @ v.swapaxes(-1, -2) - delta)
    grads = scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    return out, lse, *grads


def _gradients(call: Call, deterministic: bool, rng: np.random.Generator) -> Any:
    """Run the kernels of a call; return what they wrote and what they should have."""
    seq_q, seq_k, head_dim, value_dim = call.sizes
    heads, group = call.heads
    dtype, scale = call.dtype, 0.3 * head_dim**-0.25
    sizes = {"q": (seq_q, head_dim), "k": (seq_k, head_dim), "v": (seq_k, value_dim)}
    own = {
        name: to_bits(
            rng.standard_normal((1, heads if name == "q" else heads // group, *size)), dtype
        )
        for name, size in sizes.items()
    }
    own["dout"] = to_bits(rng.standard_normal((1, heads, seq_q, value_dim)), dtype)
    wide = [from_bits(x, dtype).astype(np.float64) for x in own.values()]
    dlse = rng.standard_normal((1, heads, seq_q)) * call.has_dlse
    out, lse, *expected = _textbook(wide, dlse, call, scale)
    q, k, v = (np.zeros((1, heads, *size), _STORED[dtype]) for size in sizes.values())
    problem = make_problem(q, k, v, scale=scale, deterministic=deterministic)
    lower, upper = (max(min(bound, seq_k), -seq_q) for bound in call.bounds)
    problem = replace(problem, lower=lower, upper=upper)
    results = {
        f"d{name}": np.full((1, heads, *size), 0xFFFF, np.uint16) for name, size in sizes.items()
    }
    # Heads that share their keys do so by strides of 0, and get gradients of their own.
    shown = {name: np.broadcast_to(x, (1, heads, *x.shape[2:])) for name, x in own.items()}
    given = Operands(
        **shown, out=to_bits(out, dtype), lse=lse.astype(np.float32),
        lse_rest=np.zeros(lse.shape, np.float32),
        dlse=dlse.astype(np.float32) if call.has_dlse else None, **results,
    )  # fmt: skip
    with _emulated():
        flash3_wgmma_backward.backward(problem, (0, 0), given)
    return results, dict(zip(results, expected, strict=True))


@contextmanager
def _emulated() -> Iterator[None]:
    """Let the rung launch on the emulated GPU, of two multiprocessors; it leaves its counters at 0."""
    maps: dict[int, TensorMap] = {}
    kept, counters = [], np.zeros(2, np.int32)

    def tensor_map(array: Any, rows: int, dtype: str) -> tuple[Any, int, int]:
        differs = [int(array.strides[axis] != 0 and array.shape[axis] > 1) for axis in (1, 0)]
        tensor = array[: None if differs[1] else 1, : None if differs[0] else 1]
        kept.append(np.zeros(128, np.uint8))
        maps[id(kept[-1])] = TensorMap(tensor, (1, 1, rows, 64), 128)
        return kept[-1], differs[0], differs[1]

    def launcher(kernel: Kernel, where: Any) -> Any:
        grid = where[0] if isinstance(where[0], tuple) else (where[0], 1)

        def run(*args: Any) -> None:
            arrays = [x for x in args if isinstance(x, np.ndarray)]
            places = {i: maps[id(x)] for i, x in enumerate(arrays) if id(x) in maps}
            launch(kernel, grid, *args, maps=places)

        return run

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(shape, np.nan, dtype)

    def aligned(*arrays: Any) -> bool:
        return True

    with (
        patch.multiple(
            flash3_wgmma_backward, tensor_map=tensor_map, empty_device=empty,
            as_bits=lambda array: array, counters=lambda: counters, multiprocessors=lambda: 2,
            no_sums=lambda array: array.reshape(-1)[:1], are_vectors=aligned,
            readable=lambda *arrays: arrays,
        ),
        patch.object(launch_common, "tensor_map", tensor_map),
        patch.object(Kernel, "__getitem__", launcher),
    ):  # fmt: skip
        forget_launches()
        yield
        forget_launches()
    assert not counters.any()


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
    found, expected = _gradients(call, deterministic, np.random.default_rng(0))
    unit = 2.0**-10 if call.dtype == "float16" else 2.0**-7
    for what, bits in found.items():
        # P and dS are rounded to the dtype before they are multiplied.
        size = 1 + np.abs(expected[what])
        error = np.abs(from_bits(bits, call.dtype) - expected[what]) / (2 * unit * size)
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        assert error[worst] <= 1, f"{what} is off at {worst} by {error[worst]} units"


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
