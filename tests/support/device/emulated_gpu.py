"""The emulated GPU with tensor cores, and small layouts for their kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.flash2_mma.launch import Layouts
from kernels.cuda.attention.flash2_mma.tangents import launch as mma_tangents
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout
from kernels.cuda.attention.flash2_split import launch as flash2_split
from kernels.cuda.attention.flash2_split import operands
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.float8 import launch as flash3_float8
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout
from kernels.cuda.device import per_device
from kernels.cuda.emulator.api import GPU
from kernels.cuda.matmul import dispatch
from kernels.cuda.matmul.layout import ProductLayout, WarpLayout
from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.runtime import targets

#: Marks of what runs on the emulated GPU alone, whose capability a test can choose.
EMULATED_ONLY = [
    pytest.mark.emulated,
    pytest.mark.skipif(not targets.EMULATED, reason="it chooses the GPU: MINITORCH_EMULATE=1"),
]
#: Marks of a call that takes seconds and is like others that always run.
FUZZ_ONLY = [
    pytest.mark.fuzz,
    pytest.mark.skipif("MINITORCH_EXAMPLES" not in os.environ, reason="make fuzz-options runs it"),
]
_ROWS, _KEYS = MmaLayout(32, 16, 2, patience=8), MmaKeyLayout(32, 32, 2, 16)
#: What depends on the device or on a layout.
_KEPT: tuple[Any, ...] = (
    targets._compute_capability, targets._dynamic_shared_memory_bytes, per_device._multiprocessors,
    flash2_mma._layout, flash2_split._layout, operands.split_kernel, flash3_wgmma.layout_for,
    flash3_wgmma.features_for, flash3_wgmma_backward._plan, flash3_float8.layout_for, dispatch._layout,
)  # fmt: skip


def emulated_only(test: Any) -> Any:
    """Mark a test that runs on the emulated GPU alone."""
    for mark in EMULATED_ONLY:
        test = mark(test)
    return test


def longer(array: Any, rows: int = 40) -> Any:
    """Return a copy of (…, seq, dim) in longer memory, in which further rows are NaN."""
    *lead, seq, dim = array.shape
    whole = np.full((*lead, seq + rows, dim), np.nan, array.dtype)
    whole[..., :seq, :] = array
    return whole[..., :seq, :]


@contextmanager
def emulated_gpu(
    cc: tuple[int, int] = (9, 0),
    rows: MmaLayout = _ROWS,
    keys: MmaKeyLayout = _KEYS,
    layout: ForwardLayout | None = None,
    blocks: int = 2,
) -> Iterator[None]:
    """Give the emulated GPU tensor cores, and their kernels small layouts.

    Args:
        cc: Its compute capability.
        rows: The layout of the kernels of ``flash2_mma`` by query rows.
        keys: That of the kernel by key columns.
        layout: That of the forward kernels of ``flash3_wgmma``; their own when None.
        blocks: Multiprocessors.
    """
    of_rows, of_keys = ({MAX_HEAD_DIM: (one,)} for one in (rows, keys))
    layouts = Layouts((of_rows,), (of_rows,), (of_keys,))
    changes: list[tuple[Any, str, Any]] = [
        (GPU, "compute_capability", cc),
        (GPU, "MULTIPROCESSOR_COUNT", blocks),
        (flash2_mma, "LAYOUTS", layouts),
        (flash2_split, "LAYOUTS", layouts),
        (mma_tangents, "LAYOUTS", {"jvp": (of_rows,), "dq": (of_rows,), "dkdv": (of_keys,)}),
        (operands, "THREADS", 64),
        (dispatch, "_HOPPER", dict.fromkeys((1, 3), ((ProductLayout(1, 64, 2, 1), 1.0, 8.0),))),
        (dispatch, "_WARPS", ((WarpLayout(32, 32, 2, 2, 2), 1.0, 8.0),)),
    ]
    if layout is not None:
        own = lambda widths, has_options=False: layout  # noqa: E731
        changes += [(module, "layout_of", own) for module in (flash3_wgmma, flash3_float8)]
    with ExitStack() as stack:
        for holder, name, value in changes:
            stack.enter_context(patch.object(holder, name, value))
        _forget()
        try:
            yield
        finally:
            _forget()
    assert not per_device.counters().copy_to_host().any(), "the last block sets the counters back"


def _forget() -> None:
    for kept in _KEPT:
        kept.cache_clear()
