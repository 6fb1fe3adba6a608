"""Arrays on the device: views for the kernels, and the two kernels for what no view can do."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numba import int64, void

from kernels.cuda.device import Kernel, array_type
from kernels.cuda.sizes import SIZES
from kernels.geometry import ceil_div
from kernels.memory import Memory, repeated_axes
from kernels.targets import cuda, device_view, element_strides, empty_device, why_no_cuda


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


class DeviceMemory(Memory):
    """Numba's device arrays."""

    def why_not(self) -> str | None:
        """Return why there is no device on this machine, or None."""
        return why_no_cuda()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised, contiguous array."""
        return empty_device(shape, dtype)

    def view(self, storage: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """See a flat storage through a shape and strides in elements; nothing is copied."""
        return device_view(storage, shape, strides)

    def four_dims(self, array: Any, shape: tuple[int, ...]) -> Any:
        """View an operand as (batch, heads, seq, dim), repeated by a stride of 0."""
        sizes = (1,) * (len(shape) - len(array.shape)) + tuple(array.shape)
        steps = (0,) * (len(shape) - len(array.shape)) + element_strides(array)
        steps = tuple(0 if size == 1 else step for size, step in zip(sizes, steps, strict=True))
        *batches, heads, seq, dim = (1, 1, *shape)[-max(len(shape), 4) :]
        *batch_steps, head_step, row_step, col_step = (0, 0, *steps)[-max(len(shape), 4) :]
        batch, batch_step = math.prod(batches), _joined_step(batches, batch_steps)
        if batch_step is None:
            return _copied(device_view(array, shape, steps))
        return device_view(
            array, (batch, heads, seq, dim), (batch_step, head_step, row_step, col_step)
        )

    def three_dims(self, array: Any) -> Any:
        """View lse, (…, heads, seq), as (batch, heads, seq)."""
        column = device_view(array, (*array.shape, 1), (*element_strides(array), 1))
        four = self.four_dims(column, tuple(column.shape))
        return device_view(four, four.shape[:3], element_strides(four)[:3])

    def sum_to(self, gradient: Any, shape: tuple[int, ...]) -> Any:
        """Sum a contiguous gradient over the leading dimensions that its operand was repeated in."""
        sizes = list(gradient.shape)
        for axis in repeated_axes(tuple(sizes), shape):
            outer, count, inner = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
            source = device_view(gradient, (outer, count, inner), (count * inner, inner, 1))
            gradient = empty_device((outer, inner), gradient.dtype)
            blocks = ceil_div(outer * inner, SIZES.flat_threads)
            sum_kernel(gradient.dtype)[blocks, SIZES.flat_threads](source, gradient)
            sizes[axis] = 1
        steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return device_view(gradient, shape, steps)


def _joined_step(sizes: list[int], steps: list[int]) -> int | None:
    """Return the one stride that steps through several dimensions, or None if there is none."""
    dims = [(size, step) for size, step in zip(sizes, steps, strict=True) if size != 1]
    even = all(slow == fast * size for (_, slow), (size, fast) in pairwise(dims))
    return (dims[-1][1] if dims else 0) if even else None


def _copied(array: Any) -> Any:
    """Copy (…, heads, seq, dim) to a contiguous (batch, heads, seq, dim), a launch for each batch."""
    *batches, heads, seq, dim = array.shape
    out = empty_device((math.prod(batches), heads, seq, dim), array.dtype)
    blocks = ceil_div(heads * seq * dim, SIZES.flat_threads)
    for batch, index in enumerate(np.ndindex(*batches)):
        copy_kernel(array.dtype)[blocks, SIZES.flat_threads](array[index], out, batch)
    return out
