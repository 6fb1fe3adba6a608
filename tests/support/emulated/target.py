"""A target whose rungs are those of tensor cores and whose device is the emulated GPU.

Operands are NumPy arrays; what a launch asks of a device is answered here, and every launch is emulated.
Tiles are the least that the kernels know, for each thread is one of Python's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from kernels import launch
from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.flash2_mma.launch import Layouts
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout
from kernels.cuda.attention.flash2_split import launch as flash2_split
from kernels.cuda.attention.flash2_split import operands
from kernels.cuda.attention.options import extras, packed_tiles
from kernels.cuda.device import memory
from kernels.cuda.emulator.device import empty
from kernels.cuda.emulator.gpu import launch as emulate
from kernels.cuda.runtime.kernel import Kernel
from kernels.problem.listed_mods import on_host
from kernels.runtime.dtypes import BITS, is_half
from kernels.runtime.memory import Ints, Memory
from kernels.scores.program import Features


def as_bits(array: Any) -> Any:
    """Return numbers of 16 bits as the integers that kernels take."""
    return array.view(BITS) if is_half(array.dtype) else array


def longer(array: Any, rows: int = 40) -> Any:
    """Return a copy of (…, seq, dim) in longer memory, in which further rows are NaN."""
    *lead, seq, dim = array.shape
    whole = np.full((*lead, seq + rows, dim), np.nan, array.dtype)
    whole[..., :seq, :] = array
    return whole[..., :seq, :]


class _RowMemory(Memory):
    """Memory of the host that lays results out as that of a device does, whose kernels store rows."""

    def empty_as(self, array: Any, shape: Ints, dtype: Any) -> Any:
        found = super().empty_as(array, shape, dtype)
        return found if found.strides[-1] == found.itemsize else np.empty(shape, dtype)


#: The rungs of tensor cores, on the host.
TENSOR_CORES = replace(
    launch.CUDA,
    memory=_RowMemory(),
    rungs=tuple(
        replace(rung, evaluate=on_host)
        for rung in launch.CUDA.rungs
        if rung.name in ("flash3_wgmma", "flash2_mma", "flash2_split")
    ),
    mask_gradient=launch.NUMPY.mask_gradient,
    sink_gradient=launch.NUMPY.sink_gradient,
)
_ROWS, _KEYS = MmaLayout(32, 16, 2, patience=8), MmaKeyLayout(32, 32, 2, 16)


def _view(array: Any, shape: Any, strides: Any, offset: int = 0, dtype: Any = None) -> Any:
    steps, whole = tuple(step * array.itemsize for step in strides), array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = array.ctypes.data - whole.ctypes.data + offset * array.itemsize
    return np.ndarray(shape, array.dtype, whole, start, steps)


def _launched(kernel: Kernel, where: Any) -> Any:
    grid, _ = where
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    return lambda *args: emulate(kernel, (x, y), *args)


def _merge(of_parts: Any, results: Any, features: Features, extras: Any) -> None:
    (part_out, *part_rows), (out, lse, rest) = of_parts, results
    parts = len(part_out) // len(out)
    split = sum(x.reshape(parts, *lse.shape).astype(np.float64) for x in part_rows)
    with np.errstate(divide="ignore"):
        whole = np.logaddexp.reduce(split, axis=0)
        if features.sink:
            whole = np.logaddexp(whole, extras.sink[..., 0])
    lse[...] = whole
    whole = np.where(np.isfinite(whole), whole, 0.0)
    rest[...] = np.where(np.isfinite(lse), whole - lse, 0.0)
    weights = np.exp(split - whole)[..., None]
    out[...] = (weights * part_out.reshape(parts, *out.shape)).sum(axis=0).astype(out.dtype)


def _forget() -> None:
    """Let go of what calls keep on their device: arrays of the host are none."""
    layouts = flash2_mma._layout, flash2_split._layout
    tiles = extras._patterns, extras._list_arrays, packed_tiles._copied
    for kept in (*tiles, memory.device_constant, *layouts, operands.split_kernel):
        kept.cache_clear()


@contextmanager
def emulated_device(
    cc: tuple[int, int] = (9, 0), rows: MmaLayout = _ROWS, keys: MmaKeyLayout = _KEYS
) -> Iterator[None]:
    """Let launches run on the emulated GPU.

    Args:
        cc: Its compute capability.
        rows: The layout of the kernels of ``flash2_mma`` by query rows.
        keys: That of the kernel by key columns.
    """
    of_rows, of_keys = ({256: (one,)} for one in (rows, keys))
    layouts = Layouts((of_rows,), (of_rows,), (of_keys,))
    of_launch = {
        "LAYOUTS": layouts,
        "compute_capability": lambda: cc,
        "dynamic_shared_memory_bytes": lambda: 227 * 1024,
        "empty_device": empty,
        "as_bits": as_bits,
        "merge_parts": _merge,
    }
    pool = {"empty_device": empty}
    modules = {
        "attention.flash2_mma.launch": of_launch,
        "attention.flash2_split.launch": {"LAYOUTS": layouts, "reshaped": np.reshape},
        "attention.delta": {
            **pool,
            "as_bits": as_bits,
            "device_view": _view,
            "reshaped": np.reshape,
        },
        "attention.flash2_split.operands": {**pool, "device_view": _view, "THREADS": 64},
        "attention.split_keys": pool,
        "device.memory": {"to_device": lambda array: array},
        "device.head_maximum": {
            "empty_device": empty,
            "fill": lambda array, value: array.fill(value),
            "multiprocessors": lambda: 1,  # blocks run one after the other
        },
        "device.per_device": {"why_no_device": lambda needed: None},
        "device.vector": {"device_pointer": lambda array: array.ctypes.data},
    }
    with ExitStack() as stack:
        for module, names in modules.items():
            for name, value in names.items():
                stack.enter_context(patch(f"kernels.cuda.{module}.{name}", value))
        stack.enter_context(patch.object(Kernel, "__getitem__", _launched))
        _forget()
        try:
            yield
        finally:
            _forget()
