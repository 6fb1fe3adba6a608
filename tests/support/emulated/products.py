"""Products on tensor cores where the device is the emulated GPU: NumPy arrays, and the least tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kernels.cuda.emulator.device import empty
from kernels.cuda.emulator.gpu import launch as emulate
from kernels.cuda.emulator.tensor_cores.engines import TensorMap
from kernels.cuda.matmul import dispatch
from kernels.cuda.matmul.layout import LINE, ProductLayout, WarpLayout
from kernels.cuda.runtime.kernel import Kernel

from .target import as_bits

_MAPS: dict[int, TensorMap] = {}
_KEPT: list[Any] = []
_FLAG = np.zeros(1, np.int64)


def _tensor_map(address: int, shape: Any, strides: Any, box: Any, dtype: str) -> Any:
    """Return what a kernel takes for a tensor map, and remember what it says."""
    size = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    stored = np.dtype(np.float32 if dtype == "float32" else np.uint16)
    whole = (ctypes.c_uint8 * (size + stored.itemsize - 1)).from_address(address)
    flat = np.ctypeslib.as_array(whole).view(stored)
    tensor = np.lib.stride_tricks.as_strided(flat, shape, strides)
    stands_for_it = np.zeros(128, np.uint8)
    _KEPT.append(stands_for_it)
    _MAPS[id(stands_for_it)] = TensorMap(tensor, box, LINE)
    return stands_for_it


def _multiply_if(
    out: Any, out_steps: Any, a: Any, a_steps: Any, b: Any, b_steps: Any, shape: Any, only_if: Any
) -> None:
    """Do what the CUDA cores' product does, if it shall."""
    if only_if[0][0] == only_if[1]:
        batch, heads, rows, cols, depth = shape
        views = (
            np.lib.stride_tricks.as_strided(array, size, [4 * step for step in steps])
            for array, size, steps in (
                (out, (batch, heads, rows, cols), out_steps),
                (a, (batch, heads, rows, depth), a_steps),
                (b, (batch, heads, depth, cols), b_steps),
            )
        )
        result, left, right = views
        result[...] = left @ right


def _launched(kernel: Kernel, where: Any) -> Any:
    def run(*args: Any) -> None:
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        maps = {i: _MAPS[id(array)] for i, array in enumerate(arrays) if id(array) in _MAPS}
        one = kernel if kernel.threads else Kernel(kernel.source, kernel.signature, where[1])
        emulate(one, (where[0], 1), *args, maps=maps)

    return run


@contextmanager
def emulated_products(cc: tuple[int, int]) -> Iterator[None]:
    """Let products run on the emulated GPU.

    Args:
        cc: Its compute capability.
    """
    changes = {
        "matmul.operands.device_pointer": lambda array: array.ctypes.data,
        "matmul.dispatch.device_pointer": lambda array: array.ctypes.data,
        "matmul.launch.map_of": lambda array, *rest: _tensor_map(array.ctypes.data, *rest),
        "matmul.launch.multiprocessors": lambda: 2,
        "matmul.dispatch.multiprocessors": lambda: 2,
        "matmul.operands.empty_device": empty,
        "matmul.operands.device_view": lambda array, shape, steps: array[: shape[0]],
        "matmul.operands.convert_flat": lambda source, out: np.copyto(out, source, "unsafe"),
        "matmul.dispatch.empty_device": empty,
        "matmul.dispatch.why_no_device": lambda needed: None,
        "matmul.dispatch.compute_capability": lambda: cc,
        "matmul.dispatch._HOPPER": dict.fromkeys((1, 3), ((ProductLayout(1, 64, 2, 1), 1.0, 8.0),)),
        "matmul.dispatch._WARPS": ((WarpLayout(32, 32, 2, 2, 2), 1.0, 8.0),),
        "matmul.dispatch.flag": lambda: _FLAG,
        "matmul.operands.flag": lambda: _FLAG,
        "matmul.dispatch.cuda_cores.multiply": _multiply_if,
    }
    bits = {"matmul.launch.as_bits", "matmul.operands.as_bits", "device.half.as_bits"}
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patch(f"kernels.cuda.{name}", value))
        for name in bits:
            stack.enter_context(patch(f"kernels.cuda.{name}", as_bits))
        stack.enter_context(patch.object(Kernel, "__getitem__", _launched))
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    dispatch._layout.cache_clear()
    _MAPS.clear()
    _KEPT.clear()
