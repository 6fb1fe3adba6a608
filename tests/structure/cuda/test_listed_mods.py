"""A bare ``mask_mod`` on the device: its evaluation into blocks, and the rungs that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.cuda.attention.options import listed_mods
from kernels.cuda.runtime.recorder import Recording, recorded_by
from kernels.problem.listed_mods import Asked, on_host
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import EMULATED
from kernels.sparsity.block_mask import BlockMask
from kernels.sparsity.states import BlockGrid

from ...support.attention.mask_mods import dilated, documents, elements, mask_mods, prefix
from ...support.attention.on_cuda import run
from ...support.attention.strategies import Case
from ...support.examples import at_most
from ...support.layouts import on_device

pytestmark = pytest.mark.emulated
#: Small enough for lists to have several blocks on the emulated GPU.
BLOCK = (16, 16) if EMULATED else (128, 64)
LONG = 40 if EMULATED else 700
LENGTHS = st.integers(BLOCK[0] + 1, LONG), st.integers(1, LONG)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with patch("kernels.problem.listed_mods.BLOCK", BLOCK):
        yield


def case_of(mod: Any, seq_q: int, seq_k: int, batch: int = 1, **options: Any) -> Case:
    rng = np.random.default_rng(0)
    shapes = (seq_q, 3), (seq_k, 3), (seq_k, 2), (seq_q, 2)
    q, k, v, dout = (rng.standard_normal((batch, 2, *x)).astype(np.float32) for x in shapes)
    return Case(q, k, v, dout, {"mask_mod": mod, **options}, (8, 4))


def mask_of(evaluate: Any, asked: Asked) -> BlockMask:
    (grid, (states, patterns)), is_exact = evaluate(asked)
    assert is_exact
    return BlockMask(states, grid.seq_q, grid.seq_k, grid.block, patterns)


@at_most(15)
@given(
    mask_mods(),
    *LENGTHS,
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    st.sampled_from([(-99, 99), (-5, 0), (3, 90)]),
)
def test_blocks_have_the_elements_of_the_function(
    mod: Any, seq_q: int, seq_k: int, lists: tuple[int, int], bounds: tuple[int, int]
) -> None:
    batches, heads = lists
    asked = Asked(mod, BlockGrid(seq_q, seq_k, *BLOCK), batches, heads, bounds, FLOAT32)
    mask, by_host = mask_of(listed_mods.on_device, asked), mask_of(on_host, asked)
    wanted = elements(mod, batches, heads, seq_q, seq_k).reshape(-1, seq_q, seq_k)
    row, col = np.indices((seq_q, seq_k))
    inside = (row + bounds[0] <= col) & (col <= row + bounds[1])
    np.testing.assert_array_equal(mask.dense(), wanted & inside)
    assert mask == by_host


@pytest.mark.parametrize("rung", ["flash2", "auto"])
@at_most(8)
@given(
    mask_mods(),
    *LENGTHS,
    st.sampled_from(
        [
            {},
            {"is_causal": True, "causal_offset": 3},
            {"window_size": (9, 4)},
            {"dropout_p": 0.3, "seed": 3},
            {"softcap": 2.0, "sink": np.ones(2, np.float32)},
        ]
    ),
)
def test_a_rung_is_the_textbook_under_a_function(
    rung: str, mod: Any, seq_q: int, seq_k: int, options: dict[str, Any]
) -> None:
    case = case_of(mod, seq_q, seq_k, **options)
    case.check(run(case, rung), f"by {rung}")


def test_a_varying_function_gives_the_same_bits() -> None:
    case = case_of(dilated(3), 40, 37)
    listed = run(case, "flash2")
    case.options["mask_mod"] = kernels.varying(dilated(3))
    for name, array in run(case, "flash2").items():
        np.testing.assert_array_equal(listed[name], array, err_msg=name)


def plan_of(mod: Any, seq: int = LONG, batch: int = 1) -> str:
    case = case_of(mod, seq, seq, batch=batch)
    return repr(kernels.plan(*map(on_device, case.operands), mask_mod=mod, rung="flash2"))


def test_a_plan_says_how_a_function_is_evaluated() -> None:
    assert "evaluated once: " in plan_of(prefix(5))
    assert "have 0 patterns" in plan_of(lambda b, h, r, c: c < BLOCK[1])
    assert "evaluated for each element" in plan_of(kernels.varying(prefix(5)))
    assert "evaluated for each element" in plan_of(prefix(5), BLOCK[0])


def test_a_function_is_evaluated_once_for_calls_of_a_kind() -> None:
    case, calls = case_of(documents(5), LONG, LONG - 7), []
    evaluate = listed_mods._on_device
    with patch.object(
        listed_mods, "_on_device", lambda asked: calls.append(asked) or evaluate(asked)
    ):
        for _ in range(3):
            run(case, "flash2")
    assert len(calls) == 1


def test_a_function_that_the_device_cannot_run_is_evaluated_on_the_host() -> None:
    def fails(asked: Asked) -> Any:
        raise RuntimeError("File uses too much global constant data")

    asked = Asked(prefix(7), BlockGrid(40, 33, *BLOCK), 1, 1, (-40, 33), FLOAT32)
    with patch.object(listed_mods, "_on_device", fails):
        assert mask_of(listed_mods.on_device, asked) == mask_of(on_host, asked)


def test_an_evaluation_is_no_part_of_a_recorded_call() -> None:
    asked = Asked(prefix(9), BlockGrid(40, 33, *BLOCK), 1, 1, (-40, 33), FLOAT32)
    recording = Recording(None)
    with recorded_by(recording):
        mask = mask_of(listed_mods.on_device, asked)
    assert not recording.is_spoilt and not recording.steps and not recording.sizes
    assert mask == mask_of(on_host, asked)
