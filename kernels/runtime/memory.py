"""Memory of one kind: allocate arrays, and view operands with the four dimensions of the kernels."""

from __future__ import annotations

import gc  # beyond module 4
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager  # beyond module 4
from ctypes import addressof, c_char
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.runtime.dtypes import BITS, acc_dtype, rounded

Ints = tuple[int, ...]
#: Shape, strides in bytes and dtype of an array.
Layout = tuple[Ints, Ints, np.dtype[Any]]
#: A function of ``(starts, seed, results, array)`` that runs a call on other arrays: the addresses of its
#: operands and results, the dropout seed, the results, and a function that returns the array of an address
#: by its index.  It returns False, and does nothing, if the call has to run in full.
Run = Callable[..., bool]
#: A function that returns a :data:`Run`, given the names of the fields whose addresses it takes, in order.
Bind = Callable[[Sequence[str]], Run]


@contextmanager  # beyond module 4
def uncollected() -> Iterator[None]:  # beyond module 4
    """Disable garbage collection, and enable it again if it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def start_of(array: Any) -> int:
    """Return the address of an array; through its buffer, if it has one, in a third of the time."""
    try:
        return addressof(c_char.from_buffer(array))
    except (BufferError, TypeError, ValueError):
        return array.ctypes.data


@lru_cache(maxsize=4096)
def join_dims(shape: Ints, *strides: Ints) -> list[Ints]:
    """Join dimensions that are contiguous in every operand, to save index divisions.

    The strides are those of the result, then of each operand; 0 where it is broadcast.  Returns shape
    and strides of the same elements, with at least one dimension, in the result's memory order.
    Operands of the same layout become vectors.
    """
    joined: list[Ints] = []  # (size, stride of each operand), the slowest dimension first
    dims = [dim for dim in zip(shape, *strides, strict=True) if dim[0] != 1]
    for size, *steps in sorted(dims, key=lambda dim: -dim[1]):
        slower = joined[-1] if joined else ()
        if slower and all(
            size * step == above for step, above in zip(steps, slower[1:], strict=True)
        ):
            joined[-1] = (slower[0] * size, *steps)
        else:
            joined.append((size, *steps))
    # A single element has no dimension left.
    return list(zip(*joined or [(1,) + (0,) * len(strides)], strict=True))


@lru_cache(maxsize=4096)
def joined(*layouts: Ints) -> list[Ints]:
    """Join the dimensions of a result and its operands, which broadcast to it; see :func:`join_dims`.

    The layouts are the shape and the strides of each in turn.
    """
    shape = layouts[0]
    pairs = zip(layouts[::2], layouts[1::2], strict=True)
    return join_dims(shape, *(_broadcast_strides(*pair, len(shape)) for pair in pairs))


def _broadcast_strides(shape: Ints, strides: Ints, dims: int) -> Ints:
    """Return the strides of an operand in a result of ``dims`` dimensions; 0 where it repeats."""
    own = tuple(0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return (0,) * (dims - len(own)) + own


def joined_step(sizes: Ints, steps: Ints) -> int | None:
    """Return the stride that steps through several dimensions, or None if there is none."""
    shape, _, joined = join_dims(sizes, row_major_strides(sizes), steps)
    return joined[0] if len(shape) == 1 else None


@lru_cache(maxsize=4096)
def strides_as(strides: Ints, shape: Ints) -> Ints:
    """Return the strides of a dense array whose dimensions have the memory order of another array.

    If a stride of that, in elements, is 0 and repeats a dimension, or the number of dimensions
    differs, the result is row-major.
    """
    repeats = any(step == 0 and size != 1 for step, size in zip(strides, shape, strict=False))
    if len(strides) != len(shape) or repeats:
        return row_major_strides(shape)
    steps, total = [1] * len(shape), 1
    # Among equal strides, dimensions of size 1 come first, as in a view that adds such a dimension.
    for axis in sorted(range(len(shape)), key=lambda i: (abs(strides[i]), shape[i] != 1, -i)):
        steps[axis] = total
        total *= shape[axis]
    return tuple(steps)


@lru_cache(maxsize=4096)
def same_layout(shape: Ints, strides: Ints, other: Ints) -> bool:
    """Tell whether two arrays of one shape have the same strides where a dimension is larger than 1."""
    return 0 in shape or all(
        size == 1 or step == wanted
        for size, step, wanted in zip(shape, strides, other, strict=True)
    )


@lru_cache(maxsize=4096)
def reordered(shape: Ints, strides: Ints, other: Ints) -> Ints | None:
    """Return the strides that give an array the memory order of another; see :meth:`Memory.laid_as`.

    Strides are in elements.  It is None if the array already has that order, or the numbers of
    dimensions differ.
    """
    wanted = strides_as(other, shape)
    if len(other) != len(shape) or same_layout(shape, strides, wanted):
        return None
    return wanted


@lru_cache(maxsize=4096)
def is_dense(shape: Ints, strides: Ints) -> bool:
    """Tell whether elements fill their memory in some order of the dimensions; strides in elements."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(maxsize=4096)
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array."""
    return tuple(accumulate((*shape[:0:-1],), mul, initial=1))[::-1] if shape else ()


def repeated_axes(broadcast: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a broadcast shape along which an array of ``shape`` was repeated."""
    extra = len(broadcast) - len(shape)
    return tuple(
        axis
        for axis, size in enumerate(broadcast)
        if axis < extra or (shape[axis - extra] == 1 and size != 1)
    )


def check_dense(shape: Ints, strides: Ints) -> None:
    """Check that an array is dense, so that one dimension can view it; otherwise raise a ValueError."""
    if not is_dense(shape, strides):
        raise ValueError(
            f"an array of shape {shape} and strides {strides}, in elements, has gaps: its memory cannot be "
            "viewed as one dimension; make a contiguous copy first"
        )


def _element_strides(array: npt.NDArray[Any]) -> Ints:
    return tuple(step // array.itemsize for step in array.strides)


class Memory:
    """The memory of the host, whose arrays are NumPy's; that of a device is a subclass."""

    is_native = False  #: Whether all of its arrays are aligned and in native byte order.

    def why_not(self) -> str | None:
        """Return why there is no such memory on this machine, or None."""
        return None

    def empty(self, shape: Ints, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised, contiguous array."""
        return np.empty(shape, dtype)

    def empty_as(self, array: Any, shape: Ints, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array for a result, with the memory order of an operand.

        The result for a permuted operand is then contiguous when it is permuted back.  Where kernels cannot
        write that order, the array is row-major; see :meth:`laid_as`.
        """
        if array.flags.c_contiguous or array.ndim != len(shape):
            return np.empty(shape, dtype)
        strides = strides_as(_element_strides(array), tuple(shape))
        return self.view(np.empty(math.prod(shape), dtype), tuple(shape), strides)

    def laid_as(self, array: Any, operand: Any) -> Any:
        """Return a dense array with the same elements and the memory order of an operand.

        It is the array itself if that has the order, or if the numbers of dimensions differ.
        """
        if reordered(array.shape, _element_strides(array), _element_strides(operand)) is None:
            return array
        out = self.empty_as(operand, array.shape, array.dtype)
        out[...] = array
        return out

    def flat(self, array: Any) -> tuple[Any, Ints | None]:
        """Return the storage of a dense array, flat, and strides in elements, None for row-major."""
        if array.flags.c_contiguous:
            return array.reshape(-1), None
        strides = _element_strides(array)
        check_dense(array.shape, strides)
        slowest_first = sorted(range(array.ndim), key=lambda axis: -strides[axis])
        return array.transpose(slowest_first).reshape(-1), strides

    def view(self, storage: Any, shape: Ints, strides: Ints) -> Any:
        """View a flat storage with a shape and strides in elements."""
        if strides == row_major_strides(shape):
            return storage.reshape(shape)  # the usual and faster case
        size = storage.itemsize
        return np.ndarray(shape, storage.dtype, storage, 0, [step * size for step in strides])

    def four_dims(self, array: Any, shape: Ints) -> Any:
        """View an operand as (batch, heads, seq, dim), broadcast to ``shape``.

        It is copied only if the leading dimensions before the heads cannot be joined, or a kernel cannot
        address the array: on the host, if it is misaligned or byte-swapped.
        """
        if (
            array.shape == shape
            and len(shape) == 4
            and array.flags.aligned
            and array.dtype.isnative
        ):
            return array  # the usual case
        # Not broadcast_to alone: its result is read-only, also where nothing is repeated.
        array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
        array = np.broadcast_to(array, shape) if array.shape != tuple(shape) else array
        if not (array.flags.aligned and array.dtype.isnative):
            array = np.array(array, array.dtype.newbyteorder("="))
        lead = (1, 1, *shape[:-2])
        return array.reshape(math.prod(lead[:-1]), lead[-1], *shape[-2:])

    def part(self, array: Any, first: int, stop: int) -> Any:
        """View the rows from ``first`` up to ``stop`` of a contiguous array."""
        return array[first:stop]

    def expanded(self, array: Any, place: int) -> Any:
        """View an array with a further dimension of size 1 at a place."""
        return np.expand_dims(array, place)

    def rows(self, array: Any) -> Any:
        """View (batch, heads, seq, 1) as (batch, heads, seq), the form of lse in kernels."""
        return array[..., 0]

    def split_heads(self, array: Any, count: int) -> Any:
        """View (…, heads, seq, dim) as (…, count, heads / count, seq, dim)."""
        *lead, heads, seq, dim = array.shape
        return array.reshape(*lead, count, heads // count, seq, dim)

    def bring(self, array: Any) -> Any:
        """Return a host array in this memory, copied if necessary."""
        return array

    def constant(self, array: Any) -> Any:
        """Return a small read-only array in this memory, like :meth:`bring`.

        Calls with the same values may share it.
        """
        return self.bring(array)

    def convert(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return an array in another floating dtype, itself if unchanged; each number is rounded once."""
        return array if array.dtype == dtype else rounded(array, dtype)

    def convert_into(self, source: Any, out: Any) -> None:
        """Write a flat array to another one of any floating dtype; each number is rounded once."""
        out[...] = rounded(source, out.dtype)

    def bits(self, array: Any) -> Any:
        """View an array of 16-bit numbers as uint16."""
        return array.view(BITS)

    def sum_to(self, gradient: Any, shape: Ints) -> Any:
        """Sum a gradient over the dimensions in which its operand of ``shape`` was repeated.

        A gradient of that shape is returned unchanged.  fp16 and bf16 are summed in float32.
        """
        repeated = repeated_axes(gradient.shape, shape)
        if not repeated:
            return gradient
        total = gradient.sum(axis=repeated, dtype=acc_dtype(gradient.dtype))
        return self.convert(total.reshape(shape), gradient.dtype)
