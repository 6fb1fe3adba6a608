"""Memory that a call does not read: NaN there changes no result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import launch
from kernels.runtime.dtypes import FLOAT16, FLOAT32, FLOAT64
from kernels.runtime.targets import EMULATED

from ..support.attention.on_cuda import packed
from ..support.attention.strategies import Case
from ..support.layouts import on_device

#: NumPy's tiled rung skips tiles by bounds alone, and for all heads at once.
VISIT_EVERYTHING = ("numpy flash2", "numpy naive", "cpu naive", "cuda naive")


def rungs(*without: str) -> list[Any]:
    """Return each target with each of its rungs, without those that are named "target rung"."""
    params = []
    for target in (launch.NUMPY, launch.CPU, launch.CUDA):
        for rung in target.rungs:
            mark = pytest.mark.emulated if FLOAT64 in rung.dtypes else pytest.mark.cuda
            marks = mark if target is launch.CUDA else ()
            params.append(pytest.param(target, rung, id=f"{target.name} {rung.name}", marks=marks))
    return [param for param in params if param.id not in without]


def run(case: Case, target: launch.Target, rung: launch.Rung) -> dict[str, Any]:
    """Run one rung forward and backward; the results come back to the host."""
    if FLOAT64 not in rung.dtypes:
        names = ("q", "k", "v", "dout")
        case = replace(case, **{name: getattr(case, name).astype(FLOAT16) for name in names})
        case.dlse = None if case.dlse is None else case.dlse.astype(FLOAT32)
    reason = rung.why_no_device() or rung.reason(case.problem(), None)
    if reason:
        pytest.skip(reason)
    if target is not launch.CUDA:
        return case.run(target, rung.name)
    tile = (16, 16) if EMULATED else None
    results = case.run(target, rung.name, tile, on_device)
    return {name: array.copy_to_host() for name, array in results.items()}


@pytest.mark.parametrize(("target", "rung"), rungs(*VISIT_EVERYTHING))
@pytest.mark.parametrize("rows", ["one row", "one block"])
@pytest.mark.parametrize("skip", ["causal", "window", "block mask", "chunks"])
def test_tiles_that_are_skipped_are_not_read(
    target: launch.Target, rung: launch.Rung, rows: str, skip: str
) -> None:
    """The rows see the middle block and a few keys of the next; NaN begins two blocks behind it."""
    small = target is launch.CUDA and EMULATED
    block, dim = (16, 4) if small else (256, 64)  # no rung has larger tiles
    seq_q, seq_k = 1 if rows == "one row" else block, 7 * block
    options: dict[str, Any] = {
        "causal": {"is_causal": True, "causal_offset": 3 * block},
        "chunks": {"chunk_size": block, "causal_offset": 3 * block},
        "window": {"window_size": (4, 4), "causal_offset": 3 * block},
        "block mask": {
            "block_mask": kernels.BlockMask([[[0, 0, 0, 1, 0, 0, 0]]], seq_q, seq_k, block)
        },
    }[skip]
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, n, dim)) for n in (seq_q, seq_k, seq_k, seq_q))
    case = Case(q, k, v, dout, options, (16, 16))
    expected = run(case, target, rung)
    for array in (k, v):
        array[:, :, 6 * block :] = np.nan
        if skip != "causal":
            array[:, :, :block] = np.nan
    for name, array in run(case, target, rung).items():
        assert np.isfinite(expected[name]).all(), name
        np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize(("target", "rung"), rungs("cuda naive", "cuda flash1"))
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "enable_gqa": True}], ids=str)
def test_a_packed_sequence_does_not_read_another(
    target: launch.Target, rung: launch.Rung, options: dict[str, Any]
) -> None:
    """No tile divides the lengths: the last tile of a sequence reaches into the next one."""
    small = target is launch.CUDA and EMULATED
    lengths, dim = ((5, 7, 3), 4) if small else ((100, 150, 70), 64)
    case = packed(0, lengths, lengths, (dim, dim), options)
    expected = run(case, target, rung)
    poisoned = slice(lengths[0], lengths[0] + lengths[1])
    for array in (case.q, case.k, case.v, case.dout, case.dlse):
        array[:, poisoned] = np.nan
    for name, array in run(case, target, rung).items():
        np.testing.assert_array_equal(
            np.delete(array, poisoned, 1), np.delete(expected[name], poisoned, 1), name
        )
