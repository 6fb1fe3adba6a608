"""Device memory: views for the kernels, and kernels that copy, sum and fill."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from kernels.cuda.device.half import as_bits, convert_flat
from kernels.cuda.runtime.arrays import (
    array_on,
    device_view,
    element_strides,
    empty_device,
    flattened,
    is_row_major,
    reshaped,
    to_device,
)
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.cuda.runtime.sizes import launch_each
from kernels.runtime.dtypes import BITS, acc_dtype, is_half
from kernels.runtime.memory import (
    Memory,
    check_dense,
    is_dense,
    join_dims,
    joined_step,
    reordered,
    repeated_axes,
    row_major_strides,
    strides_as,
)
from kernels.runtime.targets import cuda, current_device, why_no_cuda
from kernels.runtime.types import void


@cache
def copy_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that copies an array of four dimensions, for one dtype."""

    def copy(source, out):
        """Copy an array to an array of the same shape, both with any strides.

        Computes: out = source
        One thread does: one element
        Global traffic: each element read once and written once
        """
        batches, heads, rows, cols = out.shape
        i = cuda.grid(1)
        if i < batches * heads * rows * cols:
            line, col = i // cols, i % cols
            batch, head, row = line // rows // heads, line // rows % heads, line % rows
            out[batch, head, row, col] = source[batch, head, row, col]

    four = array_type(dtype, 4)
    return Kernel(copy, void(four, four))


@cache
def sum_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that sums the middle dimension of three, for one dtype."""
    zero = dtype.type(0)

    def sum_middle(source, out):
        """Sum in order, so that the result is equal from run to run.

        Computes: out[i, j] = Σ_n source[i, n, j]
        One thread does: one element of out
        Registers: one sum
        Global traffic: each element of source read once, each of out written once
        """
        cols = out.shape[1]
        i = cuda.grid(1)
        if i < out.shape[0] * cols:
            total = zero
            for n in range(source.shape[1]):
                total += source[i // cols, n, i % cols]
            out[i // cols, i % cols] = total

    return Kernel(sum_middle, void(array_type(dtype, 3), array_type(dtype, 2)))


@cache
def fill_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that fills a flat array, for one dtype."""

    def fill_flat(out, value):
        """Set every element.

        Computes: out[i] = value
        One thread does: one element
        Global traffic: each element written once
        """
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = value

    return Kernel(fill_flat, void(array_type(dtype, 1), scalar_type(dtype)))


def fill(array: Any, value: float) -> None:
    """Set every element of a device array without gaps."""
    # A launch takes integers for integers: the value is one of the dtype first.
    number = np.array(value, array.dtype)
    if is_half(array.dtype):
        number = number.view(BITS)
    flat = as_bits(flattened(array))
    launch_each(fill_kernel(number.dtype), flat.size, flat, number.item())


@lru_cache(maxsize=256)
def device_constant(
    content: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
) -> Any:
    """Return a cached read-only array on the current device with these bytes, in row-major order."""
    return to_device(np.frombuffer(content, dtype).reshape(shape))


def device_list(array: Any) -> Any:
    """Return a copy on the device, which has no empty arrays: an empty list becomes one entry of zeros."""
    return to_device(array if len(array) else np.zeros((1, *array.shape[1:]), array.dtype))


@lru_cache(maxsize=4096)
def _flat(shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the layout of a dense array as one dimension, and its strides; see ``Memory.flat``."""
    strides = tuple(step // dtype.itemsize for step in steps)
    check_dense(shape, strides)
    flat = (math.prod(shape),), (dtype.itemsize,), dtype
    return flat, None if strides == row_major_strides(shape) else strides


class DeviceMemory(Memory):
    """Numba's device arrays."""

    is_native = True

    def why_not(self) -> str | None:
        """Return why there is no device on this machine, or None."""
        return why_no_cuda()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised, contiguous array."""
        return empty_device(shape, dtype)

    def empty_as(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array in the memory order of ``array``; see :meth:`Memory.empty_as`."""
        shape = tuple(shape)
        strides = strides_as(element_strides(array), shape)
        if strides[-1] != 1:  # kernels store rows
            strides = row_major_strides(shape)
        return _empty(shape, strides, dtype)

    def laid_as(self, array: Any, operand: Any) -> Any:
        """Return an array in the memory order of an operand; see :meth:`Memory.laid_as`."""
        strides = reordered(tuple(array.shape), element_strides(array), element_strides(operand))
        return array if strides is None else _copied(array, strides)

    def view(self, storage: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """View a flat storage with a shape and strides in elements."""
        return device_view(storage, shape, strides)

    def four_dims(self, array: Any, shape: tuple[int, ...]) -> Any:
        """View an operand as (batch, heads, seq, dim), repeated by a stride of 0."""
        if tuple(array.shape) == shape and len(shape) == 4:
            return array  # as most are
        sizes = (1,) * (len(shape) - len(array.shape)) + tuple(array.shape)
        steps = (0,) * (len(shape) - len(array.shape)) + element_strides(array)
        steps = tuple(0 if size == 1 else step for size, step in zip(sizes, steps, strict=True))
        *batches, heads, seq, dim = (1, 1, *shape)[-max(len(shape), 4) :]
        *batch_steps, head_step, row_step, col_step = (0, 0, *steps)[-max(len(shape), 4) :]
        batch, batch_step = math.prod(batches), joined_step(tuple(batches), tuple(batch_steps))
        if batch_step is None:
            whole = _copied(device_view(array, shape, steps), row_major_strides(shape))
            return reshaped(whole, (batch, heads, seq, dim))
        return device_view(
            array, (batch, heads, seq, dim), (batch_step, head_step, row_step, col_step)
        )

    def part(self, array: Any, first: int, stop: int) -> Any:
        """View the rows from ``first`` up to ``stop`` of a contiguous array."""
        shape, strides = tuple(array.shape), element_strides(array)
        return device_view(array, (stop - first, *shape[1:]), strides, first * strides[0])

    def expanded(self, array: Any, place: int) -> Any:
        """View an array with a further dimension of size 1; see :meth:`Memory.expanded`."""
        shape, strides = tuple(array.shape), element_strides(array)
        sizes = (*shape[:place], 1, *shape[place:])
        return device_view(array, sizes, (*strides[:place], 1, *strides[place:]))

    def rows(self, array: Any) -> Any:
        """View (batch, heads, seq, 1) as (batch, heads, seq), the form of lse in kernels."""
        return device_view(array, array.shape[:3], element_strides(array)[:3])

    def flat(self, array: Any) -> tuple[Any, tuple[int, ...] | None]:
        """Return the flat storage and the strides of a dense array; see :meth:`Memory.flat`."""
        flat, strides = _flat(tuple(array.shape), tuple(array.strides), array.dtype)
        return array_on(array.gpu_data, flat), strides

    def split_heads(self, array: Any, count: int) -> Any:
        """View (…, heads, seq, dim) as (…, count, heads / count, seq, dim)."""
        *lead, heads, seq, dim = array.shape
        *steps, step, row_step, col_step = element_strides(array)
        group = heads // count
        return device_view(
            array, (*lead, count, group, seq, dim), (*steps, group * step, step, row_step, col_step)
        )

    def bring(self, array: Any) -> Any:
        """Return a copy of a NumPy array on the device; a device array unchanged."""
        return to_device(array) if isinstance(array, np.ndarray) else array

    def constant(self, array: Any) -> Any:
        """Return a small array on the device; see :meth:`Memory.constant`."""
        if not isinstance(array, np.ndarray):
            return array
        kind = array.shape, array.dtype, current_device()
        return device_constant(array.tobytes(), *kind)

    def convert(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return an array in a given floating dtype; see :meth:`Memory.convert`."""
        if array.dtype == dtype:
            return array
        shape, strides = tuple(array.shape), element_strides(array)
        if not is_dense(shape, strides):
            array, strides = row_major_copy(array), row_major_strides(shape)
        out = empty_device((math.prod(shape),), dtype)
        convert_flat(flattened(array), out)
        return device_view(out, shape, strides)

    def convert_into(self, source: Any, out: Any) -> None:
        """Write a flat array to ``out``, which may have a different floating dtype."""
        convert_flat(source, out)

    def bits(self, array: Any) -> Any:
        """View an array of 16-bit numbers as uint16."""
        return as_bits(array)

    def sum_to(self, gradient: Any, shape: tuple[int, ...]) -> Any:
        """Sum a gradient over the dimensions in which its operand was repeated."""
        own, sizes = gradient.dtype, list(gradient.shape)
        repeated = repeated_axes(tuple(sizes), shape)
        if not repeated:
            return gradient
        gradient = gradient if is_row_major(gradient) else row_major_copy(gradient)
        gradient = self.convert(gradient, acc_dtype(own))
        for axis in repeated:
            outer, count, inner = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
            source = reshaped(gradient, (outer, count, inner))
            gradient = empty_device((outer, inner), gradient.dtype)
            launch_each(sum_kernel(gradient.dtype), outer * inner, source, gradient)
            sizes[axis] = 1
        return self.convert(reshaped(gradient, shape), own)


def row_major_copy(array: Any) -> Any:
    """Return a row-major copy of a device array with any strides."""
    return _copied(array, row_major_strides(tuple(array.shape)))


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised device array without gaps, with these strides in elements."""
    if strides == row_major_strides(shape):
        return empty_device(shape, dtype)
    return device_view(empty_device((math.prod(shape),), dtype), shape, strides)


def _copied(array: Any, strides: tuple[int, ...]) -> Any:
    """Copy a device array with any strides to one without gaps, with these strides in elements."""
    out = _empty(tuple(array.shape), strides, array.dtype)
    source, target = as_bits(array), as_bits(out)
    dims = zip(*join_dims(tuple(array.shape), strides, element_strides(array)), strict=True)
    # The last four dimensions are the kernel's; for the others it is launched again and again.  A view
    # cannot begin before its array, so dimensions that run backwards come last.
    dims = sorted(dims, key=lambda dim: dim[2] < 0)
    dims = [(1, 0, 0)] * (4 - len(dims)) + dims
    sizes, to_steps, from_steps = (tuple(column) for column in zip(*dims, strict=True))
    kernel, count = copy_kernel(source.dtype), math.prod(sizes[-4:])
    for index in np.ndindex(*sizes[:-4]):
        parts = []
        for whole, steps in ((source, from_steps), (target, to_steps)):
            offset = sum(i * step for i, step in zip(index, steps, strict=False))
            # Not whole[index]: numba's own view of an array with a stride of 0 begins at a wrong place.
            parts.append(device_view(whole, sizes[-4:], steps[-4:], offset))
        launch_each(kernel, count, *parts)
    return out
