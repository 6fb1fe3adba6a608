"""Hopper's forward rung on the emulated GPU: its launch, with tensor maps of NumPy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout
from kernels.cuda.device.warpgroups import LINE, PANEL
from kernels.cuda.emulator.device import empty
from kernels.cuda.emulator.gpu import launch as emulate
from kernels.cuda.emulator.tensor_cores.engines import TensorMap
from kernels.cuda.runtime.kernel import Kernel

from .target import as_bits, emulated_device

#: Marks of a call that takes seconds and is like others that always run.
FUZZ_ONLY = [
    pytest.mark.fuzz,
    pytest.mark.skipif("MINITORCH_EXAMPLES" not in os.environ, reason="make fuzz-options runs it"),
]


@contextmanager
def emulated_hopper(layout: ForwardLayout | None = None, blocks: int = 2) -> Iterator[None]:
    """Let the forward rung run on the emulated GPU; it leaves its counters at 0.

    Args:
        layout: Of its kernels; their own when None.
        blocks: Multiprocessors.
    """
    maps: dict[int, tuple[Any, TensorMap]] = {}
    counters = np.zeros(2, np.int32)

    def tensor_map(array: Any, rows: int, dtype: str) -> tuple[Any, int, int]:
        array = as_bits(array)
        for axis in (0, 1):
            if array.strides[axis] == 0:
                array = array[(slice(None),) * axis + (slice(1),)]
        token = np.zeros(128, np.uint8)
        maps[id(token)] = token, TensorMap(array, (1, 1, rows, PANEL), LINE)
        return token, int(array.shape[1] > 1), int(array.shape[0] > 1)

    def byte_map(array: Any, rows: int) -> Any:
        token = np.zeros(128, np.uint8)
        maps[id(token)] = token, TensorMap(array, (1, 1, rows, LINE), LINE)
        return token

    def launched(kernel: Kernel, where: Any) -> Any:
        grid, _ = where

        def run(*args: Any) -> None:
            arrays = [array for array in args if isinstance(array, np.ndarray)]
            found = {i: maps[id(one)][1] for i, one in enumerate(arrays) if id(one) in maps}
            emulate(kernel, grid if isinstance(grid, tuple) else (grid, 1), *args, maps=found)

        return run

    of_launch = {"tensor_map": tensor_map, "reshaped": np.reshape, "as_bits": as_bits}
    of_float8 = {"byte_map": byte_map, "tensor_map": tensor_map, "reshaped": np.reshape}
    of_rounding = {
        "empty_device": empty, "as_bits": as_bits, "current_device": lambda: 0,
        "device_constant": lambda content, shape, dtype, device: np.frombuffer(content, dtype).copy(),
    }  # fmt: skip
    common = {
        "row_major_copy": np.ascontiguousarray, "as_bits": as_bits, "tensor_map": tensor_map,
        "multiprocessors": lambda: blocks, "counters": lambda: counters,
    }  # fmt: skip
    if layout is not None:
        of_launch["layout_of"] = lambda widths, has_options=False: layout
    with ExitStack() as stack:
        stack.enter_context(emulated_device())
        for name, value in of_launch.items():
            stack.enter_context(
                patch(f"kernels.cuda.attention.flash3_wgmma.forward.launch.{name}", value)
            )
        for name, value in common.items():
            stack.enter_context(
                patch(f"kernels.cuda.attention.flash3_wgmma.launch_common.{name}", value)
            )
        stack.enter_context(
            patch("kernels.cuda.attention.flash3_wgmma.packed_mask.empty_device", empty)
        )
        float8 = "kernels.cuda.attention.flash3_wgmma.float8"
        stack.enter_context(patch.multiple(f"{float8}.launch", **of_float8))
        stack.enter_context(patch.multiple(f"{float8}.quantise", **of_rounding))
        stack.enter_context(patch.object(Kernel, "__getitem__", launched))
        forget_launches()
        try:
            yield
        finally:
            forget_launches()
    assert not counters.any(), "the last block sets the counters back"


@contextmanager
def emulated_hopper_backward() -> Iterator[None]:
    """Let the backward rung run on the emulated GPU, too; it leaves its counters at 0."""
    with emulated_hopper():
        names = ("tensor_map", "as_bits")
        found = {name: getattr(flash3_wgmma, name) for name in names}

        def empty(shape: Any, dtype: Any) -> Any:
            return np.full(shape, np.nan, dtype)

        def one(array: Any) -> Any:
            return array.reshape(-1)[:1]

        with patch.multiple(
            "kernels.cuda.attention.flash3_wgmma.backward.launch",
            no_sums=one, empty_device=empty, **found,
        ):  # fmt: skip
            yield


def forget_launches() -> None:
    """Let go of layouts: those of other calls are for other devices, or tiles."""
    for kept in (flash3_wgmma.layout_for, flash3_wgmma.features_for, flash3_wgmma_backward._plan):
        kept.cache_clear()
