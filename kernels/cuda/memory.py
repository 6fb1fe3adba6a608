"""Arrays on the device: views for the kernels, and the two kernels for what no view can do."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.cuda.arrays import device_view, element_strides, empty_device, to_device
from kernels.cuda.device import Kernel, array_type, scalar_type
from kernels.cuda.half import as_bits, convert_flat
from kernels.cuda.sizes import SIZES
from kernels.dtypes import BITS, acc_dtype, is_half
from kernels.geometry import ceil_div
from kernels.memory import (
    Memory,
    is_dense,
    joined_step,
    repeated_axes,
    row_major_strides,
    strides_as,
)
from kernels.targets import cuda, current_device, why_no_cuda


@cache
def copy_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that makes one batch of an operand contiguous, for one dtype."""

    def copy(source, out, batch):
        """Copy (heads, seq, dim) with any strides to one batch of a contiguous array.

        Computes: out[batch] = source
        Source: none
        Grid: ceil(heads · seq · dim / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: none
        Global traffic: each element read once and written once
        Needs: nothing
        """
        seq, dim = source.shape[1], source.shape[2]
        i = cuda.grid(1)
        if i < source.shape[0] * seq * dim:
            head, row, col = i // (seq * dim), i // dim % seq, i % dim
            out[batch, head, row, col] = source[head, row, col]

    return Kernel(copy, void(array_type(dtype, 3), array_type(dtype, 4), int64))


@cache
def sum_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that sums the middle dimension of three, for one dtype."""
    zero = dtype.type(0)

    def sum_middle(source, out):
        """Sum in order, so that the result is equal from run to run.

        Computes: out[i, j] = Σ_n source[i, n, j]
        Source: none
        Grid: ceil(elements of out / threads)
        Block: any number of threads
        One thread does: one element of out
        Shared: none
        Registers: one sum
        Global traffic: each element of source read once, each of out written once
        Needs: nothing
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
        Source: none
        Grid: ceil(elements / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: none
        Global traffic: each element written once
        Needs: nothing
        """
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = value

    return Kernel(fill_flat, void(array_type(dtype, 1), scalar_type(dtype)))


def fill(array: Any, value: float) -> None:
    """Set every element of a contiguous device array."""
    size = math.prod(array.shape)
    blocks = ceil_div(size, SIZES.flat_threads)
    if blocks:
        # A launch takes integers for integers: the value is one of the dtype first.
        number = np.array(value, array.dtype)
        if is_half(array.dtype):
            number = number.view(BITS)
        flat = device_view(array, (size,), (1,), dtype=number.dtype)
        fill_kernel(number.dtype)[blocks, SIZES.flat_threads](flat, number.item())


@lru_cache(maxsize=256)
def device_constant(
    content: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
) -> Any:
    """Return an array on the current device with these bytes, which nobody writes to: calls share it.

    Args:
        content: The numbers in row-major order.
        shape: Of the array.
        dtype: Of its elements.
        device: The current one.
    """
    return to_device(np.frombuffer(content, dtype).reshape(shape))


class DeviceMemory(Memory):
    """Numba's device arrays."""

    is_native = True

    def why_not(self) -> str | None:
        """Return why there is no device on this machine, or None."""
        return why_no_cuda()

    def device(self) -> int:
        """Return the number of the current device."""
        return current_device()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised, contiguous array."""
        return empty_device(shape, dtype)

    def empty_as(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array in the order of another; see :meth:`Memory.empty_as`."""
        shape = tuple(shape)
        strides = strides_as(element_strides(array), shape)
        if strides == row_major_strides(shape):
            return empty_device(shape, dtype)
        return device_view(empty_device((math.prod(shape),), dtype), shape, strides)

    def view(self, storage: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """See a flat storage through a shape and strides in elements; nothing is copied."""
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
            return _copied(device_view(array, shape, steps))
        return device_view(
            array, (batch, heads, seq, dim), (batch_step, head_step, row_step, col_step)
        )

    def part(self, array: Any, first: int, stop: int) -> Any:
        """View the rows from ``first`` up to ``stop`` of a contiguous array."""
        shape, strides = tuple(array.shape), element_strides(array)
        return device_view(array, (stop - first, *shape[1:]), strides, first * strides[0])

    def column(self, array: Any) -> Any:
        """View lse, (…, heads, seq), as (…, heads, seq, 1)."""
        return device_view(array, (*array.shape, 1), (*element_strides(array), 1))

    def rows(self, array: Any) -> Any:
        """View (batch, heads, seq, 1) as (batch, heads, seq): what a kernel takes for lse."""
        return device_view(array, array.shape[:3], element_strides(array)[:3])

    def flat(self, array: Any) -> tuple[Any, tuple[int, ...] | None]:
        """Return the flat storage and the strides of an array without gaps; see :meth:`Memory.flat`."""
        strides, storage = element_strides(array), device_view(array, (array.size,), (1,))
        return storage, None if strides == row_major_strides(tuple(array.shape)) else strides

    def split_heads(self, array: Any, count: int) -> Any:
        """View (…, heads, seq, dim) as (…, count, heads / count, seq, dim)."""
        *lead, heads, seq, dim = array.shape
        *steps, step, row_step, col_step = element_strides(array)
        group = heads // count
        return device_view(
            array, (*lead, count, group, seq, dim), (*steps, group * step, step, row_step, col_step)
        )

    def bring(self, array: Any) -> Any:
        """Return a copy of a NumPy array on the device; a device array as it is."""
        return to_device(array) if isinstance(array, np.ndarray) else array

    def constant(self, array: Any) -> Any:
        """Return a small array on the device; see :meth:`Memory.constant`."""
        if not isinstance(array, np.ndarray):
            return array
        kind = array.shape, array.dtype, current_device()
        return device_constant(array.tobytes(), *kind)

    def convert(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return an array in another floating dtype; see :meth:`Memory.convert`."""
        if array.dtype == dtype:
            return array
        shape, strides = tuple(array.shape), element_strides(array)
        if not is_dense(shape, strides):
            array, strides = contiguous(array), row_major_strides(shape)
        size = (math.prod(shape),)
        out = empty_device(size, dtype)
        convert_flat(device_view(array, size, (1,)), out)
        return device_view(out, shape, strides)

    def convert_into(self, source: Any, out: Any) -> None:
        """Write a flat array to another one of any floating dtype."""
        convert_flat(source, out)

    def bits(self, array: Any) -> Any:
        """See an array of 16-bit numbers as uint16; nothing is copied."""
        return as_bits(array)

    def sum_to(self, gradient: Any, shape: tuple[int, ...]) -> Any:
        """Sum a contiguous gradient over the leading dimensions that its operand was repeated in."""
        own = gradient.dtype
        if repeated_axes(tuple(gradient.shape), shape):
            gradient = self.convert(gradient, acc_dtype(own))
        sizes = list(gradient.shape)
        for axis in repeated_axes(tuple(sizes), shape):
            outer, count, inner = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
            source = device_view(gradient, (outer, count, inner), (count * inner, inner, 1))
            gradient = empty_device((outer, inner), gradient.dtype)
            blocks = ceil_div(outer * inner, SIZES.flat_threads)
            sum_kernel(gradient.dtype)[blocks, SIZES.flat_threads](source, gradient)
            sizes[axis] = 1
        return self.convert(device_view(gradient, shape, row_major_strides(shape)), own)


def contiguous(array: Any) -> Any:
    """Return a row-major copy of a device array with any strides."""
    shape, strides = tuple(array.shape), element_strides(array)
    missing = max(4 - len(shape), 0)
    copy = _copied(device_view(array, (1,) * missing + shape, (0,) * missing + strides))
    return device_view(copy, shape, row_major_strides(shape))


def _copied(array: Any) -> Any:
    """Copy (…, heads, seq, dim) to a contiguous (batch, heads, seq, dim), a launch for each batch."""
    dtype, array = array.dtype, as_bits(array)
    *batches, heads, seq, dim = array.shape
    size = (math.prod(batches), heads, seq, dim)
    out = empty_device(size, array.dtype)
    blocks = ceil_div(heads * seq * dim, SIZES.flat_threads)
    *batch_steps, head_step, row_step, col_step = element_strides(array)
    for batch, index in enumerate(np.ndindex(*batches)):
        # Not array[index]: numba's own view of an array with a stride of 0 begins at a wrong place.
        offset = sum(i * step for i, step in zip(index, batch_steps, strict=True))
        one = device_view(array, (heads, seq, dim), (head_step, row_step, col_step), offset)
        copy_kernel(array.dtype)[blocks, SIZES.flat_threads](one, out, batch)
    return (
        out if dtype == out.dtype else device_view(out, size, row_major_strides(size), dtype=dtype)
    )
